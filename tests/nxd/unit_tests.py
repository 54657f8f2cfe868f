"""NxD's own unit tests of modules/moe, with NxD's names or with ours in their place.

    python -m tests.nxd.unit_tests [--ours] [PYTEST OPTIONS]

in the environment of docs/nxdi.md, without pytest-mock. The tests are run unchanged, from the
clone, in one process: gloo stands for the group of XLA, the closed packages are stood in for, and
each test takes one iteration in place of ten. With --ours each class of NxD's files that this
package has too is ours while the tests are imported. Prints what became of each test, and last, one
line of JSON: the numbers of those that passed, in the order of collection. unit_tests.json has
those that do not, with reasons.
"""

import contextlib
import importlib
import importlib.util
import io
import json
import os
import sys
import tempfile
from collections import namedtuple
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.nxd.stand_ins import install

PACKAGE = "neuronx_distributed.modules.moe"
FILES = ("expert_mlps", "expert_mlps_v2", "loss_function", "model", "model_utils", "moe_configs")
FILES += ("routing", "shared_experts")
# Two layers of 16 experts of 5120 x 7192 each in float32: 28 GB of memory a test.
LARGE = "5120"
TESTS = "test/unit_test/modules/moe"


def clone() -> Path:
    """Return the folder of NxD's clone."""
    spec = importlib.util.find_spec("neuronx_distributed")
    if spec is None or spec.origin is None:
        raise SystemExit("neuronx_distributed: is not on PYTHONPATH. Clone it, and add its src.")
    return Path(spec.origin).parents[2]


def prepare() -> None:
    """Stand in for the SDK as far as these tests request it, with a group of one gloo rank."""
    install()
    testing: Any = importlib.import_module("torch_neuronx.testing")
    testing.assert_close = torch.testing.assert_close
    importlib.import_module("torch_neuronx").testing = testing  # type: ignore[attr-defined]
    kernels: Any = importlib.import_module("neuronxcc.nki._private_kernels.blockwise_mm")
    kernels.SkipMode = namedtuple("SkipMode", "skip_token skip_weight")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )


def put_ours_in() -> list[str]:
    """Bind ours to NxD's names in NxD's files; return the names that were replaced."""
    from neuron_moe import nxd_compat

    replaced = []
    for module in (PACKAGE, *(f"{PACKAGE}.{name}" for name in FILES)):
        found: ModuleType = importlib.import_module(module)
        for name in nxd_compat.__all__:
            if hasattr(found, name):
                setattr(found, name, getattr(nxd_compat, name))
                replaced.append(f"{module.removeprefix(PACKAGE)}.{name}")
    return replaced


class Results:
    """A plugin of pytest that notes which tests passed, and why others did not."""

    def __init__(self) -> None:
        self.passed: set[int] = set()
        self.failed: dict[int, str] = {}
        self.names: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what needs too much memory; one iteration does."""
        items[:] = [item for item in items if LARGE not in item.nodeid]
        for item in items:
            number = len(self.names)
            function = item.nodeid.rpartition("::")[2].partition("_ExptCfg")[0]
            self.names[item.nodeid] = f"{number}: {function}"
        config: Any = sys.modules.get("test.unit_test.modules.moe.utils_testing")
        if config is not None:
            init = config.ExptCfg.__init__
            init.__defaults__ = tuple(1 if value == 10 else value for value in init.__defaults__)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note an outcome."""
        name = self.names[report.nodeid]
        number = int(name.partition(":")[0])
        if report.failed:
            why = str(report.longrepr).strip().splitlines()[-1][-200:]
            self.failed.setdefault(number, why)
        if type(report) is not pytest.TestReport or not (report.failed or report.when == "call"):
            return  # a subtest's: until the test ends pytest keeps what is printed
        if number in self.failed:
            print(f"failed {name}: {self.failed[number]}", file=sys.__stdout__, flush=True)
        elif report.passed:
            self.passed.add(number)
            print(f"passed {name}", file=sys.__stdout__, flush=True)


def main(argv: list[str]) -> int:
    """Run; return the exit status."""
    options = [option for option in argv if option != "--ours"]
    root = clone()
    os.environ.setdefault("NXD_CPU_MODE", "1")
    prepare()
    if "--ours" in argv:
        put_ours_in()
    results = Results()
    with contextlib.chdir(root), tempfile.TemporaryDirectory() as cache:
        own = ["-q", "--tb=short", "-c", os.devnull, "--rootdir", str(root)]
        own += ["-o", f"cache_dir={cache}", TESTS]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            pytest.main([*own, *options], plugins=[results])
    if not results.passed and not results.failed:
        sys.stdout.write(said.getvalue())
    sys.stdout.write(json.dumps({"passed": sorted(results.passed - results.failed.keys())}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

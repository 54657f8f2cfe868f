"""One kernel of a plan, compiled on a host that has AWS's wheels and no device.

Runs in a process of its own: `python -c START REQUEST.json`. The request names the plan and the
launch; what became of it goes to the file that it names. The calls are those that public programs
make of `nki.compiler`, in both forms that they had.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from neuron_moe.backends.nki.times import plan_runs, routed_choices
from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.plan import Plan
from neuron_moe.spec import Tuning
from neuron_moe.tools.models import read_model
from nki_kernels import IS_SIMULATED
from nki_sim.time.estimate import with_range

DUMP: Final = "--internal-print-after=lower_sync"
_START: Final = "import nki_sim; nki_sim.provide(force={force}); " + (
    "from neuron_moe.tools.chip.host import main; raise SystemExit(main())"
)


def start(*, simulates: bool) -> list[str]:
    """Return the command that works on a request: simulates the plan, or compiles a kernel."""
    return [sys.executable, "-c", _START.format(force=simulates)]


def plan_of(request: Mapping[str, Any]) -> Plan:
    """Return the plan that a request names."""
    raw_config, _ = read_model(request["model"])
    tuning = Tuning(
        num_cores=request["lnc"], block_size=request["block_size"], features=request["features"]
    )
    layer = RankLayer(
        raw_config,
        request["model"],
        tp=request["tp"],
        ep=request["ep"],
        backend="nki",
        tuning=tuning,
    )
    return layer.plan(request["phase"], request["tokens"])


def main() -> int:
    """Work on the request that the last argument names; return 0."""
    path = Path(sys.argv[-1])
    request = json.loads(path.read_text())
    found: dict[str, Any] = {"compiled": False, "why": "", "estimates": {}}
    try:
        if request["launch"] is None:
            found["estimates"] = _simulated(plan_of(request))
        else:
            found["neff"] = str(
                _compiled(plan_of(request).launches()[request["launch"]], path.parent)
            )
            found["compiled"] = True
    except Exception as error:  # noqa: BLE001  what the compiler says is the result
        traceback.print_exc()
        found["why"] = f"{type(error).__name__}: {error}"
    path.with_suffix(".found.json").write_text(json.dumps(found))
    return 0


def _simulated(plan: Plan) -> dict[str, dict[str, float]]:
    """Return the time of each launch in a graph."""
    runs = plan_runs(plan, routed_choices(plan))
    return {name: asdict(with_range(run.timeline)) for name, run in runs}


def _compiled(launch: Any, folder: Path) -> Path:
    """Compile a launch; return the program."""
    if IS_SIMULATED:
        raise OSError(
            "the Neuron SDK's nki is not installed here. Install its wheels; no device is needed."
        )
    driver, options_kind, to_neff = _driver()
    kernel = getattr(launch.kernel, "func", launch.kernel)
    options = options_kind(
        target=os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"],
        lnc=launch.num_cores,
        output_path=str(folder / "kernel.neff"),
        artifacts_dir=str(folder),
        neuronx_cc_args=(DUMP,),
    )
    inputs = {name: _operand(value) for name, value in launch.arguments if value is not None}
    found = driver.compile_to_bir(
        kernel,
        frontend=_frontend(),
        inputs=inputs,
        compile_opts=options,
        output_names=list(launch.outputs),
    )
    # A pair up to NKI 0.5, since then one result that is both.
    bir, specs = found if isinstance(found, tuple) else (found, found.descriptor)
    to_neff(
        options,
        bir,
        [],
        [each.name for each in specs.input_specs],
        [each.name for each in specs.output_specs],
    )
    return folder / "kernel.neff"


def _driver() -> tuple[Any, Any, Any]:
    """Return the module that compiles kernels, its options, and what makes a program of it."""
    driver = importlib.import_module("nki.compiler.driver")
    try:
        behind = importlib.import_module("nki.compiler.ncc_driver")
    except ImportError:
        behind = driver
    return driver, behind.CompileOptions, behind.compile_bir_to_neff


def _frontend() -> Any:
    """Return what reads a kernel: Python itself, or the parser where that is all there is."""
    frontends = importlib.import_module("nki.compiler.frontend")
    kind = getattr(frontends, "TracerFrontend", None) or frontends.ParserFrontend
    return kind()


def _operand(value: Any) -> Any:
    """Return an array of the shape and type of an operand; a record or number stays itself."""
    if not hasattr(value, "shape") or is_dataclass(value):
        return value
    name = str(value.dtype).removeprefix("torch.")
    kind = getattr(ml_dtypes, name, None) or getattr(np, {"bool": "bool_"}.get(name, name))
    return np.zeros(tuple(value.shape), kind)

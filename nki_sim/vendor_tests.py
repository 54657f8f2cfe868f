"""The test suite of the vendor's public kernel library, with this simulator in place of the
vendor's closed one: ``python -m nki_sim vendor-tests --library CHECKOUT``.

Inputs, references, tolerances and negative tests are the library's. This module is the command and,
in the process of pytest, the plugin: while pytest loads it, the modules that the suite imports are
answered, and its harness runs kernels by `run`.
"""

from __future__ import annotations

import argparse
import builtins
import dataclasses
import functools
import gzip
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import os
import signal
import sys
import tempfile
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from nki_sim import neuron_dtypes
from nki_sim.errors import NkiValidationError, UninitializedRead
from nki_sim.launch import Run, jit, run, run_ranks
from nki_sim.options import SimOptions
from nki_sim.provide import provide
from nki_sim.vendor_library import FORGIVABLE, library_options

LIBRARY_VARIABLE: Final = "NKI_LIBRARY_PATH"
OUTCOMES: Final = ("passed", "failed", "refused", "skipped")
_SUITE: Final = Path("test", "integration")
_PACKAGE: Final = Path(__file__).parent
_PLATFORM: Final = "trn2"
_OVER: Final = "over "  # so begins why a test was skipped that took too long
_TARGETS: Final = {"gen2": "trn1", "gen3": "trn2", "gen4": "trn3"}
# What the harness imports for machines elsewhere, and files that the public checkout lacks.
_REMOTE: Final = (
    *("aws_embedded_metrics", "boto3", "botocore", "debugpy", "fabric2"),
    *("filelock", "paramiko", "plotext", "pytest_html"),
    *("test.utils.perf_analysis_private", "test.utils.scripts"),
)
# What the suite draws its cases and references with, beside torch.
_NEEDED: Final = ("allpairspy", "scipy", "torch")
# Marks that would take a test out of the simulation.
_OTHER_MODES: Final = frozenset(("trace_only", "compile_only", "compile_and_infer"))
_SLOW: Final = "slow simulation"  # why the suite skips what took its own simulator too long


class _OutOfTimeError(BaseException):
    """A test took longer than it may; no handler of the suite stops it."""


@dataclasses.dataclass
class _Test:
    """What the plugin knows of the test that runs: the kernel, and what the simulator said."""

    kernel: str = ""
    error: BaseException | None = None
    forgiven: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Session:
    """What a run of the suite gives.

    Attributes:
        wanted: the tests to run, by id, with the outcome that each had; None: all.
        done: tests that are not run again.
        limit: seconds that a test may take.
        results: id, kernel, outcome, reason and seconds of each test, as they end.
        kept: the file that gets them, a line each; None: none.
        count: how many tests there are.
        tell: writes a line; None in a worker of pytest-xdist.
    """

    wanted: dict[str, str] | None = None
    done: Collection[str] = ()
    limit: float = 60.0
    results: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    kept: Path | None = None
    count: int = 0
    tell: Callable[[str], None] | None = None


_test = _Test()
_session = Session()


# --- The modules that the suite imports -----------------------------------------------------------


class _Absent(types.ModuleType):
    """A module that is not there: any name in it is an exception class that nobody raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


class _AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers, after all others, to the modules for machines elsewhere."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a spec where `name` is one of them."""
        if any(name == each or name.startswith(each + ".") for each in _REMOTE):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        """Return an empty module."""
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave it empty."""


class _MendingFinder(importlib.abc.MetaPathFinder):
    """Finds the library's modules and reads each through `mend`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the ordinary spec with a loader that mends."""
        if not name.startswith("nkilib_src."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _MendingLoader(spec.loader.name, spec.loader.path)
        return spec


class _MendingLoader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:  # type: ignore[override]
        """Compile; where that fails, without the doubled end of a docstring."""
        try:
            return super().source_to_code(data, path)
        except SyntaxError:
            return super().source_to_code(mend(bytes(data).decode()).encode(), path)


def mend(source: str) -> str:
    """Take out lines that repeat the end of a docstring after it is closed, as one file of the
    library has them (`core/mlp/mlp.py`, April 2026).
    """
    lines = source.split("\n")
    closing = [k for k, line in enumerate(lines) if line.strip() == '"""']
    for end, again in itertools.pairwise(closing):
        size = again - end
        if lines[end - size + 1 : end + 1] == lines[end + 1 : again + 1]:
            return "\n".join(lines[: end + 1] + lines[again + 1 :])
    return source


def answer_imports(library: Path) -> None:
    """Let the suite import what it needs."""
    provide(force=True)
    neuron_dtypes.provide_neuron_dtypes()
    nki = sys.modules["nki"]
    nki.__dict__["cpu_simulate"] = lambda kernel: _Simulated(kernel)
    modules = {f"nki_cpu_simulator.{n}": m for n, m in sys.modules.items() if _is_nki(n)}
    for name in ("nki_cpu_simulator", "nki_cpu_simulator.nki.builtin"):
        modules[name] = types.ModuleType(name)
    modules["nki_cpu_simulator"].__dict__.update(nki=nki, __path__=[])
    nki.__dict__["builtin"] = modules["nki_cpu_simulator.nki.builtin"]
    modules["nki_cpu_simulator.nki.language.dtypes"] = sys.modules["nki.dtype"]
    sys.modules["nki.language"].__dict__["dtypes"] = sys.modules["nki.dtype"]
    for name in ("neuronxcc.starfish", "neuronxcc.starfish.support"):
        modules[name] = types.ModuleType(name)
        modules[name].__path__ = []
    casts = types.ModuleType("neuronxcc.starfish.support.dtype")
    casts.__dict__["static_cast"] = neuron_dtypes.static_cast
    modules[casts.__name__] = casts
    if importlib.util.find_spec("attr") is None:
        modules["attr"] = types.ModuleType("attr")
        modules["attr"].__dict__["dataclass"] = dataclasses.dataclass
    sys.modules.update(modules)
    builtins.__dict__["builtin"] = nki.__dict__["builtin"]
    sys.meta_path.insert(0, _MendingFinder())
    sys.meta_path.append(_AbsentFinder())
    for name in [n for n in sys.modules if n == "test" or n.startswith("test.")]:
        del sys.modules[name]  # the standard library's, which has the name of the suite
    sys.path[:0] = [str(library), str(library / "src")]
    # A name that test_qkv_tkg.py uses without importing it.
    common = importlib.import_module("test.utils.common_dataclasses")
    builtins.__dict__["Platforms"] = common.Platforms


def _is_nki(name: str) -> bool:
    return name == "nki" or name.startswith("nki.")


# --- The simulator as the suite calls it ----------------------------------------------------------


class _Simulated:
    """A kernel as the harness calls it: ``nki.cpu_simulate(kernel)[lnc](**inputs)``."""

    def __init__(self, kernel: Any, lnc: int | None = None) -> None:
        self._kernel = kernel
        self._lnc = lnc

    def __getitem__(self, lnc: int) -> _Simulated:
        return _Simulated(self._kernel, lnc)

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        kernel = jit(self._kernel)
        launched = kernel if self._lnc is None else kernel[self._lnc]
        found = _simulate(kernel, lambda options: run(launched, *args, options=options, **kwargs))
        outputs = list(_flat(found.outputs))
        return [_Packed(each) if each.dtype.metadata else each for each in outputs]


class _Packed:
    """Packed words as the suite reads them off a device: as bits of the type that it expects."""

    def __init__(self, words: Any) -> None:
        self._words = words

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self._words if dtype is None else self._words.view(dtype)


def _simulate(kernel: Any, launch: Callable[[SimOptions], Run]) -> Run:
    """Run a kernel strictly; after a forgivable fault again without that check."""
    _test.kernel = getattr(kernel, "__name__", str(kernel))
    target = _TARGETS.get(os.environ.get("NKI_NC_VERSION", "gen3"), "trn2")
    forgiven: list[type[Exception]] = []
    while True:
        try:
            found = launch(library_options(target, forgiven, mx_headroom=_mx_headroom()))
            unwritten = [each.text for each in found.findings if each.kind == "output"]
            if not unwritten or UninitializedRead in forgiven:
                return found
            forgiven.append(UninitializedRead)  # the suite takes what nobody writes to be zero
            _test.forgiven.append(unwritten[0])
        except FORGIVABLE as fault:
            if type(fault) in forgiven:
                _test.error = fault
                raise
            forgiven.append(type(fault))
            _test.forgiven.append(_one_line(fault))
        except Exception as error:
            _test.error = error
            raise


@functools.cache
def _mx_headroom() -> int:
    """Return the headroom of quantisation of the library's own mx reference."""
    try:
        reference = importlib.import_module("nkilib_src.nkilib.core.utils.mx_torch_common")
    except ImportError:
        return 1
    ones = np.ones((8, 4), dtype=np.float32)
    packed = sys.modules["nki.language"].float8_e4m3fn_x4
    return int(reference.quantize_to_mx(ones, packed)[1].reshape(-1)[0]) - (127 - 8)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    elif value is not None:
        yield value


def _teach_ranks() -> None:
    """Let the harness run a kernel on several ranks, which it does on devices only."""
    harness = importlib.import_module("test.utils.test_orchestrator")
    common = importlib.import_module("test.utils.common_dataclasses")
    failed = importlib.import_module("test.utils.exceptions").InferenceException
    on_one = harness.Orchestrator._run_simulator_inference
    harness.Orchestrator._compiled_kernel = None  # read, but never set, in simulation

    def on_ranks(self: Any, test: Any) -> Any:
        ranks = test.inference_args.collective_ranks
        if ranks == 1:
            return on_one(self, test)
        of_rank = getattr(test.kernel_input, "for_rank", lambda rank: test.kernel_input)
        inputs = [
            {name.removesuffix(".must_alias_input"): value for name, value in of_rank(k).items()}
            for k in range(ranks)
        ]
        os.environ["NKI_NC_VERSION"] = test.compiler_input.platform_target.get_nc_gen()
        lnc = test.compiler_input.logical_nc_config
        kernel = test.kernel_func
        try:
            found = _simulate(kernel, lambda options: run_ranks(kernel, inputs, lnc, options))
        except Exception as error:
            raise failed(str(error)) from error
        folder = Path(self.fs_config.artifacts_output_directory_path, common.INF_ARTIFACT_DIR_NAME)
        for rank, outputs in enumerate(found.outputs):
            place = folder / f"output_worker_{rank}"
            place.mkdir(parents=True, exist_ok=True)
            golden = common.normalize_golden_output(test.validation_args.golden_output, rank)
            for (name, want), got in zip(golden.items(), _flat(outputs), strict=True):
                np.asarray(got, dtype=want.dtype).tofile(place / f"{name}.bin")
        return str(folder)

    harness.Orchestrator._run_simulator_inference = on_ranks


# --- The hooks of pytest --------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what the command hands to its processes."""
    parser.addoption("--vendor-list", type=Path, help="tests to run, with their outcomes")
    parser.addoption("--vendor-done", type=Path, help="tests not to run again")
    parser.addoption("--vendor-seconds", type=float, default=60.0, help="seconds per test")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Answer the suite's imports before pytest imports its conftest.py."""
    answer_imports(_library())
    known = early_config.known_args_namespace
    _session.limit = known.vendor_seconds
    if known.vendor_list:
        _session.wanted = {each["id"]: each["outcome"] for each in read_results(known.vendor_list)}
    if known.vendor_done:
        _session.done = {each["id"] for each in read_results(known.vendor_done)}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the list, in its order, all of them in simulation."""
    items[:] = [item for item in items if item.nodeid not in _session.done]
    if _session.wanted is not None:
        order = {name: k for k, name in enumerate(_session.wanted)}
        kept = [item for item in items if item.nodeid in order]
        items[:] = sorted(kept, key=lambda item: order[item.nodeid])
    for item in items:
        for node in item.listchain():
            node.own_markers = [m for m in node.own_markers if not _is_elsewhere(m)]


def _is_elsewhere(mark: pytest.Mark) -> bool:
    """Whether a mark takes a test out of the simulation."""
    return mark.name in _OTHER_MODES or _SLOW in str(mark.kwargs.get("reason", ""))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Find where lines go."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):
        _session.tell = reporter.write_line


def _teach_packed_types() -> None:
    """Let the library's reference know packed types by name, which it takes from how the vendor's
    NumPy types print.
    """
    reference = importlib.import_module("nkilib_src.nkilib.core.utils.mx_torch_common")
    on_named = reference.quantize_to_mx

    def quantize_to_mx(data: Any, out_x4_dtype: Any) -> Any:
        return on_named(data, (getattr(out_x4_dtype, "names", None) or (out_x4_dtype,))[0])

    reference.__dict__["quantize_to_mx"] = quantize_to_mx


def pytest_collection_finish(session: pytest.Session) -> None:
    """Know how many tests there are, and mend the harness."""
    _session.count = len(session.items) or _session.count
    if "test.utils.test_orchestrator" in sys.modules:
        _teach_ranks()
    if "nkilib_src.nkilib.core.utils.mx_torch_common" in sys.modules:
        _teach_packed_types()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Begin a test anew."""
    _test.__init__()  # type: ignore[misc]
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Stop a test that takes too long."""

    def stop(*_: Any) -> None:
        raise _OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _session.limit)
    try:
        return (yield)
    except _OutOfTimeError:
        pytest.skip(f"{_OVER}{_session.limit:g} s")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Keep the outcome with the report, which pytest-xdist carries between processes."""
    report = yield
    if report.when == "call" or (report.when == "setup" and not report.passed):
        outcome, reason = _judge(report, call)
        report.vendor_test = {
            "id": item.nodeid,
            "platform": item.config.getoption("platform_target", None) or _PLATFORM,
            "kernel": _test.kernel,
            "outcome": outcome,
            "reason": reason,
            "seconds": round(call.duration, 1),
        }
    return report


def _judge(report: Any, call: pytest.CallInfo[None]) -> tuple[str, str]:
    """Return outcome and reason of a test."""
    if report.passed:
        return "passed", "; ".join(f"agrees in spite of {text}" for text in _test.forgiven)
    error = call.excinfo.value if call.excinfo is not None else None
    if report.skipped or error is None:
        why = _one_line(error).removeprefix("Skipped: ") if error is not None else ""
        return "skipped", why or "expected to fail"
    if _test.error is not None and _is_refusal(_test.error):
        return "refused", _one_line(_test.error)
    last = _last_file(error)
    if (
        not _test.kernel
        and isinstance(error, KeyError)
        and last.is_relative_to(_library() / "test")
    ):
        return "skipped", f"fault of the test in {last.name}, before any kernel: {_one_line(error)}"
    return "failed", _one_line(error)


def _is_refusal(error: BaseException) -> bool:
    """Whether the simulator says no, and not the kernel."""
    return isinstance(error, NkiValidationError) or _last_file(error).is_relative_to(_PACKAGE)


def _last_file(error: BaseException) -> Path:
    """Return the file that raised an exception."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return Path(step.tb_frame.f_code.co_filename if step is not None else "")


def _library() -> Path:
    return Path(os.environ.get(LIBRARY_VARIABLE, ".")).resolve()


def _one_line(error: BaseException) -> str:
    """Return the type and the text of an exception in one short line without the checkout."""
    text = " ".join(str(error).replace(f"{_library()}{os.sep}", "").split())
    return f"{type(error).__name__}: {text}"[:400].rstrip(": ")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Count a file that cannot be imported as one test that is skipped."""
    if report.failed:
        last = str(report.longrepr).strip().splitlines()[-1].removeprefix("E ").strip()
        _keep(
            {"id": report.nodeid, "kernel": "", "outcome": "skipped", "seconds": 0.0}
            | {"reason": f"cannot be collected: {last}"[:400]}
        )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell how a test ended."""
    found = getattr(report, "vendor_test", None)
    if found is not None:
        _keep(found)


def _keep(found: dict[str, Any]) -> None:
    _session.results.append(found)
    if _session.kept is not None:
        with _session.kept.open("a") as lines:
            lines.write(json.dumps(found) + "\n")
    if _session.tell is not None:
        number = f"{len(_session.results)}/{_session.count or '?'}"
        name = found["id"].removeprefix(f"{_SUITE.as_posix()}/")
        line = f"{number:>11} {found['outcome']:<8} {found['seconds']:6.1f} s  {name}"
        reason = f"  ({found['reason'][:120]})" if found["reason"] else ""
        _session.tell(f"{line}{reason}")


def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    """Keep pytest's own letters away."""
    return report.outcome, "", ""


# --- The command ----------------------------------------------------------------------------------


def read_results(path: Path) -> list[dict[str, Any]]:
    """Read a file that `--json` wrote: an object per line, the name ending in .gz if compressed.

    Raises:
        ValueError: it is no such file.
    """
    try:
        read = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        results = [json.loads(line) for line in read.decode().splitlines()]
        for each in results:
            if each["outcome"] not in OUTCOMES:
                raise ValueError(f"{each['id']}: outcome={each['outcome']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}. Give a file that --json wrote.") from None
    return results


def _write(path: Path, results: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in results))
    return path


def _platform(result: dict[str, Any]) -> str:
    return str(result.get("platform", _PLATFORM))


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return how many tests ended how, for each file of tests: one function of the library."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for found in results:
        counts[Path(found["id"].split("::")[0]).stem.removeprefix("test_")][found["outcome"]] += 1
    total = sum(counts.values(), Counter[str]())
    width = max(map(len, (*counts, "function")))
    rows = [f"{'function':<{width}}" + "".join(f"{outcome:>9}" for outcome in OUTCOMES)]
    for name, row in [*sorted(counts.items()), ("all", total)]:
        rows.append(f"{name:<{width}}" + "".join(f"{row[each] or '':>9}" for each in OUTCOMES))
    return "\n".join(rows)


def changes(wanted: dict[str, str], results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each test of a list that ended otherwise than the list says."""
    found = {each["id"]: each for each in results}
    lines = []
    for name, before in wanted.items():
        if name not in found:
            lines.append(f"{name}: was {before}, is not there")
        elif (now := found[name]["outcome"]) != before:
            reason = found[name]["reason"]
            lines.append(f"{name}: was {before}, {now}" + (f" ({reason})" if reason else ""))
    return lines


def main(argv: list[str] | None = None) -> int:
    """Run the suite of a checkout.

    Returns:
        0; 1 where a test failed or was refused, with a list where one ended otherwise than it says;
        2 where pytest could not run.
    """
    parser = _parser()
    args, more = parser.parse_known_args(argv)
    library = args.library or os.environ.get(LIBRARY_VARIABLE)
    if library is None:
        parser.error(f"--library: missing. Give the checkout, or set {LIBRARY_VARIABLE}.")
    root = Path(library).resolve()
    if not (root / _SUITE).is_dir() or not (root / "src" / "nkilib_src").is_dir():
        raise ValueError(
            f"--library {library}: no folders {_SUITE} and src/nkilib_src in it. "
            "Give the root of a checkout of the library."
        )
    wanted = None
    if args.list:
        listed = [each for each in read_results(args.list) if _platform(each) == args.platform]
        wanted = {each["id"]: each["outcome"] for each in listed}
        if not wanted:
            raise ValueError(
                f"--list {args.list}: has no test for {args.platform}. "
                "Name another --platform-target."
            )
    if args.resume and args.json is None:
        parser.error("--resume: needs --json FILE, whose tests are not run again.")
    kept = args.json.resolve() if args.json else None
    before = read_results(kept) if kept is not None and args.resume and kept.exists() else []
    before = [each for each in before if not each["reason"].startswith(_OVER)]
    command = _pytest_arguments(root, args, wanted) + more
    os.environ[LIBRARY_VARIABLE] = str(root)
    os.environ.setdefault("NEURON_PYTHONHASHSEED", "0")  # the harness draws cases by it
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    here = Path.cwd()
    _session.kept = kept
    with tempfile.TemporaryDirectory() as folder:
        if wanted is not None:
            command.append(f"--vendor-list={_write(Path(folder, 'list'), listed)}")
        if kept is not None:  # a copy, as it is now: each process of pytest reads it
            command.append(f"--vendor-done={_write(Path(folder, 'done'), before)}")
            _write(kept, before)
        os.chdir(folder)  # the suite writes its artifacts where it runs
        try:
            status = int(pytest.main(command))
        finally:
            os.chdir(here)
    results = before + _session.results
    sys.stdout.write(f"\n{table(results)}\n")
    if status > 1 and not (before and status == pytest.ExitCode.NO_TESTS_COLLECTED):
        missing = " ".join(name for name in _NEEDED if importlib.util.find_spec(name) is None)
        hint = f"They need {missing}. pip install {missing}" if missing else "pytest says why."
        sys.stderr.write(f"The library's tests could not run. {hint}\n")
        return 2
    if wanted is None:
        return int(any(each["outcome"] in ("failed", "refused") for each in results))
    changed = changes(wanted, results)
    sys.stdout.write("\n".join(["", *changed, f"{len(changed)} of {len(wanted)} tests changed"]))
    sys.stdout.write("\n")
    return int(bool(changed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nki-sim vendor-tests",
        description=__doc__,
        epilog="Other words go to pytest, e.g. -n 16 (16 processes, with pytest-xdist).",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--library", metavar="PATH", help=f"the checkout ({LIBRARY_VARIABLE})")
    parser.add_argument("-k", metavar="EXPR", help="only tests that pytest's expression selects")
    parser.add_argument("--list", type=Path, metavar="FILE", help="run its tests; say what changed")
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="keep outcomes, reasons, seconds, a line per test"
    )
    parser.add_argument(
        "--resume", action="store_true", help="but tests that OUT has, unless they took too long"
    )
    parser.add_argument(
        "--platform-target", dest="platform", default=_PLATFORM, help="trn1, trn2 (default) or trn3"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="per test (default: 60)")
    return parser


def _pytest_arguments(
    root: Path, args: argparse.Namespace, wanted: dict[str, str] | None
) -> list[str]:
    """Return the words for pytest."""
    files = sorted({name.split("::")[0] for name in wanted or {}})
    words = [str(root / name) for name in files if (root / name).is_file()] or [str(root / _SUITE)]
    words += ["-c", str(root / "test" / "pytest.ini"), "--rootdir", str(root)]
    words += ["-p", "nki_sim.vendor_tests", "-p", "no:cacheprovider", "-W", "ignore"]
    words += [
        "-q",
        "--no-header",
        "--no-summary",
        "--tb=short",
        "-o",
        "console_output_style=classic",
    ]
    words += ["--continue-on-collection-errors", "--test-mode=simulation", "--force-local-cleanup"]
    words += [f"--vendor-seconds={args.seconds}"]
    words += ["-k", args.k] if args.k else []
    words += [f"--platform-target={args.platform}"] if args.platform != _PLATFORM else []
    return words

"""Kernels of public repositories on the simulator; tests/nki_sim/strangers.json has the outcomes.

    python -m lab.bench.strangers --checkouts ~/src          # all of them in ~/src, by name
    python -m lab.bench.strangers --checkouts ~/src --write  # keep what came out
    python -m lab.bench.strangers --checkouts ~/src --seconds 3600  # give each case an hour

Each kernel runs unmodified, with every check that does not stop public kernels elsewhere (sums in
PSUM that start without saying so are findings), on drawn inputs; what it returns is compared with a
formula in float64. A case without a kernel is a script that judges itself; one with a `solution` is
a harness of autocomp, whose test compares that solution with its own kernel, mostly the same text:
only where the case has a formula, too, a harness says more than that the kernel runs.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import runpy
import signal
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import nki_sim
from nki_sim.launch import TensorSpec
from nki_sim.options import SimOptions
from nki_sim.own_kernel import load_kernel, read_arguments, simulate

Array = np.ndarray[Any, Any]
LIST: Final = Path(__file__).parents[2] / "tests" / "nki_sim" / "strangers.json"
_TOLERANCE: Final = 0.02  # of the largest element; the results are bfloat16


def _norm(x: Array) -> Array:
    normed: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
    return normed


def _standard(x: Array) -> Array:
    """Return rows of mean 0 and variance 1."""
    mean = x.mean(axis=-1, keepdims=True)
    standard: Array = (x - mean) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
    return standard


def _convolved(x: Array, taps: Array) -> Array:
    """Return each channel of a padded row times three taps, of as many columns."""
    padded = np.pad(x, ((0, 0), (0, 0), (0, 0), (1, 1)))
    shifted = [padded[..., k : k + x.shape[-1]] * taps[..., k : k + 1] for k in range(3)]
    convolved: Array = shifted[0] + shifted[1] + shifted[2]
    return convolved


def _moe_layer(x: Array, gamma: Array, router: Array, gate_up: Array, down: Array) -> Array:
    """Return a decode step of Qwen3's MoE layer: norm, softmax, 8 experts, renormalised."""
    rows = _norm(x.reshape(len(x), -1)) * gamma.reshape(-1)
    chances = np.exp(rows @ router)
    out = np.zeros_like(rows)
    for row, chance, result in zip(rows, chances, out, strict=True):
        chosen = np.argsort(-chance)[:8]
        for expert in chosen:
            gate, up = np.split(row @ gate_up[expert], 2)
            value = gate / (1 + np.exp(-gate)) * up
            result += chance[expert] / chance[chosen].sum() * (value @ down[expert])
    return out


FORMULAS: Final[dict[str, Callable[..., Array]]] = {
    "lhsT @ rhs": lambda lhs, rhs: lhs.T @ rhs,
    "lhs @ rhs": lambda lhs, rhs: lhs @ rhs,
    "rmsnorm(lhs) @ rhs": lambda lhs, rhs: _norm(lhs) @ rhs,
    "lhs + rhs": lambda lhs, rhs: lhs + rhs,
    "rmsnorm(x) * gamma": lambda x, gamma: _norm(x) * gamma,
    "layernorm(x) * gamma + beta": lambda x, gamma, beta: _standard(x) * gamma + beta,
    "cumsum(x)": lambda x: x.cumsum(axis=-1),
    "x, last two axes exchanged": lambda x: x.swapaxes(-1, -2),
    "convolve each channel": lambda x, taps: _convolved(x, taps[:, 0]),
    "moe layer": _moe_layer,
}


def _drawn(spec: Any, seed: int) -> Any:
    """Return normal numbers, smaller by the square root of the rows."""
    if not isinstance(spec, TensorSpec):
        return spec
    numbers = np.random.default_rng(seed).standard_normal(spec.shape, np.float32)
    numbers /= np.sqrt(spec.shape[-2]) if len(spec.shape) > 1 else 1
    return numbers.astype(spec.dtype.numpy)


def _run_kernel(case: dict[str, Any], root: Path) -> str:
    kernel = load_kernel(f"{root / case['file']}:{case['kernel']}")
    given = [_drawn(spec, k) for k, spec in enumerate(read_arguments(case["arguments"])[0])]
    options = SimOptions(accumulate="report", nki=case.get("nki", "0.7"))
    run = simulate(kernel, (given, {}), case.get("lnc"), options)
    if "formula" not in case:
        return "runs"
    arrays = [x.astype(np.float64) for x in given if isinstance(x, np.ndarray)]
    error = _error(case["formula"], arrays, np.asarray(run.outputs).astype(np.float64))
    return "right" if error < _TOLERANCE else _wrong(error)


def _error(formula: str, given: list[Array], got: Array) -> float:
    """Return how far a result is off, in parts of the largest element."""
    wanted = FORMULAS[formula](*given)
    return float(np.abs(got.reshape(wanted.shape) - wanted).max() / np.abs(wanted).max())


def _wrong(error: float) -> str:
    return f"wrong: off by {error:.1%} of the largest element"


@contextmanager
def _cpu_for_device() -> Iterator[None]:
    """Let a CPU stand for the device of torch_xla."""
    names = ("torch_xla", "torch_xla.core", "torch_xla.core.xla_model")
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[0]].__dict__["device"] = lambda: torch.device("cpu")
    modules[names[1]].__dict__["xla_model"] = modules[names[2]]
    modules[names[2]].__dict__["xla_device"] = lambda: torch.device("cpu")
    sys.modules.update(modules)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:  # what else was imported stays: NumPy's compiled parts cannot be loaded twice
        for name in names:
            del sys.modules[name]


def _run_script(case: dict[str, Any], root: Path) -> str:
    """Run a script that prints `pass? True` for each comparison."""
    path = root / case["file"]
    sys.path.insert(0, str(path.parent))
    said = io.StringIO()
    with _cpu_for_device(), redirect_stdout(said):
        runpy.run_path(str(path), run_name="__main__")
    passed, failed = (said.getvalue().count(f"pass? {each}") for each in (True, False))
    return "right" if passed and not failed else f"wrong: {failed} of {passed + failed} comparisons"


def _watched(kernel: Callable[..., Any], formula: str, errors: list[float]) -> Callable[..., Any]:
    """Return a kernel that notes how far each of its results is off a formula."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)
        given = [x.double().numpy() for x in args if isinstance(x, torch.Tensor)]
        errors.append(_error(formula, given, result.double().numpy()))
        return result

    return call


def _run_harness(case: dict[str, Any], root: Path) -> str:
    """Run the test of a harness on its own kernel and on a solution put into it."""
    nki_sim.provide()
    put = (root / case["solution"]).read_text()
    text = (root / case["file"]).read_text().replace("# SUBSTITUTE HERE", put, 1)
    options = SimOptions(accumulate="report", nki=case.get("nki", "0.7"))
    with tempfile.TemporaryDirectory() as folder, _cpu_for_device():
        path = Path(folder, Path(case["file"]).name)
        path.write_text(text)
        try:
            names = runpy.run_path(str(path))
            own = re.findall(r"test_nki\((\w+), solution\)", text)[-1]
            first, second = (nki_sim.simulate(names[n], options) for n in (own, "solution"))
            errors = [0.0]
            watched = _watched(second, case["formula"], errors) if "formula" in case else second
            if not names["test_nki"](first, watched):
                return "wrong: the harness says so"
            return "right" if max(errors) < _TOLERANCE else _wrong(max(errors))
        except Exception as error:
            raise RuntimeError(str(error).replace(f"{folder}/", "")) from error


class _OutOfTimeError(BaseException):
    """A case took longer than it may; no handler of theirs stops it."""


def _stop(*_: Any) -> None:
    raise _OutOfTimeError


def run_case(case: dict[str, Any], checkouts: Path, seconds: float = 240.0) -> str:
    """Return how a case ends: right, runs, or what is wrong or refused in one sentence.

    Seconds are of this process's time on processors.
    """
    root = (checkouts / case["source"]).resolve()
    sys.path[:0] = [str(checkouts / each) for each in case.get("path", [])]
    before = signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        if "solution" in case:
            return _run_harness(case, root)
        return _run_kernel(case, root) if "kernel" in case else _run_script(case, root)
    except _OutOfTimeError:
        return "not run to its end: minutes of simulation a case"
    except Exception as error:  # noqa: BLE001  theirs may raise anything; the list keeps it
        text = re.sub(rf"{re.escape(str(root))}/", "", str(error))
        return f"refused: {text}"[:400]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        del sys.path[: len(case.get("path", []))]


def main(argv: list[str] | None = None) -> int:
    """Run the list; return 1 if a case ended otherwise than it says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--checkouts", type=Path, required=True, help="folder of the repositories")
    parser.add_argument("--write", action="store_true", help="keep the outcomes in the list")
    parser.add_argument("-k", default="", help="only cases whose file or kernel has this in it")
    parser.add_argument("--seconds", type=float, default=240.0, help="per case (default: 240)")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    content = json.loads(LIST.read_text())
    changed = 0
    for case in content["cases"]:
        name = f"{case['source']}/{case['file']}:{case.get('kernel', '')}"
        if args.k not in name:
            continue
        outcome = run_case(case, args.checkouts.resolve(), args.seconds)
        changed += outcome != case.get("outcome")
        print(f"{name}\n    {outcome}", flush=True)
        case["outcome"] = outcome
    if args.write:
        lines = ",\n".join(map(json.dumps, content["cases"]))
        sources = json.dumps(content["sources"], indent=1)
        LIST.write_text(f'{{\n"sources": {sources},\n"cases": [\n{lines}\n]\n}}\n')
    print(f"{changed} cases changed")
    return int(bool(changed) and not args.write)


if __name__ == "__main__":
    sys.exit(main())

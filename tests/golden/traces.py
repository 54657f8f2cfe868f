"""What our kernels issue: one digest for each test of tests/nki_kernels.

    python -m tests.golden.traces --write     after a change that is meant to move instructions

A digest covers every launch of a test: operations, engines, operands and what prices depend on, in
program order. A kernel that still computes the same, but with other tiles, buffers or order, shows.
"""

import argparse
import hashlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_kernels.outputs import outputs_of
from nki_sim.trace import LINE, Trace

FILE = Path(__file__).with_suffix(".json")
ROOT = FILE.parents[2]
COMMAND = "python -m tests.golden.traces --write"
written: dict[str, str] | None = None  # by test, while all are written anew


def digest(traces: list[Trace]) -> str:
    """Return how many instructions traces hold, and a digest of all of them."""
    seen = hashlib.sha256()
    for trace in traces:
        storages = [storage._replace(name="") for storage in trace.storages]
        seen.update(np.delete(trace.columns(), LINE, axis=1).tobytes())
        seen.update(trace.operand_ids()[0].tobytes())
        seen.update(repr((trace.ops, trace.facts, trace.ranges, storages, trace.after)).encode())
    return f"{sum(map(len, traces))} {seen.hexdigest()[:12]}"


def shown(error: Exception) -> str:
    """Return class and sentence of an error."""
    return f"{type(error).__name__}: {plain(str(error))}"


def plain(text: str) -> str:
    """Return a text without names of files and numbers of lines."""
    return " ".join(re.sub(r"\S+\.py:\d+", "LINE", text).split())


@contextmanager
def launches(patch: pytest.MonkeyPatch) -> Iterator[list[Trace]]:
    """Collect the traces of all launches through `nki_sim.run`.

    Nothing is found in them but memory that is left unwritten, as for rows of padding, and they
    return what is said before.
    """
    found: list[Trace] = []
    launch = nki_sim.run

    def run(*args: Any, **kwargs: Any) -> nki_sim.Run:
        done = launch(*args, **kwargs)
        found.append(done.trace)
        assert {each.kind for each in done.findings} <= {"uninitialized", "output"}
        check_outputs(args[0], args[1:], kwargs, done.outputs)
        return done

    with patch.context() as inside:
        inside.setattr(nki_sim, "run", run)
        yield found


def check_outputs(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any) -> None:
    """Compare what one of our kernels returned with what is said of it before it runs."""
    function = getattr(kernel, "func", kernel)
    if function.__module__.split(".")[0] != "nki_kernels":
        return
    signature = inspect.signature(function)
    named = {key: value for key, value in kwargs.items() if key in signature.parameters}
    bound = signature.bind(*args, **named).arguments
    shapes = {key: tuple(value.shape) for key, value in bound.items() if hasattr(value, "shape")}
    records = {key: each for key, each in bound.items() if key not in shapes and is_dataclass(each)}
    shown = outputs_of(function.__name__, shapes, records)
    pairs = zip(shown, found, strict=True) if isinstance(shown, tuple) else [(shown, found)]
    for one, real in pairs:
        assert (one.shape, one.dtype) == (real.shape, str(real.dtype)), function.__name__


def check(test: str, traces: list[Trace]) -> None:
    """Compare what a test launched with what it launched when the file was written."""
    now = digest(traces)
    if written is not None:
        written[test] = now
        return
    before = json.loads(FILE.read_text()).get(test)
    assert now == before, f"{test} issues {now}, not {before}. If that is meant: {COMMAND}"


def main(argv: list[str] | None = None) -> int:
    """Write the digests of all tests, if they pass; return the exit status of pytest."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.traces", description=__doc__)
    parser.add_argument("--write", action="store_true", required=True, help="write all digests")
    parser.add_argument("--only", default="", help="those of a file or folder of tests/nki_kernels")
    only = parser.parse_args(argv).only
    from tests.golden import traces  # not this module, which runs under another name

    traces.written = {}
    status = int(pytest.main([str(ROOT / "tests" / "nki_kernels" / only), "-m", "not slow"]))
    if status:
        return status
    kept = json.loads(FILE.read_text()) if only else {}
    kept = {test: entry for test, entry in kept.items() if not test.startswith(only)}
    FILE.write_text(json.dumps(dict(sorted((kept | traces.written).items())), indent=0) + "\n")
    return status


if __name__ == "__main__":
    raise SystemExit(main())

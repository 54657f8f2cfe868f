"""The vendor's test suite as a command: on a small library of the same form, and on a checkout."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_sim import isa, neuron_dtypes, vendor_tests
from nki_sim.language import api as nl

LIST = Path(__file__).with_name("vendor_tests.jsonl.gz")
LIBRARY = os.environ.get(vendor_tests.LIBRARY_VARIABLE)

# The form of the library: kernels in src, a harness and a suite in test.
FILES = {
    "src/nkilib_src/__init__.py": "",
    "src/nkilib_src/nkilib/__init__.py": "",
    "src/nkilib_src/nkilib/double.py": '''
        import nki
        import nki.isa as nisa
        import nki.language as nl

        @nki.jit
        def double(x, rows):
            """Double.

            In two steps.
            """

            In two steps.
            """
            out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
            tile = nl.ndarray((rows, x.shape[1]), dtype=x.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=tile, src=x[0:rows])
            nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
            nisa.dma_copy(dst=out, src=tile)
            return out
    ''',
    "test/__init__.py": "",
    "test/pytest.ini": "[pytest]\nmarkers =\n    trace_only: not simulated\n",
    "test/conftest.py": """
        import boto3
        from fabric2.connection import Connection

        def pytest_addoption(parser):
            parser.addoption("--test-mode")
            parser.addoption("--force-local-cleanup", action="store_true")
    """,
    "test/utils/__init__.py": "",
    "test/utils/common_dataclasses.py": "Platforms = ('trn2', 'trn3')\n",
    "test/integration/__init__.py": "",
    "test/integration/nkilib/__init__.py": "",
    "test/integration/nkilib/test_double.py": """
        import time

        import neuron_dtypes
        import nki_cpu_simulator.nki.language as sim_nl
        import numpy as np
        import pytest
        from nki_cpu_simulator import nki
        from nkilib_src.nkilib.double import double

        def run(rows):
            x = np.ones((4, 8), neuron_dtypes.float32)
            return x, nki.cpu_simulate(double)[1](x=x, rows=rows)[0]

        def test_agrees():
            x, got = run(4)
            np.testing.assert_allclose(got, 2 * x)

        def test_differs():
            x, got = run(4)
            np.testing.assert_allclose(got, 3 * x)

        def test_broken_rule():
            run(9)

        @pytest.mark.trace_only
        def test_refusal_is_expected(request):
            assert request.node.get_closest_marker("trace_only") is None
            with pytest.raises(Exception):
                run(9)

        def test_too_large():
            pytest.skip("too large")

        @pytest.mark.skip(reason="Skipping slow simulation test")
        def test_called_slow():
            run(4)

        def test_own_fault():
            {"x.must_alias_input": 4}["x"]

        def test_endless():
            time.sleep(60)
    """,
    "test/integration/nkilib/test_old.py": "import no_such_module\n",
}
SUITE = "test/integration/nkilib/test_double.py::test_"
EXPECTED = {
    "agrees": "passed",
    "differs": "failed",
    "broken_rule": "refused",
    "refusal_is_expected": "passed",
    "too_large": "skipped",
    "called_slow": "passed",
    "own_fault": "skipped",
    "endless": "skipped",
}


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    call = [sys.executable, "-m", "nki_sim", "vendor-tests", *words]
    return subprocess.run(call, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library of one kernel."""
    root = tmp_path_factory.mktemp("library")
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return root


def test_each_test_of_a_library_ends_as_it_should(library: Path, tmp_path: Path) -> None:
    before = {path for path in library.rglob("*") if path.is_file()}
    kept = tmp_path / "kept.json"
    done = command("--library", str(library), "--json", str(kept), "--seconds", "0.5")
    tests = {each["id"]: each for each in map(json.loads, kept.read_text().splitlines())}
    old = tests.pop("test/integration/nkilib/test_old.py")
    assert (old["outcome"], "no_such_module" in old["reason"]) == ("skipped", True)
    assert {n.removeprefix(SUITE): t["outcome"] for n, t in tests.items()} == EXPECTED
    assert tests[f"{SUITE}agrees"]["kernel"] == "double"
    assert "IllegalOperand" in tests[f"{SUITE}broken_rule"]["reason"]
    assert tests[f"{SUITE}too_large"]["reason"] == "too large"
    assert tests[f"{SUITE}endless"]["reason"] == "over 0.5 s"
    assert tests[f"{SUITE}own_fault"]["reason"].startswith("fault of the test in test_double.py")
    assert done.returncode == 1
    assert [line.split() for line in done.stdout.splitlines()[-4:]] == [
        ["function", *vendor_tests.OUTCOMES],
        ["double", "3", "1", "1", "3"],
        ["old", "1"],
        ["all", "3", "1", "1", "4"],
    ]
    assert {path for path in library.rglob("*") if path.is_file()} == before


def test_the_tests_of_a_list_are_run_on_and_what_changed_is_said(
    library: Path, tmp_path: Path
) -> None:
    listed, kept = tmp_path / "list.gz", tmp_path / "kept"
    names = ("agrees", "differs", "gone", "refusal_is_expected")
    lines = [json.dumps({"id": f"{SUITE}{name}", "outcome": "passed"}) for name in names]
    trn3 = json.dumps({"id": f"{SUITE}broken_rule", "platform": "trn3", "outcome": "passed"})
    listed.write_bytes(gzip.compress("\n".join([*lines, trn3]).encode()))
    ended = {"id": f"{SUITE}agrees", "outcome": "passed", "reason": "", "seconds": 123.0}
    kept.write_text(json.dumps(ended) + "\n")
    more = ("--json", str(kept), "--resume")
    done = command("--library", str(library), "--list", str(listed), *more)
    assert done.returncode == 1
    first, *_ = map(json.loads, kept.read_text().splitlines())
    assert first == ended
    assert f"{SUITE}differs: was passed, failed" in done.stdout
    assert f"{SUITE}gone: was passed, is not there" in done.stdout
    assert "2 of 4 tests changed" in done.stdout
    assert "broken_rule" not in done.stdout


def test_what_is_no_checkout_and_what_is_no_list_is_refused(library: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--library .*: no folders"):
        vendor_tests.main(["--library", str(tmp_path)])
    listed = tmp_path / "list.json"
    for text, words in (
        ('{"id": "a", "outcome": "fine"}', "a: outcome='fine'"),
        ('{"id": "a", "outcome": "passed", "platform": "trn3"}', "no test for trn2"),
    ):
        listed.write_text(text)
        with pytest.raises(ValueError, match=words):
            vendor_tests.main(["--library", str(library), "--list", str(listed)])


def test_only_a_doubled_end_of_a_docstring_is_taken_out() -> None:
    whole = 'def f():\n    """One.\n\n    Two.\n    """\n    return 1\n'
    assert vendor_tests.mend(whole) == whole
    doubled = whole.replace("    return", '\n    Two.\n    """\n    return')
    assert vendor_tests.mend(doubled) == whole


@pytest.mark.parametrize("name", neuron_dtypes.FORMATS)
def test_packed_arrays_as_the_references_name_them_are_taken(name: str) -> None:
    def kernel(x: Any) -> Any:
        out = nl.ndarray((4, 8), dtype=name, buffer=nl.shared_hbm)
        isa.dma_copy(dst=out, src=x)
        return out

    values = np.linspace(-4, 4, 128, dtype=np.float32).reshape(4, 32)
    packed = neuron_dtypes.static_cast(values, name)
    assert packed.dtype.names == (name,)
    got = nki_sim.run(kernel, packed).outputs
    assert np.array_equal(nki_sim.run(kernel, got).outputs, got)
    word = neuron_dtypes.FORMATS[name].word
    assert np.array_equal(got.view(word), packed.view(word))


@pytest.mark.slow
@pytest.mark.skipif(LIBRARY is None, reason="NKI_LIBRARY_PATH names no checkout")
@pytest.mark.parametrize("platform", ["trn2", "trn3"])
def test_the_listed_tests_of_the_library_end_as_they_did(platform: str) -> None:
    done = command("--list", str(LIST), "--platform-target", platform)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

"""nki-sim lint --precedent: somebody's kernel beside what public kernels use."""

import json
from pathlib import Path

import pytest

from nki_sim.__main__ import main

KERNEL = """
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def double(x):
    x_sb = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=x_sb, src=x)
    nisa.OP
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=x_sb)
    return out
"""


def kernel(folder: Path, name: str, operation: str) -> str:
    path = folder / f"{name}.py"
    path.write_text(KERNEL.replace("OP", operation))
    return f"{path}:double"


@pytest.mark.parametrize(
    ("operation", "missing"),
    [
        ("tensor_scalar(dst=x_sb, data=x_sb, op0=nl.multiply, operand0=2.0)", ""),
        ("tensor_scalar(dst=x_sb, data=x_sb, op0=nl.logical_xor, operand0=2.0)", "logical_xor"),
    ],
)
def test_a_kernel_of_somebody_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], operation: str, missing: str
) -> None:
    place = kernel(tmp_path, f"kernel_{missing or 'known'}", operation)
    out = tmp_path / "report.json"
    words = ["lint", "--precedent", place, "x=128x64:bfloat16", "--json", str(out)]
    assert main(words) == 0
    report = json.loads(out.read_text())
    assert set(report) == {"uses", "sources", "without"}
    assert set(report["sources"]) == {"vendor", "tutorials", "documentation"}
    printed = capsys.readouterr().out
    if not missing:
        assert report["without"] == []
        return
    (found,) = report["without"]
    assert (found["kernel"], found["file"], found["line"]) == ("double", place[:-7], 11)
    assert missing in found["what"]
    assert found["what"] in printed


def test_a_missing_kernel_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "--precedent", "none.py:double"]) == 1
    assert "no such file" in capsys.readouterr().err


def test_both_forms_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lint", "--help"])
    assert "--precedent FILE.py:NAME" in capsys.readouterr().out

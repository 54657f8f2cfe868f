"""neuron-moe profile: kernels from files, arguments from words, what-if, layers of models."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.check.vendor_cases.library import LIBRARY_VARIABLE
from neuron_moe.tools.profile import main
from neuron_moe.tools.profile.roofline import roofline_point, roofline_text
from neuron_moe.tools.profile.what_if import changed_chip, sensitivity
from nki_sim import TensorSpec
from nki_sim.hardware import TRN2
from nki_sim.own_kernel import TIMES_ONLY, load_kernel, read_arguments, simulate
from nki_sim.time.timeline import Timeline
from tests.tools.pages.asks import check_page

KERNEL = """
import nki, nki.isa as nisa, nki.language as nl
from near import DTYPE

@nki.jit
def copy(x, times=1):
    y = nl.ndarray(x.shape, dtype=DTYPE, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, dtype=DTYPE, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    for _time in range(times):
        nisa.tensor_copy(
            dst=tile,
            src=tile,
        )
    nisa.dma_copy(dst=y, src=tile)
    return y

@nki.jit
def gather(table, rows):
    tile = nl.ndarray((rows.shape[0], 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=rows)
    found = nl.ndarray((rows.shape[0], table.shape[1]), dtype=table.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=found, src=table.ap([[table.shape[1], rows.shape[0]], [1, table.shape[1]]],
                                          vector_offset=tile, indirect_dim=0))
    y = nl.ndarray(found.shape, dtype=table.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=y, src=found)
    return y

def touch(tile):
    nisa.tensor_copy(dst=tile, src=tile)

def middle(tile):
    touch(tile)

@nki.jit
def twice(x):
    tile, y = nl.ndarray(x.shape, DTYPE, nl.sbuf), nl.ndarray(x.shape, DTYPE, nl.shared_hbm)
    nisa.dma_copy(dst=tile, src=x)
    for _time in range(2): middle(tile)
    middle(tile)
    nisa.dma_copy(dst=y, src=tile)
    return y
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "near.py").write_text("import nki.language as nl\nDTYPE = nl.bfloat16\n")
    (folder / "own.py").write_text(KERNEL)
    return folder / "own.py"


@pytest.fixture(scope="module")
def run(file: Path) -> Timeline:
    kernel = load_kernel(f"{file}:copy")
    found: Timeline = simulate(
        kernel, read_arguments(["128x512:bfloat16", "times=3"]), None, TIMES_ONLY
    ).timeline
    return found


def test_lines_have_their_source_and_sum_to_the_time(run: Timeline) -> None:
    lines = run.line_times()
    assert {(one.lane, one.instructions, one.source) for one in lines} == {
        ("dma", 1, "nisa.dma_copy(dst=tile, src=x)"),
        ("vector", 3, "nisa.tensor_copy(dst=tile, src=tile)"),
        ("dma", 1, "nisa.dma_copy(dst=y, src=tile)"),
    }
    assert sum(one.path_ns for one in lines) == pytest.approx(run.total_ns)
    assert [one.path_ns for one in lines] == sorted((one.path_ns for one in lines), reverse=True)
    printed = f"{lines}"
    assert "own.py:11" in printed
    assert "LineTime" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert f"{lines[:1]}".count("own.py") == 1


def test_a_line_that_several_call_is_told_apart_by_its_callers(file: Path) -> None:
    kernel = load_kernel(f"{file}:twice")
    lines = simulate(
        kernel, read_arguments(["128x512:bfloat16"]), None, TIMES_ONLY
    ).timeline.line_times()
    shared = [one for one in lines if one.op == "tensor_copy"]
    assert sorted((one.instructions, one.origin) for one in shared) == [
        (1, "from own.py:33, own.py:40"),
        (2, "from own.py:33, own.py:39"),
    ]
    assert "from own.py:33, own.py:40" in f"{lines}"
    assert {one.origin for one in lines if one.op == "dma_copy"} == {""}


def test_words_become_arguments(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(4))
    by_position, by_name = read_arguments(
        [
            "128x4:float32",
            "7",
            f"rows={tmp_path / 'rows.npy'}",
            "axis=(0, 1)",
            "name=gelu",
            "n=8x2:int32",
        ]
    )
    assert by_position == [TensorSpec((128, 4), by_position[0].dtype), 7]
    assert (by_name["axis"], by_name["name"]) == ((0, 1), "gelu")
    assert by_name["rows"].tolist() == [0, 1, 2, 3]
    assert (by_name["n"].shape, by_name["n"].dtype, by_name["n"].any()) == ((8, 2), np.int32, False)


def test_a_kernel_goes_where_the_numbers_of_a_file_say(file: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(16, dtype=np.int32)[:, None])
    kernel = load_kernel(f"{file}:gather")
    words = ["1000x64:bfloat16", f"rows={tmp_path / 'rows.npy'}"]
    assert (
        simulate(kernel, read_arguments(words), None, TIMES_ONLY).timeline.hbm_bytes
        > 2 * 16 * 64 * 2
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--kernel", "none.py:x"], "no such file. Give FILE.py:NAME"),
        (["--kernel", "OWN:cpy"], "no kernel 'cpy'. Did you mean copy"),
        (["--kernel", "OWN:copy", "--args", "x=128x4:float31"], "'float31' is no dtype"),
        (["--kernel", "OWN:copy", "--args", "x=128x4"], "128x4: has no dtype. Write 128x4:float32"),
        (["--kernel", "OWN:copy", "--args", "times=1", "128x4:float32"], "stands behind a named"),
        (["--kernel", "OWN:copy", "--set", "dma_run=3"], "Close to it: dma_run_ns"),
        (["--kernel", "OWN:copy", "--set", "dma_run_ns=-3"], "must be a positive number"),
        (["--kernel", "OWN:copy", "--set", "array_rows=64"], "no coefficient 'array_rows'"),
        (["--kernel", "OWN:copy", "--target", "trn9"], "unknown. Use one of"),
        (["--model", "qwen3_30b_a3b"], "say of how many tokens"),
        (["--model", "qwen3_30b_a3b", "--tokens", "4", "--args", "x=1"], "are of a kernel"),
    ],
)
def test_wrong_words_are_refused_in_a_sentence(args: list[str], message: str, file: Path) -> None:
    with pytest.raises(ValueError, match=message):
        main([word.replace("OWN", str(file)) for word in args])


def test_arguments_that_do_not_fit_are_an_error_of_the_caller(file: Path) -> None:
    with pytest.raises(
        ValueError, match=r"missing a required argument: 'x'. It is copy\(x, times=1"
    ):
        main(["--kernel", f"{file}:copy", "--args", "times=2"])


def test_what_goes_wrong_in_a_kernel_is_told_with_its_line(file: Path) -> None:
    with pytest.raises(ValueError, match=r"copy breaks a rule: .*own.py:8: .*129"):
        main(["--kernel", f"{file}:copy", "--args", "129x4:bfloat16"])
    with pytest.raises(ValueError, match=r"copy fails: TypeError: .*own.py:10"):
        main(["--kernel", f"{file}:copy", "--args", "128x4:bfloat16", "times=often"])
    with pytest.raises(ValueError, match=r"copy fails: .* Given as text: '128by4'; a tensor is"):
        main(["--kernel", f"{file}:copy", "--args", "128by4"])


def test_what_if_changes_what_was_named(run: Timeline) -> None:
    chip = changed_chip(TRN2, ["dma_first_byte_ns=x2", "hwdge_ns=7"])
    assert chip.dma_first_byte_ns == 2 * TRN2.dma_first_byte_ns
    assert chip.hwdge_ns == 7.0
    found = {one["coefficient"]: one for one in sensitivity(run)}
    assert found["dma_first_byte_ns"]["halved"] < 1.0 < found["dma_first_byte_ns"]["doubled"]
    assert "matmul_drain_ns" not in found


def test_the_roofline_point_is_that_of_the_run(run: Timeline) -> None:
    point = roofline_point(run)
    assert point["flops"] == 0
    assert point["hbm_bytes"] == 2 * 128 * 512 * 2
    assert point["hbm_gb_per_s"] / point["peak_hbm_gb_per_s"] == pytest.approx(point["share"])
    assert "no matmul" in roofline_text(point)


def test_the_json_file_has_what_is_printed(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    words = ["--kernel", f"{file}:copy", "--args", "128x512:bfloat16", "--json", str(path)]
    assert main([*words, "--set", "dma_first_byte_ns=x2"]) == 0
    text, shown = capsys.readouterr().out, json.loads(path.read_text())
    assert not text.splitlines()[-1].startswith("{")
    (launch,) = shown["launches"]
    assert f"{launch['us']:,.2f} us" in text
    assert f"{shown['what_if']['us']:,.2f} us instead" in text
    assert shown["what_if"]["us"] > launch["us"]
    assert {line["source"] for line in launch["lines"]} >= {"nisa.dma_copy(dst=tile, src=x)"}


def test_the_page_has_the_lanes_the_lines_and_what_was_asked(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.html"
    words = ["--kernel", f"{file}:copy", "--args", "128x512:bfloat16", "--report", str(path)]
    assert main([*words, "--set", "dma_first_byte_ns=x2", "--sensitivity"]) == 0
    page = path.read_text()
    check_page(page)
    assert page.count("<svg") == 1  # no roofline without a matmul
    for words_of_it in ("own.py:9", "nisa.dma_copy(dst=y, src=tile)", "instead of", "if doubled"):
        assert words_of_it in page, words_of_it


@pytest.mark.skipif(
    LIBRARY_VARIABLE not in os.environ,
    reason=f"{LIBRARY_VARIABLE} is not set: it names a checkout of the vendor's kernel library",
)
@pytest.mark.parametrize(
    ("kernel", "words", "hottest"),
    [
        ("cumsum/cumsum.py:cumsum", ["256x4096:bfloat16"], "nisa.tensor_tensor_scan("),
        (
            "output_projection/output_projection_cte/output_projection_cte.py:output_projection_cte",
            ["1x8x128x1024:bfloat16", "1024x2048:bfloat16"],
            "nisa.nc_matmul(",
        ),
    ],
)
def test_a_kernel_of_the_vendors_library(
    kernel: str, words: list[str], hottest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    library = Path(os.environ[LIBRARY_VARIABLE]) / "src" / "nkilib_src" / "nkilib" / "core"
    assert main(["--kernel", f"{library / kernel}", "--args", *words]) == 0
    lines: list[Any] = capsys.readouterr().out.split("count  line\n")[1].splitlines()
    assert lines[1].strip().startswith(hottest)
    assert max(map(len, lines)) <= 80

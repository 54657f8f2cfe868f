"""neuron-moe check vendor without the vendor's library: case files, scaling, judging, reports."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import nki_kernels.provided  # noqa: F401  answers to `import nki`

# isort: split
import nki
import nki.isa as nisa
import nki.language as nl

from lab.check import vendor as check_vendor
from lab.check.case_file import read_cases
from lab.check.outcomes import in_turn
from lab.check.vendor_cases import mx
from lab.check.vendor_cases.adapters import ADAPTERS
from lab.check.vendor_cases.block_mapping import map_blocks, num_blocks
from lab.check.vendor_cases.case import Case, Job, Limits, difference, seed_of
from lab.check.vendor_cases.inputs import Draw

ENTRY = {"id": "a1", "kernel": "double", "variant": "v", "params": {"batch": 4, "hidden": 256}}


def write_cases(path: Path, *entries: dict) -> Path:
    path.write_text(json.dumps({"meta": {}, "cases": list(entries)}))
    return path


def case(**params: object) -> Case:
    return Case.from_json(ENTRY | {"params": params})


def test_only_cases_of_the_status_are_read(tmp_path):
    path = write_cases(tmp_path / "c.json", ENTRY, ENTRY | {"id": "a2", "status": "commented_out"})
    assert [c.id for c in read_cases(path)] == ["a1"]
    assert [c.id for c in read_cases(path, status="any")] == ["a1", "a2"]
    assert [c.id for c in read_cases(path, status="any", match="a2")] == ["a2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ('{"rows": []}', "no list `cases`"), ('[{"id": "x"}]', "lacks kernel")],
)
def test_a_broken_case_file_is_named(tmp_path, text, message):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_cases(path)


def test_a_missing_library_is_named(tmp_path):
    path = write_cases(tmp_path / "c.json", ENTRY)
    with pytest.raises(ValueError, match="--library"):
        check_vendor.main(["--library", str(tmp_path), "--cases", str(path)])


def test_an_unknown_kernel_is_skipped_with_the_reason():
    unknown = Case.from_json(ENTRY | {"kernel": "conv9d"})
    outcome = check_vendor.run_case(unknown, None, Limits())
    assert outcome.outcome == "skipped"
    assert "conv9d" in outcome.reason


def test_a_case_without_its_sizes_is_skipped_with_the_reason():
    lacking = Case.from_json(ENTRY | {"kernel": "moe_tkg", "params": {}})
    outcome = check_vendor.run_case(lacking, None, Limits())
    assert outcome.outcome == "skipped"
    assert "is missing from the case" in outcome.reason


def test_no_case_starts_after_the_time_budget():
    outcomes = check_vendor.run_cases([case(batch=4, hidden=256)], None, max_seconds=-1)
    assert outcomes[0].outcome == "skipped"
    assert "time budget" in outcomes[0].reason


def test_all_kernels_get_their_turn_small_cases_first():
    cases = [
        Case.from_json({"id": f"{kernel}{size}", "kernel": kernel, "params": {"T": size}})
        for kernel in ("a", "b")
        for size in (8, 2)
    ]
    assert [c.id for c in in_turn(cases)] == ["a2", "b2", "a8", "b8"]


def test_every_element_is_held_against_the_largest_expected_one():
    expected = np.array([1.0, 0.01, 100.0], dtype=np.float32)
    assert difference(expected + np.float32([0.0, 1.9, 0.0]), expected, 0.02, 1e-5) == ""
    assert "1 of 3 elements off" in difference(
        expected + np.float32([0.0, 2.1, 0.0]), expected, 0.02, 1e-5
    )


@pytest.mark.parametrize(
    ("actual", "expected", "why"),
    [
        ([1.0, np.nan], [1.0, 2.0], "1 of 2 elements finite on one side only"),
        ([1.0], [1.0, 2.0], "shape (1,), expected (2,)"),
        ([np.nan, 1.0], [np.nan, 1.0], ""),
    ],
    ids=["nan", "shape", "both-nan"],
)
def test_finiteness_and_shape_must_match(actual, expected, why):
    assert difference(np.float32(actual), np.float32(expected), 0.02, 0.0) == why


def test_integers_without_tolerance_must_be_equal():
    big = np.array([2**24 + 1, -1], dtype=np.int32)
    assert difference(big, big, 0.0, 0.0) == ""
    assert "1 of 2 integers differ" in difference(big - [1, 0], big, 0.0, 0.0)


def test_tokens_are_halved_until_the_work_fits_and_never_below_the_least():
    limits = Limits(macs=1000.0)
    assert limits.tokens(4096, lambda tokens: tokens, step=256, least=512) == 512
    assert limits.tokens(900, lambda tokens: tokens) == 900
    assert limits.tokens(1600, lambda tokens: tokens, step=128) == 768


def test_a_case_draws_the_same_inputs_whatever_its_id():
    one, other = (Case.from_json(ENTRY | {"id": name}) for name in ("x", "y"))
    assert seed_of(one) == seed_of(other)
    assert seed_of(one) != seed_of(case(batch=5, hidden=256))


@pytest.mark.parametrize("skip_token", [False, True], ids=["pad-row", "skip"])
def test_every_routed_token_has_one_slot_in_a_block_of_its_expert(skip_token):
    T, K, E, B = 200, 3, 5, 32
    blocks = num_blocks(T, K, E, B, multiple=2)
    mapping = map_blocks(Draw(0), T, K, E, B, blocks, skip_token)
    pad = -1 if skip_token else T
    pairs = [
        (token, int(expert))
        for expert, ids in zip(
            mapping.block_to_expert, mapping.token_position_to_id.reshape(blocks, B), strict=True
        )
        for token in ids
        if token != pad
    ]
    assert sorted(pairs) == sorted(map(tuple, np.argwhere(mapping.mask_TE)))
    assert mapping.conditions(extra=1).sum() == blocks - mapping.num_padding_blocks


@pytest.mark.parametrize("name", mx.FORMATS)
def test_packing_keeps_representable_numbers(name):
    values = np.array([[0.0, 1.0, -1.5, 6.0, 0.5, -2.0, 4.0, 3.0]], dtype=np.float32)
    assert np.array_equal(mx.unpack(mx.pack(values, name), name), values)


def test_stable_hidden_states_survive_quantisation():
    hidden = mx.draw_stable_hidden(Draw(1), 2, 512)
    # 128 partitions x 4 slots; groups of 8 partitions x 4 slots share a scale
    tile = hidden.reshape(2, 4, 1, 128).transpose(3, 2, 0, 1).reshape(16, 8, 2, 4)
    exponent = np.floor(np.log2(np.abs(tile).max(axis=(1, 3), keepdims=True))) - 8
    scaled = tile / np.exp2(exponent)
    assert np.array_equal(scaled.astype("float8_e4m3fn").astype(np.float32), scaled)


@nki.jit
def double(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=out, src=tile)
    return out


@pytest.mark.parametrize(
    ("factor", "outcome", "status"), [(2.0, "passed", 0), (1.5, "failed", 1)], ids=["ok", "wrong"]
)
def test_the_command_runs_a_library_and_writes_table_and_json(
    tmp_path, monkeypatch, capsys, factor, outcome, status
):
    def build(case: Case, *_: object) -> Job:
        x = np.ones((case.need("batch"), case.need("hidden")), np.float32)
        return Job(kernel=double, cores=1, inputs={"x": x}, reference=lambda: {"out": x * factor})

    monkeypatch.setitem(ADAPTERS, ENTRY["kernel"], build)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "src" / "nkilib_src" / "nkilib").mkdir(parents=True)
    cases = write_cases(tmp_path / "c.json", ENTRY, ENTRY | {"id": "b1", "kernel": "conv9d"})
    out = tmp_path / "out.json"
    words = ["--library", str(tmp_path), "--cases", str(cases), "--json", str(out)]
    assert check_vendor.main(words) == status
    assert ENTRY["kernel"] in capsys.readouterr().out
    first, second = json.loads(out.read_text())
    assert set(first) == {"id", "kernel", "variant", "outcome", "reason", "simulated_us"}
    assert (first["id"], first["outcome"]) == ("a1", outcome)
    assert first["simulated_us"] > 0
    assert (second["outcome"], second["simulated_us"]) == ("skipped", None)
    assert "vendor-tests -k conv9d" in second["reason"]

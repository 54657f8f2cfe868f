"""decode_layer on several ranks of one launch, which ends in the sum of their outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_kernels.common.costs import KernelCost
from nki_kernels.common.formula import ExpertFormula, RouterFormula
from nki_kernels.common.rank_sums import RankSum
from nki_kernels.decode import (
    DecodeRequest,
    DecodeSizes,
    LayerConfig,
    LayerForm,
    check_decode_layer,
    cost_decode_layer,
    decode_layer,
    make_layer_config,
)
from nki_kernels.outputs import outputs_of
from nki_sim import SimOptions
from tests.nki_kernels.decode.layer_cases import Case, draw, expected, operands_of, specs_of
from tests.nki_kernels.ranks import EVERY, SUMS_AND_CUTS, Array, inner_columns, rows_of_rank
from tests.nki_kernels.traces import measured_cost

Part = tuple[Case, dict[str, Array]]
CASES = {
    "few": Case("qwen3", 4, N=32, E=32),
    "rows": Case("deepseek", 44, N=32, E=32, H=320),
    "two-tiles": Case("mixtral", 132, H=128),
    "one-core": Case("qwen2-moe", 12, num_cores=1),
    "bfloat16-out": Case("deepseek", 8, N=32, E=32, options={"output_dtype": "bfloat16"}),
    "packed": Case("deepseek", 16, N=32, E=32, options={"layout": "packed"}),
}


def by_experts(case: Case, arrays: dict[str, Array], ranks: int) -> list[Part]:
    """Cut a layer's routed experts over ranks; the first one has the shared experts."""
    parts, each = [], case.E // ranks
    for rank in range(ranks):
        first = rank * each
        mine = dict(arrays)
        for name in ("gate_up", "down"):
            mine[name] = arrays[name][first : first + each]
        if rank and "shared_down" in mine:
            mine["shared_down"] = np.zeros_like(mine["shared_down"])
        parts.append((replace(case, E=each, first=first), mine))
    return parts


def by_width(case: Case, arrays: dict[str, Array], ranks: int) -> list[Part]:
    """Cut the intermediate axes of a layer's experts over ranks."""
    parts, width = [], case.settings.get("shared_width", 0)
    for rank in range(ranks):
        columns = inner_columns(case.I, rank, ranks)
        half = columns[: case.I // ranks]
        mine = {
            **arrays,
            "gate_up": np.ascontiguousarray(arrays["gate_up"][:, :, columns]),
            "down": np.ascontiguousarray(arrays["down"][:, half]),
        }
        options = case.options
        if width:
            shared = slice(rank * width // ranks, (rank + 1) * width // ranks)
            mine |= {"gate": arrays["gate"][shared], "up": arrays["up"][shared]}
            mine["shared_down"] = np.ascontiguousarray(arrays["shared_down"][:, shared])
            options = {**options, "shared_width": width // ranks}
        parts.append((replace(case, I=case.I // ranks, options=options), mine))
    return parts


CUTS = {"EP": by_experts, "TP": by_width}


def launch(
    parts: list[Part], ranks: RankSum, options: SimOptions | None = None, **form: Any
) -> tuple[nki_sim.Run, list[LayerConfig]]:
    """Run the ranks of a layer in one launch."""
    configs = [case.config(ranks=ranks, **form) for case, _ in parts]
    calls = []
    for (case, arrays), config in zip(parts, configs, strict=True):
        operands = operands_of(config, arrays, case.first)
        check_decode_layer(config, operands)
        calls.append({**operands, "config": config})
    cores = configs[0].moe.num_cores
    run = nki_sim.run_ranks(decode_layer, calls, lnc=cores, options=options or SimOptions())
    return run, configs


def assert_close(output: Any, wanted: Any) -> None:
    error = output.astype(np.float64) - wanted
    assert np.sqrt(np.square(error).mean()) <= 2.0**-7 * np.sqrt(np.square(wanted).mean())
    assert np.abs(error).max() <= 2.0**-6 * np.abs(wanted).max()


def cost_of(parts: list[Part], configs: list[LayerConfig]) -> KernelCost:
    """Return what all ranks move and multiply."""
    total = KernelCost(0, 0, 0)
    for (case, arrays), config in zip(parts, configs, strict=True):
        mine = range(case.first, case.first + case.E)
        touched = set(expected(case, arrays).index_TK.flat) & set(mine)
        total = total + cost_decode_layer(config, len(touched))
    return total


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("ranks", "cut"), SUMS_AND_CUTS)
def test_a_launch_of_ranks_gives_the_sum_of_their_formulas(ranks: str, name: str, cut: str) -> None:
    case, total = CASES[name], EVERY[ranks]
    parts = CUTS[cut](case, draw(case), len(total.groups[0]))
    run, configs = launch(parts, total)
    wanted = sum(expected(*part).output_TH for part in parts)
    shape = (case.T, case.H)
    for rank, output in enumerate(run.outputs):
        assert_close(output, rows_of_rank(wanted, total, rank))
        known: Any = outputs_of("decode_layer", {"hidden": shape}, {"config": configs[rank]})
        assert (known.shape, known.dtype) == (output.shape, str(output.dtype))
    assert not run.findings
    assert measured_cost(run.trace) == cost_of(parts, configs)


@pytest.mark.parametrize(
    "options",
    [
        SimOptions(start_core=1),
        SimOptions(preempt=0.3, seed=2),
        pytest.param(SimOptions(fill=0), marks=pytest.mark.long),
    ],
)
def test_no_order_of_cores_or_ranks_changes_a_bit(options: SimOptions) -> None:
    case, total = CASES["rows"], EVERY["reduce_scatter-2"]
    parts = by_experts(case, draw(case), 2)
    usual, found = (launch(parts, total, each)[0].outputs for each in (SimOptions(), options))
    for one, other in zip(usual, found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("layout", ["ehi", "packed"])
@pytest.mark.parametrize("H", [128, 320])
def test_both_cores_join_the_sum_of_one_token(H: int, layout: str) -> None:
    case = Case("qwen3", 1, H=H, options={"layout": layout})
    parts = by_width(case, draw(case), 2)
    run, configs = launch(parts, EVERY["all_reduce-2"])
    for output in run.outputs:
        assert_close(output, sum(expected(*part).output_TH for part in parts))
    assert not run.findings
    assert measured_cost(run.trace) == cost_of(parts, configs)


def test_groups_add_up_apart_and_routings_are_returned_whole() -> None:
    case = CASES["few"]
    arrays = draw(case)
    parts = [*by_experts(case, arrays, 2), *by_width(case, arrays, 2)]
    total = RankSum("reduce_scatter", ((1, 0), (2, 3)))
    run, _ = launch(parts, total, returns_routing=True)
    wanted = expected(case, arrays)
    for rank, (output, affinities, index) in enumerate(run.outputs):
        assert_close(output, rows_of_rank(wanted.output_TH, total, rank))
        np.testing.assert_array_equal(index, wanted.index_TK)
        assert affinities.shape == index.shape


def test_a_token_without_numbers_spoils_its_own_row_alone() -> None:
    case = CASES["rows"]
    arrays = draw(case)
    wanted = expected(case, arrays).output_TH
    arrays["hidden"][5, 7] = np.nan
    outputs = launch(by_experts(case, arrays, 2), EVERY["all_reduce-2"])[0].outputs
    others = np.arange(case.T) != 5
    assert_close(outputs[1][others], wanted[others])
    assert np.isnan(outputs[1][5]).all()


def test_what_the_configuration_accepts_fits_in_memory() -> None:
    sizes = DecodeSizes(T=256, H=8192, I=256, E=2, K=8, num_experts=256)
    form = LayerForm(has_norm=True, ranks=EVERY["all_reduce-2"])
    request = DecodeRequest(mode="all")
    router = RouterFormula(top_k=8)
    config = make_layer_config(sizes, router, ExpertFormula(), form, request=request)
    calls = [{**specs_of(config), "config": config}] * 2
    # Raises where memory is too small.
    nki_sim.run_ranks(decode_layer, calls, lnc=2, options=SimOptions(mode="indices"))


def test_rows_that_have_no_room_on_chip_beside_their_sum_are_refused() -> None:
    sizes = DecodeSizes(T=256, H=8704, I=64, E=2, K=2, num_experts=8)
    form = LayerForm(ranks=EVERY["all_reduce-2"])
    with pytest.raises(ValueError, match="H=8704: sums over ranks need 212992 bytes"):
        make_layer_config(sizes, RouterFormula(top_k=2), ExpertFormula(), form)
    scattered = LayerForm(ranks=EVERY["reduce_scatter-2"])
    make_layer_config(sizes, RouterFormula(top_k=2), ExpertFormula(), scattered)


PAIR = ((0, 1),)
REFUSED: dict[str, RankSum] = {
    "collective='gather': must be one of none, all_reduce": RankSum("gather", PAIR),
    "all_reduce takes groups of ranks. Name both or none": RankSum("all_reduce"),
    "collective none takes no groups": RankSum(groups=PAIR),
    r"\(1, 2\)\): must be groups of equally many ranks": RankSum("all_reduce", ((0, 1), (1, 2))),
    r"\(2,\)\): must be groups of equally many ranks": RankSum("all_reduce", ((0, 1), (2,))),
    r"\(0, -1\),\): must be groups of equally many ranks": RankSum("all_reduce", ((0, -1),)),
    "portions=2: must divide the 1 tiles": RankSum("all_reduce", PAIR, 2),
    "T=4: 3 ranks cannot share 4 rows evenly. Pad the tokens, or use all_reduce": RankSum(
        "reduce_scatter", ((0, 1, 2),)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_sums_that_ranks_cannot_make_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _configure(LayerForm(ranks=REFUSED[message]))


def test_a_residual_that_every_rank_would_add_is_refused() -> None:
    with pytest.raises(ValueError, match="has_residual=True: with all_reduce every rank would add"):
        _configure(LayerForm(has_residual=True, ranks=RankSum("all_reduce", PAIR)))


def _configure(form: LayerForm) -> None:
    sizes = DecodeSizes(T=4, H=128, I=32, E=4, K=2, num_experts=8)
    make_layer_config(sizes, RouterFormula(top_k=2), ExpertFormula(), form)

"""prefill_layer on several ranks of one launch: the sum of their outputs, portion after portion."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_kernels.combine import check_combined_ranks
from nki_kernels.common.costs import KernelCost
from nki_kernels.common.rank_sums import ALONE, RankSum
from nki_kernels.decode import LayerArrays
from nki_kernels.layer import PrefillLayerConfig, check_prefill_layer, prefill_layer
from nki_kernels.outputs import outputs_of
from nki_sim import SimOptions
from tests.nki_kernels.layer import test_kernel as layer
from tests.nki_kernels.ranks import EVERY, SUMS_AND_CUTS, Array, inner_columns, rows_of_rank
from tests.nki_kernels.traces import measured_cost

Part = tuple["Ranked", LayerArrays]


@dataclass(frozen=True, kw_only=True)
class Ranked(layer.Case):
    """A layer on one of several ranks."""

    ranks: RankSum = ALONE

    def config(self) -> PrefillLayerConfig:
        config = super().config()
        return replace(config, out=replace(config.out, ranks=self.ranks))


CASES = {
    "one-tile": Ranked(T=40),
    "uneven-tiles": Ranked(T=260, H=128, router=layer.GROUPED, N=16, E=16),
    "one-core": Ranked(T=132, num_cores=1, has_norm=False),
    "shared-gated": Ranked(T=60, shared=64, gated=True),
    "portions": Ranked(T=512, H=128, ranks=RankSum(portions=2)),
    "broken-portions": Ranked(T=768, H=64, N=16, E=16, ranks=RankSum(portions=3), broken=(5, 700)),
}


def cut(case: Ranked, arrays: LayerArrays, how: str, ranks: int) -> list[Part]:
    """Cut a layer over ranks: its experts (EP) or their inner axis (TP), shared ones by width."""
    gate_up, down, parts = np.asarray(arrays.gate_up_EH2I), np.asarray(arrays.down_EIH), []
    for rank in range(ranks):
        if how == "EP":
            first, each = rank * case.E // ranks, case.E // ranks
            mine = slice(first, first + each)
            of_rank, experts = replace(case, E=each, first=first), (gate_up[mine], down[mine])
        else:
            columns = inner_columns(case.I, rank, ranks)
            rows = columns[: case.I // ranks]
            experts = (gate_up[:, :, columns].copy(), down[:, rows].copy())
            of_rank = replace(case, I=case.I // ranks)
        given = replace(arrays, gate_up_EH2I=experts[0], down_EIH=experts[1])
        if arrays.shared is not None:
            gate, up, out = arrays.shared
            width = case.shared // ranks
            held = slice(rank * width, (rank + 1) * width)
            given = replace(given, shared=(gate[held], up[held], out[:, held].copy()))
            of_rank = replace(of_rank, shared=width)
        parts.append((of_rank, given))
    return parts


def launch(parts: list[Part], options: SimOptions | None = None) -> nki_sim.Run:
    """Run the ranks of a layer in one launch."""
    calls = []
    for case, arrays in parts:
        config = case.config()
        check_prefill_layer(config)
        calls.append(layer.operands_of(case, arrays, config))
    cores = parts[0][0].num_cores
    return nki_sim.run_ranks(prefill_layer, calls, lnc=cores, options=options or SimOptions())


def sum_of(parts: list[Part]) -> Array:
    return np.sum([layer._expected(*part).output_TH for part in parts], axis=0)


def ranked(name: str, total: RankSum) -> Ranked:
    case = CASES[name]
    return replace(case, ranks=replace(total, portions=case.ranks.portions))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("ranks", "how"), SUMS_AND_CUTS)
def test_a_launch_of_ranks_gives_the_sum_of_their_formulas(ranks: str, name: str, how: str) -> None:
    case = ranked(name, EVERY[ranks])
    parts = cut(case, layer.draw_arrays(case), how, len(case.ranks.groups[0]))
    run = launch(parts)
    wanted, whole = sum_of(parts), np.ones(case.T, bool)
    whole[list(case.broken)] = False
    scale = np.abs(wanted[whole]).max()
    counted = KernelCost(0, 0, 0)
    for rank, outputs in enumerate(run.outputs):
        mine = rows_of_rank(wanted, case.ranks, rank)
        is_whole = rows_of_rank(whole, case.ranks, rank)
        assert np.abs(outputs[0] - mine)[is_whole].max() <= layer.ROUNDING * scale
        assert np.isnan(outputs[0][~is_whole]).all()
        given: dict[str, Any] = {"config": parts[rank][0].config()}
        known = outputs_of("prefill_layer", {"hidden": (case.T, case.H)}, given)
        assert [each.shape for each in known] == [each.shape for each in outputs]
        counted = counted + layer.cost_of(parts[rank][0], outputs[2])
    assert counted == measured_cost(run.trace)


@pytest.mark.parametrize(
    "options",
    [
        SimOptions(start_core=1),
        pytest.param(SimOptions(preempt=0.3, seed=4), marks=pytest.mark.long),
        pytest.param(SimOptions(fill=0), marks=pytest.mark.long),
    ],
)
def test_no_order_of_cores_or_ranks_changes_a_bit(options: SimOptions) -> None:
    case = ranked("portions", EVERY["reduce_scatter-2"])
    parts = cut(case, layer.draw_arrays(case), "EP", 2)
    usual, found = (launch(parts, each).outputs for each in (SimOptions(), options))
    for one, other in zip(usual, found, strict=True):
        np.testing.assert_array_equal(one[0], other[0])


def test_portions_change_no_bit() -> None:
    results = []
    for portions in (1, 2, 4):
        case = Ranked(T=1024, H=64, ranks=replace(EVERY["reduce_scatter-2"], portions=portions))
        results.append(launch(cut(case, layer.draw_arrays(case), "EP", 2)).outputs)
    for rank in range(2):
        for found in results[1:]:
            np.testing.assert_array_equal(found[rank][0], results[0][rank][0])


def test_a_portion_is_added_up_while_the_next_one_is_summed() -> None:
    case = Ranked(T=1024, H=512, ranks=replace(EVERY["all_reduce-2"], portions=4))
    run = launch(cut(case, layer.draw_arrays(case), "TP", 2))
    for rank in range(2):
        mine = [each for each in run.timeline.intervals() if (each.rank, each.core) == (rank, 1)]
        sums = [each for each in mine if each.op == "all_reduce"]
        last = max(each.start_ns for each in mine if each.op == "nc_matmul")
        assert len(sums) == 4
        meetings = [each.op for each in mine if each.op in ("core_barrier", "all_reduce")]
        assert meetings[-8:] == 4 * ["core_barrier", "all_reduce"]
        assert sums[0].start_ns < last < sums[-1].start_ns


def test_a_core_without_a_token_joins_the_sum() -> None:
    case = Ranked(T=1, ranks=EVERY["all_reduce-2"])
    parts = cut(case, layer.draw_arrays(case), "TP", 2)
    wanted = sum_of(parts)
    for output, *_ in launch(parts).outputs:
        assert np.abs(output - wanted).max() <= layer.ROUNDING * np.abs(wanted).max()


PAIR = ((0, 1),)


@pytest.mark.parametrize(
    ("ranks", "num_tokens", "message"),
    [
        (
            RankSum("all_reduce", PAIR, 3),
            512,
            "portions=3: must divide the 2 tiles that a core has",
        ),
        (RankSum("all_reduce", PAIR, 2), 500, "portions=2: must divide the 1 tiles"),
        (RankSum("all_reduce", PAIR, 0), 512, "portions=0"),
        (RankSum("reduce_scatter", PAIR), 33, "T=33: 2 ranks cannot share 33 rows evenly"),
        (RankSum("reduce_scatter", ((0, 1, 2),), 3), 768, "3 ranks cannot share 256 rows evenly"),
    ],
)
def test_rows_that_ranks_cannot_share_are_refused(
    ranks: RankSum, num_tokens: int, message: str
) -> None:
    config = Ranked(T=num_tokens, H=128, ranks=ranks).config()
    with pytest.raises(ValueError, match=message):
        check_prefill_layer(config)


def test_a_residual_that_every_rank_would_add_is_refused() -> None:
    dims = Ranked(has_residual=True, ranks=EVERY["all_reduce-2"]).config().out
    with pytest.raises(ValueError, match="has_residual=True: with all_reduce every rank would add"):
        check_combined_ranks(dims, 40)

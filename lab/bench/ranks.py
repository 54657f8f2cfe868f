"""neuron-moe bench ranks: a MoE layer's launch on all ranks, the sum over them inside or after it.

    neuron-moe bench ranks --phases prefill --tokens 1024 --portions 1 2 4

after us: the launch on all of 8 ranks that split each expert (TP8) or the experts (EP8), and then
the collective alone; inside us: the launch that ends in the collective, on as many portions of its
rows as --portions says (decode: 1), the best of them. Both are simulated, collectives computed: of
their terms 6 us are published samples of an unnamed platform, 1.5 us a hop documented, and the rate
of a rank's links (--link-rates) is assumed. Beside a collective the DMA engines are as free as
without it, which on the chip they are not. Not in the times: what a graph takes to go on from a
launch to the collective after it, which is not published.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

import nki_sim
from lab.bench.layer.command import MODELS, TOKENS
from neuron_moe.backends.nki.layer import LayerPlan
from neuron_moe.backends.nki.prefill_layer import PrefillLayerPlan
from neuron_moe.backends.nki.times import launch_on_ranks
from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.tools.console import format_table, tell_json
from neuron_moe.tools.models import model_among, read_model
from neuron_moe.tools.parsers import Parser
from nki_kernels.common.rank_sums import COLLECTIVES, RankSum
from nki_sim.hardware import Hardware
from nki_sim.time.costs import price_meeting
from nki_sim.time.schedule_model import CORNERS
from nki_sim.time.timeline import schedule_corners
from nki_sim.trace import Facts, SyncFacts, Trace

CHIP = nki_sim.hardware.find("trn2")
RANKS = 8
SPLITS = {f"TP{RANKS}": (RANKS, 1), f"EP{RANKS}": (1, RANKS)}  # tp, ep
GROUP = (tuple(range(RANKS)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A layer in a corner of the clock; times in microseconds.

    Attributes:
        model, split, phase, T, collective: what is computed.
        corner: order that the clock assumes.
        link_rate: GB/s of a rank's links.
        launch_us: all ranks, until the last has ended, without a collective.
        collective_us: the collective alone.
        inside_us: by number of portions, the launch that ends in the collective.
    """

    model: str
    split: str
    phase: str
    T: int
    collective: str
    corner: str
    link_rate: float
    launch_us: float
    collective_us: float
    inside_us: dict[int, float]

    @property
    def after_us(self) -> float:
        """The launch, and the collective after it."""
        return self.launch_us + self.collective_us

    @property
    def best(self) -> int:
        """Number of portions with which the launch takes the least time."""
        return min(self.inside_us, key=self.inside_us.__getitem__)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 0."""
    options = _parse(argv)
    rows = []
    for model, split, phase in product(options.models, options.splits, options.phases):
        portions = options.portions if phase == "prefill" else [1]
        for tokens in options.tokens or TOKENS[phase]:
            plan = _plan(model, split, phase, tokens)
            for collective in options.collectives:
                rows += rows_of(plan, (model, split), collective, portions, options.link_rates)
    print(_table(rows))
    tell_json(
        options.json,
        "bench ranks",
        kind="simulated, collectives computed",
        rows=[asdict(row) for row in rows],
    )
    return 0


def _table(rows: Sequence[Row]) -> str:
    titles = ("layer", "corner", "GB/s", "launch us", "sum us", "after us", "inside us", "portions")
    lines: list[Sequence[str]] = [titles]
    for row in rows:
        name = f"{row.model} {row.split} {row.phase} T={row.T:,} {row.collective}"
        us = (row.launch_us, row.collective_us, row.after_us, row.inside_us[row.best])
        times = (f"{each:,.1f}" for each in us)
        lines.append((name, row.corner, f"{row.link_rate:g}", *times, str(row.best)))
    return format_table(lines)


def rows_of(
    plan: LayerPlan | PrefillLayerPlan,
    names: tuple[str, str],
    collective: str,
    portions: Sequence[int],
    link_rates: Sequence[float],
) -> list[Row]:
    """Simulate a layer on all ranks; return a row for each corner and rate.

    Args:
        plan: of one launch on a rank.
        names: model and split.
        collective: one of COLLECTIVES, not none.
        portions: numbers of them to try.
        link_rates: of a rank's links in GB/s.
    """
    collective_us: dict[float, float] = {}
    inside_us: dict[tuple[str, float], dict[int, float]] = {
        (corner, rate): {} for corner in CORNERS for rate in link_rates
    }
    for number in portions:
        trace = launch_on_ranks(plan, RANKS, RankSum(collective, GROUP, number)).trace
        for rate in link_rates:
            chip = replace(CHIP, collective_bytes_per_ns=rate)
            collective_us[rate] = _collective_us(trace.facts, number, chip)
            for corner, us in _corners_us(trace, chip).items():
                inside_us[corner, rate][number] = us
    launch_us = _corners_us(launch_on_ranks(plan, RANKS).trace, CHIP)
    return [
        Row(
            model=names[0],
            split=names[1],
            phase=plan.step.phase,
            T=plan.step.tokens,
            collective=collective,
            corner=corner,
            link_rate=rate,
            launch_us=launch_us[corner],
            collective_us=collective_us[rate],
            inside_us=inside,
        )
        for (corner, rate), inside in inside_us.items()
    ]


def _corners_us(trace: Trace, chip: Hardware) -> dict[str, float]:
    """Return when the last rank ends, by corner."""
    return {corner: line.total_us for corner, line in schedule_corners(trace, chip).items()}


def _collective_us(facts: Sequence[Facts], portions: int, chip: Hardware) -> float:
    """Return what one collective takes of all portions that a run moved."""
    moved = [each for each in facts if isinstance(each, SyncFacts) and each.ranks > 1]
    whole = moved[0]._replace(moved_bytes=portions * moved[0].moved_bytes)
    return price_meeting(whole, chip).duration_ns / 1e3


def _plan(model: str, split: str, phase: str, tokens: int) -> LayerPlan | PrefillLayerPlan:
    """Return how a layer is computed in one launch.

    Raises:
        ValueError: it takes several.
    """
    tp, ep = SPLITS[split]
    plan = RankLayer(read_model(model)[0], model, tp=tp, ep=ep, backend="nki").plan(phase, tokens)
    if not isinstance(plan, LayerPlan | PrefillLayerPlan):
        raise ValueError(
            f"{model} {split} {phase} T={tokens}: takes several launches. Choose other --tokens."
        )
    return plan


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("bench ranks", __doc__)
    parser.add_argument(
        "--models", nargs="+", type=model_among(MODELS), choices=MODELS, default=["gpt_oss_20b"]
    )
    parser.add_argument("--splits", nargs="+", choices=list(SPLITS), default=list(SPLITS))
    parser.add_argument("--phases", nargs="+", choices=list(TOKENS), default=list(TOKENS))
    parser.add_argument(
        "--tokens", nargs="+", type=int, help="default: 128 1024 8192, in decode 1 16 64"
    )
    parser.add_argument(
        "--collectives",
        nargs="+",
        choices=COLLECTIVES[1:],
        default=["all_reduce"],
        help="what becomes of the sums (default: all_reduce)",
    )
    parser.add_argument(
        "--portions", nargs="+", type=int, default=[1], help="of a prefill's rows (default: 1)"
    )
    parser.add_argument(
        "--link-rates",
        nargs="+",
        type=float,
        default=[CHIP.collective_bytes_per_ns],
        help="of a rank, in GB/s (default: 128)",
    )
    parser.add_json_option()
    options = parser.parse_args(argv)
    for name in ("tokens", "link_rates"):
        given = getattr(options, name)
        if given is not None and min(given) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} {given}: must be positive.")
    return options

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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
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
from neuron_moe.tools.timing.sources import Writer
from nki_kernels.common.rank_sums import COLLECTIVES, RankSum
from nki_sim.hardware import Hardware
from nki_sim.time.costs import price_meeting
from nki_sim.time.estimate import Estimate, estimate
from nki_sim.trace import Facts, SyncFacts

CHIP = nki_sim.hardware.find("trn2")
RANKS = 8
SPLITS = {f"TP{RANKS}": (RANKS, 1), f"EP{RANKS}": (1, RANKS)}  # tp, ep
GROUP = (tuple(range(RANKS)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A layer; times in microseconds, of launches in a graph.

    Attributes:
        model, split, phase, T, collective: what is computed.
        link_rate: GB/s of a rank's links.
        launch: all ranks, until the last has ended, without a collective.
        collective_us: the collective alone.
        inside: by number of portions, the launch that ends in the collective.
    """

    model: str
    split: str
    phase: str
    T: int
    collective: str
    link_rate: float
    launch: Estimate
    collective_us: float
    inside: dict[int, Estimate]

    @property
    def best(self) -> int:
        """Number of portions with which the launch likely takes the least time."""
        return min(self.inside, key=lambda number: self.inside[number].us)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 0."""
    options = _parse(argv)
    cases = [
        (model, split, phase, tokens, collective, portions)
        for model, split, phase in product(options.models, options.splits, options.phases)
        for portions in [options.portions if phase == "prefill" else [1]]
        for tokens in options.tokens or TOKENS[phase]
        for collective in options.collectives
    ]
    rows = list[Row]()
    writer = Writer(options.json, lambda: {"rows": [asdict(row) for row in rows]})
    find = partial(rows_of, link_rates=options.link_rates)
    with ProcessPoolExecutor(options.jobs) as pool:
        for found in pool.map(find, *zip(*cases, strict=True)):
            rows += found
            writer.write()
    print(_table(rows))
    tell_json(
        options.json,
        "bench ranks",
        kind="simulated, collectives computed",
        rows=[asdict(row) for row in rows],
    )
    return 0


def _table(rows: Sequence[Row]) -> str:
    titles = ("layer", "GB/s", "launch us", "sum us", "after us", "inside us", "portions")
    lines: list[Sequence[str]] = [titles]
    for row in rows:
        name = f"{row.model} {row.split} {row.phase} T={row.T:,} {row.collective}"
        after_us = row.launch.us + row.collective_us
        us = (row.launch.us, row.collective_us, after_us, row.inside[row.best].us)
        times = (f"{each:,.1f}" for each in us)
        lines.append((name, f"{row.link_rate:g}", *times, str(row.best)))
    return format_table(lines)


def rows_of(
    model: str,
    split: str,
    phase: str,
    tokens: int,
    collective: str,
    portions: Sequence[int],
    link_rates: Sequence[float],
) -> list[Row]:
    """Simulate a layer on all ranks; return a row for each rate.

    Args:
        model, split, phase, tokens: the layer and its step.
        collective: one of COLLECTIVES, not none.
        portions: numbers of them to try.
        link_rates: of a rank's links in GB/s.

    Raises:
        ValueError: the layer takes several launches, or the portions do not fit.
    """
    plan = _plan(model, split, phase, tokens)
    collective_us: dict[float, float] = {}
    inside: dict[float, dict[int, Estimate]] = {rate: {} for rate in link_rates}
    for number in portions:
        trace = launch_on_ranks(plan, RANKS, RankSum(collective, GROUP, number)).trace
        for rate in link_rates:
            chip = replace(CHIP, collective_bytes_per_ns=rate)
            collective_us[rate] = _collective_us(trace.facts, number, chip)
            inside[rate][number] = estimate(trace, chip, is_alone=False)
    launch = estimate(launch_on_ranks(plan, RANKS).trace, CHIP, is_alone=False)
    return [
        Row(
            model=model,
            split=split,
            phase=phase,
            T=tokens,
            collective=collective,
            link_rate=rate,
            launch=launch,
            collective_us=collective_us[rate],
            inside=found,
        )
        for rate, found in inside.items()
    ]


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
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_json_option()
    options = parser.parse_args(argv)
    if options.jobs < 1:
        raise ValueError(f"--jobs {options.jobs}: must be positive.")
    for name in ("tokens", "link_rates"):
        given = getattr(options, name)
        if given is not None and min(given) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} {given}: must be positive.")
    return options

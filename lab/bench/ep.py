"""neuron-moe bench ep: experts of a prefill on one rank of expert parallelism, beside their bound.

    neuron-moe bench ep --models qwen3_30b_a3b --tokens 1024 --ep 8 64

Rank 0's launch of index, experts and sum, choices given and drawn alike (bfloat16, plain weights).
replicate: every rank has all T tokens and returns a row for each; all-to-all: it has the rows of
the U tokens that chose an expert here, M pairs. The bound, computed, is the larger of

    6 M H I / 157.3 TF/s       (bytes of E experts + 2 M H read + rows returned) / 716 GB/s

us: the launch as a program, simulated, with its range. x bound: the launch alone over the bound.
planned us: what the layout planner expects of the same choices.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product

import torch

from neuron_moe.backends.nki.times import draw_choices, plan_runs
from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.parallel.topology import INSTANCES
from neuron_moe.plan import Step
from neuron_moe.planner.coefficients import Machine
from neuron_moe.planner.layer_cost import RoutedTokens, layer_cost
from neuron_moe.planner.sizes import ModelSizes
from neuron_moe.tools.console import format_table, tell_json
from neuron_moe.tools.models import model_among, read_model
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.timing.plans import experts_alone, plan_of
from neuron_moe.tools.timing.sources import Writer
from neuron_moe.tools.timing.timelines import bottleneck, program, time_of
from nki_sim.time.estimate import Estimate

MODELS = ("qwen3_30b_a3b", "gpt_oss_120b")
FORMS = {"replicate": "all tokens", "all_to_all": "rows with a choice here"}
# Most that a launch may take of 8,192 tokens, its own cost apart, in bounds.
LIMITS = {8: 1.7, 16: 1.9, 32: 2.3, 64: 2.8}
MORE_OF_ALL_TOKENS = 0.3
_LIMITED_TOKENS = 8192
_FLOPS_PER_NS, _BYTES_PER_NS, _BF16_BYTES = 157.3e3, 716.0, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A launch; times in microseconds.

    Attributes:
        model, T, ep, form: what is computed.
        pairs, rows: M, U.
        columns: of the sum over a token's pairs, 0 for one of each choice.
        time: of the launch as a program.
        x_bound: the launch alone over the bound, its likely time.
        bound_us: of the experts' work.
        limit: most that the latter may be; None: not said.
        bottleneck: what holds it up, where it is above.
        planned_us: by the layout planner.
    """

    model: str
    T: int
    ep: int
    form: str
    pairs: int
    rows: int
    columns: int
    time: Estimate
    x_bound: float
    bound_us: float
    limit: float | None
    bottleneck: str
    planned_us: float


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 0."""
    options = _parse(argv)
    cases = [*product(options.models, options.tokens, options.ep, options.forms)]
    with ProcessPoolExecutor(options.jobs) as pool:
        rows = list[Row]()
        writer = Writer(options.json, lambda: {"rows": [asdict(row) for row in rows]})
        for row in pool.map(row_of, *zip(*cases, strict=True)):
            rows.append(row)
            writer.write()
    print(_table(rows))
    for row in rows:
        if row.limit is not None and row.x_bound > row.limit:
            print(f"above {row.limit}: {row.model} EP{row.ep} {row.form}: {row.bottleneck}")
    tell_json(
        options.json,
        "bench ep",
        kind="simulated, bound computed",
        rows=[asdict(row) for row in rows],
    )
    return 0


def row_of(model: str, tokens: int, ep: int, form: str) -> Row:
    """Simulate a rank's launch.

    Args:
        model: name of a shipped configuration.
        tokens: T of all ranks.
        ep: ranks that share the experts.
        form: one of FORMS.
    """
    raw = read_model(model)[0]
    layer = RankLayer(raw, model, ep=ep, backend="nki")
    parts = experts_alone(layer.parts(Step("prefill", tokens)))
    spec, experts = parts.spec, parts.weights.num_experts
    index_TK = draw_choices(tokens, parts.num_experts, spec.top_k)
    is_here_TK = index_TK < experts
    pairs, rows = int(is_here_TK.sum()), int(is_here_TK.any(1).sum())
    is_sent = form == "all_to_all"
    step = Step("prefill", tokens, rows=rows if is_sent else 0)
    plan = plan_of(parts, step)
    ((_, run),) = plan_runs(plan, index_TK[is_here_TK.any(1)] if is_sent else index_TK)
    H, width = spec.hidden_size, spec.intermediate_size
    moved = 3 * experts * H * width + pairs * H + (rows if is_sent else tokens) * H
    bound_ns = max(6 * pairs * H * width / _FLOPS_PER_NS, _BF16_BYTES * moved / _BYTES_PER_NS)
    limit = LIMITS.get(ep) if tokens == _LIMITED_TOKENS else None
    if limit is not None and not is_sent:
        limit += MORE_OF_ALL_TOKENS
    work = RoutedTokens("prefill", torch.from_numpy(index_TK), parts.num_experts)
    sizes = ModelSizes.from_config(model, raw, "bf16")
    machine = Machine.build(INSTANCES["trn2.48xlarge"])
    planned = layer_cost(sizes, machine, 1, ep, form, work)
    (launch,) = plan.launches()
    x_bound = run.timeline.total_ns / bound_ns
    return Row(
        model=model,
        T=tokens,
        ep=ep,
        form=form,
        pairs=pairs,
        rows=rows,
        columns=launch.records["config"].columns,
        time=program([time_of(run.timeline)]),
        x_bound=x_bound,
        bound_us=bound_ns / 1e3,
        limit=limit,
        bottleneck=bottleneck(run.timeline) if limit is not None and x_bound > limit else "",
        planned_us=planned.experts_us,
    )


def _table(rows: Sequence[Row]) -> str:
    titles = ("rank", "form", "pairs", "us", "bound us", "x bound", "limit", "planned us")
    return format_table([titles, *_lines(rows)], numbers_from=3)


def _lines(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    for row in rows:
        limit = "-" if row.limit is None else f"{row.limit:.1f}"
        numbers = (str(row.time), f"{row.bound_us:,.0f}", f"{row.x_bound:.2f}", limit)
        name = f"{row.model} EP{row.ep} T={row.T:,}"
        yield name, row.form, str(row.pairs), *numbers, f"{row.planned_us:,.0f}"


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("bench ep", __doc__)
    parser.add_argument(
        "--models", nargs="+", type=model_among(MODELS), choices=MODELS, default=list(MODELS)
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 8192])
    parser.add_argument("--ep", nargs="+", type=int, default=list(LIMITS), help="ranks")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_json_option()
    options = parser.parse_args(argv)
    for name in ("tokens", "ep", "jobs"):
        given = getattr(options, name)
        if (min(given) if isinstance(given, list) else given) < 1:
            raise ValueError(f"--{name} {given}: must be positive.")
    return options

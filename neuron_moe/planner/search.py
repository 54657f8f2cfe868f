"""Every layout of a machine, its cost under several routings, and the best one with the reason."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from torch import Tensor

from neuron_moe.parallel.config import STRATEGIES, ParallelConfig, divisors
from neuron_moe.parallel.placement import ExpertPlacement, place_experts
from neuron_moe.planner.coefficients import COEFFICIENTS, Machine
from neuron_moe.planner.layer_cost import LayerCost, RoutedTokens, layer_cost
from neuron_moe.planner.sizes import ModelSizes
from neuron_moe.train.balance import (
    expert_load,
    skewed_trace,
    stretch_load,
    uniform_trace,
    zipf_trace,
)

MOST_EXTRA_EXPERTS = 0.125  # of the experts, as replicas
PHASES = ("prefill", "decode")
WORTH_A_HYBRID = 1.05  # a second layout must win this much to be mentioned as better


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to spread the experts.

    Args:
        tp: ranks that split an expert.
        ep: ranks that split the experts.
        strategy: how tokens travel.
        is_balanced: experts placed by load, with replicas where they divide.
    """

    tp: int
    ep: int
    strategy: str
    is_balanced: bool

    def __str__(self) -> str:
        way = "all-to-all" if self.strategy == "all_to_all" else "replicate-and-reduce"
        return f"EP {self.ep} x TP {self.tp}, {way}" + (", EPLB" if self.is_balanced else "")


@dataclass(frozen=True, slots=True)
class Entry:
    """The cost of one layout, phase and routing."""

    layout: Layout
    phase: str
    routing: str
    cost: LayerCost


@dataclass(frozen=True)
class LayoutCosts:
    """What every layout costs, and those that cannot be.

    Attributes:
        model: its sizes.
        machine: where.
        tokens: by phase.
        entries: all costs.
        memory_bytes: of a rank, by (ep, extra experts).
        rejected: layouts that cannot be, and why.
        placements: by (routing, ep), where experts were placed by load.
        decisive: the routing by which layouts are ranked.
    """

    model: ModelSizes
    machine: Machine
    tokens: Mapping[str, int]
    decisive: str
    entries: list[Entry] = field(default_factory=list)
    memory_bytes: dict[tuple[int, int], float] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    placements: dict[tuple[str, int], ExpertPlacement] = field(default_factory=dict)

    def ranking(self, phase: str, routing: str | None = None) -> list[Entry]:
        """Return the costs of a phase, cheapest first."""
        routing = routing or self.decisive
        chosen = [e for e in self.entries if (e.phase, e.routing) == (phase, routing)]
        return sorted(chosen, key=lambda entry: entry.cost.total_us)

    def best_replicated(self, phase: str) -> Entry:
        """Return the best entry that needs no all-to-all, which Neuron does not offer yet."""
        return next(e for e in self.ranking(phase) if e.layout.strategy == "replicate")

    def find(self, layout: Layout, phase: str, routing: str | None = None) -> Entry:
        """Return one entry.

        Raises:
            ValueError: the layout was not computed.
        """
        for entry in self.ranking(phase, routing):
            if entry.layout == layout:
                return entry
        raise ValueError(f"layout={layout}: was not computed. It may have been rejected.")

    def best_single(self) -> dict[str, Entry]:
        """Return, by phase, the entries of the cut that is the best compromise.

        One cut of the experts serves both phases, while the strategy is free in each; the best has
        the smallest mean slowdown against the best of each phase.
        """
        slowdown: dict[tuple[int, bool], float] = {}
        cheapest: dict[tuple[int, bool, str], Entry] = {}
        for phase in PHASES:
            ranking = self.ranking(phase)
            for entry in reversed(ranking):
                cheapest[entry.layout.ep, entry.layout.is_balanced, phase] = entry
            for (ep, is_balanced, of), entry in cheapest.items():
                if of == phase:
                    ratio = entry.cost.total_us / ranking[0].cost.total_us
                    slowdown[ep, is_balanced] = slowdown.get((ep, is_balanced), 0.0) + ratio
        ep, is_balanced = min(slowdown, key=lambda cut: slowdown[cut])
        return {phase: cheapest[ep, is_balanced, phase] for phase in PHASES}


def synthetic_routings(
    model: ModelSizes, num_tokens: int, recorded_load: Tensor | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return two traces of each routing: one to place experts by, a later one to be judged on.

    Args:
        model: how many experts and choices.
        num_tokens: T of each trace.
        recorded_load: [E'] load of a recorded layer; stretched to E where E' differs.
    """
    experts, top_k = model.num_experts, model.top_k
    routings = {
        "uniform": uniform_trace(2 * num_tokens, experts, top_k),
        "zipf": zipf_trace(2 * num_tokens, experts, top_k),
    }
    if recorded_load is not None:
        weight_E = stretch_load(recorded_load, experts)
        # Loads of distinct choices; drawn again with these weights they come out a little flatter.
        shuffled = weight_E[uniform_trace(1, experts, experts, seed=3)[0].long()]
        routings["recorded"] = skewed_trace(shuffled, 2 * num_tokens, top_k)
    return {name: (trace[:num_tokens], trace[num_tokens:]) for name, trace in routings.items()}


def cost_layouts(
    model: ModelSizes,
    machine: Machine,
    routings: Mapping[str, tuple[Tensor, Tensor]],
    tokens: Mapping[str, int],
    decisive: str,
    placements: Mapping[tuple[str, int], ExpertPlacement] | None = None,
) -> LayoutCosts:
    """Compute the cost of every layout.

    Args:
        model: its sizes.
        machine: its ranks.
        routings: by name, traces [T, K] of the model's experts: to place by, to be judged on.
        tokens: T by phase; traces must be at least as long.
        decisive: the routing to choose the layout for.
        placements: by (routing, ep), placements computed before, to be used again.

    Raises:
        ValueError: no layout fits the machine; the message says why for each.
    """
    costs = LayoutCosts(model, machine, tokens, decisive)
    for ep in divisors(machine.ranks):
        tp = machine.ranks // ep
        reason = _why_impossible(model, machine, tp, ep)
        if reason:
            costs.rejected[f"EP {ep} x TP {tp}"] = reason
            continue
        for routing, (known, later) in routings.items():
            for is_balanced in (False, True) if ep > 1 else (False,):
                placement = (placements or {}).get((routing, ep)) if is_balanced else None
                if placement is None:
                    placement = _placement(model, machine, known, tp, ep, is_balanced)
                _add(costs, placement, tp, ep, routing, later, is_balanced)
    if not costs.entries:
        reasons = "; ".join(f"{layout}: {why}" for layout, why in costs.rejected.items())
        raise ValueError(
            f"model={model.name}: no layout fits {machine.instance.name} x {machine.nodes}."
            f" {reasons}. Use more nodes, or narrower weights."
        )
    return costs


def memory_bytes(model: ModelSizes, ranks: int, num_physical: int) -> float:
    """Return the bytes of weights a rank holds; what is not an expert is split over all ranks."""
    experts = model.expert_bytes * num_physical * model.num_moe_layers
    shared = model.shared_bytes * model.num_moe_layers
    return (experts + shared + 2 * model.dense_parameters) / ranks


def _why_impossible(model: ModelSizes, machine: Machine, tp: int, ep: int) -> str:
    config = ParallelConfig(tp=tp, ep=ep)
    try:
        config.check_topology(machine.instance, machine.lnc, machine.nodes)
        config.check_experts(model.num_experts, model.intermediate_size)
    except ValueError as error:
        return str(error)
    needed = memory_bytes(model, machine.ranks, model.num_experts)
    room = machine.hbm_bytes - COEFFICIENTS["reserve_bytes"].value
    if needed > room:
        return (
            f"weights of {needed / 2**30:.1f} GiB a rank must fit {room / 2**30:.1f} GiB (of"
            f" {machine.hbm_bytes / 2**30:.0f} GiB, less a reserve)"
        )
    return ""


def _placement(
    model: ModelSizes, machine: Machine, known: Tensor, tp: int, ep: int, is_balanced: bool
) -> ExpertPlacement:
    """Place experts by a known trace; as many replicas as divide, are allowed and fit."""
    if not is_balanced:
        return ExpertPlacement.contiguous(model.num_experts, ep)
    room = machine.hbm_bytes - COEFFICIENTS["reserve_bytes"].value
    extra = int(model.num_experts * MOST_EXTRA_EXPERTS) // ep * ep
    while extra and memory_bytes(model, tp * ep, model.num_experts + extra) > room:
        extra -= ep
    return place_experts(expert_load(known, model.num_experts), ep, extra_experts=extra)


def _add(
    costs: LayoutCosts,
    placement: ExpertPlacement,
    tp: int,
    ep: int,
    routing: str,
    later: Tensor,
    is_balanced: bool,
) -> None:
    model, machine = costs.model, costs.machine
    extra = placement.num_physical - model.num_experts
    costs.memory_bytes[ep, extra] = memory_bytes(model, tp * ep, placement.num_physical)
    if is_balanced:
        costs.placements[routing, ep] = placement
    for phase in PHASES:
        physical_TK = placement.to_physical(later[: costs.tokens[phase]])
        work = RoutedTokens(phase, physical_TK, placement.num_physical)
        for strategy in STRATEGIES if ep > 1 else ("replicate",):
            cost = layer_cost(model, machine, tp, ep, strategy, work)
            costs.entries.append(Entry(Layout(tp, ep, strategy, is_balanced), phase, routing, cost))


def layout_memory(costs: LayoutCosts, layout: Layout) -> float:
    """Return the bytes of weights a rank holds in a layout, replicas included."""
    num_physical = costs.model.num_experts
    if layout.is_balanced:
        num_physical = costs.placements[costs.decisive, layout.ep].num_physical
    return memory_bytes(costs.model, costs.machine.ranks, num_physical)


def phase_memory(costs: LayoutCosts, prefill: Layout, decode: Layout) -> tuple[float, bool]:
    """Return the bytes of a rank that serves both phases, and whether the experts are kept once."""
    once = layout_memory(costs, prefill)
    # Both cut the experts over all ranks: parts are as large, hence shared only if equal.
    shares = (prefill.tp, prefill.ep) == (decode.tp, decode.ep)
    if shares:
        return once, True
    whole = memory_bytes(costs.model, costs.machine.ranks, 0)  # all but the routed experts
    return once + layout_memory(costs, decode) - whole, False


def explain(costs: LayoutCosts, phase: str) -> list[str]:
    """Say why a phase's best layout is the best: against pure TP, no EPLB, and the next."""
    ranking = costs.ranking(phase)
    best = ranking[0]
    cost = best.cost
    latent = f", latent's projections {cost.latent_us:.1f} us" if cost.latent_us else ""
    lines = [
        f"experts {cost.experts_us:.0f} us ({cost.bound}; {cost.path}), collectives"
        f" {cost.collective_us:.0f} us, router {cost.router_us:.1f} us, shared experts"
        f" {cost.shared_us:.1f} us{latent}; busiest rank {cost.busiest_over_mean:.2f} x the mean"
    ]
    pure = [e for e in ranking if e.layout.ep == 1]
    if pure and best.layout.ep > 1:
        other = pure[0].cost
        lines.append(
            f"tensor parallel alone takes {other.total_us:.0f} us"
            f" ({other.total_us / cost.total_us:.1f} x): experts {other.experts_us:.0f} us"
            f" ({other.bound}), as each rank moves every row of every choice for a slice of"
            f" {costs.model.intermediate_size // pure[0].layout.tp} columns"
        )
    if best.layout.ep == 1:
        lines.append("experts are split evenly whatever the routing; no rank waits for another")
    unbalanced = [e for e in ranking if e.layout == replace(best.layout, is_balanced=False)]
    if best.layout.is_balanced and unbalanced:
        other = unbalanced[0].cost
        lines.append(
            f"without EPLB it takes {other.total_us:.0f} us, the busiest rank at"
            f" {other.busiest_over_mean:.2f} x the mean"
        )
    others = [
        e
        for e in ranking
        if (e.layout.ep, e.layout.strategy) != (best.layout.ep, best.layout.strategy)
    ]
    if others:
        lines.append(f"next best: {others[0].layout}, {others[0].cost.total_us:.0f} us")
    return lines


def config_of(prefill: Layout, decode: Layout) -> ParallelConfig:
    """Return the configuration that runs both phases so."""
    is_hybrid = (prefill.tp, prefill.ep) != (decode.tp, decode.ep)
    return ParallelConfig(
        tp=prefill.tp,
        ep=prefill.ep,
        sp=True,
        strategy=prefill.strategy,
        decode_moe_tp=decode.tp if is_hybrid else None,
        decode_moe_ep=decode.ep if is_hybrid else None,
        decode_strategy=decode.strategy if decode.strategy != prefill.strategy else None,
    )


def write_config(config: ParallelConfig) -> str:
    """Return the Python expression of a configuration, defaults left out."""
    default = ParallelConfig().to_dict()
    given = [f"{k}={v!r}" for k, v in config.to_dict().items() if v != default[k]]
    return f"ParallelConfig({', '.join(given)})"


def to_dict(entry: Entry) -> dict[str, object]:
    """Return an entry as plain values, for JSON."""
    return {
        **asdict(entry.layout),
        "phase": entry.phase,
        "routing": entry.routing,
        **asdict(entry.cost),
        "experts_us": entry.cost.experts_us,
    }

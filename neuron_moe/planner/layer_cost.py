"""Time of one MoE layer on the busiest rank of a layout: computed from documented peaks.

    layer = router + experts of the busiest rank + shared experts + projections of a latent
        + collectives                                                             (nothing overlaps)
    experts = max(tensor engine, HBM)                                             (these two do)
        blockwise: and a launch's own cost, its index, first weights, the sum over a token's pairs

Tensor engine, prefill: 128-row tiles of each expert's rows; per tile 3 H ceil(I/128) columns and
the PE's transposes, or gate and up packed where I is narrow; rows or I are split over the physical
cores of a rank. Decode: every 128 x 128 tile of each touched expert once, at least 64 columns.
HBM: the weights of the experts the path reads, and rows: read, written and read again between
dispatch and combine, and each output row written once.

What is left out flatters all layouts alike: norms, attention, kernel launches, run lengths of DMAs,
refetching of weights. Overlap of communication with work is left out too, and favours layouts that
communicate little.

Axes: T tokens, K choices, H hidden, I intermediate of a rank, E physical experts, D expert-parallel
ranks.
"""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from neuron_moe.dispatch.all_to_all import destinations
from neuron_moe.dispatch.tokens import AFFINITY_BYTES, INDEX_BYTES
from neuron_moe.paths import choose_path
from neuron_moe.planner.coefficients import COEFFICIENTS, Machine
from neuron_moe.planner.collective_times import ROW_BYTES, around_experts
from neuron_moe.planner.sizes import WEIGHT_BYTES, ModelSizes
from nki_sim.hardware import TRN2

# Of a launch, simulated: index of its first rows and of each; products over the engine's time.
_INDEX_US, _INDEX_ROW_US, _PRODUCTS = 30.0, 0.004, 1.15


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Tokens of one forward and where their experts are.

    Args:
        phase: 'prefill' or 'decode'.
        physical_TK: [T, K] int32 physical expert of each choice.
        num_physical: E, replicas counted.
    """

    phase: str
    physical_TK: Tensor
    num_physical: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.physical_TK.shape[0]


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Where the time of a layer goes, in microseconds, on the busiest rank.

    Attributes:
        total_us: all of it.
        router_us: scores and choice.
        experts_us: routed experts.
        tensor_us: routed experts on the tensor engine.
        hbm_us: routed experts' bytes.
        shared_us: shared experts.
        latent_us: projections into the experts' latent and out of it; 0 where there is none.
        collective_us: all collectives.
        bound: what decides the experts' time, 'tensor engine' or 'HBM'.
        path: which path the experts take.
        busiest_over_mean: rows of the busiest expert-parallel rank over the mean.
        wire_bytes: bytes the collectives send to a rank.
    """

    total_us: float
    router_us: float
    experts_us: float
    tensor_us: float
    hbm_us: float
    shared_us: float
    latent_us: float
    collective_us: float
    bound: str
    path: str
    busiest_over_mean: float
    wire_bytes: float


def layer_cost(
    model: ModelSizes, machine: Machine, tp: int, ep: int, strategy: str, work: RoutedTokens
) -> LayerCost:
    """Compute the cost of one layer.

    Args:
        model: its sizes.
        machine: where it runs.
        tp: ranks that split an expert.
        ep: ranks that split the experts.
        strategy: 'replicate' or 'all_to_all'.
        work: the tokens.
    """
    per_rank = work.num_physical // ep
    flat = work.physical_TK.reshape(-1).long()
    load_DE = torch.bincount(flat, minlength=work.num_physical).view(ep, per_rank)
    rows_D = destinations(work.physical_TK, per_rank, ep).sum(
        0
    )  # distinct tokens that reach a rank
    path = choose_path(
        work.phase, work.num_tokens, model.top_k, work.num_physical, num_local_experts=per_rank
    ).path
    written_D = rows_D if strategy == "all_to_all" else torch.full_like(rows_D, work.num_tokens)
    width = ceil(model.intermediate_size / tp)
    tensor_D = _tensor_ns(model, machine, width, work.phase, load_DE)
    hbm_D = _hbm_ns(model, machine, width, path, load_DE, written_D)
    busiest = int(torch.maximum(tensor_D, hbm_D).argmax())
    tensor_us, hbm_us = float(tensor_D[busiest]) / 1e3, float(hbm_D[busiest]) / 1e3
    experts_us = max(tensor_us, hbm_us)
    if path == "blockwise":
        here_TK = work.physical_TK // per_rank == busiest
        rows = int(written_D[busiest])
        experts_us = _launch_us(model, machine, width, tensor_us, hbm_us, here_TK, per_rank, rows)
    own = _own_tokens(work, strategy, tp * ep)
    router_us = _router_ns(model, machine, own) / 1e3
    shared_us = _shared_ns(model, machine, work.num_tokens, tp * ep) / 1e3
    entering = int(written_D[busiest])
    latent_us = _latent_ns(model, machine, entering, own) / 1e3
    if strategy == "all_to_all":
        collective_ns, wire = _exchange(model, machine, tp, ep, work, float(rows_D.max()))
    else:
        collective_ns, wire = _replicate(model, machine, tp * ep, work)
    collective_us = collective_ns / 1e3
    load_D = load_DE.sum(1).double()
    return LayerCost(
        total_us=router_us + experts_us + shared_us + latent_us + collective_us,
        router_us=router_us,
        experts_us=experts_us,
        tensor_us=tensor_us,
        hbm_us=hbm_us,
        shared_us=shared_us,
        latent_us=latent_us,
        collective_us=collective_us,
        bound="tensor engine" if tensor_us > hbm_us else "HBM",
        path=path,
        busiest_over_mean=float(load_D.max() / load_D.mean()),
        wire_bytes=wire,
    )


def _launch_us(
    model: ModelSizes,
    machine: Machine,
    width: int,
    tensor_us: float,
    hbm_us: float,
    here_TK: Tensor,
    num_experts: int,
    rows: int,
) -> float:
    """Return the time of a launch of index, experts and sum with so many rows.

    Its products go on a little less than the tensor engine could; it waits for the gate and up
    weights of a first expert on each core.
    """
    pairs_T = here_TK.sum(1)
    spread = torch.bincount(pairs_T, minlength=model.top_k + 1).tolist()
    spread[0] = rows - sum(spread[1:])
    inputs = model.num_matrices - 1
    first = (
        inputs * model.expert_hidden_size * width * WEIGHT_BYTES[model.weight_format] * machine.lnc
    )
    # Kernels answer to `import nki`, which nobody does who only reads a model.
    import nki_kernels.provided  # noqa: F401
    from nki_kernels.combine import best_sum_ns

    sum_us = best_sum_ns(spread, num_experts, model.expert_hidden_size, 1, machine.lnc)[1] / 1e3
    own_us = TRN2.launch_cost_ns(machine.lnc) / 1e3
    wait_us = first / machine.hbm_bytes_per_ns / 1e3
    index_us = _INDEX_US + _INDEX_ROW_US * rows
    return own_us + index_us + wait_us + max(_PRODUCTS * tensor_us, hbm_us) + sum_us


def _own_tokens(work: RoutedTokens, strategy: str, ranks: int) -> int:
    """Return the tokens a rank routes: all of a replicated decode batch, else its share."""
    is_shared_out = work.phase == "prefill" or strategy == "all_to_all"
    return ceil(work.num_tokens / ranks) if is_shared_out else work.num_tokens


def tile_cycles(hidden: int, width: int, num_matrices: int = 3) -> float:
    """Return tensor engine cycles of one 128-row tile through an expert on one physical core."""
    rows = COEFFICIENTS["tile_rows"].value
    plain = num_matrices * hidden * ceil(width / rows) + rows * ceil(hidden / rows)
    if num_matrices == 2:
        return plain
    packed = hidden * ceil(2 * width / rows) + hidden * ceil(width / 32) / 4
    return min(plain, packed)


def matmul_cycles(rows: int, contracted: int, columns: int) -> float:
    """Return cycles of [rows, contracted] @ [contracted, columns] in bf16 on one physical core.

    Either operand may be the stationary one, in 128 x 128 tiles; the other streams through each
    tile, at least 64 columns at a time.
    """
    tile, least = COEFFICIENTS["tile_rows"].value, COEFFICIENTS["least_columns"].value
    deep = ceil(contracted / tile)
    return deep * min(
        ceil(columns / tile) * max(rows, least), ceil(rows / tile) * max(columns, least)
    )


def _tensor_ns(
    model: ModelSizes, machine: Machine, width: int, phase: str, load_DE: Tensor
) -> Tensor:
    clock = COEFFICIENTS["tensor_clock_ghz"].value
    rows = COEFFICIENTS["tile_rows"].value
    if phase == "decode":
        weights = model.num_matrices * model.expert_hidden_size * width
        tiles = weights / (rows * COEFFICIENTS["tile_columns"].value)
        columns_DE = load_DE.clamp(min=int(COEFFICIENTS["least_columns"].value)) * (load_DE > 0)
        return columns_DE.sum(1).double() * tiles / clock / machine.lnc
    tiles_D = torch.ceil(load_DE / rows).sum(1).double()
    hidden, matrices = model.expert_hidden_size, model.num_matrices
    by_rows = tile_cycles(hidden, width, matrices) / machine.lnc
    by_width = tile_cycles(hidden, ceil(width / machine.lnc), matrices)
    return tiles_D * min(by_rows, by_width) / clock


def _hbm_ns(
    model: ModelSizes,
    machine: Machine,
    width: int,
    path: str,
    load_DE: Tensor,
    written_D: Tensor,
) -> Tensor:
    weights = model.num_matrices * model.expert_hidden_size * width
    expert = weights * WEIGHT_BYTES[model.weight_format]
    touched_D = (load_DE > 0).sum(1).double()
    if path == "all_experts":
        touched_D = torch.full_like(touched_D, load_DE.shape[1])
    row = model.expert_hidden_size * ROW_BYTES
    moved_D = 3 * load_DE.sum(1).double() * row + written_D.double() * row
    return (touched_D * expert + moved_D) / machine.hbm_bytes_per_ns


def _router_ns(model: ModelSizes, machine: Machine, tokens: int) -> float:
    """Float32 scores of the own tokens; the weights are read in float32."""
    cycles = matmul_cycles(tokens, model.hidden_size, model.num_experts)
    moved = model.hidden_size * (4 * model.num_experts + tokens * ROW_BYTES)
    return _products_ns(machine, cycles * COEFFICIENTS["fp32_passes"].value, moved)


def _shared_ns(model: ModelSizes, machine: Machine, tokens: int, ranks: int) -> float:
    """Shared experts split over all ranks, for all tokens."""
    if not model.shared_size:
        return 0.0
    width = ceil(model.shared_size / ranks)
    cycles = matmul_cycles(tokens, model.hidden_size, (model.num_matrices - 1) * width)
    cycles += matmul_cycles(tokens, width, model.hidden_size)
    moved = model.shared_bytes / ranks + tokens * model.hidden_size * ROW_BYTES
    return _products_ns(machine, cycles, moved)


def _latent_ns(model: ModelSizes, machine: Machine, entering: int, leaving: int) -> float:
    """Rows into the latent where their experts are, own tokens out of it; whole on every rank."""
    if not model.latent_size:
        return 0.0
    hidden, latent = model.hidden_size, model.latent_size
    cycles = matmul_cycles(entering, hidden, latent) + matmul_cycles(leaving, latent, hidden)
    moved = (2 * hidden * latent + (entering + leaving) * (hidden + latent)) * ROW_BYTES
    return _products_ns(machine, cycles, moved)


def _products_ns(machine: Machine, cycles: float, moved_bytes: float) -> float:
    """Return the time of products that the cores share, beside the bytes that they move."""
    tensor_ns = cycles / COEFFICIENTS["tensor_clock_ghz"].value / machine.lnc
    return max(tensor_ns, moved_bytes / machine.hbm_bytes_per_ns)


def _replicate(
    model: ModelSizes, machine: Machine, ranks: int, work: RoutedTokens
) -> tuple[float, float]:
    """All-gather and reduce-scatter in prefill, one all-reduce in decode."""
    found = around_experts(
        machine,
        work.num_tokens,
        model.hidden_size,
        model.top_k,
        ranks,
        is_split=work.phase == "prefill",
    )
    return 1e3 * sum(each.us for each in found), sum(each.wire_bytes for each in found)


def _exchange(
    model: ModelSizes, machine: Machine, tp: int, ep: int, work: RoutedTokens, busiest_rows: float
) -> tuple[float, float]:
    """Counts, rows there and back over the expert group, gather and sum over the tensor group."""
    row = model.hidden_size * ROW_BYTES
    routing = model.top_k * (INDEX_BYTES + AFFINITY_BYTES)
    arriving = busiest_rows / tp
    counts = machine.gather_ns(ep * ep * 4, ep) + machine.gather_ns(tp * ep * ep * 4, tp)
    there = machine.exchange_ns(arriving * (row + routing), ep, tp)
    there += machine.gather_ns(busiest_rows * (row + routing), tp)
    back = machine.exchange_ns(arriving * row, ep, tp) + machine.gather_ns(busiest_rows * row, tp)
    if work.phase == "decode":  # the tokens were the same on all ranks, and are to be so again
        back += machine.gather_ns(work.num_tokens * row, tp * ep)
    wire = (arriving * (ep - 1) / ep + busiest_rows * (tp - 1) / tp) * (2 * row + routing)
    return counts + there + back, wire

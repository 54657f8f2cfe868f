"""The torch backend: the readable reference, with autograd, on any device.

Every path exists in two forms with the same result:

* static: shapes depend on sizes only and nothing leaves the device, so `torch.export` and compilers
  can take it.
  blockwise multiplies blocks of slots, selective gathers the weights of each pair, all_experts is a
  batched matmul over
  all experts. The batched operands are materialised: a form for graphs, not for memory.
* eager: the form that is fast on a CPU. One pass over the experts that were chosen at all, each
  weight read once. An
  expert nobody chose adds exactly zero, so all three paths may use it.

`TorchBackend()` takes the static form while a graph is being captured and the eager one otherwise.

Axes: T tokens, K choices, P = T * K pairs, E experts of this rank, H hidden, I intermediate.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from neuron_moe.activations import activate
from neuron_moe.blocks import BlockMapping, build_block_mapping, sort_pairs
from neuron_moe.paths import decide
from neuron_moe.plan import LayerParts, Plan, Step
from neuron_moe.router import Routing
from neuron_moe.weights.expert_weights import ExpertWeights, LocalRouting, Packed
from neuron_moe.weights.laid_out import LaidOut
from neuron_moe.weights.packed import PackedMatrices

_TOKENS_PER_PIECE = 32  # tokens combined in one call
_ROWS_PER_RUN = 256  # rows whose activations are computed in one call; keeps them in the cache


class TorchBackend:
    """See the module's docstring.

    Args:
        static: force the static form (True) or the eager one (False); None decides per call.
    """

    name = "torch"
    has_gradient = True

    def __init__(self, static: bool | None = None) -> None:
        self.static = static

    def plan(self, parts: LayerParts, step: Step) -> Plan:
        """Decide how a step is computed; nothing needs to be prepared."""
        decision = decide(parts.workload(step), self.name, parts.compat)
        return TorchPlan(step, decision, parts, self.static)

    def pack(self, first_EHI: Tensor, down_EIH: Tensor) -> tuple[Packed, Packed] | str:
        """Return both matrices in oneDNN's layout.

        Raises:
            ValueError: not on this device, in this dtype or with this build of torch.
        """
        return PackedMatrices(first_EHI), PackedMatrices(down_EIH)

    def lay_out(self, parts: LayerParts, phase: str) -> LaidOut | None:
        """Refuse: there is one layout for both phases."""
        raise ValueError(
            f"for_{phase}=True: backend={self.name!r} has one layout for both phases. Leave it"
            " False, or use backend='nki'."
        )


@dataclass(frozen=True, eq=False)
class TorchPlan(Plan):
    """A step computed by torch operations.

    Attributes:
        static: as of the backend.
    """

    static: bool | None

    def route(self, hidden_TH: Tensor) -> Routing:
        """Route T tokens."""
        assert self.parts.router is not None
        routing: Routing = self.parts.router(hidden_TH)
        return routing

    def experts(self, hidden_NH: Tensor, routing: LocalRouting) -> Tensor:
        """Compute this rank's experts; return [N, H] float32."""
        weights = self.parts.weights
        if not self._is_static(weights):
            return chosen_experts(hidden_NH, routing, weights)
        if self.path == "selective":
            return _gathered_weights(hidden_NH, routing, weights)
        if self.path == "all_experts":
            return _every_expert(hidden_NH, routing, weights)
        mapping = build_block_mapping(
            routing.expert_index_TK,
            weights.num_experts,
            self.decision.work.block_size,
            pad_to_even=self.parts.tuning.pad_num_blocks_to_even,
        )
        return _blocks(hidden_NH, routing, weights, mapping)

    def _is_static(self, weights: ExpertWeights) -> bool:
        is_static = torch.compiler.is_compiling() if self.static is None else self.static
        if is_static and weights.packed_down is not None:
            raise ValueError(
                "packed weights: the static form needs plain tensors. Export before pack_weights(),"
                " or load the state dict again, which unpacks."
            )
        return is_static


def chosen_experts(hidden_TH: Tensor, routing: LocalRouting, weights: ExpertWeights) -> Tensor:
    """Return [T, H] float32 of any path: loop over the experts that were chosen.

    Eager only, the counts leave the device.
    """
    top_k = routing.expert_index_TK.shape[1]
    pairs = sort_pairs(routing.expert_index_TK, weights.num_experts)
    chosen = [(e, n) for e, n in enumerate(pairs.tokens_per_expert_E.tolist()) if n]
    if not chosen:
        return hidden_TH.new_zeros(hidden_TH.shape, dtype=torch.float32)
    order_P = pairs.order_P[: sum(count for _, count in chosen)]
    rows_PH = hidden_TH[order_P // top_k]
    if routing.scales_input:
        affinity_P1 = routing.expert_affinities_TK.reshape(-1, 1)[order_P]
        rows_PH = (rows_PH * affinity_P1).to(hidden_TH.dtype)
    outputs: list[Tensor] = []
    first = 0
    for run in _runs(chosen):
        run_rows = sum(count for _, count in run)
        outputs += _run_of_experts(rows_PH[first : first + run_rows], weights, run)
        first += run_rows
    return _combine(outputs, order_P, routing)


def _combine(outputs: list[Tensor], order_P: Tensor, routing: LocalRouting) -> Tensor:
    """Weigh and add the K rows of each token in float32, a few tokens at a time.

    Small pieces stay in the cache and reuse their memory; whole [T, K, H] temporaries cost more
    than the arithmetic.
    """
    affinities_TK = routing.expert_affinities_TK
    num_tokens, top_k = affinities_TK.shape
    num_rows = order_P.shape[0]
    if num_rows < num_tokens * top_k:  # pairs without an expert read a row of zeros
        outputs = [*outputs, outputs[0].new_zeros((1, outputs[0].shape[1]))]
    output_PH = torch.cat(outputs)
    row_of_pair = order_P.new_full((num_tokens * top_k,), num_rows)
    row_of_pair[order_P] = torch.arange(num_rows, device=order_P.device)
    weights_TK = torch.ones_like(affinities_TK) if routing.scales_input else affinities_TK
    pieces = []
    for index, weight in zip(
        torch.split(row_of_pair, _TOKENS_PER_PIECE * top_k),
        torch.split(weights_TK, _TOKENS_PER_PIECE),
        strict=True,
    ):
        rows_tKH = output_PH[index].view(weight.shape[0], top_k, -1).float()
        pieces.append(torch.bmm(weight.unsqueeze(1), rows_tKH).squeeze(1))
    return torch.cat(pieces)


def _runs(chosen: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Group (expert, rows) so that one activation call serves many experts with few rows each."""
    runs: list[list[tuple[int, int]]] = [[]]
    rows = 0
    for expert, count in chosen:
        if rows and rows + count > _ROWS_PER_RUN:
            runs.append([])
            rows = 0
        runs[-1].append((expert, count))
        rows += count
    return runs


def _run_of_experts(
    rows_nH: Tensor, weights: ExpertWeights, run: list[tuple[int, int]]
) -> list[Tensor]:
    """Compute consecutive experts, each on its rows."""
    counts = [count for _, count in run]
    projected = torch.cat(
        [
            _gate_up(rows, weights, expert)
            for rows, (expert, _) in zip(torch.split(rows_nH, counts), run, strict=True)
        ]
    )
    activated = torch.split(activate(projected, weights.formula), counts)
    return [_down(rows, weights, expert) for rows, (expert, _) in zip(activated, run, strict=True)]


def _gate_up(rows_nH: Tensor, weights: ExpertWeights, expert: int) -> Tensor:
    if weights.packed_gate_up is not None:
        projected = weights.packed_gate_up.multiply(rows_nH, expert)
    else:
        projected = rows_nH @ weights.gate_up_proj_EHI[expert]
    if weights.gate_up_bias_EI is not None:
        projected = projected + weights.gate_up_bias_EI[expert]
    return projected


def _down(rows_nI: Tensor, weights: ExpertWeights, expert: int) -> Tensor:
    if weights.packed_down is not None:
        output = weights.packed_down.multiply(rows_nI, expert)
    else:
        output = rows_nI @ weights.down_proj_EIH[expert]
    if weights.down_bias_EH is not None:
        output = output + weights.down_bias_EH[expert] * weights.down_bias_scale
    return output


def _blocks(
    hidden_TH: Tensor, routing: LocalRouting, weights: ExpertWeights, mapping: BlockMapping
) -> Tensor:
    """Multiply each block of slots with its expert's matrices; static shapes."""
    num_tokens, top_k = routing.expert_index_TK.shape
    num_blocks = mapping.block_to_expert.shape[0]
    num_pairs = num_tokens * top_k
    expert_N = mapping.block_to_expert.to(torch.int64)
    is_real = mapping.pair_of_slot >= 0
    pair = mapping.pair_of_slot.to(torch.int64)
    affinity_NB1 = routing.expert_affinities_TK.reshape(-1)[pair.clamp(min=0)]
    affinity_NB1 = torch.where(is_real, affinity_NB1, 0.0).view(num_blocks, -1, 1)
    token = mapping.token_position_to_id.to(torch.int64).clamp(min=0)
    slots_NBH = hidden_TH[token].view(num_blocks, -1, hidden_TH.shape[1])
    if routing.scales_input:
        slots_NBH = (slots_NBH * affinity_NB1).to(hidden_TH.dtype)
    projected = torch.bmm(slots_NBH, weights.gate_up_proj_EHI[expert_N])
    if weights.gate_up_bias_EI is not None:
        projected = projected + weights.gate_up_bias_EI[expert_N].unsqueeze(1)
    output_NBH = torch.bmm(activate(projected, weights.formula), weights.down_proj_EIH[expert_N])
    if weights.down_bias_EH is not None:
        bias_NH = weights.down_bias_EH[expert_N] * weights.down_bias_scale
        output_NBH = output_NBH + bias_NH.unsqueeze(1)
    output_NBH = output_NBH.float()
    if not routing.scales_input:
        output_NBH = output_NBH * affinity_NB1
    target = torch.where(is_real, pair, num_pairs)  # padding slots meet in a row that is cut off
    by_pair = output_NBH.new_zeros((num_pairs + 1, hidden_TH.shape[1]))
    by_pair = by_pair.index_copy(0, target, output_NBH.flatten(0, 1))
    return by_pair[:num_pairs].view(num_tokens, top_k, -1).sum(1)


def _gathered_weights(hidden_TH: Tensor, routing: LocalRouting, weights: ExpertWeights) -> Tensor:
    """Load the weights of each pair; static shapes."""
    num_tokens, top_k = routing.expert_index_TK.shape
    index_P = routing.expert_index_TK.reshape(-1).to(torch.int64)
    is_real_P11 = (index_P >= 0).view(-1, 1, 1)
    index_P = index_P.clamp(min=0)
    affinity_P11 = routing.expert_affinities_TK.reshape(-1, 1, 1)
    rows_P1H = hidden_TH.repeat_interleave(top_k, dim=0).unsqueeze(1)
    if routing.scales_input:
        rows_P1H = (rows_P1H * affinity_P11).to(hidden_TH.dtype)
    projected = torch.bmm(rows_P1H, weights.gate_up_proj_EHI[index_P])
    if weights.gate_up_bias_EI is not None:
        projected = projected + weights.gate_up_bias_EI[index_P].unsqueeze(1)
    output = torch.bmm(activate(projected, weights.formula), weights.down_proj_EIH[index_P])
    if weights.down_bias_EH is not None:
        output = output + (weights.down_bias_EH[index_P] * weights.down_bias_scale).unsqueeze(1)
    output = torch.where(is_real_P11, output, 0).float()
    if not routing.scales_input:
        output = output * affinity_P11
    return output.view(num_tokens, top_k, -1).sum(1)


def _every_expert(hidden_TH: Tensor, routing: LocalRouting, weights: ExpertWeights) -> Tensor:
    """Compute every expert for every token and weigh; static shapes."""
    num_tokens, num_experts = hidden_TH.shape[0], weights.num_experts
    index_TK = routing.expert_index_TK.to(torch.int64)
    is_none_TK = index_TK < 0
    column_TK = torch.where(is_none_TK, num_experts, index_TK)  # one more column collects no-expert
    zeros_TE = hidden_TH.new_zeros((num_tokens, num_experts + 1), dtype=torch.float32)

    def spread(values_TK: Tensor) -> Tensor:
        return zeros_TE.scatter(1, column_TK, values_TK)[:, :num_experts]

    affinity_TE = spread(routing.expert_affinities_TK)
    is_chosen_TE = spread(torch.ones_like(routing.expert_affinities_TK)) > 0
    rows_ETH = hidden_TH.unsqueeze(0).expand(num_experts, -1, -1)
    if routing.scales_input:
        rows_ETH = (rows_ETH * affinity_TE.t().unsqueeze(2)).to(hidden_TH.dtype)
    projected = torch.bmm(rows_ETH, weights.gate_up_proj_EHI)
    if weights.gate_up_bias_EI is not None:
        projected = projected + weights.gate_up_bias_EI.unsqueeze(1)
    output_ETH = torch.bmm(activate(projected, weights.formula), weights.down_proj_EIH)
    if weights.down_bias_EH is not None:
        output_ETH = output_ETH + (weights.down_bias_EH * weights.down_bias_scale).unsqueeze(1)
    # Choose, do not multiply by zero: what an expert makes of another's token may be infinite.
    output_ETH = torch.where(is_chosen_TE.t().unsqueeze(2), output_ETH, 0).float()
    if not routing.scales_input:
        output_ETH = output_ETH * affinity_TE.t().unsqueeze(2)
    return output_ETH.sum(0)

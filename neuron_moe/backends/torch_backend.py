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

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neuron_moe.activations import activate, at_least_float32, sum_dtype
from neuron_moe.backends.chosen_experts import chosen_experts
from neuron_moe.backends.form_choice import settle_forms
from neuron_moe.backends.saving import saving_experts
from neuron_moe.blocks import BlockMapping, build_block_mapping
from neuron_moe.device import can_look
from neuron_moe.paths import decide
from neuron_moe.plan import LayerParts, Plan, Step, kept_note
from neuron_moe.router import Routing
from neuron_moe.spec import ExpertSpec, RouterSpec
from neuron_moe.weights.expert_weights import ExpertWeights, LocalRouting, Packed
from neuron_moe.weights.laid_out import LaidOut
from neuron_moe.weights.packed import PackedMatrices
from neuron_moe.weights.product_forms import ProductForms


class TorchBackend:
    """See the module's docstring.

    Args:
        static: force the static form (True) or the eager one (False); None decides per call.
    """

    name = "torch"
    has_gradient = True
    plans_ahead = False

    def __init__(self, static: bool | None = None) -> None:
        self.static = static

    def check(self, experts: ExpertSpec, router: RouterSpec) -> None:
        """Refuse nothing: every formula is computed."""

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

    def settle_forms(self, parts: LayerParts, form: str) -> ProductForms | None:
        """Return the form of each step; see `form_choice.settle_forms`."""
        return settle_forms(parts, form)

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
        weights, save_percent = self.parts.weights, self.parts.tuning.save_percent
        if save_percent is not None and torch.is_grad_enabled() and weights.packed_down is None:
            return saving_experts(hidden_NH, routing, weights, self.parts.spec, save_percent)
        if not self._is_static(hidden_NH, weights):
            return chosen_experts(hidden_NH, routing, weights)
        weights = _decoded(weights)
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

    def notes(self) -> tuple[str, ...]:
        """Return what training keeps, and in which form a CPU multiplies, if that was settled."""
        return (*kept_note(self.parts.tuning), *self._form_notes())

    def _form_notes(self) -> tuple[str, ...]:
        forms, tokens = self.parts.weights.product_forms, self.step.rows or self.step.tokens
        if forms is None or self.static:
            return ()
        form = self.parts.weights.product_form(tokens)
        return (f"expert products are {form}: {forms.why(tokens)}",)

    def _is_static(self, hidden_NH: Tensor, weights: ExpertWeights) -> bool:
        is_static = self.static if self.static is not None else not can_look(hidden_NH)
        if is_static and isinstance(weights.packed_down, PackedMatrices):
            raise ValueError(
                "packed weights: the static form needs plain tensors. Export before pack_weights(),"
                " or load the state dict again, which unpacks."
            )
        return is_static


def _decoded(weights: ExpertWeights) -> ExpertWeights:
    """Return the same with codes decoded."""
    first, down = weights.packed_gate_up, weights.packed_down
    if first is None and down is None:
        return weights
    return replace(
        weights,
        gate_up_proj_EHI=weights.gate_up_proj_EHI if first is None else first.unpack(),
        down_proj_EIH=weights.down_proj_EIH if down is None else down.unpack(),
        packed_gate_up=None,
        packed_down=None,
    )


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
    output_NBH = at_least_float32(output_NBH)
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
    output = at_least_float32(torch.where(is_real_P11, output, 0))
    if not routing.scales_input:
        output = output * affinity_P11
    return output.view(num_tokens, top_k, -1).sum(1)


def _every_expert(hidden_TH: Tensor, routing: LocalRouting, weights: ExpertWeights) -> Tensor:
    """Compute every expert for every token and weigh; static shapes."""
    num_tokens, num_experts = hidden_TH.shape[0], weights.num_experts
    index_TK = routing.expert_index_TK.to(torch.int64)
    is_none_TK = index_TK < 0
    column_TK = torch.where(is_none_TK, num_experts, index_TK)  # one more column collects no-expert
    zeros_TE = hidden_TH.new_zeros((num_tokens, num_experts + 1), dtype=sum_dtype(hidden_TH))

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
    output_ETH = at_least_float32(torch.where(is_chosen_TE.t().unsqueeze(2), output_ETH, 0))
    if not routing.scales_input:
        output_ETH = output_ETH * affinity_TE.t().unsqueeze(2)
    return output_ETH.sum(0)

"""What the experts of one rank compute with: their weights, and a routing in their numbering."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuron_moe.weights.laid_out import LaidOut
from neuron_moe.weights.narrow import NarrowMatrices
from neuron_moe.weights.packed import PackedMatrices
from neuron_moe.weights.product_forms import ProductForms
from nki_kernels.common.formula import ExpertFormula

Packed = PackedMatrices | NarrowMatrices


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The routed experts of one rank.

    Attributes:
        gate_up_proj_EHI: [E, H, 2I], gate columns first ([E, H, I] without a gate); without numbers
            if packed.
        down_proj_EIH: [E, I, H]; without numbers if packed.
        gate_up_bias_EI: [E, 2I] or None, as in the checkpoint.
        down_bias_EH: [E, H] or None, as in the checkpoint.
        formula: what happens between the projections.
        down_bias_scale: 1 / ranks that add the same down bias before a sum over ranks.
        packed_gate_up: in another form, see `Backend.pack`; None if plain.
        packed_down: likewise.
        why_plain: why packing left them as they were; empty if it did not, or was not asked.
        decode_copy: the same in the order of the decode kernel, if there is one.
        prefill_copy: the same in the order of the prefill kernel, if there is one.
        product_forms: in which form a CPU multiplies with them, if that was settled.
    """

    gate_up_proj_EHI: Tensor
    down_proj_EIH: Tensor
    gate_up_bias_EI: Tensor | None
    down_bias_EH: Tensor | None
    formula: ExpertFormula
    down_bias_scale: float = 1.0
    packed_gate_up: Packed | None = None
    packed_down: Packed | None = None
    why_plain: str = ""
    decode_copy: LaidOut | None = None
    prefill_copy: LaidOut | None = None
    product_forms: ProductForms | None = None

    @property
    def num_experts(self) -> int:
        """Experts of this rank."""
        return self.gate_up_proj_EHI.shape[0]

    @cached_property
    def each_expert(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The plain matrices of each expert, gate_up and down: views that record no gradient."""
        return tuple(
            matrices.detach().unbind() for matrices in (self.gate_up_proj_EHI, self.down_proj_EIH)
        )  # type: ignore[return-value]

    def wants_gradient(self, *inputs: Tensor) -> bool:
        """Say whether a gradient of these weights or of some inputs is to be recorded."""
        if not torch.is_grad_enabled():
            return False
        biases = (self.gate_up_bias_EI, self.down_bias_EH)
        matrices = (self.gate_up_proj_EHI, self.down_proj_EIH)
        return any(
            each is not None and each.requires_grad for each in (*inputs, *matrices, *biases)
        )

    def product_form(self, tokens: int) -> str:
        """Return the form in which a CPU multiplies them in a step of some tokens."""
        if self.product_forms is not None:
            return self.product_forms.of(tokens)
        return self.own_form

    @property
    def own_form(self) -> str:
        """The form for any number of tokens, where none was settled."""
        return "plain" if self.packed_down is None else "padded"

    def packed_matrices(self, *, is_wanted: bool) -> tuple[Packed | None, Packed | None]:
        """Return gate_up and down as they are packed, or None each; see `product_form`.

        Args:
            is_wanted: take the second copy, where there are both.
        """
        forms = self.product_forms
        if is_wanted and forms is not None and forms.packed is not None:
            return forms.packed
        return self.packed_gate_up, self.packed_down

    def run(self, experts: slice) -> "ExpertWeights":
        """Return a run of the experts; a view."""
        gate_up_bias, down_bias = self.gate_up_bias_EI, self.down_bias_EH
        packed_gate_up, packed_down = self.packed_gate_up, self.packed_down
        decode_copy, prefill_copy = self.decode_copy, self.prefill_copy
        return replace(
            self,
            gate_up_proj_EHI=self.gate_up_proj_EHI[experts],
            down_proj_EIH=self.down_proj_EIH[experts],
            gate_up_bias_EI=None if gate_up_bias is None else gate_up_bias[experts],
            down_bias_EH=None if down_bias is None else down_bias[experts],
            packed_gate_up=None if packed_gate_up is None else packed_gate_up.run(experts),
            packed_down=None if packed_down is None else packed_down.run(experts),
            decode_copy=None if decode_copy is None else decode_copy.run(experts),
            prefill_copy=None if prefill_copy is None else prefill_copy.run(experts),
            product_forms=None if self.product_forms is None else self.product_forms.run(experts),
        )


def refuse_gradient(output: Tensor, weights: ExpertWeights) -> Tensor:
    """Return an output; requesting the gradient of a matrix that is packed is an error from here.

    Args:
        output: computed with the weights.
        weights: of this rank.
    """
    if not torch.is_grad_enabled():
        return output
    pairs = (
        (weights.gate_up_proj_EHI, weights.packed_gate_up),
        (weights.down_proj_EIH, weights.packed_down),
    )
    trained = [matrix for matrix, packed in pairs if packed is not None and matrix.requires_grad]
    refused: Tensor = _Refused.apply(output, *trained) if trained else output  # type: ignore[no-untyped-call]
    return refused


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, output: Tensor, *_trained: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> Any:
        raise RuntimeError(
            "expert weights: packed by pack_weights() or settle_forms(), so they have no gradient."
            " Call unpack_weights() of the layer's experts before you train them, or"
            " requires_grad_(False) on their weights if they are frozen."
        )


class LocalRouting(NamedTuple):
    """A routing in the numbering of this rank.

    Attributes:
        expert_index_TK: [T, K] int32 local expert; -1 for padding tokens and for experts of other
            ranks.
        expert_affinities_TK: [T, K] float32; 0 where the index is -1.
        scales_input: affinities multiply the expert's input instead of its output (Llama4).
        model_index_TK: [T, K] int32 the choices before, in the numbering of all ranks; None where
            that is the same.
    """

    expert_index_TK: Tensor
    expert_affinities_TK: Tensor
    scales_input: bool = False
    model_index_TK: Tensor | None = None

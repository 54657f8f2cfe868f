"""The gate, up and down projections of the experts of one rank.

Axes: E experts of this rank, C rows of an expert, H hidden, I intermediate of this rank.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.activations import activate
from neuron_moe.errors import WeightError
from neuron_moe.parallel.shard import ExpertShard
from neuron_moe.spec import ExpertSpec, InitMethods
from neuron_moe.weights.expert_weights import ExpertWeights, Packed, refuse_gradient
from neuron_moe.weights.laid_out import LaidOut
from neuron_moe.weights.linear import ExpertLinear
from neuron_moe.weights.narrow import NarrowMatrices
from neuron_moe.weights.packed import PackedMatrices
from neuron_moe.weights.product_forms import ProductForms
from neuron_moe.weights.stamps import Source, Stamp
from nki_kernels.common.formula import num_projections

Pack = Callable[[Tensor, Tensor], tuple[Packed, Packed] | str]
"""See `Backend.pack`."""


class Experts(nn.Module):
    """Gate, up and down projections of the experts of one rank.

    Args:
        spec: sizes and formula of the model's experts.
        shard: the part of them this rank owns.
        dtype: dtype of the weights.
        device: where they live.
        num_physical: experts of all ranks, replicas counted, if some have replicas.
        init_methods: how the first and the down projections are drawn.
    """

    def __init__(
        self,
        spec: ExpertSpec,
        shard: ExpertShard,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        num_physical: int | None = None,
        init_methods: InitMethods = (None, None),
    ) -> None:
        super().__init__()
        num_physical = num_physical or spec.num_experts
        self.formula = spec.formula
        self.shard = shard
        num_experts = num_physical // shard.ep_size
        width = len(shard.columns(spec.intermediate_size))
        first_name = "gate_up_proj" if spec.formula.has_gate else "up_proj"
        self.first_name = first_name
        self.copies: dict[str, LaidOut] = {}
        self.product_forms: ProductForms | None = None
        first = ExpertLinear(
            num_experts,
            spec.hidden_size,
            width * num_projections(spec.formula),
            bias=spec.formula.has_gate_up_bias,
            dtype=dtype,
            device=device,
            init_method=init_methods[0],
        )
        self.add_module(first_name, first)
        self.down_proj = ExpertLinear(
            num_experts,
            width,
            spec.hidden_size,
            bias=spec.formula.has_down_bias,
            dtype=dtype,
            device=device,
            init_method=init_methods[1],
        )

    def weights(self) -> ExpertWeights:
        """Return the tensors in the form backends take."""
        first = self.first
        if (first.kept is None) != (self.down_proj.kept is None):
            self._unpack_the_other()
        first.check(self.first_name)
        self.down_proj.check("down_proj")
        matrices, down_matrices = first.matrices, self.down_proj.matrices
        if matrices.dtype != down_matrices.dtype:
            raise WeightError(
                f"{self.first_name}.weight: dtype {matrices.dtype} must be that of"
                f" down_proj.weight, {down_matrices.dtype}. Cast the module with .to()."
            )
        return ExpertWeights(
            gate_up_proj_EHI=matrices,
            down_proj_EIH=down_matrices,
            gate_up_bias_EI=first.bias,
            down_bias_EH=self.down_proj.bias,
            formula=self.formula,
            down_bias_scale=1.0 / self.shard.tp_size,
            packed_gate_up=first.kept,
            packed_down=self.down_proj.kept,
            why_plain=first.why_plain,
            decode_copy=self._valid_copy("decode"),
            prefill_copy=self._valid_copy("prefill"),
            product_forms=self._valid_forms(),
        )

    def _unpack_the_other(self) -> None:
        """Unpack a matrix that was packed with one that was given other numbers since."""
        for linear in (self.first, self.down_proj):
            kept = linear.kept
            if not (isinstance(kept, NarrowMatrices) and kept.is_quantized):
                linear.unpack()

    @property
    def first(self) -> ExpertLinear:
        """The gate and up projections, or the only up projection."""
        first: ExpertLinear = getattr(self, self.first_name)
        return first

    def pack(self, pack: Pack) -> None:
        """Keep both matrices in the form a backend likes best, unless they are in one already."""
        first, down = self.first, self.down_proj
        if first.kept is not None or down.kept is not None:
            return
        packed = pack(first.weight.detach(), down.weight.detach())
        if isinstance(packed, str):
            first.why_plain = packed
            return
        first.keep_packed(packed[0], is_trained=first.weight.requires_grad)
        down.keep_packed(packed[1], is_trained=down.weight.requires_grad)

    def settle_forms(self, forms: ProductForms) -> None:
        """Multiply in these forms from now on, with matrices in the layouts that they take."""
        linears = (self.first, self.down_proj)
        first, down = (
            PackedMatrices(linear.weight.detach()) if forms.wants_packed else None
            for linear in linears
        )
        if forms.wants_plain:
            for linear in linears:
                linear.lay(is_transposed=forms.wants_transposed)
        if first is not None and down is not None:
            if forms.wants_plain:
                forms = replace(forms, packed=(first, down))
            else:
                for linear, packed in zip(linears, (first, down), strict=True):
                    linear.keep_packed(packed, is_trained=linear.weight.requires_grad)
        if forms.packed is not None or forms.compute is not None:
            forms = replace(forms, made_from=Stamp(self._sources()))
        self.product_forms = forms

    def unpack(self) -> None:
        """Undo `pack` and `settle_forms`: every weight is plain again, and can be trained."""
        self.unsettle_forms()
        for linear in (self.first, self.down_proj):
            linear.unpack()
        self.copies.clear()

    def forget_forms(self) -> None:
        """Forget copies of the numbers in other layouts, but those that stand in place of them.

        Raises:
            WeightError: somebody wrote to a weight that stands for such a form.
        """
        self.copies.clear()
        for linear in (self.first, self.down_proj):
            linear.check_stand_in()
        forms = self.product_forms
        if forms is not None and forms.made_from is not None:
            self.product_forms = None

    def unsettle_forms(self) -> None:
        """Undo `settle_forms` and, of matrices packed for a CPU, `pack`."""
        self.product_forms = None
        for linear in (self.first, self.down_proj):
            if isinstance(linear.kept, PackedMatrices):
                linear.unpack()
            elif linear.kept is None and not linear.weight.is_contiguous():
                linear.lay(is_transposed=False)

    def _valid_forms(self) -> ProductForms | None:
        forms = self.product_forms
        if forms is None or forms.made_from is None or forms.made_from.fits(self._sources()):
            return forms
        return None

    def __getstate__(self) -> dict[str, Any]:
        """Leave laid out copies out of copies of the module: `pack_weights` makes them again."""
        return {**self.__dict__, "copies": {}, "product_forms": None}

    def lay_out(self, phase: str, make: Callable[[ExpertWeights], LaidOut | None]) -> None:
        """Keep a copy in the layout a phase reads fastest; a weight that changes makes it stale."""
        if self._valid_copy(phase) is None:
            copy = make(self.weights())
            if copy is not None:
                self.copies[phase] = replace(copy, made_from=Stamp(self._sources()))

    def _valid_copy(self, phase: str) -> LaidOut | None:
        copy = self.copies.get(phase)
        if copy is None or copy.made_from is None or not copy.made_from.fits(self._sources()):
            return None
        return copy

    def _sources(self) -> tuple[Source, ...]:
        linears = (self.first, self.down_proj)
        matrices = (
            each.kept if isinstance(each.kept, NarrowMatrices) else each.weight for each in linears
        )
        return (*matrices, *(each.bias for each in linears if each.bias is not None))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Experts":
        """Move or cast; laid out copies move along, those of another dtype are dropped.

        Product forms are dropped: they are of one device and dtype.
        """
        valid = {phase: self._valid_copy(phase) for phase in self.copies}
        before = self.down_proj.weight.dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.copies, self.product_forms = {}, None
        if self.down_proj.weight.dtype == before:
            self.copies = {
                phase: replace(copy.to(self.down_proj.device), made_from=Stamp(self._sources()))
                for phase, copy in valid.items()
                if copy is not None
            }
        return self

    def forward(self, hidden_states: Tensor, expert_indices: Tensor | None = None) -> Tensor:
        """Run experts on rows of their own, without routing.

        Args:
            hidden_states: [E, C, H], or [1, C, H] for the same rows in every expert.
            expert_indices: [E'] experts to run, default all of this rank.

        Returns:
            [E', C, H]; a partial sum under tensor parallelism.
        """
        weights = self.weights()
        first, down = (
            linear.weight if linear.kept is None else linear.kept.unpack()
            for linear in (self.first, self.down_proj)
        )
        first_bias, down_bias = weights.gate_up_bias_EI, weights.down_bias_EH
        if expert_indices is not None:
            first, down = first[expert_indices], down[expert_indices]
            first_bias = None if first_bias is None else first_bias[expert_indices]
            down_bias = None if down_bias is None else down_bias[expert_indices]
        projected = hidden_states.expand(first.shape[0], -1, -1) @ first
        if first_bias is not None:
            projected = projected + first_bias.unsqueeze(1)
        output = activate(projected, self.formula) @ down
        if down_bias is not None:
            output = output + (down_bias * weights.down_bias_scale).unsqueeze(1)
        return refuse_gradient(output, weights)

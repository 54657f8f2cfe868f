"""A whole layer's decode step on the kernels: decode_layer, one launch.

Norm, router, routed and shared experts; nothing passes through HBM between them. Shapes: T tokens,
K choices, E experts of this rank, N of all ranks, H hidden, I intermediate.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from neuron_moe.backends.nki import features
from neuron_moe.backends.nki.decode import (
    chosen_mode,
    config_records,
    describe,
    expert_operands,
    mode_changes,
    with_layout,
)
from neuron_moe.backends.nki.launch import Input, Launch, check_call, dtype_name, run
from neuron_moe.backends.nki.operands import format_note
from neuron_moe.backends.nki.routed_plan import norm_of
from neuron_moe.backends.nki.router import check_router, different_choices, router_form
from neuron_moe.plan import Forms, FusedOutput, LayerParts, Plan, Step
from neuron_moe.router import Routing
from neuron_moe.shared_experts import SharedExperts
from neuron_moe.weights.expert_weights import LocalRouting
from neuron_moe.weights.laid_out import from_numpy, to_numpy
from neuron_moe.weights.narrow import KERNEL_FORMATS, are_numbers
from nki_kernels.common.chip import cached_by_chip
from nki_kernels.common.formula import ExpertFormula
from nki_kernels.decode import (
    LayerForm,
    decode_layer,
    make_layer_config,
    pack_shared_experts,
    weight_shapes,
)


@dataclass(frozen=True, eq=False)
class FusedPlan(Plan):
    """A whole layer in one launch."""

    @property
    @abstractmethod
    def launch(self) -> Launch:
        """The launch."""

    @property
    def is_fused(self) -> bool:
        """It is."""
        return True

    def launches(self, own_tokens: int | None = None) -> tuple[Launch, ...]:
        """Return the launch."""
        return (self.launch,)

    def layer(self, hidden_TH: Tensor, is_real_T: Tensor | None = None) -> FusedOutput:
        """Compute the layer for T tokens, [T, H] bfloat16."""
        check_call(hidden_TH)
        check_router(self.parts.router)
        is_real_T1 = None if is_real_T is None else is_real_T.to(torch.int32).view(-1, 1)
        output_TH, *routed = run(self.launch, hidden=hidden_TH, is_real=is_real_T1)
        return FusedOutput(output_TH, different_choices(routed[1]) if routed else None)

    def route(self, hidden_TH: Tensor) -> Routing:
        """Refuse: the choices stay on chip."""
        raise NotImplementedError(f"{self._kernel}: routes inside its launch. Call layer().")

    def experts(self, hidden_NH: Tensor, routing: LocalRouting) -> Tensor:
        """Refuse: the choices stay on chip."""
        raise NotImplementedError(f"{self._kernel}: computes the whole layer. Call layer().")

    def changes(self) -> tuple[str, ...]:
        """Say how to get another plan, or several launches."""
        apart = "one launch: moe_fused_kernel_enabled=False of MoEFusedTKGConfig"
        return (*super().changes(), apart)

    @property
    def _kernel(self) -> str:
        return self.decision.kernel.removeprefix("nki.")

    def stages_note(self) -> str:
        """Return a line about what the launch computes."""
        is_prefill = self._kernel == "prefill_layer"
        parts = {
            "rmsnorm": self.has_norm,
            "router": True,
            "index": is_prefill,
            "routed experts": True,
            "shared experts": self.parts.shared is not None,
            "combine": is_prefill,
            "residual": self.adds_input,
        }
        return f"one kernel: {', '.join(name for name, is_there in parts.items() if is_there)}"

    def norm_note(self) -> tuple[str, ...]:
        """Return a line about a norm that the launch does not compute."""
        if self.parts.norm is None or self.has_norm:
            return ()
        return ("before it: rmsnorm, another norm than x * weight / rms(x)",)


@dataclass(frozen=True, eq=False)
class LayerPlan(FusedPlan):
    """Few tokens, from the norm to the shared experts in one launch.

    Attributes:
        config: what decode_layer is compiled for.
    """

    config: Any

    @property
    def has_norm(self) -> bool:
        """Whether the norm is one that the kernel has."""
        return bool(self.config.form.has_norm)

    @property
    def adds_input(self) -> bool:
        """Whether the kernel adds the residual."""
        return bool(self.config.form.has_residual)

    @cached_property
    def launch(self) -> Launch:
        """The launch of decode_layer."""
        parts, moe = self.parts, self.config.moe
        shape = (moe.T, moe.H)
        return fused_launch(
            self, decode_layer, self.config, shape, _weight_operands(parts, self.config)
        )

    def chosen(self) -> dict[str, Any]:
        """Return the mode, in the words of a tuned plan."""
        return chosen_mode(self)

    def changes(self) -> tuple[str, ...]:
        """Say how to get the other mode, or several launches."""
        return (*mode_changes(self.path), *super().changes())

    def notes(self) -> tuple[str, ...]:
        """Say how the kernel goes through the experts, and what else it computes."""
        return (
            describe(self.config.moe),
            self.stages_note(),
            format_note(self.parts.weights),
            *features.decode_notes(self.config.moe),
            *self.norm_note(),
        )


def layer_config(parts: LayerParts, step: Step, path: str | None) -> Any:
    """Return what decode_layer is compiled for.

    Args:
        parts: of the layer.
        step: what is requested.
        path: 'selective', 'all_experts', or None for the choice of the cost model.

    Raises:
        ValueError: the kernel does not have or hold it.
    """
    assert parts.router is not None
    check_router(parts.router)
    norm, shared = norm_of(parts.norm, parts.forms), parts.shared
    weight_NH = router_form(parts.router, parts.forms)
    form = LayerForm(
        has_norm=norm is not None,
        norm_eps=1e-6 if norm is None else norm[1],
        router_dtype=dtype_name(weight_NH),
        shared_width=0 if shared is None else shared.width,
        shared_formula=ExpertFormula() if shared is None else shared.spec.formula,
        shared_format="bfloat16" if shared is None else shared_format(shared, parts.forms),
        has_shared_gate=shared is not None and shared.spec.is_gated,
        # The kernel's residual is what it is given, which is the input where it has the norm.
        has_residual=parts.adds_input and (parts.norm is None or norm is not None),
        returns_routing=parts.returns_routing,
        has_padding=step.has_padding,
    )
    sizes, formula, weights, request = config_records(parts, step.tokens, path)
    router = parts.router.spec.formula
    return with_layout(
        parts.weights,
        weights,
        lambda weights: _layer_config(sizes, router, formula, form, weights, request),
    )


def shared_format(shared: SharedExperts, forms: Forms) -> str:
    """Return the format in which a kernel for the whole layer reads shared experts.

    Codes of 8 bits stay what they are where Trainium 2 reads the same numbers in them. Other types
    of 8 bits become bfloat16, which holds their numbers.

    Raises:
        ValueError: it does not compute them.
    """
    weights = (*shared.first_weights(), shared.down_proj.weight)
    wide = [each for each in weights if each.dtype != torch.bfloat16 and each.element_size() > 1]
    if wide:
        raise ValueError(
            f"shared experts in {dtype_name(wide[0])}: the kernel reads bfloat16 and 8 bits."
            " Convert them."
        )
    return forms.get("shared format", partial(_narrowest, weights))


def _narrowest(weights: Sequence[Tensor]) -> str:
    """Return the format that holds matrices of bfloat16 or 8 bits."""
    dtype = weights[0].dtype
    if dtype not in KERNEL_FORMATS or any(each.dtype != dtype for each in weights):
        return "bfloat16"
    # Without numbers there is nothing to look at; such a layer can be explained, not run.
    can_hold = all(each.is_meta or are_numbers(each.detach()) for each in weights)
    return KERNEL_FORMATS[dtype] if can_hold else "bfloat16"


def shared_weights(shared: SharedExperts, weight_format: str) -> tuple[Tensor, ...]:
    """Return the first matrices [I, H], then down [H, I], in a format of `shared_format`."""
    weights = (*shared.first_weights(), shared.down_proj.weight)
    dtype = torch.bfloat16 if weight_format == "bfloat16" else None
    return tuple(each.detach().to(dtype or each.dtype) for each in weights)


# One configuration for all layers alike, so that they share a compiled kernel.
_layer_config = cached_by_chip(make_layer_config)


def why_apart(parts: LayerParts, step: Step) -> str:
    """Say why one launch does not compute a step of few tokens; '' if it does."""
    if parts.why_apart:
        return parts.why_apart
    try:
        layer_config(parts, step, None)
    except ValueError as error:
        return str(error)
    return ""


def fused_launch(
    plan: Plan,
    kernel: Any,
    config: Any,
    shape: tuple[int, int],
    weights: Mapping[str, Tensor | None],
) -> Launch:
    """Return the launch of a kernel for a whole layer.

    Args:
        plan: that it is of.
        kernel: decode_layer or prefill_layer.
        config: what it is compiled for.
        shape: [T, H] of the tokens.
        weights: its operands beside the tokens.
    """
    hidden = Input("hidden", shape, "bfloat16")
    operands = {
        **weights,
        "hidden": hidden,
        "residual": hidden if plan.adds_input else None,
        "is_real": Input("is_real", (shape[0], 1), "int32") if plan.step.has_padding else None,
    }
    outputs = ("output", "affinities", "index") if plan.parts.returns_routing else ("output",)
    return Launch(kernel, plan.parts.tuning.num_cores, {"config": config}, operands, outputs)


def _weight_operands(parts: LayerParts, config: Any) -> dict[str, Tensor | None]:
    """Put a layer's weights in the order of the kernel."""
    router = parts.router
    assert router is not None
    bias, selection_bias = router.linear_router.bias, router.e_score_correction_bias
    norm = norm_of(parts.norm, parts.forms)
    return {
        **expert_operands(parts, config.moe),
        "router_weight": _router_weight(parts, config),
        "norm_weight": None if norm is None else norm[0].view(1, -1),
        "router_bias": None if bias is None else bias.float().view(1, -1),
        "selection_bias": None if selection_bias is None else selection_bias.float().view(1, -1),
        **_shared_operands(parts, config),
    }


def _router_weight(parts: LayerParts, config: Any) -> Tensor:
    """Return the router's weight in the order of the kernel, made once."""
    axis, cut = config.moe.h_axis, config.router_parts
    assert parts.router is not None
    weight_NH = router_form(parts.router, parts.forms)

    def pack() -> Tensor:
        return _pack_router(weight_NH.detach(), axis, cut)

    return parts.forms.get(f"layer router {axis} {cut}", pack)


def _pack_router(weight_NH: Tensor, axis: Any, num_parts: int = 1) -> Tensor:
    """Return what `pack_router_weight` does, by operations that can be a part of a graph."""
    rows = axis.rows * axis.count - weight_NH.shape[1]
    padded = functional.pad(weight_NH.t(), (0, 0, 0, rows))
    group = axis.count if axis.is_strided else axis.group
    grouped = padded.reshape(axis.count // group, axis.rows, group, num_parts, -1)
    packed = grouped.permute(3, 1, 0, 2, 4)
    return packed.reshape(num_parts, axis.rows, axis.count, -1).contiguous()


def _shared_operands(parts: LayerParts, config: Any) -> dict[str, Tensor]:
    """Return the shared experts' matrices in the order of the kernel, made once."""
    shared, layout, axis = parts.shared, config.shared, config.moe.h_axis
    if shared is None:
        return {}
    form = f"{layout.weights.layout} {layout.E} {layout.chunks} {axis}"
    gate_up, down = parts.forms.get(f"layer shared {form}", partial(_pack_shared, shared, layout))
    operands = {"shared_gate_up": gate_up, "shared_down": down}
    if shared.shared_expert_gate is not None:
        weight_1H = shared.shared_expert_gate.weight

        def pack_gate() -> Tensor:
            return _pack_router(weight_1H.detach(), axis)

        operands["shared_gate"] = parts.forms.get(f"layer gate {axis}", pack_gate)
    return operands


def _pack_shared(shared: SharedExperts, layout: Any) -> tuple[Tensor, ...]:
    weights = shared_weights(shared, layout.weights.format)
    if weights[0].is_meta:
        return tuple(weights[0].new_empty(shape) for shape in weight_shapes(layout))
    packed = pack_shared_experts(layout, *map(to_numpy, weights))
    return tuple(_packed(array, weights[0]) for array in packed)


def _packed(array: Any, like: Tensor) -> Tensor:
    return from_numpy(array, like.dtype).to(like.device)

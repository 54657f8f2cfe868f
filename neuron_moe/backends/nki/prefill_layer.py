"""A whole layer's prefill on the kernels: prefill_layer, one launch.

Norm, router, index, routed and shared experts, weighted sum. Shapes: T tokens, N experts of all
ranks, H hidden, I intermediate of the shared experts.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.backends.nki import features
from neuron_moe.backends.nki.decode import first_expert_of
from neuron_moe.backends.nki.launch import Launch, numbers_near
from neuron_moe.backends.nki.layer import (
    FusedPlan,
    fused_launch,
    shared_format,
    shared_weights,
)
from neuron_moe.backends.nki.prefill import PrefillPlan, by_parts, columns_of
from neuron_moe.backends.nki.router import router_config, router_form
from neuron_moe.shared_experts import SharedExperts
from nki_kernels.common.chip import cached_by_chip
from nki_kernels.layer import (
    PrefillLayerConfig,
    check_prefill_layer,
    make_shared_config,
    prefill_layer,
    shared_work_tiles,
)
from nki_kernels.prefill import ExpertSizes, PrefillConfig, stored_parts


@dataclass(frozen=True, eq=False)
class PrefillLayerPlan(FusedPlan, PrefillPlan):
    """Many tokens, from the norm to the weighted sum in one launch; `apart` is empty."""

    @property
    def adds_input(self) -> bool:
        """Whether the kernel adds the residual."""
        return self.parts.adds_input and (self.parts.norm is None or self.has_norm)

    @property
    def _is_gated(self) -> bool:
        """Whether a gate scales the shared experts."""
        return self.parts.shared is not None and self.parts.shared.spec.is_gated

    @cached_property
    def config(self) -> Any:
        """What prefill_layer is compiled for.

        Raises:
            ValueError: sizes or a formula that a stage does not take.
        """
        parts, made = self.parts, self._compiled
        assert parts.router is not None
        weight = router_form(parts.router, parts.forms)
        router = router_config(
            parts.router,
            made.config.num_tokens,
            torch.bfloat16,
            weight.dtype,
            parts.tuning.num_cores,
            self.norm,
        )
        shared = self.shared_config
        out = replace(
            made.out,
            has_spoils=True,
            has_residual=self.adds_input,
            has_shared=shared is not None,
            has_gate=self._is_gated,
        )
        config = PrefillLayerConfig(
            replace(router, returns_logits=False, has_gate=self._is_gated),
            made.dims,
            made.work_tiles,
            made.config,
            out,
            parts.returns_routing,
            shared,
            has_padding=self.step.has_padding,
            columns=columns_of(parts, self.step, made.config),
        )
        check_prefill_layer(config)
        return config

    @cached_property
    def shared_config(self) -> Any:
        """What the shared experts are compiled for, None if there are none.

        Raises:
            ValueError: the kernel does not have them.
        """
        shared, made = self.parts.shared, self._compiled
        if shared is None:
            return None
        weight_format = shared_format(shared, self.parts.forms)
        sizes = ExpertSizes(made.config.H, shared.width, 1, weight_format)
        formula = shared.spec.formula
        request = features.shared_request(self.parts.tuning)
        return _shared_config(formula, sizes, made.config.num_tokens, made.config, request)

    @cached_property
    def launch(self) -> Launch:
        """The launch of prefill_layer."""
        config = self.config
        shape = (config.experts.num_tokens, config.experts.H)
        return fused_launch(self, prefill_layer, config, shape, self._weight_operands())

    def prepare(self) -> None:
        """Put weights in the form that the launch reads."""
        _ = self.launch

    def _weight_operands(self) -> dict[str, Tensor | None]:
        parts, norm = self.parts, self.norm
        assert parts.router is not None
        linear, selection_bias = parts.router.linear_router, parts.router.e_score_correction_bias
        return {
            **self.matrices,
            **self.beside,
            **self._shared_operands(),
            "router_weight": router_form(parts.router, parts.forms),
            "first_expert": first_expert_of(parts, self.operands),
            "norm_weight": None if norm is None else norm[0].view(1, -1),
            "router_bias": None if linear.bias is None else linear.bias.view(1, -1),
            "selection_bias": None if selection_bias is None else selection_bias.view(1, -1),
        }

    def _shared_operands(self) -> dict[str, Tensor]:
        """Return matrices and work tiles of shared experts, made once."""
        shared, config = self.parts.shared, self.config.shared
        if shared is None:
            return {}
        make = partial(_shared_matrices, shared, config)
        gate_up, down = self.parts.forms.get(f"layer shared {stored_parts(config)}", make)
        names = ("shared_work_expert", "shared_work_row_tiles", "shared_iterations")
        lists = {
            name: numbers_near(torch.from_numpy(array), down)
            for name, array in zip(names, shared_work_tiles(config), strict=True)
        }
        operands = {"shared_gate_up": gate_up, "shared_down": down, **lists}
        gate = shared.shared_expert_gate
        if gate is not None:
            assert self.parts.router is not None
            dtype = router_form(self.parts.router, self.parts.forms).dtype
            shorten = partial(_gate_matrix, gate, dtype)
            operands["shared_gate"] = self.parts.forms.get(f"layer gate {dtype}", shorten)
        return operands

    def why_apart(self) -> str:
        """Say why one launch does not compute the layer; '' if it does."""
        parts = self.parts
        if parts.why_apart:
            return parts.why_apart
        if self.path == "capacity":
            return "choices beyond the capacity are dropped between router and experts"
        try:
            _ = self.config
        except ValueError as error:
            return str(error)
        return ""

    def _around(self) -> tuple[str, ...]:
        return (self.stages_note(), *self.norm_note())


def _shared_matrices(shared: SharedExperts, config: PrefillConfig) -> tuple[Tensor, Tensor]:
    """Return [1, H, 2I] or [1, H, I] and [1, I, H], shared experts as one; perhaps by parts."""
    *first, down_HI = shared_weights(shared, config.weight_format)
    matrices = (torch.cat(first).t().unsqueeze(0), down_HI.t().unsqueeze(0))
    if not config.loop.by_parts:
        gate_up, down = (matrix.contiguous() for matrix in matrices)
        return gate_up, down
    in_parts, out_parts = stored_parts(config)
    return by_parts(matrices[0], in_parts, len(first)), by_parts(matrices[1], out_parts, 1)


def _gate_matrix(gate: nn.Linear, dtype: torch.dtype) -> Tensor:
    """Return [1, H] in the type of the router, whose products it shares."""
    return gate.weight.detach().to(dtype)


# One configuration for all layers alike, so that they share a compiled kernel.
_shared_config = cached_by_chip(make_shared_config)

"""Decode on the kernels: the experts of a few tokens in one launch of decode_moe.

Axes: T tokens, K choices, E experts of this rank, H hidden.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from neuron_moe.backends.nki import features, words
from neuron_moe.backends.nki.launch import Input, Launch, check_call, numbers_near, run
from neuron_moe.backends.nki.operands import (
    Operands,
    format_note,
    kernel_formula,
    matrices_of,
    operands_of,
)
from neuron_moe.backends.nki.routed_plan import RoutedPlan
from neuron_moe.plan import LayerParts, Plan
from neuron_moe.weights.expert_weights import ExpertWeights, LocalRouting
from neuron_moe.weights.laid_out import LaidOut, from_numpy, to_numpy
from neuron_moe.weights.narrow import NarrowMatrices
from nki_kernels.common.chip import cached_by_chip
from nki_kernels.common.formula import ExpertFormula
from nki_kernels.decode import (
    DecodeRequest,
    DecodeSizes,
    WeightForm,
    decode_moe,
    loads_bias,
    make_decode_config,
    pack_down,
    pack_gate_up,
    weight_shapes,
    why_not_decoded,
)

MODES = {"selective": "selective", "all_experts": "all"}  # path of a decision: mode of the kernel


@dataclass(frozen=True, eq=False)
class DecodePlan(RoutedPlan):
    """Few tokens, each expert read once.

    Attributes:
        config: what decode_moe is compiled for.
        why_apart: why router and experts are separate launches, for the notes.
    """

    config: Any
    why_apart: str

    @cached_property
    def _launch(self) -> Launch:
        config = self.config
        choices = (config.T, config.K)
        operands = {
            "hidden": Input("hidden", (config.T, config.H), "bfloat16"),
            "expert_index": Input("model_index", choices, "int32"),
            "expert_affinities": Input("affinities", choices, "float32"),
            **expert_operands(self.parts, config),
        }
        return Launch(decode_moe, self.parts.tuning.num_cores, {"config": config}, operands)

    def expert_launches(self) -> tuple[Launch, ...]:
        """Return the launch of decode_moe."""
        return (self._launch,)

    def experts(self, hidden_NH: Tensor, routing: LocalRouting) -> Tensor:
        """Compute the experts; return [N, H] float32. Choices of other ranks are recognised on the
        chip.
        """
        check_call(hidden_NH)
        index_TK = routing.model_index_TK
        (output_TH,) = run(
            self._launch,
            hidden=hidden_NH,
            model_index=routing.expert_index_TK if index_TK is None else index_TK,
            affinities=routing.expert_affinities_TK,
        )
        return output_TH

    def notes(self) -> tuple[str, ...]:
        """Say how the kernel goes through the experts."""
        form, opened = format_note(self.parts.weights), features.decode_notes(self.config)
        if self.parts.router is None:
            return (describe(self.config), form, *opened)
        front = f"kernels: router_topk in front of it{', with rmsnorm' if self.has_norm else ''}"
        return (describe(self.config), front, form, *opened, f"not fused: {self.why_apart}")

    def chosen(self) -> dict[str, Any]:
        """Return the mode, in the words of a tuned plan."""
        return chosen_mode(self)

    def changes(self) -> tuple[str, ...]:
        """Say how to get the other mode."""
        return mode_changes(self.path)


def chosen_mode(plan: Plan) -> dict[str, Any]:
    """Return the mode of a decode step, in the words of a tuned plan."""
    return {"tokens": plan.step.tokens, "mode": plan.path}


def mode_changes(path: str) -> tuple[str, ...]:
    """Say how to get another decode mode than `path`."""
    other = next(mode for mode in MODES if mode != path)
    return (
        f"mode: decode_mode={other!r} of BlockwiseMatmulConfig or Tuning, --decode-mode {other}",
    )


def expert_operands(parts: LayerParts, config: Any) -> dict[str, Tensor | None]:
    """Return the experts' operands of a decode kernel, prepared once for all steps of a layout:
    matrices, biases, scales and the number of the first expert of this rank.

    Raises:
        ValueError: a dtype or form that the kernels do not read.
    """
    layout, copy = config.weights.layout, parts.weights.decode_copy
    operands = operands_of(parts)
    named = parts.expert_form("decode beside", partial(_named, operands))
    if layout == "packed":
        assert copy is not None
        operands = operands.laid_out(copy)
        named = {"down_bias": named["down_bias"] if loads_bias(config) else None}
    return {
        "gate_up": operands.gate_up_EHI,
        "down": operands.down_EIH,
        "first_expert": first_expert_of(parts, operands),
        **named,
    }


def first_expert_of(parts: LayerParts, operands: Operands) -> Tensor:
    """Return the number of local expert 0, [1, 1] int32, made once.

    It is data of the kernel, so that one compiled graph serves all ranks.
    """

    def make() -> Tensor:
        first = parts.first_expert
        if isinstance(first, Tensor):
            return first.view(1, 1)
        return numbers_near(torch.tensor([[first]], dtype=torch.int32), operands.down_EIH)

    return parts.expert_form("first expert", make)


def _named(operands: Operands) -> dict[str, Any]:
    bias = operands.down_bias_EH
    return {
        "down_bias": None if bias is None else bias.to(torch.bfloat16),
        "gate_up_bias": operands.gate_up_bias_EI,
        "gate_up_scale": operands.gate_up_scale_EI,
        "down_scale": operands.down_scale_En,
    }


def why_in_blocks(parts: LayerParts) -> str:
    """Say why a few tokens go through blockwise_moe, which has more formulas; '' if they do not.

    Raises:
        ValueError: no kernel has the formula.
    """
    return why_not_decoded(kernel_formula(parts.weights))


def decode_config(parts: LayerParts, num_tokens: int, path: str | None = None) -> Any:
    """Return what decode_moe is compiled for; without a path its cost model takes the faster mode.

    Args:
        parts: of the layer.
        num_tokens: T.
        path: 'selective', 'all_experts' or None.

    Raises:
        ValueError: sizes or a formula that the kernel does not have.
    """
    sizes, formula, form, request = config_records(parts, num_tokens, path)
    return with_layout(
        parts.weights, form, lambda form: _decode_config(sizes, formula, form, request)
    )


def with_layout(weights: ExpertWeights, form: WeightForm, make: Callable[[WeightForm], Any]) -> Any:
    """Return what `make` makes for the weights' copy for decode, else for plain weights.

    Chunks of the copy are fixed; where they leave no room for the tokens, plain weights do.

    Args:
        weights: of this rank.
        form: of the plain weights.
        make: makes a configuration for a form of the weights.
    """
    copy = weights.decode_copy
    if copy is not None:
        with contextlib.suppress(ValueError):
            config = make(words.FORM if words.is_words(copy) else replace(form, layout="packed"))
            wanted = weight_shapes(getattr(config, "moe", config))
            if (tuple(copy.gate_up.shape), tuple(copy.down.shape)) == wanted:
                return config
    return make(form)


def config_records(
    parts: LayerParts, num_tokens: int, path: str | None
) -> tuple[DecodeSizes, ExpertFormula, WeightForm, DecodeRequest]:
    """Return sizes, formula, form of the weights (plain layout) and request of a decode step."""
    weights, form = parts.weights, WeightForm()
    narrow = weights.packed_down
    if isinstance(narrow, NarrowMatrices):
        scope = "expert" if narrow.scale.shape[1] == 1 else "channel"
        form = WeightForm(format=narrow.format, has_scales=True, down_scale=scope)
    experts, width, hidden_size = weights.down_proj_EIH.shape
    sizes = DecodeSizes(
        T=num_tokens,
        H=hidden_size,
        I=width,
        E=experts,
        K=parts.spec.top_k,
        num_experts=parts.num_experts,
        num_cores=parts.tuning.num_cores,
    )
    request = DecodeRequest(
        mode="auto" if path is None else MODES[path],
        scaling="pre" if parts.spec.scales_input else "post",
        chip=words.chip_name(),
    )
    return sizes, kernel_formula(weights), form, request


# One configuration for all layers alike, so that they share a compiled kernel.
_decode_config = cached_by_chip(make_decode_config)


def lay_out(parts: LayerParts) -> LaidOut:
    """Return experts in the packed layout of decode_moe, which does not depend on the tokens.

    On a trn3 those of an MXFP4 checkpoint are its words. Of weights on the meta device the shapes.
    """
    weights = parts.weights
    operands = operands_of(parts)
    whole = replace(parts, num_experts=max(weights.num_experts, parts.spec.top_k))
    sizes, formula, form, request = config_records(whole, 1, None)
    request = replace(request, scaling="post")
    if request.chip == words.CHIP:
        copy = words.words_copy(weights, lambda form: _decode_config(sizes, formula, form, request))
        if copy is not None:
            return copy
    try:
        config = _decode_config(sizes, formula, replace(form, layout="packed"), request)
    except ValueError as error:
        raise ValueError(
            f"for_decode=True: the decode kernel cannot take these experts: {error}"
        ) from error
    gate_up_EHI, down_EIH = matrices_of(weights)
    dtype, device = down_EIH.dtype, down_EIH.device
    if device.type == "meta":
        made = [torch.empty(shape, dtype=dtype, device=device) for shape in weight_shapes(config)]
        return LaidOut(made[0], made[1])
    beside = (operands.gate_up_bias_EI, operands.gate_up_scale_EI, operands.down_scale_En)
    gate_up = pack_gate_up(
        config,
        to_numpy(gate_up_EHI),
        *(None if values is None else to_numpy(values) for values in beside),
    )
    bias = operands.down_bias_EH
    bias_EH = None if bias is None else to_numpy(bias.to(torch.bfloat16))
    down = pack_down(config, to_numpy(down_EIH), bias_EH)
    return LaidOut(from_numpy(gate_up, dtype).to(device), from_numpy(down, dtype).to(device))


def path_of(config: Any) -> str:
    """Return the decision's path that a configuration stands for."""
    return next(path for path, mode in MODES.items() if mode == config.mode)


def describe(config: Any) -> str:
    """Return a line for `MoE.explain` about how the kernel goes through the experts."""
    count = config.chunks * config.parts
    parts = "whole experts" if count == 1 else f"experts in {count} parts"
    split = {"experts": "take alternate experts", "intermediate": "split each expert"}
    cores = f"{config.num_cores} cores {split[config.shard]}"
    if config.num_cores == 1:
        cores = "one core"
    layout = "laid out for decode" if config.weights.layout == "packed" else "plain layout"
    if config.weights == words.FORM:
        layout = "MXFP4 words as in the checkpoint (trn3), activations quantised to 8 bits on chip"
    how = f"{parts}, {config.weight_buffers} on chip at once; {layout}"
    return f"plan: {config.mode} mode, {cores}; {how}"

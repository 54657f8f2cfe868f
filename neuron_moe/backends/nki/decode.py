"""Decode on the kernels: the experts of a few tokens in one launch of decode_moe.

Axes: T tokens, K choices, E experts of this rank, H hidden.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from neuron_moe.backends.nki.launch import check_call, launch
from neuron_moe.backends.nki.operands import (
    Operands,
    check_formula,
    format_note,
    operands_of,
    weight_format,
)
from neuron_moe.backends.nki.router import Route, router_call
from neuron_moe.plan import LayerParts, Plan
from neuron_moe.router import Routing
from neuron_moe.weights.expert_weights import ExpertWeights, LocalRouting
from neuron_moe.weights.laid_out import LaidOut, from_numpy, to_numpy
from neuron_moe.weights.narrow import NarrowMatrices
from nki_kernels.common.formula import ExpertFormula, bounds_of
from nki_kernels.decode.config import packed_rows, packed_run
from nki_kernels.decode.kernel import decode_moe
from nki_kernels.decode.layout import pack_down, pack_gate_up
from nki_kernels.decode.options import make_decode_config

SWIGLU_OAI_SCALE = 1.702
MODES = {"selective": "selective", "all_experts": "all"}  # path of a decision: mode of the kernel


@dataclass(frozen=True, eq=False)
class ExpertOperands:
    """The experts' operands of a decode kernel.

    Attributes:
        matrices: gate and up, down.
        first_expert: [1, 1] int32; data of the kernel, so that one compiled graph serves all ranks.
        named: biases and scales.
    """

    matrices: tuple[Any, Any]
    first_expert: Tensor
    named: dict[str, Any]


@dataclass(frozen=True, eq=False)
class DecodePlan(Plan):
    """Few tokens, each expert read once.

    Attributes:
        config: what decode_moe is compiled for.
        why_apart: why router and experts are separate launches, for the notes.
    """

    config: Any
    why_apart: str

    @cached_property
    def _route(self) -> Route:
        assert self.parts.router is not None
        return router_call(self.parts.router, self.parts.forms, self.parts.tuning.num_cores)

    @cached_property
    def _operands(self) -> ExpertOperands:
        return expert_operands(self.parts, self.config)

    def route(self, hidden_TH: Tensor) -> Routing:
        """Route T tokens."""
        return self._route(hidden_TH)

    def experts(self, hidden_NH: Tensor, routing: LocalRouting) -> Tensor:
        """Compute the experts; return [N, H] float32. Choices of other ranks are told apart on the
        chip.
        """
        check_call(hidden_NH)
        made, index_TK = self._operands, routing.model_index_TK
        output_TH: Tensor = launch(
            self.parts.tuning.num_cores,
            decode_moe,
            hidden_NH,
            *made.matrices,
            routing.expert_index_TK if index_TK is None else index_TK,
            routing.expert_affinities_TK,
            made.first_expert,
            self.config,
            **made.named,
        )
        return output_TH

    def notes(self) -> tuple[str, ...]:
        """Say how the kernel goes through the experts."""
        notes = (
            describe(self.config),
            "kernels: router_topk in front of it",
            format_note(self.parts.weights),
        )
        is_alone = self.parts.router is None
        return notes if is_alone else (*notes, f"not fused: {self.why_apart}")


def expert_operands(parts: LayerParts, config: Any) -> ExpertOperands:
    """Return the experts' operands of a decode kernel, prepared once for all steps of a layout.

    Raises:
        ValueError: a dtype or form that the kernels do not read.
    """
    layout = config.weight_layout
    return parts.forms.get(f"decode experts {layout}", partial(_prepare, parts, layout))


def _prepare(parts: LayerParts, layout: str) -> ExpertOperands:
    operands, copy = operands_of(parts.weights), parts.weights.decode_copy
    named = _named(operands)
    if layout == "packed":
        assert copy is not None
        operands = operands.laid_out(copy)
        named = {"down_bias": named["down_bias"]}
    down = parts.weights.packed_down
    device = (down.codes_Ekn if isinstance(down, NarrowMatrices) else operands.down_EIH).device
    first = torch.tensor([[parts.first_expert]], dtype=torch.int32, device=device)
    return ExpertOperands((operands.gate_up_EHI, operands.down_EIH), first, named)


def _named(operands: Operands) -> dict[str, Any]:
    bias = operands.down_bias_EH
    return {
        "down_bias": None if bias is None else bias.to(torch.bfloat16),
        "gate_up_bias": operands.gate_up_bias_EI,
        "gate_up_scale": operands.gate_up_scale_EI,
        "down_scale": operands.down_scale_En,
    }


def decode_config(parts: LayerParts, num_tokens: int, path: str | None = None) -> Any:
    """Return what decode_moe is compiled for; without a path its cost model takes the faster mode.

    Args:
        parts: of the layer.
        num_tokens: T.
        path: 'selective', 'all_experts' or None.

    Raises:
        ValueError: sizes or a formula that the kernel does not have.
    """
    arguments = config_arguments(parts, num_tokens, path)
    make = functools.partial(_decode_config, K=parts.spec.top_k, **arguments)
    return with_layout(parts.weights, make)


def with_layout(weights: ExpertWeights, make: Callable[..., Any]) -> Any:
    """Return what `make` makes for the weights' copy for decode, else for plain weights.

    Chunks of the copy are fixed; where they leave no room for the tokens, plain weights do.

    Args:
        weights: of this rank.
        make: makes a configuration with a given weight_layout.
    """
    if weights.decode_copy is not None:
        with contextlib.suppress(ValueError):
            config = make(weight_layout="packed")
            if _is_laid_out_for(getattr(config, "moe", config), weights.decode_copy):
                return config
    return make(weight_layout="ehi")


def _is_laid_out_for(config: Any, copy: LaidOut) -> bool:
    wanted = (config.chunks, packed_rows(config), packed_run(config))
    return tuple(copy.gate_up.shape[1:]) == wanted


def config_arguments(parts: LayerParts, num_tokens: int, path: str | None) -> dict[str, Any]:
    """Return the arguments of make_decode_config but K and the layout."""
    weights, formula = parts.weights, parts.weights.formula
    check_formula(formula)
    down = weights.packed_down
    narrow = down if isinstance(down, NarrowMatrices) else None
    down_scale = "none"
    if narrow is not None:
        down_scale = "expert" if narrow.scale_En.shape[1] == 1 else "channel"
    experts, width, hidden_size = weights.down_proj_EIH.shape
    return {
        "T": num_tokens,
        "H": hidden_size,
        "I": width,
        "E": experts,
        "num_experts": parts.num_experts,
        "num_cores": parts.tuning.num_cores,
        "mode": "auto" if path is None else MODES[path],
        "weight_format": weight_format(weights),
        "activation": _name_in_decode(formula),
        "gate_limits": bounds_of(formula.gate_limits),
        "up_limits": bounds_of(formula.up_limits),
        "up_offset": formula.up_offset,
        "scaling": "pre" if parts.spec.scales_input else "post",
        "has_gate_up_bias": weights.gate_up_bias_EI is not None,
        "has_down_bias": weights.down_bias_EH is not None,
        "has_scales": narrow is not None,
        "down_scale": down_scale,
        "output_dtype": "float32",
    }


@functools.lru_cache(maxsize=256)
def _decode_config(**arguments: Any) -> Any:
    return make_decode_config(**arguments)


def lay_out(parts: LayerParts) -> LaidOut:
    """Return experts in the packed layout of decode_moe, which does not depend on the tokens."""
    weights = parts.weights
    operands = operands_of(weights)
    whole = max(weights.num_experts, parts.spec.top_k)
    arguments = {**config_arguments(parts, 1, None), "num_experts": whole, "scaling": "post"}
    try:
        config = _decode_config(K=parts.spec.top_k, weight_layout="packed", **arguments)
    except ValueError as error:
        raise ValueError(
            f"for_decode=True: the decode kernel cannot take these experts: {error}"
        ) from error
    beside = (operands.gate_up_bias_EI, operands.gate_up_scale_EI, operands.down_scale_En)
    gate_up_EHI, down_EIH = weights.gate_up_proj_EHI, weights.down_proj_EIH
    if isinstance(weights.packed_gate_up, NarrowMatrices):
        gate_up_EHI = weights.packed_gate_up.codes_Ekn
    if isinstance(weights.packed_down, NarrowMatrices):
        down_EIH = weights.packed_down.codes_Ekn
    gate_up = pack_gate_up(
        config,
        to_numpy(gate_up_EHI),
        *(None if values is None else to_numpy(values) for values in beside),
    )
    down = pack_down(config, to_numpy(down_EIH))
    dtype, device = down_EIH.dtype, down_EIH.device
    return LaidOut(from_numpy(gate_up, dtype).to(device), from_numpy(down, dtype).to(device))


def _name_in_decode(formula: ExpertFormula) -> str:
    """Return the name of an activation that decode_moe has, whose scales are fixed.

    Raises:
        ValueError: it has no such activation.
    """
    fixed = {1.0: "silu", SWIGLU_OAI_SCALE: "swiglu_oai"}
    name = fixed.get(formula.scale) if formula.gates_itself else formula.activation
    is_plain = formula.gates_itself or formula.scale == 1.0
    if name is None or not is_plain or not formula.has_gate:
        raise ValueError(
            f"hidden_act_scaling_factor={formula.scale:g}, glu_mlp={formula.has_gate}: the"
            " decode kernel has gated experts with scale 1, and SwiGLU with scale 1 or"
            f" {SWIGLU_OAI_SCALE}. Use backend='torch'."
        )
    return name


def path_of(config: Any) -> str:
    """Return the decision's path that a configuration stands for."""
    return next(path for path, mode in MODES.items() if mode == config.mode)


def describe(config: Any) -> str:
    """Return a line for `MoE.explain` about how the kernel goes through the experts."""
    parts = "whole experts" if config.chunks == 1 else f"experts in {config.chunks} parts"
    split = {"experts": "take alternate experts", "intermediate": "split each expert"}
    cores = f"{config.num_cores} cores {split[config.shard]}"
    if config.num_cores == 1:
        cores = "one core"
    layout = "laid out for decode" if config.weight_layout == "packed" else "plain layout"
    return f"plan: {config.mode} mode, {cores}; {parts}, {config.slots} on chip at once; {layout}"

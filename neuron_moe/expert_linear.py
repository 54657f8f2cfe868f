"""The weights of routed experts: one matrix per expert, and the three projections of an expert.

Axes: E experts of this rank, C rows of an expert, H hidden, I intermediate of this rank.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuron_moe.activations import ActivationSpec
from neuron_moe.backends import Backend, ExpertWeights, LaysOut, Packed
from neuron_moe.backends.laid_out import LaidOut
from neuron_moe.backends.narrow import KERNEL_FORMATS, NarrowMatrices
from neuron_moe.backends.prepared import Source, Stamp
from neuron_moe.config import RoutedExpertsMLPOpsConfig
from neuron_moe.errors import WeightError
from neuron_moe.parallel.shard import ExpertShard
from neuron_moe.state import check_weight, refuse_wrong_weights

_LARGEST_DRAWN_BYTES = 1 << 30


class ExpertLinear(nn.Module):
    """One matrix (and bias) per expert: weight [E, in, out], bias [E, out].

    A state dict may hold the weight as fp8 codes and a `scale` beside it, NxD's quantised form.

    A weight of up to 1 GiB starts with random values, a larger one with zeros: real ones come from
    a checkpoint. Biases start as zeros.
    """

    bias: nn.Parameter | None
    packed: Packed | None

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str | None,
        init_method: Any = None,
    ) -> None:
        super().__init__()
        shape = (num_experts, input_size, output_size)
        weight, is_drawn = _allocate(shape, dtype, device)
        self.shape = shape
        self.weight = nn.Parameter(weight)
        self.packed = None
        self.why_plain = ""
        if bias:
            self.bias = nn.Parameter(
                torch.zeros((num_experts, output_size), dtype=dtype, device=device)
            )
        else:
            self.register_parameter("bias", None)
        if is_drawn:
            self.reset_parameters(init_method)
        refuse_wrong_weights(self)

    def check(self, name: str) -> None:
        """Raise WeightError if somebody assigned a weight or bias that does not fit."""
        check_weight(f"{name}.weight", self.weight, self.shape)
        if self.bias is not None:
            check_weight(f"{name}.bias", self.bias, self.shape[::2])

    def reset_parameters(self, init_method: Any = None) -> None:
        """Draw each expert's matrix from `init_method`, or kaiming-uniform with a = sqrt(5)."""
        with torch.no_grad():
            for matrix in self.weight:
                if init_method is None:
                    nn.init.kaiming_uniform_(matrix.t(), a=math.sqrt(5))
                else:
                    init_method(matrix)

    @property
    def device(self) -> torch.device:
        """Where the numbers lie, also of packed weights."""
        if isinstance(self.packed, NarrowMatrices):
            return self.packed.codes_Ekn.device
        return self.weight.device if self.packed is None else torch.device("cpu")

    def keep_packed(self, packed: Packed) -> None:
        """Keep the weight in another form; `weight` stays, as a shape without memory."""
        self.packed = packed
        self.weight = nn.Parameter(self.weight.to("meta"), requires_grad=False)

    def unpack(self) -> None:
        """Undo `keep_packed`."""
        if self.packed is not None:
            self.weight = nn.Parameter(self.packed.unpack())
            self.packed = None

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if isinstance(self.packed, NarrowMatrices) and self.packed.is_quantized:
            destination[f"{prefix}weight"] = self.packed.codes_Ekn
            destination[f"{prefix}scale"] = self.packed.scale_En.unsqueeze(1)
        elif self.packed is not None:
            destination[f"{prefix}weight"] = self.packed.unpack()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *lists: list[str],
    ) -> None:
        """Load plain weights, or fp8 codes with their `scale`, which stay as they are."""
        self.why_plain = ""
        weight, scale = (state_dict.get(prefix + name) for name in ("weight", "scale"))
        if not isinstance(scale, Tensor) or getattr(weight, "dtype", None) not in KERNEL_FORMATS:
            self.unpack()
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, *lists
            )
            return
        assert isinstance(weight, Tensor)
        narrow = NarrowMatrices.from_codes(
            f"{prefix}weight", weight, scale, self.shape, self.weight.dtype
        )
        rest = {
            name: value
            for name, value in state_dict.items()
            if name not in (f"{prefix}weight", f"{prefix}scale")
        }
        missing: list[str] = []
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing, *lists)
        missing_keys += [name for name in missing if name != f"{prefix}weight"]
        self.keep_packed(narrow)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ExpertLinear":
        """Move or cast; codes move, and stand for weights of the new dtype."""
        if not isinstance(self.packed, NarrowMatrices):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            return self
        like = fn(torch.empty(0, dtype=self.weight.dtype, device=self.packed.codes_Ekn.device))
        packed = self.packed.to(like.device, like.dtype)
        shape = torch.empty(self.shape, dtype=like.dtype, device="meta")
        self.weight = nn.Parameter(like, requires_grad=False)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weight = nn.Parameter(shape, requires_grad=False)
        self.packed = packed
        return self

    def extra_repr(self) -> str:
        """Show the shape in the module's repr."""
        return f"weight={list(self.weight.shape)}, bias={self.bias is not None}"


def _allocate(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device | str | None
) -> tuple[Tensor, bool]:
    """Return a weight and whether to draw its values; a large CPU weight is zeros, not yet touched.

    Weights of real models come from a checkpoint: drawing gigabytes first costs minutes and memory.
    """
    where = torch.empty(0, device=device).device
    num_bytes = math.prod(shape) * dtype.itemsize
    if where.type == "cpu" and num_bytes > _LARGEST_DRAWN_BYTES:
        untouched = torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
        return untouched.view(dtype).view(shape), False
    return torch.empty(shape, dtype=dtype, device=where), where.type != "meta"


class Experts(nn.Module):
    """Gate, up and down projections of the experts of one rank.

    Args:
        config: sizes and activation of the model's experts.
        shard: the part of them this rank owns.
        dtype: dtype of the weights.
        device: where they live.
        num_slots: expert slots of all ranks, if some experts have replicas.
    """

    def __init__(
        self,
        config: RoutedExpertsMLPOpsConfig,
        shard: ExpertShard,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        num_slots: int | None = None,
    ) -> None:
        super().__init__()
        num_slots = num_slots or config.num_experts
        shard.check(num_slots, config.intermediate_size)
        self.activation = ActivationSpec.from_config(config)
        self.shard = shard
        num_experts = num_slots // shard.ep_size
        width = config.intermediate_size // shard.tp_size
        first_name = "gate_up_proj" if config.glu_mlp else "up_proj"
        self.first_name = first_name
        self.copies: dict[str, LaidOut] = {}
        first = ExpertLinear(
            num_experts,
            config.hidden_size,
            width * self.activation.num_projections,
            bias=config.bias,
            dtype=dtype,
            device=device,
            init_method=config.input_layer_init_method,
        )
        self.add_module(first_name, first)
        self.down_proj = ExpertLinear(
            num_experts,
            width,
            config.hidden_size,
            bias=config.bias,
            dtype=dtype,
            device=device,
            init_method=config.output_layer_init_method,
        )

    def weights(self) -> ExpertWeights:
        """Return the tensors in the form backends take."""
        first = self.first
        first.check(self.first_name)
        self.down_proj.check("down_proj")
        if first.weight.dtype != self.down_proj.weight.dtype:
            raise WeightError(
                f"{self.first_name}.weight: dtype {first.weight.dtype} must be that of"
                f" down_proj.weight, {self.down_proj.weight.dtype}. Cast the module with .to()."
            )
        return ExpertWeights(
            gate_up_proj_EHI=first.weight,
            down_proj_EIH=self.down_proj.weight,
            gate_up_bias_EI=first.bias,
            down_bias_EH=self.down_proj.bias,
            activation=self.activation,
            down_bias_scale=1.0 / self.shard.tp_size,
            packed_gate_up=first.packed,
            packed_down=self.down_proj.packed,
            why_plain=first.why_plain,
            decode_copy=self._valid_copy("decode"),
            prefill_copy=self._valid_copy("prefill"),
        )

    @property
    def first(self) -> ExpertLinear:
        """The gate and up projections, or the only up projection."""
        first: ExpertLinear = getattr(self, self.first_name)
        return first

    def pack(self, backend: Backend) -> None:
        """Keep both matrices in the form a backend likes best, unless they are in one already."""
        first, down = self.first, self.down_proj
        if first.packed is not None or down.packed is not None:
            return
        packed = backend.pack(first.weight.detach(), down.weight.detach())
        if isinstance(packed, str):
            first.why_plain = packed
            return
        first.keep_packed(packed[0])
        down.keep_packed(packed[1])

    def __getstate__(self) -> dict[str, Any]:
        """Leave laid out copies out of copies of the module: `pack_weights` makes them again."""
        return {**self.__dict__, "copies": {}}

    def lay_out(self, backend: LaysOut, phase: str, top_k: int) -> None:
        """Keep a copy in the layout a phase reads fastest; a weight that changes makes it stale."""
        if self._valid_copy(phase) is None:
            copy = backend.lay_out(self.weights(), phase, top_k)
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
            each.packed if isinstance(each.packed, NarrowMatrices) else each.weight
            for each in linears
        )
        return (*matrices, *(() if self.first.bias is None else (self.first.bias,)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Experts":
        """Move or cast; laid out copies move along, those of another dtype are dropped."""
        valid = {phase: self._valid_copy(phase) for phase in self.copies}
        before = self.down_proj.weight.dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.copies = {}
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
            linear.weight if linear.packed is None else linear.packed.unpack()
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
        output = self.activation(projected) @ down
        return (
            output
            if down_bias is None
            else output + (down_bias * weights.down_bias_scale).unsqueeze(1)
        )

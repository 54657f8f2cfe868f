"""Experts as NxD's `quantize.convert` turns them: fp8 codes with scales, under NxD's names.

`convert` swaps the modules whose classes its table has, all but those of `modules_to_not_convert`;
`sharder` enters ours there. What is in a quantised module are parameters, for NxD's sharder cuts
them and its builder makes them operands of the graph.

Axes: E experts, in and out as the matrix multiplies them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.errors import WeightError, refuse
from neuron_moe.experts import RoutedExperts
from neuron_moe.nxd_compat.nxd import as_parallel_layer
from neuron_moe.quantize.fp8 import SCHEMES
from neuron_moe.weights.checks import check_weight
from neuron_moe.weights.experts import Experts
from neuron_moe.weights.linear import ExpertLinear
from neuron_moe.weights.narrow import KERNEL_FORMATS, NarrowMatrices, are_numbers

PER_TENSOR, PER_CHANNEL, BY_EXPERT = SCHEMES[:3]
_WAY_OUT = "or list the experts in modules_to_not_convert."


class QuantizedExpertLinear(ExpertLinear):
    """One matrix per expert as codes: weight [E, in, out] fp8, scale float32, bias [E, out].

    The scale is [1], [1, 1, out] or [E, 1, out], by the scheme. Codes start as zeros.

    Args:
        plain: the module it takes the place of.
        codes: dtype of the codes.
        scheme: one of NxD's quantisation types.

    Attributes:
        dtype: that is computed with.
        scheme: as given.
    """

    scale: nn.Parameter

    def __init__(self, plain: ExpertLinear, codes: torch.dtype, scheme: str) -> None:
        nn.Module.__init__(self)
        device, (num_experts, _, columns) = plain.weight.device, plain.shape
        shape = (num_experts if scheme == BY_EXPERT else 1, 1, columns)
        self.shape, self.dtype, self.scheme = plain.shape, plain.weight.dtype, scheme
        self.packed, self.why_plain = None, ""
        self._made: tuple[Tensor, Tensor, NarrowMatrices] | None = None
        self.weight = nn.Parameter(torch.zeros(plain.shape, dtype=codes, device=device), False)
        scale = torch.ones((1,) if scheme == PER_TENSOR else shape, device=device)
        self.scale = nn.Parameter(scale.float(), False)
        self.register_parameter("bias", plain.bias)
        self.train(plain.training)

    @classmethod
    def from_float(cls, mod: ExpertLinear, q_config: Mapping[str, Any]) -> "QuantizedExpertLinear":
        """Return what `convert` puts in a module's place.

        As in NxD's experts, `activation_quantization_type` and `clamp_bound` change nothing.

        Raises:
            ValueError: a type or dtype that the experts do not compute with.
        """
        scheme, codes = (
            getattr(q_config[key], "value", q_config[key])
            for key in ("quantization_type", "quantized_dtype")
        )
        refuse(
            (
                (
                    scheme not in (PER_TENSOR, PER_CHANNEL, BY_EXPERT),
                    f"quantization_type={scheme!r}: experts compute with a scale for a tensor or"
                    f" for each output channel. Use {BY_EXPERT!r}, {_WAY_OUT}",
                ),
                (
                    codes not in KERNEL_FORMATS,
                    f"quantization_dtype: experts multiply fp8 codes, not {codes}. Use 'f8e4m3',"
                    f" {_WAY_OUT}",
                ),
                (
                    q_config.get("quantization_per_channel_axis") not in (None, 2),
                    "quantization_per_channel_axis: must be 2, the output channels of an expert,"
                    " or None.",
                ),
            )
        )
        made = cls(mod, codes, scheme)
        as_parallel_layer(made)
        return made

    @property
    def matrices(self) -> Tensor:
        """[E, in, out] in the dtype that is computed with, without numbers."""
        return self.weight.new_empty(1, dtype=self.dtype).expand(self.shape)

    @property
    def kept(self) -> NarrowMatrices:
        """Views of codes and scale; the same object as long as both are the same Parameters."""
        made = self._made
        if made is None or made[0] is not self.weight or made[1] is not self.scale:
            num_experts, _, columns = self.shape
            width = 1 if self.scheme == PER_TENSOR else columns
            scale_En = self.scale.detach().reshape(-1, width).expand(num_experts, width)
            narrow = NarrowMatrices(self.weight.detach(), scale_En, self.dtype, True)
            self._made = made = (self.weight, self.scale, narrow)
        return made[2]

    def check(self, name: str) -> None:
        """Raise WeightError if somebody assigned codes or a bias that do not fit."""
        if tuple(self.weight.shape) != self.shape or self.weight.dtype not in KERNEL_FORMATS:
            raise WeightError(
                f"{name}.weight: {self.weight.dtype} {list(self.weight.shape)} must be fp8"
                f" {list(self.shape)}. Load the quantised state dict again."
            )
        if self.bias is not None:
            check_weight(f"{name}.bias", self.bias, self.shape[::2])

    def check_stand_in(self) -> None:
        """Nothing stands for these codes."""

    def unpack(self) -> None:
        """Stay codes: a quantised module has no other form."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave the views out of copies of the module."""
        return {**self.__dict__, "_made": None}

    def _save_to_state_dict(self, *args: Any, **keys: Any) -> None:
        nn.Module._save_to_state_dict(self, *args, **keys)

    def _load_from_state_dict(self, *args: Any, **keys: Any) -> None:
        nn.Module._load_from_state_dict(self, *args, **keys)

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> "QuantizedExpertLinear":
        """Move, or compute in another dtype; codes and scale keep theirs."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            is_kept = tensor is not self.bias and moved.dtype != tensor.dtype
            return tensor.to(moved.device) if is_kept else moved

        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        nn.Module._apply(self, move, recurse)  # type: ignore[no-untyped-call]
        self._made = None
        return self


class QuantizedShared:
    """Stands in NxD's table for the matrices of shared experts, which stay plain."""

    @classmethod
    def from_float(cls, mod: nn.Module, q_config: Mapping[str, Any]) -> nn.Module:
        """Refuse.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "shared_experts: stay plain with quantized=True. List 'shared_experts' in"
            " modules_to_not_convert, and keep them plain in the checkpoint."
        )


def check_codes(mlps: RoutedExperts, state: Mapping[str, Any], prefix: str) -> str:
    """Return what is wrong with codes and scales in a state dict, whole or cut, or ''."""
    for experts_name, experts in mlps.named_children():
        if not isinstance(experts, Experts):
            continue
        for linear_name, linear in experts.named_children():
            name = f"{prefix}{experts_name}.{linear_name}."
            weight = state.get(f"{name}weight")
            if isinstance(linear, QuantizedExpertLinear) and isinstance(weight, Tensor):
                problem = _wrong(linear, weight, has_scale=f"{name}scale" in state)
                if problem:
                    return f"{name}weight: {problem}"
    return ""


def check_plain(mlps: RoutedExperts, state: Mapping[str, Any], prefix: str) -> str:
    """Return which plain experts a whole state dict has as codes, or ''.

    NxD's builder would cast the codes, and drop their scales.
    """
    for linear_name, linear in mlps.get_submodule("mlp_op").named_children():
        weight = state.get(f"{prefix}mlp_op.{linear_name}.weight")
        if not isinstance(weight, Tensor) or isinstance(linear, QuantizedExpertLinear):
            continue
        if weight.element_size() == 1:
            return (
                f"{prefix}mlp_op.{linear_name}.weight: {weight.dtype}, in a layer that was not"
                " quantised. Set quantized=True and take the experts out of"
                " modules_to_not_convert, or decode the checkpoint."
            )
    return ""


def _wrong(linear: QuantizedExpertLinear, weight: Tensor, *, has_scale: bool) -> str:
    if weight.dtype != linear.weight.dtype:
        return (
            f"{weight.dtype} must be {linear.weight.dtype}, as quantization_dtype says. Quantise"
            f" the checkpoint's experts, {_WAY_OUT}"
        )
    if not has_scale:
        return "has no scale beside it. Check the names of the checkpoint's tensors."
    if not weight.is_meta and not all(map(are_numbers, weight)):
        return (
            "holds codes above 240 (e4m3), infinite or NaN. Use rescale_ocp_to_neuron(), or repair"
            " the checkpoint."
        )
    return ""

"""One matrix per expert, as a module that also holds packed and quantised forms."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuron_moe.errors import WeightError
from neuron_moe.weights.checks import check_weight, refuse_wrong_weights
from neuron_moe.weights.expert_weights import Packed
from neuron_moe.weights.huge_pages import request_huge_pages
from neuron_moe.weights.narrow import KERNEL_FORMATS, NarrowMatrices

_LARGEST_DRAWN_BYTES = 1 << 30


class ExpertLinear(nn.Module):
    """One matrix (and bias) per expert: weight [E, in, out], bias [E, out].

    A state dict may hold the weight as fp8 codes and a `scale` beside it, NxD's quantised form.

    Where the weight is kept in another form, `weight` stays the same Parameter, of one NaN that
    stands for all elements: writing to it raises, and whoever gives it or its `data` other numbers
    gets these.

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
        self._stand_in_version = 0
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
        """Where the numbers are, also of packed weights."""
        kept = self.kept
        if isinstance(kept, NarrowMatrices):
            return kept.codes_Ekn.device
        return self.weight.device if kept is None else torch.device("cpu")

    @property
    def matrices(self) -> Tensor:
        """[E, in, out] in the dtype that is computed with; without numbers in another form."""
        return self.weight

    @property
    def kept(self) -> Packed | None:
        """The form in which the weight is kept; None: `weight` has the numbers.

        Raises:
            WeightError: somebody wrote to the weight that stands for it.
        """
        if self.packed is None or not _stands_in(self.weight):
            return None
        if self.weight._version != self._stand_in_version:
            raise WeightError(
                "weight: written to while its numbers are kept in another form. Assign a Parameter"
                " or `weight.data`, load a state dict, or call unpack_weights() before you write."
            )
        return self.packed

    def keep_packed(self, packed: Packed, *, is_trained: bool) -> None:
        """Keep the weight in another form, in place of its numbers and gradient.

        Args:
            packed: the form.
            is_trained: whether the Parameter says that it has a gradient, as it did; requesting one
                is an error then. Else it says that it has none.
        """
        self.packed = packed
        self._stand_in(self.weight.dtype, self.weight.device)
        if not is_trained:
            self.weight.requires_grad_(False)

    def unpack(self) -> None:
        """Undo `keep_packed`; forget a form that nothing stands for any more."""
        kept = self.kept
        if kept is not None:
            requires_grad = self.weight.requires_grad or isinstance(kept, NarrowMatrices)
            self._hold(kept.unpack())
            self.weight.requires_grad_(requires_grad)
        self.packed = None

    def check_stand_in(self) -> None:
        """Raise WeightError if somebody wrote to the weight behind autograd's back."""
        kept = self.kept
        if kept is None or self.weight.is_meta or bool(self.weight[0, 0, 0].isnan()):
            return
        raise WeightError(
            "weight: `weight.data` was written to while its numbers are kept in another form."
            " Assign `weight.data`, or call unpack_weights() before you write."
        )

    def _stand_in(self, dtype: torch.dtype, device: torch.device) -> None:
        one = torch.full((1,), torch.nan, dtype=dtype, device=device)
        self.weight.grad = None
        self._hold(one.expand(self.shape))
        self._stand_in_version = self.weight._version

    def _hold(self, weight: Tensor) -> None:
        """Give the Parameter other numbers; it stays itself where torch allows that."""
        if torch._has_compatible_shallow_copy_type(self.weight, weight):
            self.weight.data = weight
        else:
            self.weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle what stands for a kept weight as its shape, not as numbers."""
        state = dict(self.__dict__)
        if self.kept is not None:
            state["_parameters"] = {**self._parameters, "weight": None}
            state["_stood_in"] = (self.weight.dtype, self.weight.device, self.weight.requires_grad)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        stood_in = state.pop("_stood_in", None)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if stood_in is not None:
            dtype, device, requires_grad = stood_in
            one = torch.empty(1, dtype=dtype, device=device)
            self._parameters["weight"] = nn.Parameter(one, requires_grad=requires_grad)
            self._stand_in(dtype, device)

    def lay(self, *, is_transposed: bool) -> None:
        """Store the weight as [E, out, in], or as [E, in, out]; its shape stays."""
        self._hold(laid(self.weight.detach(), is_transposed=is_transposed))

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        kept = self.kept
        if isinstance(kept, NarrowMatrices) and kept.is_quantized:
            destination[f"{prefix}weight"] = kept.codes_Ekn
            destination[f"{prefix}scale"] = kept.scale.unsqueeze(1)
        elif kept is not None:
            destination[f"{prefix}weight"] = kept.unpack()

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
        self.keep_packed(narrow, is_trained=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ExpertLinear":
        """Move or cast; codes move, and stand for weights of the new dtype.

        Matrices packed for a CPU are unpacked if they change: call pack_weights() again.
        """
        kept = self.kept
        if kept is None:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            return self
        is_narrow = isinstance(kept, NarrowMatrices)
        like = fn(torch.empty(0, dtype=self.weight.dtype, device=self.device))
        if not is_narrow and (like.dtype, like.device.type) != (self.weight.dtype, "cpu"):
            self.unpack()
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            return self
        weight, self._parameters["weight"] = self.weight, None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._parameters["weight"] = weight
        if isinstance(kept, NarrowMatrices):
            self.packed = kept.to(like.device, like.dtype)
        self._stand_in(like.dtype, like.device)
        return self

    def extra_repr(self) -> str:
        """Show the shape in the module's repr."""
        return f"weight={list(self.weight.shape)}, bias={self.bias is not None}"


def _stands_in(weight: Tensor) -> bool:
    """Say whether a weight is one number that stands for all."""
    return weight.untyped_storage().nbytes() < weight.numel() * weight.element_size()


def laid(weight_Ekn: Tensor, *, is_transposed: bool) -> Tensor:
    """Return a copy of [E, in, out] that is in memory as [E, out, in], or as it says."""
    num_experts, num_inputs, num_outputs = weight_Ekn.shape
    sizes = (num_outputs, num_inputs) if is_transposed else (num_inputs, num_outputs)
    memory = request_huge_pages(weight_Ekn.new_empty((num_experts, *sizes)))
    copy_Ekn = memory.transpose(1, 2) if is_transposed else memory
    return copy_Ekn.copy_(weight_Ekn)


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

"""The cuda backend: experts by Triton kernels, with gradients; routers by torch operations, without
a gradient by kernels.

Without a GPU the same kernels run in Triton's interpreter, slowly: set TRITON_INTERPRET=1 before
anything imports triton, and keep tensors on the CPU.
"""

import importlib.util
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from neuron_moe.paths import decide
from neuron_moe.plan import LayerParts, Plan, Step, kept_note
from neuron_moe.router import Routing
from neuron_moe.spec import ExpertSpec, RouterSpec
from neuron_moe.weights.expert_weights import LocalRouting, Packed
from neuron_moe.weights.laid_out import LaidOut
from neuron_moe.weights.narrow import MXFP4, NarrowMatrices
from neuron_moe.weights.product_forms import ProductForms

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_KEEP_ALL = 100


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


class CudaBackend:
    """See the module's docstring.

    Raises:
        ValueError: triton is not installed, or there is neither a GPU nor the interpreter.
    """

    name = "cuda"
    has_gradient = True
    plans_ahead = False

    def __init__(self) -> None:
        if importlib.util.find_spec("triton") is None:
            raise ValueError(
                "backend='cuda': triton is not installed, which comes with torch for CUDA. Install"
                " it (pip install triton), or use backend='torch'."
            )
        if not torch.cuda.is_available() and not _is_interpreted():
            raise ValueError(
                "backend='cuda': torch sees no GPU. Use backend='torch', or set TRITON_INTERPRET=1"
                " to run the kernels slowly on the CPU, in float32 or float16."
            )

    def check(self, experts: ExpertSpec, router: RouterSpec) -> None:
        """Refuse nothing: every formula is computed."""

    def plan(self, parts: LayerParts, step: Step) -> Plan:
        """Decide how a step is computed.

        Raises:
            ValueError: weights packed for a CPU, or a dtype without kernels.
        """
        weights = parts.weights
        packed = weights.packed_gate_up, weights.packed_down
        if any(each is not None and not isinstance(each, NarrowMatrices) for each in packed):
            raise ValueError(
                "packed weights: backend='cuda' takes plain tensors, fp8 and MXFP4. Load the state"
                " dict again, which unpacks."
            )
        if weights.down_proj_EIH.dtype not in _DTYPES:
            raise ValueError(
                f"dtype {weights.down_proj_EIH.dtype}: backend='cuda' computes bfloat16, float16"
                " and float32. Cast the module with .to(), or use backend='torch'."
            )
        return CudaPlan(step, decide(parts.workload(step), self.name, parts.compat), parts)

    def pack(self, first_EHI: Tensor, down_EIH: Tensor) -> tuple[Packed, Packed] | str:
        """Return both matrices as MXFP4 codes, if no weight loses a bit; else why they stay."""
        first = NarrowMatrices.from_mxfp4_values(first_EHI)
        down = None if first is None else NarrowMatrices.from_mxfp4_values(down_EIH)
        if first is None or down is None:
            return "some weights are no MXFP4 values, or above 12"
        return first, down

    def settle_forms(self, parts: LayerParts, form: str) -> ProductForms | None:
        """Return None: there is one form."""
        return None

    def lay_out(self, parts: LayerParts, phase: str) -> LaidOut | None:
        """Return None: both phases read one layout."""
        return None


@dataclass(frozen=True, eq=False)
class CudaPlan(Plan):
    """A step computed by the kernels of this room."""

    def notes(self) -> tuple[str, ...]:
        """Return what training keeps, if that was requested, in which format weights are read, and
        which products are slower.
        """
        return (*kept_note(self.parts.tuning), *self._format_notes(), *self._kernel_notes())

    def _format_notes(self) -> tuple[str, ...]:
        weights = self.parts.weights
        formats = {
            packed.format
            for packed in (weights.packed_gate_up, weights.packed_down)
            if isinstance(packed, NarrowMatrices)
        }
        if formats:
            return (
                f"weights: {' and '.join(sorted(formats))}, decoded in registers and multiplied in"
                f" {weights.down_proj_EIH.dtype}; no gradient",
            )
        return (f"weights: plain: {weights.why_plain}",) if weights.why_plain else ()

    def _kernel_notes(self) -> tuple[str, ...]:
        from neuron_moe.backends.cuda import hopper_launch

        down_EIH = self.parts.weights.down_proj_EIH
        _, I, H = down_EIH.shape  # noqa: E741  the axis
        is_hopper = hopper_launch.has_hopper_kernels(down_EIH.device)
        if not is_hopper or hopper_launch.takes(down_EIH.dtype, I, H):
            return ()
        return (
            f"{down_EIH.dtype}, H={H}, I={I}: without the products for Hopper GPUs, which take"
            " bfloat16 and float16 and multiples of 64",
        )

    def route(self, hidden_TH: Tensor) -> Routing:
        """Route T tokens."""
        from neuron_moe.backends.cuda import route

        router = self.parts.router
        assert router is not None
        if route.takes(router, hidden_TH):
            return route.route(router, hidden_TH)
        routing: Routing = router(hidden_TH)
        return routing

    def _matrix(
        self, name: str, plain_Ekn: Tensor, packed: Packed | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return a matrix of the experts, and the scales of codes."""
        if not isinstance(packed, NarrowMatrices):
            return plain_Ekn, None
        if packed.format == MXFP4:
            return packed.codes_Ekn, packed.scale
        scale_En = self.parts.expert_form(f"scale of {name}", lambda: packed.scale_per_channel_En)
        return packed.codes_Ekn, scale_En

    def experts(self, hidden_NH: Tensor, routing: LocalRouting) -> Tensor:
        """Compute this rank's experts; return [N, H]."""
        from neuron_moe.backends.cuda.operators import experts
        from neuron_moe.backends.cuda.records import Matrices

        if hidden_NH.dtype == torch.bfloat16 and _is_interpreted():
            raise ValueError(
                "dtype torch.bfloat16 with TRITON_INTERPRET=1: Triton's interpreter multiplies"
                " bfloat16 wrongly. Cast the module to float32 or float16, or use a GPU."
            )
        weights = self.parts.weights
        bias_EH = weights.down_bias_EH
        if bias_EH is not None and weights.down_bias_scale != 1.0:
            bias_EH = bias_EH * weights.down_bias_scale
        first, first_scale = self._matrix("first", weights.gate_up_proj_EHI, weights.packed_gate_up)
        down, down_scale = self._matrix("down", weights.down_proj_EIH, weights.packed_down)
        matrices = Matrices(first, weights.gate_up_bias_EI, down, bias_EH, first_scale, down_scale)
        formula = self.parts.spec.formula_text
        index_TK, affinities_TK = routing.expert_index_TK, routing.expert_affinities_TK
        num_tokens, top_k = index_TK.shape
        percent = self.parts.tuning.save_percent
        save_percent = _KEEP_ALL if percent is None else percent
        if not torch.is_grad_enabled():
            save_percent = 0
        if not routing.scales_input:
            return experts(hidden_NH, affinities_TK, index_TK, matrices, formula, save_percent)
        # An expert's input differs by its affinity: each choice is a token of its own.
        scaled_NKH = hidden_NH.unsqueeze(1) * affinities_TK.unsqueeze(2)
        scaled_PH = scaled_NKH.to(hidden_NH.dtype).flatten(0, 1)
        ones_P1 = torch.ones_like(affinities_TK).reshape(-1, 1)
        output_PH = experts(
            scaled_PH, ones_P1, index_TK.reshape(-1, 1), matrices, formula, save_percent
        )
        return output_PH.view(num_tokens, top_k, -1).sum(1, dtype=torch.float32)

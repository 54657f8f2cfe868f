"""vLLM's compiled kernel for experts on a CPU, as one more form of our products."""

from typing import Any

import torch
from torch import Tensor
from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
    ArmCPUUnquantizedExperts,
    CPUUnquantizedExperts,
    X86CPUUnquantizedExperts,
)

from neuron_moe.serving.options import VLLM_FORM
from neuron_moe.weights.expert_weights import ExpertWeights, LocalRouting
from neuron_moe.weights.product_forms import Compute
from nki_kernels.common.formula import ExpertFormula


class VllmKernel:
    """See the module's docstring; a `CustomKernel`."""

    name = VLLM_FORM

    def computes(self, weights: ExpertWeights) -> bool:
        """Say whether sizes, dtype and formula are among its own."""
        form = _form_of(weights.down_proj_EIH.dtype)
        sizes = weights.down_proj_EIH.shape[1:]
        aligned = all(
            size % alignment == 0
            for size in sizes
            for alignment in (form.output_alignment, form.reduction_alignment)
        )
        return aligned and weights.formula == ExpertFormula()

    def prepare(self, weights: ExpertWeights) -> Compute:
        """Return what computes all experts of a step in one call."""
        isa = _form_of(weights.down_proj_EIH.dtype).isa
        first, down = (
            cpu_prepack_moe_weight(matrices.detach().transpose(1, 2).contiguous(), isa)
            for matrices in (weights.gate_up_proj_EHI, weights.down_proj_EIH)
        )
        for packed in (first, down):
            torch._dynamo.mark_static(packed)  # sizes are none of a graph's unknowns

        def compute(hidden_TH: Tensor, routing: LocalRouting) -> Tensor:
            # The kernel reads memory row by row, whatever the strides.
            hidden_TH, affinities_TK, index_TK = (
                each.contiguous()
                for each in (hidden_TH, routing.expert_affinities_TK, routing.expert_index_TK)
            )
            output_TH = torch.empty_like(hidden_TH)
            matrices = first, down, None, None
            cpu_fused_moe(output_TH, hidden_TH, *matrices, affinities_TK, index_TK, "silu", isa)
            return output_TH

        return compute


def _form_of(dtype: torch.dtype) -> Any:
    """Return vLLM's choice for this machine."""
    if dtype == torch.bfloat16:
        for form in (X86CPUUnquantizedExperts, ArmCPUUnquantizedExperts):
            if form._supports_current_device():
                return form
    return CPUUnquantizedExperts

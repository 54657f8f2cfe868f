"""Small layers for tests of the nki backend."""

from typing import Any

import torch

from neuron_moe import BlockwiseMatmulConfig, ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig
from neuron_moe.routing import RouterTopK

GPT_OSS: dict[str, Any] = {
    "hidden_act": "sigmoid",
    "glu_type": "swiglu",
    "hidden_act_scaling_factor": 1.702,
    "hidden_act_bias": 1.0,
    "gate_clamp_upper_limit": 7.0,
    "up_clamp_upper_limit": 7.0,
    "up_clamp_lower_limit": -7.0,
    "bias": True,
}
SILU: dict[str, Any] = {"hidden_act": "silu"}
LLAMA4: dict[str, Any] = {"hidden_act": "silu", "early_expert_affinity_modulation": True}
E, H, I = 8, 128, 64  # noqa: E741


def build(
    backend: str, mlp: dict[str, Any], tuning: dict[str, Any], dtype: torch.dtype, top_k: int = 2
) -> MoE:
    """Return a layer whose weights depend on the sizes only."""
    router = RouterTopK(E, top_k, H, bias=True, dtype=dtype)
    config = RoutedExpertsMLPOpsConfig(
        num_experts=E,
        hidden_size=H,
        intermediate_size=I,
        top_k=top_k,
        **{"glu_mlp": True, **mlp},
    )
    experts = ExpertMLPsV2(
        config,
        BlockwiseMatmulConfig.from_kwargs(**{"block_size": 32, **tuning}),
        dtype=dtype,
        backend=backend,
    )
    layer = MoE(router, experts).eval()
    torch.manual_seed(3)
    for parameter in layer.parameters():
        drawn = torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5
        parameter.data = drawn.to(torch.bfloat16).to(dtype)
    return layer

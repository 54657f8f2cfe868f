"""The constructor calls of the public MoE guide run as they stand, at their real sizes."""

import torch

from neuron_moe.modules.moe import MoE, routing
from neuron_moe.modules.moe.expert_mlps_v2 import ExpertMLPsV2
from neuron_moe.modules.moe.moe_configs import BlockwiseMatmulConfig, RoutedExpertsMLPOpsConfig
from neuron_moe.modules.moe.shared_experts import SharedExperts


def test_a_layer_of_128_experts() -> None:
    router = routing.RouterTopK(num_experts=128, top_k=8, hidden_size=7168)
    experts_config = RoutedExpertsMLPOpsConfig(
        num_experts=128,
        top_k=8,
        hidden_size=7168,
        intermediate_size=2048,
        hidden_act="silu",
        glu_mlp=True,
        capacity_factor=None,
        normalize_top_k_affinities=True,
    )
    blockwise_config = BlockwiseMatmulConfig.from_kwargs(block_size=512, logical_nc_config=2)
    expert_mlps = ExpertMLPsV2(
        routed_experts_mlp_config=experts_config,
        blockwise_matmul_config=blockwise_config,
        sequence_parallel_enabled=True,
    )
    layer = MoE(router=router, expert_mlps=expert_mlps, sequence_parallel_enabled=True)
    assert expert_mlps.mlp_op.gate_up_proj.weight.shape == (128, 7168, 4096)
    with torch.no_grad():
        output = layer(torch.randn(1, 1, 7168))[0]
    assert output.shape == (1, 1, 7168)


def test_swiglu_equals_silu_glu_and_dropping_builds() -> None:
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 8, "intermediate_size": 6}
    blockwise = BlockwiseMatmulConfig.from_kwargs(
        block_size=512, logical_nc_config=2, skip_dma_token=True, skip_dma_weight=True
    )
    layers = [
        ExpertMLPsV2(
            RoutedExpertsMLPOpsConfig(
                hidden_act=act,
                glu_mlp=True,
                capacity_factor=factor,
                normalize_top_k_affinities=True,
                **sizes,
            ),
            blockwise,
        )
        for act, factor in (("swiglu", None), ("silu", None), ("swiglu", 1.25))
    ]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    hidden_TH = torch.randn(5, 8)
    affinities_TK, index_TK = torch.rand(5, 4).topk(2)
    outputs = [layer(hidden_TH, affinities_TK, index_TK, 1) for layer in layers]
    torch.testing.assert_close(outputs[0], outputs[1])
    assert layers[2].choose_path("prefill", 5).path == "capacity"


def test_shared_experts_beside_routed_ones() -> None:
    sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 64}
    shared = SharedExperts(
        hidden_size=64,
        intermediate_size=96,
        num_shared_experts=1,
        hidden_act="silu",
        sequence_parallel_enabled=True,
        fused_gate_up_projection=True,
    )
    experts_config = RoutedExpertsMLPOpsConfig(
        **sizes, intermediate_size=96, hidden_act="silu", glu_mlp=True
    )
    layer = MoE(
        router=routing.RouterTopK(**sizes),
        expert_mlps=ExpertMLPsV2(
            routed_experts_mlp_config=experts_config,
            blockwise_matmul_config=BlockwiseMatmulConfig.from_kwargs(block_size=512),
            sequence_parallel_enabled=True,
        ),
        shared_experts=shared,
        sequence_parallel_enabled=True,
    )
    assert layer(torch.randn(1, 4, 64))[0].shape == (1, 4, 64)

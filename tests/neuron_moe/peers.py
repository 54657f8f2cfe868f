"""MoE layers of transformers with random weights, and ours with the same ones."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from neuron_moe import (
    BlockwiseMatmulConfig,
    ExpertMLPsV2,
    GroupLimitedRouter,
    MoE,
    RoutedExpertsMLPOpsConfig,
    RouterTopK,
    SharedExperts,
)

HIDDEN = 64
INTERMEDIATE = 48


@dataclass(frozen=True)
class Peer:
    """A transformers layer in float32, and how to build ours from it."""

    layer: nn.Module
    build: Callable[[nn.Module, torch.dtype], MoE]

    def output(self, hidden_BSH: Tensor) -> Tensor:
        """Return the layer's output [B, S, H]."""
        result = self.layer(hidden_BSH)
        result = result[0] if isinstance(result, tuple) else result
        return result.reshape(hidden_BSH.shape)


def make_peer(name: str) -> Peer:
    """Return the peer called `name` with weights drawn from a normal distribution."""
    layer, build = PEERS[name]()
    with torch.no_grad():
        for parameter in [*layer.parameters(), *layer.buffers()]:
            parameter.normal_(0.0, 0.2)
    return Peer(layer.eval(), build)


def _experts(config: RoutedExpertsMLPOpsConfig, dtype: torch.dtype) -> ExpertMLPsV2:
    blockwise = BlockwiseMatmulConfig.from_kwargs(block_size=32)
    return ExpertMLPsV2(config, blockwise, dtype=dtype)


def _fill(
    moe: MoE,
    router_weight: Tensor,
    gate_up_EHI: Tensor,
    down_EIH: Tensor,
) -> MoE:
    with torch.no_grad():
        moe.router.linear_router.weight.copy_(router_weight)
        here = [*moe.expert_mlps.local_experts()]
        moe.expert_mlps.mlp_op.gate_up_proj.weight.copy_(gate_up_EHI[here])
        moe.expert_mlps.mlp_op.down_proj.weight.copy_(down_EIH[here])
    return moe.eval()


def _gpt_oss() -> tuple[nn.Module, Callable[[nn.Module, torch.dtype], MoE]]:
    config = GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_local_experts=8,
        num_experts_per_tok=4,
    )

    def build(layer: nn.Module, dtype: torch.dtype) -> MoE:
        router = RouterTopK(8, 4, HIDDEN, bias=True, apply_act_fn_over_topk=True)
        experts = _experts(
            RoutedExpertsMLPOpsConfig(
                8,
                HIDDEN,
                INTERMEDIATE,
                4,
                "sigmoid",
                True,
                bias=True,
                glu_type="swiglu",
                hidden_act_scaling_factor=1.702,
                hidden_act_bias=1.0,
                gate_clamp_upper_limit=7.0,
                up_clamp_upper_limit=7.0,
                up_clamp_lower_limit=-7.0,
            ),
            dtype,
        )
        moe = MoE(router, experts)
        theirs = layer.experts

        def halves(interleaved: Tensor) -> Tensor:
            return torch.cat([interleaved[..., ::2], interleaved[..., 1::2]], dim=-1)

        with torch.no_grad():
            router.linear_router.bias.copy_(layer.router.bias)
            here = [*experts.local_experts()]
            experts.mlp_op.gate_up_proj.bias.copy_(halves(theirs.gate_up_proj_bias)[here])
            experts.mlp_op.down_proj.bias.copy_(theirs.down_proj_bias[here])
        return _fill(moe, layer.router.weight, halves(theirs.gate_up_proj), theirs.down_proj)

    return GptOssMLP(config), build


def _llama4() -> tuple[nn.Module, Callable[[nn.Module, torch.dtype], MoE]]:
    config = Llama4TextConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_local_experts=8,
        num_experts_per_tok=1,
        hidden_act="silu",
    )

    def build(layer: nn.Module, dtype: torch.dtype) -> MoE:
        router = RouterTopK(8, 1, HIDDEN, act_fn="sigmoid")
        experts = _experts(
            RoutedExpertsMLPOpsConfig(
                8, HIDDEN, INTERMEDIATE, 1, "silu", True, early_expert_affinity_modulation=True
            ),
            dtype,
        )
        shared = SharedExperts(HIDDEN, INTERMEDIATE, 1, "silu", dtype=dtype)
        shared.load_state_dict(layer.shared_expert.state_dict())
        moe = MoE(router, experts, shared)
        return _fill(moe, layer.router.weight, layer.experts.gate_up_proj, layer.experts.down_proj)

    return Llama4TextMoe(config), build


def _softmax_then_top_k(experts: int, top_k: int) -> Callable[[nn.Module, torch.dtype], MoE]:
    def build(layer: nn.Module, dtype: torch.dtype) -> MoE:
        config = RoutedExpertsMLPOpsConfig(
            experts, HIDDEN, INTERMEDIATE, top_k, "silu", True, normalize_top_k_affinities=True
        )
        moe = MoE(RouterTopK(experts, top_k, HIDDEN), _experts(config, dtype))
        return _fill(
            moe,
            layer.gate.weight,
            layer.experts.gate_up_proj.transpose(1, 2),
            layer.experts.down_proj.transpose(1, 2),
        )

    return build


def _qwen3_moe() -> tuple[nn.Module, Callable[[nn.Module, torch.dtype], MoE]]:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=16,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    )
    return Qwen3MoeSparseMoeBlock(config), _softmax_then_top_k(16, 8)


def _mixtral() -> tuple[nn.Module, Callable[[nn.Module, torch.dtype], MoE]]:
    config = MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    return MixtralSparseMoeBlock(config), _softmax_then_top_k(8, 2)


def _deepseek_v3() -> tuple[nn.Module, Callable[[nn.Module, torch.dtype], MoE]]:
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        n_routed_experts=32,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )

    def build(layer: nn.Module, dtype: torch.dtype) -> MoE:
        router = GroupLimitedRouter(
            32, 8, HIDDEN, n_group=8, topk_group=4, renormalize=True, routed_scaling_factor=2.5
        )
        with torch.no_grad():
            router.e_score_correction_bias.copy_(layer.gate.e_score_correction_bias)
        experts = _experts(
            RoutedExpertsMLPOpsConfig(32, HIDDEN, INTERMEDIATE, 8, "silu", True), dtype
        )
        shared = SharedExperts(HIDDEN, INTERMEDIATE, 1, "silu", dtype=dtype)
        shared.load_state_dict(layer.shared_experts.state_dict())
        return _fill(
            MoE(router, experts, shared),
            layer.gate.weight,
            layer.experts.gate_up_proj.transpose(1, 2),
            layer.experts.down_proj.transpose(1, 2),
        )

    return DeepseekV3MoE(config), build


PEERS = {
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "mixtral": _mixtral,
}

"""NxDI's two functions that build a MoE layer from a model's configuration."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from neuron_moe.backends import Backend
from neuron_moe.errors import refuse
from neuron_moe.fused_decode import MoEFusedTKGConfig
from neuron_moe.moe import MoE
from neuron_moe.nxd_compat.configs import (
    BlockwiseMatmulConfig,
    RoutedExpertsMLPOpsConfig,
)
from neuron_moe.nxd_compat.experts import ExpertMLPsV2
from neuron_moe.nxd_compat.groups import (
    get_moe_ep_group,
    get_moe_tp_ep_group,
    init_tensor_expert_parallel_moe_process_groups,
)
from neuron_moe.nxd_compat.routers import RouterTopK
from neuron_moe.nxd_compat.shared import SharedExperts
from neuron_moe.parallel import parallel_state

Groups = dict[str, Any]
_EXPERT_KEYS = (  # of the neuron configuration, under their own names
    "is_hidden_dim_shuffled",
    "is_intermediate_dim_shuffled",
    "glu_mlp",
    "glu_type",
    "hidden_act_scaling_factor",
    "hidden_act_bias",
    "use_index_calc_kernel",
    "gate_clamp_upper_limit",
    "gate_clamp_lower_limit",
    "up_clamp_upper_limit",
    "up_clamp_lower_limit",
    "early_expert_affinity_modulation",
)
_TKG_KEYS = {
    "moe_fused_kernel_enabled": "moe_fused_nki_kernel_enabled",
    "router_topk_kernel_enabled": "router_topk_nki_kernel_enabled",
    "expert_mlp_kernel_enabled": "expert_mlp_nki_kernel_enabled",
    "shared_mlp_kernel_enabled": "shared_mlp_nki_kernel_enabled",
    "norm_topk_prob": "normalize_top_k_affinities",
}


def initialize_moe_module(
    config: Any,
    rmsnorm: nn.Module | None = None,
    init_tkg_module: bool = False,
    apply_act_fn_over_topk: bool = False,
    router_bias: bool = False,
    experts_bias: bool = False,
    *,
    backend: str | Backend = "torch",
    presharded: bool | None = None,
) -> MoE:
    """Build the layer of an NxDI configuration, as `modules.moe_v2` does; in eval mode.

    Args:
        config: NxDI's InferenceConfig with a MoENeuronConfig.
        rmsnorm: norm in front of router and experts, or None.
        init_tkg_module: read the switches of NxD's fused decode kernel.
        apply_act_fn_over_topk: activate the chosen logits only.
        router_bias: the router has a bias.
        experts_bias: the experts have biases.
        backend: name of the backend, or a backend.
        presharded: see `ExpertMLPsV2`.

    Raises:
        ValueError: a key that cannot be honoured, or degrees that do not fit together.
    """
    neuron = config.neuron_config
    _refuse_keys(neuron)
    parallel_state.default_groups()  # NxD's, from here on
    is_hybrid = neuron.hybrid_sharding_config is not None
    router = RouterTopK(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.hidden_size,
        sequence_parallel_enabled=neuron.sequence_parallel_enabled,
        sequence_dimension=1,
        dtype=neuron.router_config.dtype,
        bias=router_bias,
        act_fn=neuron.router_config.act_fn,
        apply_act_fn_over_topk=apply_act_fn_over_topk,
        renormalize=_router_normalizes(config),
    )
    experts = ExpertMLPsV2(
        _expert_config(config, bias=experts_bias),
        BlockwiseMatmulConfig.of(neuron.blockwise_matmul_config),
        dtype=neuron.torch_dtype,
        sequence_parallel_enabled=neuron.sequence_parallel_enabled,
        is_prefill=neuron.is_prefill_stage is not False,
        enabled_hybrid_sharding=is_hybrid,
        backend=backend,
        **_groups(neuron, is_hybrid=is_hybrid),
    )
    layer = MoE(
        router,
        experts,
        _shared_experts(config),
        rmsnorm,
        sequence_parallel_enabled=neuron.sequence_parallel_enabled,
        sequence_dimension=1,
        return_router_logits=neuron.return_router_logits,
        return_expert_index=neuron.return_expert_index,
        init_tkg_module=init_tkg_module,
        tkg_config=_tkg_config(neuron) if init_tkg_module else None,
    )
    return _finish(layer, presharded)


def initialize_moe_module_v1(
    config: Any,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    hidden_act: str,
    normalize_top_k_affinities: bool = True,
    *,
    backend: str | Backend = "torch",
    presharded: bool | None = None,
) -> MoE:
    """Build the layer of an NxDI configuration, as `modules.moe` does (Mixtral, DBRX).

    Unlike there, moe_ep_degree splits the experts, and blockwise_matmul_config is read.

    Args:
        config: NxDI's InferenceConfig with a MoENeuronConfig.
        num_experts: E.
        top_k: K.
        hidden_size: H.
        intermediate_size: I of the whole expert.
        hidden_act: activation of the gate.
        normalize_top_k_affinities: divide the K affinities of a token by their sum.
        backend: name of the backend, or a backend.
        presharded: see `ExpertMLPsV2`.

    Returns:
        The layer, in eval mode.

    Raises:
        ValueError: a key that cannot be honoured.
    """
    neuron = config.neuron_config
    _refuse_keys(neuron)
    parallel_state.default_groups()  # NxD's, from here on
    is_parallel = neuron.sequence_parallel_enabled
    router = RouterTopK(
        num_experts,
        top_k,
        hidden_size,
        sequence_parallel_enabled=is_parallel,
        sequence_dimension=1,
    )
    experts = ExpertMLPsV2(
        RoutedExpertsMLPOpsConfig(
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            hidden_act=hidden_act,
            glu_mlp=neuron.glu_mlp,
            capacity_factor=neuron.capacity_factor,
            normalize_top_k_affinities=normalize_top_k_affinities,
        ),
        BlockwiseMatmulConfig.of(neuron.blockwise_matmul_config),
        sequence_parallel_enabled=is_parallel,
        is_prefill=neuron.is_prefill_stage is not False,
        backend=backend,
        **_groups(neuron, is_hybrid=False),
    )
    layer = MoE(router, experts, sequence_parallel_enabled=is_parallel, sequence_dimension=1)
    return _finish(layer, presharded)


def initialize_moe_process_group(
    config: Any, enabled_hybrid_sharding: bool
) -> tuple[ProcessGroup | None, ...]:
    """Return decode's tensor and expert group, then prefill's, as `modules.moe_v2` does."""
    found = _groups(config.neuron_config, is_hybrid=enabled_hybrid_sharding)
    return tuple(
        found[f"{phase}_{kind}_model_parallel_group"]
        for phase in ("tkg", "cte")
        for kind in ("tensor", "expert")
    )


def _finish(layer: MoE, presharded: bool | None) -> MoE:
    assert isinstance(layer.expert_mlps, ExpertMLPsV2)
    layer.expert_mlps.check_even()
    layer.presharded = presharded
    layer.must_load = True
    layer.eval()
    return layer


def _refuse_keys(neuron: Any) -> None:
    """Raise ValueError for degrees that do not fit, and for weights that would not arrive."""
    tp, ep, ranks = neuron.moe_tp_degree, neuron.moe_ep_degree, neuron.tp_degree
    refuse(
        (
            (
                neuron.is_mxfp4_compute,
                "is_mxfp4_compute=True: the checkpoint is shuffled for a kernel of Trainium 3. Set"
                " it False.",
            ),
            (
                neuron.hybrid_sharding_config is None and (tp, ep) != (1, 1) and tp * ep != ranks,
                f"moe_tp_degree={tp}, moe_ep_degree={ep}: the product must be tp_degree={ranks},"
                " over which outputs are summed. Set moe_tp_degree to"
                f" {ranks // ep if ranks % ep == 0 else 'another divisor'}, or leave both 1.",
            ),
        )
    )


def _expert_config(config: Any, *, bias: bool) -> RoutedExpertsMLPOpsConfig:
    neuron = config.neuron_config
    return RoutedExpertsMLPOpsConfig(
        num_experts=config.num_local_experts,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        top_k=config.num_experts_per_tok,
        hidden_act=config.hidden_act,
        bias=bias,
        hidden_size_actual=getattr(config, "original_hidden_size", None),
        intermediate_size_actual=getattr(config, "original_intermediate_size", None),
        enable_spmd_rank=neuron.blockwise_matmul_config.parallelize_token_to_block_mapping,
        normalize_top_k_affinities=neuron.normalize_top_k_affinities
        and not _router_normalizes(config),
        **{key: getattr(neuron, key) for key in _EXPERT_KEYS},
    )


def _router_normalizes(config: Any) -> bool:
    """Say whether the router divides the affinities, with which decode can be one launch.

    A single one cannot be meant: the experts' configuration refuses it.
    """
    return bool(config.neuron_config.normalize_top_k_affinities) and config.num_experts_per_tok > 1


def _shared_experts(config: Any) -> SharedExperts | None:
    if not config.n_shared_experts:
        return None
    neuron = config.neuron_config
    return SharedExperts(
        config.hidden_size,
        config.intermediate_size,
        config.n_shared_experts,
        config.hidden_act,
        dtype=neuron.torch_dtype,
        reduce_dtype=neuron.rpl_reduce_dtype,
        fused_gate_up_projection=neuron.fused_shared_experts,
        sequence_parallel_enabled=neuron.shared_experts_sequence_parallel_enabled,
        transpose_weights=neuron.transpose_shared_experts_weights,
        tensor_model_parallel_group=parallel_state.get_world_group(),
    )


def _tkg_config(neuron: Any) -> MoEFusedTKGConfig:
    switches: Mapping[str, Any] = {name: getattr(neuron, key) for name, key in _TKG_KEYS.items()}
    # NxD's `convert` says later which experts are codes: modules_to_not_convert may name them.
    return MoEFusedTKGConfig(False, router_mm_dtype=neuron.router_config.dtype, **switches)


def _groups(neuron: Any, *, is_hybrid: bool) -> Groups:
    """Return NxD's groups for experts: the MoE's own where experts are cut otherwise."""
    tensor = parallel_state.get_tensor_model_parallel_group()
    expert = parallel_state.get_expert_model_parallel_group()
    groups: Groups = {
        "tensor_model_parallel_group": tensor,
        "expert_model_parallel_group": expert,
    }
    if is_hybrid:
        hybrid = neuron.hybrid_sharding_config
        init_tensor_expert_parallel_moe_process_groups(
            hybrid.moe_tkg_tp_degree,
            hybrid.moe_tkg_ep_degree,
            hybrid.moe_cte_tp_degree,
            hybrid.moe_cte_ep_degree,
        )
    elif neuron.moe_ep_degree > 1:
        tp, ep = neuron.moe_tp_degree, neuron.moe_ep_degree
        init_tensor_expert_parallel_moe_process_groups(tp, ep, tp, ep)
    for phase, is_prefill in (("tkg", False), ("cte", True)):
        is_own = is_hybrid or neuron.moe_ep_degree > 1
        groups[f"{phase}_tensor_model_parallel_group"] = (
            get_moe_tp_ep_group(is_prefill) if is_own else tensor
        )
        groups[f"{phase}_expert_model_parallel_group"] = (
            get_moe_ep_group(is_prefill) if is_own else expert
        )
    return groups

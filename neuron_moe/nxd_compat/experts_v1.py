"""NxD's first class of routed experts, whose constructor takes every setting on its own."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from neuron_moe.backends import Backend
from neuron_moe.errors import names_its_keys
from neuron_moe.nxd_compat.configs import (
    BlockShardStrategy,
    BlockwiseMatmulConfig,
    GLUType,
    RoutedExpertsMLPOpsConfig,
)
from neuron_moe.nxd_compat.experts import ExpertMLPsV2
from neuron_moe.spec import DEFAULT_LNC_SIZE


@names_its_keys
class ExpertMLPs(ExpertMLPsV2):
    """`ExpertMLPsV2` with the keys of its two configurations as arguments.

    `init_method` and `output_layer_init_method` are the configuration's input_layer_init_method and
    output_layer_init_method; block_size=None leaves the size to the backend.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        glu_mlp: bool,
        capacity_factor: float | None,
        sequence_parallel_enabled: bool = False,
        block_size: int | None = None,
        normalize_top_k_affinities: bool = False,
        bias: bool = False,
        glu_type: GLUType | str | None = GLUType.GLU,
        hidden_act_scaling_factor: float = 1.0,
        hidden_act_bias: float = 0.0,
        gate_clamp_upper_limit: float | None = None,
        gate_clamp_lower_limit: float | None = None,
        up_clamp_upper_limit: float | None = None,
        up_clamp_lower_limit: float | None = None,
        return_bias: bool = False,
        init_method: Callable[..., Any] | None = torch.nn.init.kaiming_uniform_,
        output_layer_init_method: Callable[..., Any] | None = torch.nn.init.kaiming_uniform_,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
        tensor_model_parallel_group: ProcessGroup | None = None,
        expert_model_parallel_group: ProcessGroup | None = None,
        enable_spmd_rank: bool = False,
        blockwise_nki_autograd_cls: Any = None,
        use_torch_block_wise: bool = False,
        logical_nc_config: int = DEFAULT_LNC_SIZE,
        parallelize_token_to_block_mapping: bool = True,
        early_expert_affinity_modulation: bool = False,
        optimized_block_to_token_mapping: bool = True,
        use_block_parallel: bool = False,
        always_augment_inputs_for_blockwise_matmul: bool = False,
        block_sharding_strategy: BlockShardStrategy | str = BlockShardStrategy.HI_LO,
        skip_dma_token: bool = False,
        skip_dma_weight: bool = False,
        tkg_tensor_model_parallel_group: ProcessGroup | None = None,
        tkg_expert_model_parallel_group: ProcessGroup | None = None,
        cte_tensor_model_parallel_group: ProcessGroup | None = None,
        cte_expert_model_parallel_group: ProcessGroup | None = None,
        is_prefill: bool = True,
        enabled_hybrid_sharding: bool = False,
        use_shard_on_intermediate_dynamic_while: bool = False,
        use_shard_on_block_dynamic_while: bool = False,
        use_index_calc_kernel: bool = False,
        expert_distribution: list[list[int]] | None = None,
        *,
        backend: str | Backend = "torch",
        compat: str | None = None,
    ) -> None:
        given = dict(locals())
        given["input_layer_init_method"] = init_method
        given["output_layer_init_method"] = output_layer_init_method
        if block_size is None:
            del given["block_size"]
        super().__init__(
            RoutedExpertsMLPOpsConfig(**_of(RoutedExpertsMLPOpsConfig, given, "is_prefill")),
            BlockwiseMatmulConfig.from_kwargs(**_of(BlockwiseMatmulConfig, given)),
            **_of(ExpertMLPsV2.__init__, given),
        )


def _of(takes: Callable[..., Any], given: dict[str, Any], but: str = "") -> dict[str, Any]:
    """Return what a function or class takes of the arguments, but one."""
    names = inspect.signature(takes).parameters.keys() - {"self", but}
    return {name: given[name] for name in names & given.keys()}

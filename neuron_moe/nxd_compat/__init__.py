"""NxD at the door: its names, signatures, configurations and enums, translated into ours.

Each class is a core class with NxD's constructor, MoE the core's own; nothing is computed here. A
key that changes nothing here says so in `explain()`, one that cannot be honoured is refused by
name.

| NxD's | core |
| --- | --- |
| RouterTopK, GroupLimitedRouter | router.Router with a RouterSpec |
| RoutedExpertsMLPOpsConfig | spec.ExpertSpec |
| BlockwiseMatmulConfig | spec.Tuning |
| ExpertMLPsV2 | experts.RoutedExperts |
| SharedExperts | shared_experts.SharedExperts with a SharedSpec |
| MoE, MoEFusedTKGConfig | the same: moe.MoE, fused_decode.MoEFusedTKGConfig |
| ExpertMLPs | ExpertMLPsV2 |
| moe_process_group | groups that NxD's sharder finds too |
| NxDI's initialize_moe_module, both forms | MoE; `install()` puts it into NxDI's models |
"""

from neuron_moe.fused_decode import MoEFusedTKGConfig
from neuron_moe.moe import MoE
from neuron_moe.nxd_compat.configs import (
    BlockShardStrategy,
    BlockwiseMatmulConfig,
    GLUType,
    RoutedExpertsMLPOpsConfig,
    RouterConfig,
    to_torch_dtype,
)
from neuron_moe.nxd_compat.experts import ExpertMLPsV2
from neuron_moe.nxd_compat.experts_v1 import ExpertMLPs
from neuron_moe.nxd_compat.functions import ACT2FN, load_balancing_loss_func
from neuron_moe.nxd_compat.groups import (
    destroy_moe_model_parallel,
    get_expert_parallel_rank_from_global_rank,
    get_experts_for_expert_parallel_rank,
    get_moe_ep_group,
    get_moe_tp_ep_group,
    init_tensor_expert_parallel_moe_process_groups,
)
from neuron_moe.nxd_compat.install import Rebinding, install, is_installed, uninstall
from neuron_moe.nxd_compat.nxdi import (
    initialize_moe_module,
    initialize_moe_module_v1,
    initialize_moe_process_group,
)
from neuron_moe.nxd_compat.routers import GroupLimitedRouter, RouterSinkhorn, RouterTopK
from neuron_moe.nxd_compat.sharder import SPMDRank
from neuron_moe.nxd_compat.shared import SharedExperts

__all__ = [
    "ACT2FN",
    "BlockShardStrategy",
    "BlockwiseMatmulConfig",
    "ExpertMLPs",
    "ExpertMLPsV2",
    "GLUType",
    "GroupLimitedRouter",
    "MoE",
    "MoEFusedTKGConfig",
    "Rebinding",
    "RoutedExpertsMLPOpsConfig",
    "RouterConfig",
    "RouterSinkhorn",
    "RouterTopK",
    "SPMDRank",
    "SharedExperts",
    "destroy_moe_model_parallel",
    "get_expert_parallel_rank_from_global_rank",
    "get_experts_for_expert_parallel_rank",
    "get_moe_ep_group",
    "get_moe_tp_ep_group",
    "init_tensor_expert_parallel_moe_process_groups",
    "initialize_moe_module",
    "initialize_moe_module_v1",
    "initialize_moe_process_group",
    "install",
    "is_installed",
    "load_balancing_loss_func",
    "to_torch_dtype",
    "uninstall",
]

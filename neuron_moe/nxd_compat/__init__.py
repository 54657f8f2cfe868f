"""NxD at the door: its names, signatures, configurations and enums, translated into ours.

Each class is a core class with NxD's constructor; nothing is computed here. A key that changes
nothing here says so in `explain()`, one that cannot be honoured is refused by name.

| NxD's | core |
| --- | --- |
| RouterTopK, GroupLimitedRouter | router.Router with a RouterSpec |
| RoutedExpertsMLPOpsConfig | spec.ExpertSpec |
| BlockwiseMatmulConfig | spec.Tuning |
| ExpertMLPsV2 | experts.RoutedExperts |
| SharedExperts | shared_experts.SharedExperts with a SharedSpec |
| MoE, MoEFusedTKGConfig | moe.MoE with LayerOptions |
"""

from neuron_moe.nxd_compat.configs import (
    BlockShardStrategy,
    BlockwiseMatmulConfig,
    GLUType,
    MoEFusedTKGConfig,
    RoutedExpertsMLPOpsConfig,
    RouterConfig,
)
from neuron_moe.nxd_compat.experts import ExpertMLPsV2
from neuron_moe.nxd_compat.layer import MoE
from neuron_moe.nxd_compat.routers import GroupLimitedRouter, RouterTopK
from neuron_moe.nxd_compat.shared import SharedExperts

__all__ = [
    "BlockShardStrategy",
    "BlockwiseMatmulConfig",
    "ExpertMLPsV2",
    "GLUType",
    "GroupLimitedRouter",
    "MoE",
    "MoEFusedTKGConfig",
    "RoutedExpertsMLPOpsConfig",
    "RouterConfig",
    "RouterTopK",
    "SharedExperts",
]

"""NxD's module name for the configurations, so that import lines carry over."""

from neuron_moe.fused_decode import MoEFusedTKGConfig
from neuron_moe.nxd_compat.configs import (
    BlockwiseMatmulConfig,
    RoutedExpertsMLPOpsConfig,
    RouterConfig,
)

__all__ = [
    "BlockwiseMatmulConfig",
    "MoEFusedTKGConfig",
    "RoutedExpertsMLPOpsConfig",
    "RouterConfig",
]

"""NxD's module name for the configurations, so that import lines carry over."""

from neuron_moe.nxd_compat.configs import (
    BlockwiseMatmulConfig,
    MoEFusedTKGConfig,
    RoutedExpertsMLPOpsConfig,
    RouterConfig,
)

__all__ = [
    "BlockwiseMatmulConfig",
    "MoEFusedTKGConfig",
    "RoutedExpertsMLPOpsConfig",
    "RouterConfig",
]

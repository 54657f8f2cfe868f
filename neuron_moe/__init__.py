"""neuron-moe: Mixture-of-Experts inference modules that run, verify and tune anywhere.

from neuron_moe import MoE, RouterTopK, ExpertMLPsV2, RoutedExpertsMLPOpsConfig
"""

from neuron_moe import routing
from neuron_moe.blocks import BlockMapping, build_block_mapping, num_blocks
from neuron_moe.config import (
    BlockShardStrategy,
    BlockwiseMatmulConfig,
    GLUType,
    MoEFusedTKGConfig,
    RoutedExpertsMLPOpsConfig,
    RouterConfig,
)
from neuron_moe.dispatch import Decision, Explanation, choose_path
from neuron_moe.experts import ExpertMLPsV2, Experts
from neuron_moe.moe import MoE, MoEOutput
from neuron_moe.parallel import parallel_state
from neuron_moe.routing import GroupLimitedRouter, RouterTopK, Routing
from neuron_moe.shared_experts import SharedExperts

__version__ = "0.1.0"

__all__ = [
    "BlockMapping",
    "BlockShardStrategy",
    "BlockwiseMatmulConfig",
    "Decision",
    "ExpertMLPsV2",
    "Experts",
    "Explanation",
    "GLUType",
    "GroupLimitedRouter",
    "MoE",
    "MoEFusedTKGConfig",
    "MoEOutput",
    "RoutedExpertsMLPOpsConfig",
    "RouterConfig",
    "RouterTopK",
    "Routing",
    "SharedExperts",
    "build_block_mapping",
    "choose_path",
    "num_blocks",
    "parallel_state",
    "routing",
]

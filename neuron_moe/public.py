"""The names that `neuron_moe` offers; importing them imports torch."""

from neuron_moe import routing
from neuron_moe.blocks import BlockMapping, build_block_mapping, num_blocks
from neuron_moe.explain import Explanation
from neuron_moe.moe import MoEOutput
from neuron_moe.nxd_compat import (
    BlockShardStrategy,
    BlockwiseMatmulConfig,
    ExpertMLPsV2,
    GLUType,
    GroupLimitedRouter,
    MoE,
    MoEFusedTKGConfig,
    RoutedExpertsMLPOpsConfig,
    RouterConfig,
    RouterTopK,
    SharedExperts,
)
from neuron_moe.parallel import parallel_state
from neuron_moe.paths import Decision, choose_path
from neuron_moe.router import Routing
from neuron_moe.weights import Experts

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

"""The names that `neuron_moe` offers; importing them imports torch."""

from neuron_moe import routing
from neuron_moe.blocks import BlockMapping, build_block_mapping, num_blocks
from neuron_moe.experts import RoutedExperts
from neuron_moe.explain import Explanation
from neuron_moe.fused_decode import MoEFusedTKGConfig
from neuron_moe.latent import Latent
from neuron_moe.moe import MoE, MoEOutput
from neuron_moe.nxd_compat import (
    BlockShardStrategy,
    BlockwiseMatmulConfig,
    ExpertMLPsV2,
    GLUType,
    GroupLimitedRouter,
    RoutedExpertsMLPOpsConfig,
    RouterConfig,
    RouterTopK,
    SharedExperts,
)
from neuron_moe.parallel import parallel_state
from neuron_moe.paths import Decision, choose_path
from neuron_moe.router import Router, Routing
from neuron_moe.spec import (
    ExpertFormula,
    ExpertSpec,
    LatentSpec,
    RouterFormula,
    RouterSpec,
    SharedSpec,
    Tuning,
    limits,
)
from neuron_moe.weights import Experts

__all__ = [
    "BlockMapping",
    "BlockShardStrategy",
    "BlockwiseMatmulConfig",
    "Decision",
    "ExpertFormula",
    "ExpertMLPsV2",
    "ExpertSpec",
    "Experts",
    "Explanation",
    "GLUType",
    "GroupLimitedRouter",
    "Latent",
    "LatentSpec",
    "MoE",
    "MoEFusedTKGConfig",
    "MoEOutput",
    "RoutedExperts",
    "RoutedExpertsMLPOpsConfig",
    "Router",
    "RouterConfig",
    "RouterFormula",
    "RouterSpec",
    "RouterTopK",
    "Routing",
    "SharedExperts",
    "SharedSpec",
    "Tuning",
    "build_block_mapping",
    "choose_path",
    "limits",
    "num_blocks",
    "parallel_state",
    "routing",
]

"""What a rank owns, and how ranks work together: tensor, expert, sequence and data parallel."""

from neuron_moe.parallel.config import ExpertLayout, ParallelConfig
from neuron_moe.parallel.failure import CollectiveError
from neuron_moe.parallel.shard import ExpertShard

__all__ = ["CollectiveError", "ExpertLayout", "ExpertShard", "ParallelConfig"]

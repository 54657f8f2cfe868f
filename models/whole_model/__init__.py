"""A whole model on the ranks of a machine, by formula: memory of a rank, time of a step.

What `neuron-moe compile` and `neuron-moe plan` share. Routed experts are left to whoever knows
their kernels; attention, dense layers, norms, vocabulary and collectives are here.
"""

from neuron_moe.models.whole_model.dense_time import (
    DenseTimes,
    PartTime,
    StepWork,
    dense_times,
    shared_experts_time,
)
from neuron_moe.models.whole_model.layers import LayerKind, layer_kinds
from neuron_moe.models.whole_model.memory import RankMemory, ServingLoad, rank_memory

__all__ = [
    "DenseTimes",
    "LayerKind",
    "PartTime",
    "RankMemory",
    "ServingLoad",
    "StepWork",
    "dense_times",
    "layer_kinds",
    "rank_memory",
    "shared_experts_time",
]

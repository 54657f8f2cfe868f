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
from neuron_moe.models.whole_model.planned import PlannedModel, plan_model
from neuron_moe.models.whole_model.serving import (
    TARGETS,
    Serving,
    ServingPlan,
    ServingTimes,
    WholeModel,
    best_first,
    plan_serving,
    serving_layouts,
    ties,
)

__all__ = [
    "TARGETS",
    "DenseTimes",
    "LayerKind",
    "PartTime",
    "PlannedModel",
    "RankMemory",
    "Serving",
    "ServingLoad",
    "ServingPlan",
    "ServingTimes",
    "StepWork",
    "WholeModel",
    "best_first",
    "dense_times",
    "layer_kinds",
    "plan_model",
    "plan_serving",
    "rank_memory",
    "serving_layouts",
    "shared_experts_time",
    "ties",
]

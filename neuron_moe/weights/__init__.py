"""Expert weights: the modules that hold them, and the forms in which backends read them."""

from neuron_moe.weights.expert_weights import ExpertWeights, LocalRouting, Packed
from neuron_moe.weights.experts import Experts
from neuron_moe.weights.laid_out import LaidOut
from neuron_moe.weights.linear import ExpertLinear
from neuron_moe.weights.narrow import NarrowMatrices
from neuron_moe.weights.packed import PackedMatrices

__all__ = [
    "ExpertLinear",
    "ExpertWeights",
    "Experts",
    "LaidOut",
    "LocalRouting",
    "NarrowMatrices",
    "Packed",
    "PackedMatrices",
]

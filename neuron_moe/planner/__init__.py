"""What a MoE layer costs in each layout on Trn2, and which costs least: computed, not measured."""

from neuron_moe.planner.coefficients import COEFFICIENTS, Coefficient, Machine
from neuron_moe.planner.layer_cost import LayerCost, RoutedTokens, layer_cost
from neuron_moe.planner.search import LayoutCosts, cost_layouts
from neuron_moe.planner.sizes import ModelSizes

__all__ = [
    "COEFFICIENTS",
    "Coefficient",
    "LayerCost",
    "LayoutCosts",
    "Machine",
    "ModelSizes",
    "RoutedTokens",
    "cost_layouts",
    "layer_cost",
]

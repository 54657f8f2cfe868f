"""neuron-moe tune: the fastest block sizes and plans of a model's MoE layer."""

from neuron_moe.tools.tune.command import main

__all__ = ["main"]

"""`neuron-moe bench layer`: whole MoE layers in the layouts people deploy."""

from lab.bench.layer.command import main

__all__ = ["main"]

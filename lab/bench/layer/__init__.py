"""`neuron-moe bench layer`: a whole MoE layer, as a rank computes it, in launches and in one."""

from lab.bench.layer.command import main

__all__ = ["main"]

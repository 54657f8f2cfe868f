"""The decode benchmark: our kernels beside the vendor's and the HBM bound."""

from neuron_moe.tools.bench.decode.command import main

__all__ = ["main"]

"""The prefill benchmark: our kernels beside the vendor's and the roofline."""

from neuron_moe.tools.bench.prefill.command import main

__all__ = ["main"]

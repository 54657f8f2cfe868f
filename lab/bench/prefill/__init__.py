"""The prefill benchmark: our kernels beside the vendor's and the roofline."""

from lab.bench.prefill.command import main

__all__ = ["main"]

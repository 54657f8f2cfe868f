"""The decode benchmark: our kernels beside the vendor's and the HBM bound."""

from lab.bench.decode.command import main

__all__ = ["main"]

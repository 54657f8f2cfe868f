"""neuron-moe tune; see the package of that name."""

from neuron_moe.tools.tune import main

__all__ = ["main"]

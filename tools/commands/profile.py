"""neuron-moe profile; see the package of that name."""

from neuron_moe.tools.profile import main

__all__ = ["main"]

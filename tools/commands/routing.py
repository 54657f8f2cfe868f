"""neuron-moe routing: which experts a text chooses, and what follows for block size and EPLB."""

from neuron_moe.tools.routing import main

__all__ = ["main"]

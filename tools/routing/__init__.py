"""neuron-moe routing: which experts a text chooses, and what follows."""

from neuron_moe.tools.routing.command import main

__all__ = ["main"]

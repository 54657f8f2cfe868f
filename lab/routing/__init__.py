"""neuron-moe routing: which experts a text chooses, and what follows."""

from lab.routing.command import main

__all__ = ["main"]

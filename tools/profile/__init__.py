"""neuron-moe profile: where the time of a kernel or of a layer goes, source line by source line."""

from neuron_moe.tools.profile.command import main

__all__ = ["main"]

"""`neuron-moe bench anchors`: published times of the chip beside what the simulator says."""

from lab.bench.anchors.command import main

__all__ = ["main"]

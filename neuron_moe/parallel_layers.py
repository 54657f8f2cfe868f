"""NxD's module name for the parallel state, so that import lines carry over."""

from neuron_moe.parallel import parallel_state

__all__ = ["parallel_state"]

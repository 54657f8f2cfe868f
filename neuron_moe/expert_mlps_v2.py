"""NxD's module name for the routed experts, so that import lines carry over."""

from neuron_moe.nxd_compat.experts import ExpertMLPsV2

__all__ = ["ExpertMLPsV2"]

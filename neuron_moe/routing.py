"""NxD's module name for the routers, so that import lines carry over."""

from neuron_moe.nxd_compat.routers import GroupLimitedRouter, RouterTopK
from neuron_moe.router import Router, Routing, route

__all__ = ["GroupLimitedRouter", "Router", "RouterTopK", "Routing", "route"]

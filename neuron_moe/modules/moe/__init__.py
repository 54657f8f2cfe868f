"""NxD's module paths of the MoE, so that import lines carry over with one word changed.

    from neuron_moe.modules.moe.routing import RouterTopK  # was neuronx_distributed.modules.moe

A module of NxD that is missing here holds nothing that its users call; see docs/nxdi.md.
"""

import sys
from types import ModuleType

from neuron_moe import expert_mlps_v2, moe_configs, nxd_compat, routing
from neuron_moe.nxd_compat import ACT2FN, ExpertMLPs, MoE, RouterTopK, load_balancing_loss_func

__all__ = ["ACT2FN", "MODULES", "ExpertMLPs", "MoE", "RouterTopK", "load_balancing_loss_func"]

_ALL = nxd_compat  # every name of NxD's that is ours
MODULES: dict[str, ModuleType] = {
    "expert_mlps": _ALL,
    "expert_mlps_v2": expert_mlps_v2,
    "loss_function": _ALL,
    "model": _ALL,
    "model_utils": _ALL,
    "moe_configs": moe_configs,
    "moe_process_group": _ALL,
    "routing": routing,
    "shared_experts": _ALL,
}
for _name, _module in MODULES.items():
    sys.modules[f"{__name__}.{_name}"] = _module
    globals()[_name] = _module

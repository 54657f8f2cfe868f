"""A layer of torchtitan and ours of its configuration, for tests; import where torchtitan is."""

from dataclasses import fields
from functools import partial
from typing import Any

from torch import nn
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)

from lab.train.titan import NeuronMoE

E, K = 8, 2
_INIT = partial(nn.init.normal_, std=0.2)


def titan_config(hidden: int, intermediate: int, **router: Any) -> Any:
    """Return torchtitan's configuration of a layer with a shared expert and balanced biases."""
    return make_moe_config(
        num_experts=E,
        router=make_router_config(
            dim=hidden,
            num_experts=E,
            gate_param_init={"weight": _INIT},
            top_k=K,
            **{"route_norm": True, "route_scale": 1.5, **router},
        ),
        routed_experts=make_routed_experts_config(
            dim=hidden,
            hidden_dim=intermediate,
            num_experts=E,
            top_k=K,
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), _INIT),
            comm_backend="standard",
        ),
        shared_experts=make_ffn_config(
            dim=hidden,
            hidden_dim=intermediate,
            w1_param_init={"weight": _INIT},
            w2w3_param_init={"weight": _INIT},
        ),
    )


def titan_layers(hidden: int, intermediate: int, **router: Any) -> tuple[nn.Module, NeuronMoE]:
    """Return torchtitan's layer and ours of the same configuration and weights."""
    config = titan_config(hidden, intermediate, **router)
    same = {field.name: getattr(config, field.name) for field in fields(config)}
    theirs = config.build()
    theirs.init_states()
    ours = NeuronMoE.Config(**same).build()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours

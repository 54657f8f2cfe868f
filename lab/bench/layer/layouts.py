"""The layouts in which a layer is deployed on one trn2.48xlarge.

tp ranks split each expert, ep ranks share the experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from neuron_moe.models.routing_trace import recorded_load
from neuron_moe.parallel.topology import instance
from neuron_moe.planner import Machine, ModelSizes, cost_layouts
from neuron_moe.planner.search import synthetic_routings
from neuron_moe.tools.models import read_model

Split = tuple[int, int]
"""tp, ep."""

TOKENS = {"prefill": 8192, "decode": 64}  # those for which `neuron-moe plan` chooses
LAYOUTS = ("TP 8", "planner's", "NxDI's")


@cache
def machine() -> Machine:
    """Return the machine."""
    return Machine.build(instance("trn2.48xlarge"))


def layouts_of(model: str, phase: str) -> Iterator[tuple[str, Split]]:
    """Yield each different split with its names.

    Args:
        model: name of a shipped configuration.
        phase: prefill or decode.
    """
    # NxDI leaves moe_tp_degree and moe_ep_degree at 1 and then splits experts over the whole
    # tensor-parallel group (`initialize_moe_module` of modules/moe_v2.py). On this machine that is
    # all 64 logical cores in its published settings: tp64 of its tests for GPT-OSS and Llama 4,
    # and contrib/models/DeepSeek-V3.
    splits = ((8, 1), planned(model)[phase], (machine().ranks, 1))
    names: dict[Split, list[str]] = {}
    for name, split in zip(LAYOUTS, splits, strict=True):
        names.setdefault(split, []).append(name)
    yield from ((", ".join(each), split) for split, each in names.items())


@cache
def planned(model: str) -> dict[str, Split]:
    """Return by phase what `neuron-moe plan --model` finds best for the layer, of the layouts
    without an all-to-all between ranks, which the Neuron SDK only announces.
    """
    sizes = ModelSizes.from_config(model, read_model(model)[0])
    load, _ = recorded_load(None)
    decisive = "zipf" if load is None else "recorded"
    routings = synthetic_routings(sizes, max(TOKENS.values()), load)
    costs = cost_layouts(sizes, machine(), {decisive: routings[decisive]}, TOKENS, decisive)
    best = {phase: costs.best_replicated(phase).layout for phase in TOKENS}
    return {phase: (layout.tp, layout.ep) for phase, layout in best.items()}

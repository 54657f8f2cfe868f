"""How many tokens each expert of each MoE layer of a model got.

Letters: L MoE layers, E experts.
"""

import torch
from torch import Tensor, nn

from neuron_moe.moe import MoE


def moe_layers(model: nn.Module) -> list[MoE]:
    """Return the MoE layers of a model, first to last."""
    return [module for module in model.modules() if isinstance(module, MoE)]


class LoadRecorder:
    """Count the tokens of every expert while the recorder is entered as a context.

    Example:
        with LoadRecorder(model) as loads:
            model(prompt)
            prefill_LE = loads.take()
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = moe_layers(model)
        if not self._layers:
            raise ValueError(
                f"model={type(model).__name__}: has no MoE layer. Record a model that has one."
            )

    def __enter__(self) -> "LoadRecorder":
        for layer in self._layers:
            layer.enable_load_counters()
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            layer.enable_load_counters(False)

    def take(self) -> Tensor:
        """Return the tokens of each expert `[L, E]` int64 since the last call; start again at 0."""
        loads = [layer.expert_load for layer in self._layers]
        counted = [load for load in loads if load is not None]
        if len(counted) != len(loads):
            raise RuntimeError("LoadRecorder.take() outside its context: nothing was counted.")
        for layer in self._layers:
            layer.enable_load_counters()
        return torch.stack(counted)

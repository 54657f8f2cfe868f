"""A model's MoE layer as one rank holds it, without weights: what plans are made of."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.errors import check_positive_int
from neuron_moe.models.expert_load import moe_layers
from neuron_moe.models.loader import parse_config
from neuron_moe.moe import MoE
from neuron_moe.parallel.collectives import SingleRank
from neuron_moe.parallel.config import divisors
from neuron_moe.plan import LayerParts, Plan, Step
from neuron_moe.shared_experts import SharedExperts
from neuron_moe.spec import Tuning

_MOST_RANKS = 128  # that a message names


class RankLayer:
    """The first MoE layer whose router scores, on one rank of tp x ep, on the meta device.

    Args:
        raw_config: a config.json.
        name: what messages call it.
        tp: ranks that split an expert.
        ep: ranks that split the experts.
        backend: name of the backend.
        tuning: how its kernels go about it.

    Raises:
        ValueError: a configuration that is not as it must be, or sizes that do not divide.
    """

    def __init__(
        self,
        raw_config: Mapping[str, Any],
        name: str,
        *,
        tp: int = 1,
        ep: int = 1,
        backend: str = "torch",
        tuning: Tuning | None = None,
    ) -> None:
        model_file, config = parse_config(raw_config, name)
        with torch.device("meta"):
            model: nn.Module = model_file.Model(config, dtype=torch.bfloat16, backend=backend)
        layers = moe_layers(model)  # of which a table of token ids may choose in a few
        scores = (layer for layer in layers if not layer.router.spec.table_size)
        self._layer: MoE = next(scores, layers[0])
        self._layer.router.linear_router.to(torch.bfloat16)  # as routers are published
        self._tp, self._ep = tp, ep
        self._tuning = tuning or Tuning()
        experts = self._layer.expert_mlps.spec
        for name, ranks, what in (("ep", ep, "num_experts"), ("tp", tp, "intermediate_size")):
            size = getattr(experts, what)  # equal parts: what one rank takes stands for all
            if size % check_positive_int(name, ranks):
                fitting = [each for each in divisors(size) if each <= _MOST_RANKS]
                raise ValueError(
                    f"{name}={ranks}: must divide {what}={size}. Use one of"
                    f" {', '.join(map(str, fitting))}."
                )

    def parts(self, step: Step) -> LayerParts:
        """Return what a backend plans a step with."""
        layer = self._layer
        whole = layer.parts(step)
        return replace(
            whole,
            weights=_share_of(whole.weights, self._tp, self._ep),
            tuning=self._tuning,
            shared=_shared_share(layer.shared_experts, self._tp * self._ep),
            adds_input=whole.adds_input and self._tp * self._ep == 1,
        )

    def plan(self, phase: str, tokens: int, *, in_one: bool = True, is_part: bool = False) -> Plan:
        """Return how a step is computed; it has no weights to run with.

        Args:
            phase: one of paths.PHASES.
            tokens: T.
            in_one: False requests a launch of each stage.
            is_part: whether ranks hold parts of the sequence, which come together behind routers.
        """
        step = Step(phase, tokens, is_part=is_part)
        parts = self.parts(step)
        if not in_one:
            parts = replace(parts, fuses_decode=False)
        return self._layer.expert_mlps.backend.plan(parts, step)


def _share_of(weights: Any, tp: int, ep: int) -> Any:
    """Return the experts of a rank: a run of them, a slice of each."""
    experts = weights.num_experts // ep
    width = weights.down_proj_EIH.shape[1] // tp
    gate_up_bias, down_bias = weights.gate_up_bias_EI, weights.down_bias_EH

    def columns(tensor: Tensor) -> Tensor:
        return tensor[:experts, ..., : tensor.shape[-1] // tp]

    return replace(
        weights,
        gate_up_proj_EHI=columns(weights.gate_up_proj_EHI),
        down_proj_EIH=weights.down_proj_EIH[:experts, :width],
        gate_up_bias_EI=None if gate_up_bias is None else columns(gate_up_bias),
        down_bias_EH=None if down_bias is None else down_bias[:experts],
    )


def _shared_share(shared: SharedExperts | None, ranks: int) -> SharedExperts | None:
    """Return the shared experts of a rank; those that do not divide stay whole."""
    if shared is None or shared.spec.intermediate_size % ranks:
        return shared
    spec = replace(shared.spec, intermediate_size=shared.spec.intermediate_size // ranks)
    return SharedExperts(
        spec, group=SingleRank("shared experts"), dtype=torch.bfloat16, device="meta"
    )

"""A model as it is planned: what its layers hold, counted in them, not guessed from config.json."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from neuron_moe.experts import RoutedExperts
from neuron_moe.models.loader import parse_config
from neuron_moe.moe import MoE
from neuron_moe.planner.sizes import ModelSizes, weight_format_of
from neuron_moe.shared_experts import SharedExperts


class PlannedModel(NamedTuple):
    """A model and its sizes.

    Attributes:
        sizes: those of the planner.
        model: a `DecoderModel` on the meta device; None where no model file reads config.json.
        config: its facts, or None.
        problem: why there is no model.
    """

    sizes: ModelSizes
    model: nn.Module | None = None
    config: Any = None
    problem: str = ""

    @property
    def longest(self) -> int | None:
        """Positions that a sequence may have; None where nobody knows."""
        return None if self.config is None else int(self.config.max_position_embeddings)

    @property
    def length_reason(self) -> str:
        """What messages say behind `longest`, where it is not config.json's."""
        return "" if self.config is None else str(self.config.length_reason)


def plan_model(
    name: str, raw_config: Mapping[str, Any], weight_format: str | None = None
) -> PlannedModel:
    """Return a model with the sizes that its layers have.

    Args:
        name: what reports call it.
        raw_config: its config.json, or the sizes alone.
        weight_format: of the routed experts, a key of WEIGHT_BYTES; None: as in the checkpoint.

    Raises:
        ValueError: a size is missing, or layers that the planner does not tell apart.
    """
    try:
        model_file, config = parse_config(raw_config, name)
    except ValueError as error:
        sizes = ModelSizes.from_config(name, raw_config, weight_format)
        return PlannedModel(sizes, problem=str(error))
    with torch.device("meta"):
        model = model_file.Model(config)
    stored = weight_format or weight_format_of(raw_config)
    return PlannedModel(_count(name, model, config, stored), model, config)


def _count(name: str, model: nn.Module, config: Any, weight_format: str) -> ModelSizes:
    """Return the sizes of a model's layers."""
    sparse = [module for module in model.modules() if isinstance(module, MoE)]
    if not sparse:
        raise ValueError(f"{name}: no layer of it has experts. Take a Mixture-of-Experts model.")
    identities = sparse[0].router.spec.num_identity
    if identities:
        raise ValueError(
            f"{name}: {identities} experts of each layer give back what they are given, which are"
            " not planned. Take a model without them."
        )
    specs = {_sizes_of(moe) for moe in sparse}
    if len(specs) > 1:
        raise ValueError(
            f"{name}: layers have experts of {len(specs)} sizes, which are not planned. Take a"
            " model whose layers have the same."
        )
    first = sparse[0]
    spec, shared = first.expert_mlps.spec, first.shared_experts
    whole, routed, common = (
        sum(parameter.numel() for module in modules for parameter in module.parameters())
        for modules in ([model], _parts(model, RoutedExperts), _parts(model, SharedExperts))
    )
    hidden = int(config.hidden_size)
    return ModelSizes(
        name=name,
        hidden_size=hidden,
        intermediate_size=spec.intermediate_size,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        num_layers=int(config.num_hidden_layers),
        num_moe_layers=len(sparse),
        shared_size=0 if shared is None else shared.spec.intermediate_size,
        dense_parameters=whole - routed - common,
        weight_format=weight_format,
        latent_size=0 if spec.hidden_size == hidden else spec.hidden_size,
        num_matrices=3 if spec.formula.has_gate else 2,
    )


def _sizes_of(moe: MoE) -> tuple[int, ...]:
    """Return what all layers with experts must have in common."""
    spec, shared = moe.expert_mlps.spec, moe.shared_experts
    width = 0 if shared is None else shared.spec.intermediate_size
    return spec.num_experts, spec.top_k, spec.hidden_size, spec.intermediate_size, width


def _parts(model: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kind)]

"""What a server may be given for our models beside its own settings, and what it must be given.

vLLM hands `additional_config` to models unread; ours is the part under OPTIONS_KEY.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch

from neuron_moe.errors import check_choice, check_positive_int, closest
from neuron_moe.models.attention import StateShape
from neuron_moe.models.compressed_attention import CompressedAttention
from neuron_moe.models.decoder import DecoderModel
from neuron_moe.models.delta_net import Recurrent
from neuron_moe.models.expert_load import moe_layers
from neuron_moe.models.loader import build_model
from neuron_moe.parallel.config import ParallelConfig
from neuron_moe.tuned import TunedPlans, read_tuned
from neuron_moe.weights.experts import Experts
from neuron_moe.weights.product_forms import FORMS, MEASURED
from nki_kernels.common.formula import ExpertFormula

ARCHITECTURE = "NeuronMoeForCausalLM"
HYBRID_ARCHITECTURE = "NeuronMoeHybridForCausalLM"  # the same with recurrent layers
NATIVE_ARCHITECTURE = "NeuronMoeNativeForCausalLM"
NATIVE_HYBRID_ARCHITECTURE = "NeuronMoeNativeHybridForCausalLM"
OPTIONS_KEY = "neuron_moe"
VLLM_FORM = "vllm"  # of products: through its compiled kernel for experts
BACKENDS = ("torch", "nki")
PREFILL = 2  # new tokens for which attention makes the keys and values of all heads
BLOCK_SIZES = (128, 64, 32)  # tokens of a block of the cache that vLLM's attention on a CPU takes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """How our model computes inside a server.

    Attributes:
        expert_parallel_size: ranks that split the experts; the others split each expert. None
            leaves it to the server's own switch.
        backend: of the MoE layers.
        product_form: how a CPU multiplies with weights, see `models.loader.load_model`; VLLM_FORM
            is one more form here, of experts that its kernel computes.
        metrics: count expert load and paths.
        joins: compile all but attention and experts, see `joined`.
        graph_tokens: decode steps of up to so many tokens run their MoE layers as static graphs,
            captured at the start, in which load is not counted; None for no graphs.
        graph_compiler: backend of torch.compile for both.
        block_size: slots of a block of experts in prefill; None leaves it to the backend.
        tuned: a file of `neuron-moe tune`, whose plans are taken for steps of their sizes.
    """

    expert_parallel_size: int | None = None
    backend: str = "torch"
    product_form: str = MEASURED
    metrics: bool = False
    joins: bool = False
    graph_tokens: int | None = None
    graph_compiler: str = "inductor"
    block_size: int | None = None
    tuned: str | None = None

    def __post_init__(self) -> None:
        if self.expert_parallel_size is not None:
            check_positive_int("expert_parallel_size", self.expert_parallel_size)
        for name in ("graph_tokens", "block_size"):
            if getattr(self, name) is not None:
                check_positive_int(name, getattr(self, name))
        check_choice("backend", self.backend, BACKENDS)
        if self.joins and self.backend != BACKENDS[0]:
            raise ValueError(
                f"backend={self.backend!r}: must be {BACKENDS[0]!r} with joins=True (--compile)."
                " Leave one of them off."
            )
        check_choice("product_form", self.product_form, (MEASURED, *FORMS, VLLM_FORM))

    @classmethod
    def read(cls, additional_config: Mapping[str, Any]) -> "ServingOptions":
        """Return the options in a server's additional_config.

        Raises:
            ValueError: a key or value that is none of ours.
        """
        for key in additional_config:
            if key != OPTIONS_KEY and key.replace("-", "_").lower() == OPTIONS_KEY:
                raise ValueError(f"additional_config: {key!r} must be {OPTIONS_KEY!r}. Correct it.")
        given = additional_config.get(OPTIONS_KEY, {})
        known = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping):
            raise ValueError(f"{OPTIONS_KEY}={given!r}: must be an object with {', '.join(known)}.")
        for name in given:
            if name not in known:
                raise ValueError(
                    f"additional_config: {OPTIONS_KEY}.{name} must be one of {', '.join(known)}."
                    f" {closest(name, known)}"
                )
        return cls(**given)

    def build(self, folder: Path, dtype: torch.dtype) -> DecoderModel:
        """Return the model of a checkpoint, without weights.

        Raises:
            ValueError: the file of tuned plans is not as it must be.
        """
        model = cast(DecoderModel, build_model(folder, dtype=dtype, backend=self.backend))
        if self.block_size is not None or self.tuned is not None:
            plans = TunedPlans() if self.tuned is None else read_tuned(self.tuned).plans
            for layer in moe_layers(model):
                experts = layer.expert_mlps
                experts.tuning = replace(experts.tuning, block_size=self.block_size, tuned=plans)
        return model

    def layout(self, num_ranks: int, *, splits_experts: bool = False) -> ParallelConfig:
        """Return how the ranks of a server split the experts.

        Args:
            num_ranks: its tensor parallel ranks.
            splits_experts: its switch for expert parallelism is on.

        Raises:
            ValueError: the ranks cannot be split so.
        """
        expert_ranks = self.expert_parallel_size or (num_ranks if splits_experts else 1)
        if num_ranks % expert_ranks:
            raise ValueError(
                f"expert_parallel_size={expert_ranks}: must divide the {num_ranks} ranks of the"
                " server. Choose a divisor, or another tensor parallel size."
            )
        return ParallelConfig(tp=num_ranks // expert_ranks, ep=expert_ranks)


def hf_overrides(architecture: str = ARCHITECTURE) -> dict[str, Any]:
    """Return what the server must read in place of a checkpoint's config.json.

    Its own class of the architecture is passed by. Our reader decodes weights, so that the server
    must not expect codes.

    Args:
        architecture: HYBRID_ARCHITECTURE of models with recurrent layers.
    """
    return {"architectures": [architecture], "quantization_config": {}}


def architecture_of(model: DecoderModel) -> str:
    """Return the name of our class in vLLM that serves a model.

    Raises:
        ValueError: all layers keep a state of each sequence, which vLLM has no cache for.
    """
    layers = model.attentions
    if not any(layer.cache_shape for layer in layers):
        raise ValueError(
            f"layers: all {len(layers)} keep a state of each sequence, one must attend: vLLM"
            " has no cache for this one. Generate with `neuron-moe generate`."
        )
    keeps_states = any(isinstance(layer, Recurrent | CompressedAttention) for layer in layers)
    return HYBRID_ARCHITECTURE if keeps_states else ARCHITECTURE


def page_shapes(model: DecoderModel, longest: int) -> list[StateShape]:
    """Return what a page of states holds, of a layer with a memory, or of all layers with entries.

    Args:
        model: to be served.
        longest: tokens of a sequence.
    """
    layers = model.attentions
    pooled = [each for each in layers if isinstance(each, CompressedAttention)]
    if pooled:
        return [shape for each in pooled for shape in each.sequence_shapes(longest)]
    recurrent = [each.state_shapes for each in layers if isinstance(each, Recurrent)]
    return list(recurrent[0]) if recurrent else []


def text_places(token_ids: Sequence[int], images: Sequence[Any]) -> tuple[torch.Tensor, int]:
    """Return the places of a prompt of text on three axes, and what to add in decode.

    Raises:
        ValueError: there are images.
    """
    if images:
        raise ValueError(
            f"mm_features: {len(images)} given, must be none; only the text model is"
            ' served. Pass --limit-mm-per-prompt \'{"image": 0, "video": 0}\'.'
        )
    return torch.arange(len(token_ids)).expand(3, -1).contiguous(), 0


def check_servable(model: DecoderModel, longest: int) -> None:
    """Raise ValueError where vLLM has no cache for what a layer keeps, or sequences are too long.

    Args:
        model: to be served.
        longest: tokens of a sequence, vLLM's max_model_len.
    """
    reason, limit = model.config.length_reason, model.config.max_position_embeddings
    if reason and longest > limit:
        raise ValueError(
            f"max_model_len={longest}: must be at most {limit}{reason}."
            f" Give --max-model-len {limit}."
        )
    architecture_of(model)


def check_product_form(model: DecoderModel, options: ServingOptions) -> None:
    """Raise ValueError where vLLM's kernel is requested and cannot compute some experts."""
    if options.product_form != VLLM_FORM:
        return
    for name, experts in model.named_modules():
        if not isinstance(experts, Experts):
            continue
        unlike = [
            field.name
            for field in fields(ExpertFormula)
            if getattr(experts.formula, field.name) != getattr(ExpertFormula(), field.name)
        ]
        if unlike or experts.shard.ep_size > 1:
            found = f"another {', '.join(unlike)}" if unlike else f"EP{experts.shard.ep_size}"
            raise ValueError(
                f"product_form={VLLM_FORM!r}: {name} has {found}, must be SwiGLU without biases,"
                " with all experts on each rank, for vLLM's kernel. Leave --product-form at"
                f" {MEASURED!r}, or take one of {', '.join(FORMS)}."
            )


def block_size_of(model: DecoderModel) -> int:
    """Return how many tokens a block of the cache takes, so that chunks of attention are blocks.

    Raises:
        ValueError: no size fits.
    """
    reaches = (attention.reach for attention in model.attentions)
    chunks = sorted({reach.chunk or 0 for reach in reaches if reach is not None})
    for size in BLOCK_SIZES:
        if all(chunk % size == 0 for chunk in chunks):
            return size
    raise ValueError(
        f"attention_chunk_size={chunks[-1]}: must be a multiple of {BLOCK_SIZES[-1]}, the tokens of"
        " vLLM's smallest block. Serve a model with other chunks."
    )

"""One class of vLLM's for every model of this package.

Letters: T tokens of all sequences in a step, H hidden, V vocabulary, n sequences.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.utils.torch_utils import set_default_torch_dtype

from neuron_moe.backends.custom_kernels import register
from neuron_moe.models.decoder import DecoderModel
from neuron_moe.models.dense_forms import settle_linears
from neuron_moe.models.loader import fill_model, settle_experts
from neuron_moe.parallel import parallel_state
from neuron_moe.serving.joined import join
from neuron_moe.serving.metrics import ServingCounters
from neuron_moe.serving.options import VLLM_FORM, ServingOptions, architecture_of, hf_overrides
from neuron_moe.serving.static_decode import capture_decode
from neuron_moe.serving.vllm_attention import PagedCore, put_cores
from neuron_moe.serving.vllm_kernel import VllmKernel
from neuron_moe.serving.vllm_linear import can_take_linears, take_linears
from neuron_moe.serving.vllm_states import HybridPages
from neuron_moe.weights.product_forms import MEASURED


class NeuronMoeForCausalLM(nn.Module):
    """A model of ours that vLLM schedules: our layers and weights, its cache and attention.

    Args:
        vllm_config: of the server; `additional_config` may hold `ServingOptions`.
        prefix: of the names of layers.

    Raises:
        ValueError: the server's settings or the checkpoint do not fit.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.folder = Path(vllm_config.model_config.model)
        if not self.folder.is_dir():
            raise ValueError(
                f"model={self.folder}: must be the folder of a checkpoint. Download it first."
            )
        self.options = ServingOptions.read(vllm_config.additional_config or {})
        _join_ranks(vllm_config, self.options)
        dtype = vllm_config.model_config.dtype
        with set_default_torch_dtype(torch.float32):  # vLLM's is that of the model meanwhile
            self.model = self.options.build(self.folder, dtype)
        _check_class(type(self).__name__, self.model)
        put_cores(self.model, vllm_config, prefix)
        self._counters: ServingCounters | None = None
        self._config = vllm_config
        self._forward_tokens: Callable[..., Tensor] = self.model.forward_tokens

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return [T, H]."""
        return self.model.embed(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden states [T, H].

        Args:
            input_ids: [T] token ids of all sequences.
            positions: [T] int64, the place of each in its sequence, or [3, T].
            intermediate_tensors: of pipeline parallelism, which there is not.
            inputs_embeds: in place of token ids, which there is not.
        """
        phase = _phase()
        if self._counters is not None:
            self._counters.count_step(phase, input_ids.shape[0])
        places = positions[0] if positions.ndim > 1 else positions  # of text: three axes alike
        return self._forward_tokens(input_ids, places, phase=phase)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return [n, V] of the last token of each sequence, [n, H]."""
        return self.model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill the model with our own reader; return the names of all parameters.

        Args:
            weights: what vLLM would read; stays unread.
        """
        with set_default_torch_dtype(torch.float32):
            fill_model(self.model, self.folder)
            self._settle_forms()
            if self.options.graph_tokens is not None:
                graphs = self.options.graph_tokens, self.options.graph_compiler
                capture_decode(self.model, *graphs)
        for attention in self.model.attentions:
            if isinstance(attention.core, PagedCore):
                attention.core.settle(attention)
        # Every rank routes all tokens: one of them counts.
        if self.options.metrics and get_tensor_model_parallel_rank() == 0:
            self._counters = ServingCounters(self.model)
        if self.options.joins:
            self._join()
        return {name for name, _ in self.named_parameters()}

    def _settle_forms(self) -> None:
        """Choose how experts and dense projections are multiplied."""
        options = self.options
        if options.backend == "nki" or options.graph_tokens is not None:
            return  # these take plain weights
        register(VllmKernel())
        settle_experts(self.model, options.product_form)
        is_vllms = options.product_form in (MEASURED, VLLM_FORM)
        if is_vllms and can_take_linears(self._config.model_config.dtype):
            take_linears(self.model)
        else:
            settle_linears(self.model, options.product_form)

    def _join(self) -> None:
        """Compile the model as graphs, of one token and of several in each phase."""
        joined = join(self.model, self.options.graph_compiler)
        with set_forward_context(None, self._config), set_default_torch_dtype(torch.float32):
            joined.capture()
        self._forward_tokens = joined


class NeuronMoeHybridForCausalLM(HybridPages, NeuronMoeForCausalLM):
    """The same for models with recurrent layers."""


def _check_class(name: str, model: DecoderModel) -> None:
    """Raise ValueError where vLLM would give a model other pages than it needs."""
    if name != (wanted := architecture_of(model)):
        raise ValueError(
            f"architectures: {name}, must be {wanted} for this checkpoint. Give"
            f" --hf-overrides '{json.dumps(hf_overrides(wanted))}'."
        )


def _join_ranks(config: VllmConfig, options: ServingOptions) -> None:
    """Build our groups from the ranks that vLLM has started."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}, data_parallel_size="
            f"{parallel.data_parallel_size}: must be 1. Raise tensor_parallel_size, or start"
            " several servers."
        )
    num_ranks = get_tensor_model_parallel_world_size()
    layout = options.layout(num_ranks, splits_experts=parallel.enable_expert_parallel)
    if num_ranks > 1 and not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(config=layout, watch=False)


def _phase() -> str:
    """Return 'decode' where every sequence of the step adds one token."""
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        return "prefill"  # vLLM's warm-up
    # Attention says how long the longest is; layers that keep states, how many add several.
    several = (
        getattr(layer, "num_prefills", 0) or getattr(layer, "max_query_len", 1) > 1
        for layer in metadata.values()
    )
    return "prefill" if any(several) else "decode"

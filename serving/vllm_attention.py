"""vLLM's paged attention as the core of our attention modules.

Letters: T tokens of all sequences, Q query heads, J key/value heads, D head size, W value size.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention

from neuron_moe.models.attention import AttentionFacts, CacheView
from neuron_moe.models.compressed_attention import CompressedAttention
from neuron_moe.models.decoder import DecoderModel
from neuron_moe.models.delta_net import Recurrent
from neuron_moe.serving.heads import gather_columns, own_heads, ranks_of_heads
from neuron_moe.serving.options import PREFILL, check_servable
from neuron_moe.serving.vllm_entries import put_entry_cores
from neuron_moe.serving.vllm_states import StateCore


class PagedCore:
    """Keeps keys and values in vLLM's pages; one for each layer.

    It is no module, so that its scales stay out of the state dict.

    Args:
        attention: the module it computes for.
        config: of the server.
        prefix: name of the layer, unique in the model.

    Raises:
        ValueError: the server has no attention of this kind.
    """

    def __init__(self, attention: AttentionFacts, config: VllmConfig, prefix: str) -> None:
        num_heads, num_kv_heads, head_size, _ = attention.core_sizes(PREFILL)
        self.group = ranks_of_heads(num_heads, num_kv_heads)
        arguments: dict[str, Any] = {
            "num_heads": num_heads // self.group.size,
            "head_size": head_size,
            "scale": attention.scale,
            "num_kv_heads": num_kv_heads // self.group.size,
            "cache_config": config.cache_config,
            "prefix": prefix,
        }
        reach = attention.reach
        if reach.chunk is not None:
            self.paged = ChunkedLocalAttention(**arguments, attention_chunk_size=reach.chunk)
        else:
            if attention.sinks is not None:
                arguments["sinks"] = own_heads(self.group, attention.sinks, 0)
            self.paged = Attention(**arguments, per_layer_sliding_window=reach.window)
        self._check(head_size, reach.window)

    def _check(self, head_size: int, window: int | None) -> None:
        sizes = self.paged.attn_backend.get_supported_head_sizes()
        name = self.paged.attn_backend.get_name()
        if sizes and head_size not in sizes:
            raise ValueError(
                f"head_dim={head_size}: must be one of {', '.join(map(str, sizes))} for the"
                f" attention {name} of vLLM. Serve this model elsewhere."
            )
        if self.paged.sliding_window != window:
            raise ValueError(
                f"sliding_window={self.paged.sliding_window}: vLLM reads it so for"
                f" {self.paged.layer_name}, the model has {window}. Correct config.json."
            )

    def settle(self, attention: AttentionFacts) -> None:
        """Take over weights that were loaded since: loading replaces parameters."""
        if attention.sinks is not None:
            self.paged.impl.sinks = own_heads(self.group, attention.sinks, 0)

    def __call__(
        self,
        _attention: AttentionFacts,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _view: CacheView | None,
    ) -> Tensor:
        """Return [.., Q * W]; arguments as `models.attention.Core`, the last one unread."""
        query, key, value = (own_heads(self.group, part) for part in (query, key, value))
        leading, value_size = query.shape[:2], value.shape[-1]
        missing = key.shape[-1] - value_size
        if missing:  # pages keep keys and values of one size
            value = functional.pad(value, (0, missing))
        out = self.paged(*(part.flatten(0, 1).flatten(1) for part in (query, key, value)))
        if missing:
            out = out.unflatten(-1, (query.shape[2], -1))[..., :value_size].flatten(-2)
        return gather_columns(self.group, out.view(*leading, -1))


def put_cores(model: DecoderModel, config: VllmConfig, prefix: str) -> None:
    """Put vLLM's pages into every layer of a model that keeps something.

    Raises:
        ValueError: vLLM has no cache for it, or sequences are longer than the model computes.
    """
    check_servable(model, config.model_config.max_model_len)
    put_entry_cores(model, config, prefix)
    for layer, attention in enumerate(model.attentions):
        name = f"{prefix}.layers.{layer}.self_attn".lstrip(".")
        if isinstance(attention, Recurrent):
            attention.core = StateCore(attention, config, model.embed_tokens.weight.dtype, name)
        elif attention.cache_shape and not isinstance(attention, CompressedAttention):
            attention.core = PagedCore(attention, config, name)

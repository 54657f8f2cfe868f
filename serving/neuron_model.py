"""Our models in the native form of vllm-neuron, the plugin that serves Trainium.

Its runner asks a factory for the model, reads the needs of the cache, binds pages, loads weights,
and compiles one static graph for each bucket: prefill of one sequence, decode of several. The
interface is the plugin's (`tests/serving/vllm_neuron.json` records it with its source).

Letters: T tokens of the step with padding, H hidden, V vocabulary, n sampled positions.
"""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.models.delta_net import GatedDeltaNet
from neuron_moe.models.loader import parse_config, read_config
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.collectives import Collectives
from neuron_moe.serving.heads import gather_columns
from neuron_moe.serving.neuron_attention import attend_pages, find_functions, recur_pages, view_of
from neuron_moe.serving.neuron_dense import VocabularyHead, cut_dense
from neuron_moe.serving.neuron_weights import assign, parameter_loaders
from neuron_moe.serving.options import (
    ARCHITECTURE,
    NATIVE_ARCHITECTURE,
    NATIVE_HYBRID_ARCHITECTURE,
    OPTIONS_KEY,
    ServingOptions,
    text_places,
)

QUANTIZATIONS = (None, "bf16", "mxfp4")  # our reader decodes whatever a checkpoint holds
PLUGIN = "vllm_neuron"
_RAISE_TP = "Raise the tensor parallel size instead."
# Settings of the plugin with the one value that is served, and what to do for another.
_SETTLED: dict[str, tuple[Any, str]] = {
    **{f"{part}_dp_size": (1, _RAISE_TP) for part in ("attention", "embedding", "lm_head", "mlp")},
    "apply_prefill_dcp": (False, _RAISE_TP),
    "all2all_backend": (None, "Leave it out: experts exchange by all-reduce."),
    "fp8_packed_kv": (False, "Leave it out: pages are in the dtype of the model."),
}


class NeuronMoeNativeForCausalLM(nn.Module):
    """A model of ours as the runner of vllm-neuron wants it; made by `from_configs`.

    vLLM takes a class for a model that generates text if its constructor knows `vllm_config` and it
    has `embed_input_ids` and `compute_logits`.

    Args:
        folder: of the checkpoint.
        dtype: of the parameters.
        options: how it computes.
        vllm_config: of vLLM itself, whose runner makes models another way.

    Attributes:
        is_hybrid: read by vLLM; there are recurrent layers.

    Raises:
        ValueError: vLLM's own runner is to run it, or the model keeps what the plugin has no pages
            for, or none of this class.
    """

    is_hybrid = False

    def __init__(
        self,
        folder: Path | None = None,
        dtype: torch.dtype = torch.bfloat16,
        options: ServingOptions | None = None,
        *,
        vllm_config: object = None,
        prefix: str = "",
    ) -> None:
        name = NATIVE_HYBRID_ARCHITECTURE if self.is_hybrid else NATIVE_ARCHITECTURE
        if folder is None or options is None or vllm_config is not None:
            raise ValueError(
                f"{name}{f' {prefix}' if prefix else ''}: is for vllm-neuron, which makes it by"
                f" from_configs(). On a CPU choose {ARCHITECTURE}."
            )
        super().__init__()
        self.folder, self.options = folder, options
        self.model = options.build(folder, dtype)
        attentions = self.model.attentions
        wanted = any(isinstance(each, GatedDeltaNet) for each in attentions)
        if wanted != self.is_hybrid:
            other = NATIVE_HYBRID_ARCHITECTURE if wanted else NATIVE_ARCHITECTURE
            raise ValueError(
                f"architectures: {name} is for models {'without' if wanted else 'with'} recurrent"
                f" layers. Name {other} in --hf-overrides."
            )
        self._functions, self._sampler = find_functions(), None
        self._tells_logits = False
        self._caches: list[tuple[Tensor, ...]] = []
        self._names = []
        for layer, attention in enumerate(attentions):
            is_recurrent = isinstance(attention, GatedDeltaNet)
            self._names.append(f"layers.{layer}.{'linear_attn' if is_recurrent else 'self_attn'}")
            shape = attention.cache_shape
            if not is_recurrent and (len(shape) != 2 or shape[0] != shape[1]):
                raise ValueError(
                    f"layer {layer}: {type(attention).__name__} keeps {shape}, must keep keys and"
                    " values of one size; vllm-neuron has pages for those alone. Serve it with"
                    " `neuron-moe serve`."
                )
            attention.core = recur_pages if is_recurrent else attend_pages
        group = _model_group()
        self._parts = {} if group is None else cut_dense(self.model, group)

    @classmethod
    def from_configs(
        cls,
        hf_config: Any,
        neuron_config: Any = None,
        *,
        text_neuron_config: Any = None,
        vision_neuron_config: Any = None,
    ) -> "NeuronMoeNativeForCausalLM":
        """Return the model of a checkpoint, without weights, for this rank.

        Args:
            hf_config: of transformers; its `name_or_path` must be the checkpoint's folder, and an
                attribute `neuron_moe` may hold `ServingOptions` (--hf-overrides).
            neuron_config: of the plugin, or None.
            text_neuron_config: the same, where the plugin has settings of a vision tower, too.
            vision_neuron_config: those; the text model has no use for them.

        Raises:
            ValueError: something is requested that this model does not do.
        """
        settings = text_neuron_config if neuron_config is None else neuron_config
        _check_config(settings)
        folder = Path(hf_config.name_or_path)
        if not folder.is_dir():
            raise ValueError(
                f"model={folder}: must be the folder of a checkpoint. Download it first."
            )
        options = ServingOptions.read({OPTIONS_KEY: getattr(hf_config, OPTIONS_KEY, {})})
        _take_groups()
        dtype = getattr(hf_config, "dtype", None) or torch.bfloat16
        model = cls(folder, dtype, options)
        model._take_sampler(settings)
        return model

    def _take_sampler(self, neuron_config: Any) -> None:
        """Let the plugin's sampler choose tokens, where they are to be sampled on the device; it
        takes each rank's logits.
        """
        settings = getattr(neuron_config, "on_device_sampling_config", None)
        if settings is None:
            return
        group, vocab_size = _model_group(), self.model.config.vocab_size
        if group is not None and vocab_size % group.size:
            raise ValueError(
                f"on_device_sampling_config: vocab_size={vocab_size} must divide by the"
                f" {group.size} ranks. Set it to null in --additional-config, and pass"
                " --no-async-scheduling."
            )
        ranks = importlib.import_module("vllm.distributed.parallel_state").get_tp_group()
        sampler = importlib.import_module(f"{PLUGIN}.nn.sampler").Sampler
        self._sampler = sampler(settings, process_group=ranks.device_group)
        self._tells_logits = bool(getattr(neuron_config, "max_logprobs", 0)) or (
            getattr(neuron_config, "debug_logits_dir", None) is not None
        )
        if isinstance(self.model.lm_head, VocabularyHead):
            self.model.lm_head.gathers = False

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return [T, H], the embeddings of [T] token ids."""
        return self.model.embed(input_ids)

    def compute_logits(self, hidden_TH: Tensor) -> Tensor:
        """Return [T, V] logits of the last hidden states [T, H]."""
        return self.model.compute_logits(hidden_TH)

    def get_kv_spec(self) -> Any:
        """Return the plugin's `KVSpec`: what each layer keeps of a token on this rank, or, where it
        is recurrent, of a sequence.

        Raises:
            ValueError: this version of the plugin has no pages for recurrent layers.
        """
        records = importlib.import_module(f"{PLUGIN}.model.kv_cache")
        layers, recurrent, dtype = [], [], self.model.embed_tokens.weight.dtype
        if self.is_hybrid and not hasattr(records, "RecurrentLayerSpec"):
            raise ValueError(
                f"{PLUGIN}: this version has no RecurrentLayerSpec, must have pages for recurrent"
                " layers. Install one that serves Qwen3.5."
            )
        for name, attention in zip(self._names, self.model.attentions, strict=True):
            if isinstance(attention, GatedDeltaNet):
                states = attention.state_shapes
                spec = records.RecurrentLayerSpec(
                    name=name,
                    shapes=tuple(each.sizes for each in states),
                    dtypes=(torch.float32,) * len(states),  # as pages of states are
                )
                recurrent.append(spec)
                continue
            heads, size = attention.cache_shape[0]
            spec = records.LayerSpec(
                name=name,
                num_kv_heads=heads,
                head_size=size,
                dtype=dtype,
                sliding_window_size=attention.reach.window,
                chunk_size=attention.reach.chunk,
            )
            layers.append(spec)
        more = {"recurrent_layers": recurrent} if recurrent else {}
        return records.KVSpec(layers=layers, **more)

    def bind_kv_cache(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the pages of each layer: keys and values, [pages, heads, tokens, head size]; one
        tensor a layer where layers share pages, see `neuron_attention`.

        Raises:
            ValueError: a layer has none, or they are of another form.
        """
        caches = []
        for name, attention in zip(self._names, self.model.attentions, strict=True):
            pages, wanted = kv_caches.get(name), self._pages_of(attention)
            found = None if pages is None else [(*each.shape, each.dtype) for each in pages]
            if pages is None or found is None or not _are_pages(found, wanted):
                allowed = ", ".join(map(str, wanted)).replace("None", "any")
                raise ValueError(
                    f"kv_caches[{name!r}]: {found}, must be {allowed}. Allocate what get_kv_spec()"
                    " says, unpacked, and leave --kv-cache-dtype out."
                )
            caches.append(tuple(pages))
        self._caches = caches

    def _pages_of(self, attention: Any) -> list[tuple[Any, ...]]:
        """Return axes and dtype of each tensor of pages that a layer takes; None is any size."""
        if isinstance(attention, GatedDeltaNet):
            return [(None, None, torch.float32)]
        (heads, size), dtype = attention.cache_shape[0], self.model.embed_tokens.weight.dtype
        if self.is_hybrid:
            return [(None, 2, heads, None, size, dtype)]
        return [(None, heads, None, size, dtype)] * 2

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        inputs_embeds: Tensor | None = None,
        is_token_ids: Tensor | None = None,
        attn_metadata: Mapping[str, Mapping[str, Any]] | None = None,
        sampling_positions: Tensor | None = None,
        sampling_params: Tensor | None = None,
        spec_decode_metadata: Any = None,
        logit_mask: Tensor | None = None,
        rank: Tensor | None = None,
        **_more: Any,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return logits [n, V] of the sampled positions; where they are sampled on the device,
        tokens [n] and the logits, if they were requested.

        Args:
            input_ids: [T] token ids, padded to the bucket.
            positions: [T] place of each in its sequence.
            inputs_embeds: prompt embeddings, which it does not take.
            is_token_ids: which of them are none.
            attn_metadata: by layer: slot_mapping [T], block_table_tensor, max_query_len,
                decode_token_threshold and, for tables cut to a window, swa_kv_pos_offset.
            sampling_positions: [n] which of the T tokens to give logits for; None for all.
            sampling_params: [n, 3] of sampling on the device: top_k, top_p, temperature.
            spec_decode_metadata: of speculation, which it does not do.
            logit_mask: [n, V] bool of sampling on the device, which tokens may be.
            rank: of this process, for the sampler; the weights are of one rank already.

        Raises:
            ValueError: embeddings or speculation were given, or no pages are bound.
        """
        refused = {"inputs_embeds": inputs_embeds, "spec_decode_metadata": spec_decode_metadata}
        for name, value in refused.items():
            if value is not None:
                raise ValueError(f"{name}: must be None, it is not served. Leave it off.")
        if attn_metadata is None or not self._caches:
            raise ValueError("forward: needs attn_metadata and bound pages. Call bind_kv_cache().")
        first = attn_metadata[self._names[0]]
        is_decode = first["max_query_len"] <= first["decode_token_threshold"]
        views = [
            view_of(
                caches,
                attn_metadata[name],
                positions,
                is_decode=is_decode,
                functions=self._functions,
            )
            for name, caches in zip(self._names, self._caches, strict=True)
        ]
        hidden_TH = self.model.forward_tokens(
            input_ids,
            positions.long(),
            phase="decode" if is_decode else "prefill",
            # In decode a row more costs less than telling padding apart, which takes fusion away.
            # Padding has slot -1, since vLLM 0.24 slot 0, which no token has.
            real_T=None if is_decode else first["slot_mapping"].flatten() > 0,
            views=views,
        )
        if sampling_positions is not None:
            hidden_TH = hidden_TH.index_select(0, sampling_positions)
        logits: Tensor = self.model.compute_logits(hidden_TH)
        if self._sampler is None:
            return logits
        tokens_n = self._sampler(logits, sampling_params, logit_mask=logit_mask, tp_rank=rank)
        if not self._tells_logits:
            return tokens_n, None
        group = _model_group()
        return tokens_n, logits if group is None else gather_columns(group, logits)

    def load_weights(
        self, checkpoint_path: str, device: torch.device, cache_dir: str | None
    ) -> None:
        """Fill the model through the plugin's pipelined reader and our loaders.

        Args:
            checkpoint_path: folder of the checkpoint.
            device: where parameters go.
            cache_dir: of the plugin.
        """
        checkpoints = importlib.import_module(f"{PLUGIN}.utils.checkpoints")
        loaders = importlib.import_module(f"{PLUGIN}.utils.weight_loader")
        model_file, config = parse_config(read_config(self.folder), self.folder)
        mappings = {}
        weight_map = model_file.weight_map(config)
        made = parameter_loaders(self.model, weight_map, checkpoint_path, self._parts)
        parameters = _as_parameters(self.model, made)
        for name, loader in made.items():
            attached = loaders.SafetensorsWeightLoader(transform=loader.transform)
            loaders.set_weight_loader(parameters[name], attached)
            mappings[name] = list(loader.keys)
        group = _model_group()
        checkpoint = checkpoints.SafetensorsCheckpoint(checkpoint_path, cache_dir)
        loaded = checkpoint.load_sharded_pipelined(
            group.rank if group else 0, group.size if group else 1, self.model, mappings, device
        )
        assign(self.model, loaded.state_dict, device)
        self.model.eval().requires_grad_(False)

    def load_weights_lite(
        self, checkpoint_path: str, device: torch.device, cache_dir: str | None
    ) -> None:
        """Load nothing: graphs are compiled from shapes, and no scale is baked into them."""


class NeuronMoeNativeHybridForCausalLM(NeuronMoeNativeForCausalLM):
    """The same for models with recurrent layers, which say more of themselves.

    Attributes:
        kv_cache_page_major: read by the plugin, which then gives each layer one tensor of pages
            that it shares with others.
        supports_mrope: read by vLLM; places of images have three axes, those of text are alike.
    """

    is_hybrid = True
    kv_cache_page_major = True
    supports_mrope = True

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of what a recurrent layer keeps, for vLLM to size a page."""
        folder = vllm_config.model_config.model
        _, config = parse_config(read_config(folder), folder)
        sizes = config.linear_attention.shared_by(vllm_config.parallel_config.tensor_parallel_size)
        return tuple(each.sizes for each in sizes.state_shapes)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        """Return their dtypes: pages of states are float32."""
        return torch.float32, torch.float32

    def get_mrope_input_positions(
        self, input_tokens: Sequence[int], mm_features: Sequence[Any]
    ) -> tuple[Tensor, int]:
        """Return the places of a prompt of text on three axes, and what to add in decode.

        Raises:
            ValueError: there are images.
        """
        return text_places(input_tokens, mm_features)


def _are_pages(found: Sequence[tuple[Any, ...]], wanted: Sequence[tuple[Any, ...]]) -> bool:
    return len(found) == len(wanted) and all(
        len(have) == len(want) and all(b in (None, a) for a, b in zip(have, want, strict=True))
        for have, want in zip(found, wanted, strict=True)
    )


def _as_parameters(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    """Make parameters of the named tensors of a model; the plugin fills no buffers."""
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf in dict(module.named_buffers(recurse=False)):
            setattr(module, leaf, nn.Parameter(module.get_buffer(leaf), requires_grad=False))
    return dict(model.named_parameters())


def _check_config(neuron_config: Any) -> None:
    """Raise ValueError for what this model does not do."""
    quantization = getattr(neuron_config, "quantization", None)
    if quantization not in QUANTIZATIONS:
        raise ValueError(
            f"quantization={quantization!r}: must be one of {', '.join(map(str, QUANTIZATIONS))}."
            " Leave it out: weights are decoded as the checkpoint stores them."
        )
    for name, (served, way_out) in _SETTLED.items():
        if (value := getattr(neuron_config, name, served)) not in (None, served):
            raise ValueError(f"{name}={value!r}: must be {served}. {way_out}")


def _take_groups() -> None:
    """Take the plugin's ranks as ours, once."""
    groups = importlib.import_module("vllm.distributed.parallel_state")
    if (ranks := groups.get_dcp_group().world_size) > 1:
        raise ValueError(
            f"decode_context_parallel_size={ranks}: must be 1, every rank keeps all tokens of its"
            " heads. Leave --decode-context-parallel-size out."
        )
    tensor = groups.get_tp_group()
    if tensor.world_size == 1 or parallel_state.model_parallel_is_initialized():
        return
    neuron = importlib.import_module(f"{PLUGIN}.parallel.neuron_parallel_state")
    expert_ranks, whole = neuron.get_neuron_ep_degree(), tensor.device_group
    if expert_ranks == 1:
        parallel_state.adopt_groups(whole)
    elif expert_ranks == tensor.world_size:
        parallel_state.adopt_groups(None, whole)
    else:  # a mesh, of which rows split an expert and columns the experts
        rows, columns = neuron.get_neuron_ep_tp_group(), neuron.get_neuron_ep_group()
        parallel_state.adopt_groups(rows.device_group, columns.device_group, whole)


def _model_group() -> Collectives | None:
    groups = parallel_state.get_groups()
    return None if groups is None else groups.model

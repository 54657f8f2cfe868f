"""Stand-ins for what our native form asks of vllm-neuron and of vLLM: names and meanings alone.

Written from the recorded interface (`vllm_neuron.json`), so that the native form runs where neither
is installed.
"""

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

_ATTRIBUTE = "_loader"


@dataclass
class LayerSpec:
    name: str
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    sliding_window_size: int | None = None
    chunk_size: int | None = None


@dataclass
class RecurrentLayerSpec:
    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass
class KVSpec:
    layers: list[LayerSpec]
    recurrent_layers: Sequence[RecurrentLayerSpec] | None = None  # theirs: an empty list


@dataclass
class SafetensorsWeightLoader:
    transform: Callable[[Sequence[Any], int], Tensor] | None = None


def set_weight_loader(param: nn.Parameter, loader: SafetensorsWeightLoader) -> None:
    setattr(param, _ATTRIBUTE, loader)


@dataclass
class CheckpointLoadResult:
    state_dict: dict[str, Tensor]
    missing_keys: list[str]
    unexpected_keys: list[str]


class SafetensorsCheckpoint:
    """Hands every parameter's loader slices of the tensors it is mapped to."""

    def __init__(self, checkpoint_path: str, cache_dir: str | None) -> None:
        self._files = {}
        for path in sorted(Path(checkpoint_path).glob("*.safetensors")):
            opened = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(opened.keys(), opened)

    def load_sharded_pipelined(
        self,
        rank: int,
        world_size: int,
        model: nn.Module,
        mappings: Mapping[str, Any],
        device: torch.device,
    ) -> CheckpointLoadResult:
        loaded = {}
        for name, parameter in model.named_parameters():
            keys = mappings.get(name, name)
            keys = keys if isinstance(keys, list) else [keys]
            slices = [self._files[key].get_slice(key) for key in keys]
            transform = getattr(parameter, _ATTRIBUTE).transform
            loaded[name] = transform(slices, rank).contiguous().to(device)
        return CheckpointLoadResult(loaded, [], [])


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    sliding_window: int | None = None,
    sink: Tensor | None = None,
    tp_q: bool = True,
    tp_out: bool = False,
    prior: Tensor | int = 0,
) -> Tensor:
    """Attend over a whole sequence: [heads, size, tokens] of [heads, size, tokens] and values."""
    assert (tp_q, tp_out) == (False, True)
    places = prior + torch.arange(q.shape[2])[:, None]
    others = torch.arange(k.shape[2])[None]
    is_seen = others <= places
    if sliding_window is not None:
        is_seen = is_seen & (others > places - sliding_window)
    logits = (q.transpose(1, 2).float() @ k.float()) * scale
    logits = logits.masked_fill(~is_seen, -torch.inf)
    if sink is not None:
        logits = torch.cat((logits, sink[:, None].float().expand(-1, logits.shape[1], 1)), -1)
    weights = logits.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return (weights @ v).transpose(1, 2)


def segmented_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    prior_tokens: Tensor,
    block_size: int,
    kv_segment_size: int,
    scale: float | None = None,
    sliding_window: int | None = None,
    sink: Tensor | None = None,
    tp_q: bool = True,
    tp_out: bool = False,
) -> Tensor:
    """The same of [heads, tokens, size], with the keys and values before in pages."""
    assert tp_q
    assert kv_segment_size
    k, v = (
        cache[block_tables[0].long().clamp_min(0)]
        .transpose(0, 1)
        .flatten(1, 2)
        .repeat_interleave(q.shape[0] // cache.shape[1], dim=0)
        for cache in (k_cache, v_cache)
    )
    assert k_cache.shape[2] == block_size
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return flash_attention(
        q, k, v, scale, sliding_window, sink, tp_q=False, tp_out=tp_out, prior=prior_tokens
    )


class Sampler(nn.Module):
    """Takes the best token, wherever its logit is."""

    def __init__(self, sampling_config: Any, process_group: Any) -> None:
        super().__init__()
        self.process_group = process_group

    def forward(
        self,
        logits: Tensor,
        sampling_params: Tensor | None = None,
        logit_mask: Tensor | None = None,
        tp_rank: Tensor | None = None,
    ) -> Tensor:
        if self.process_group is not None:
            gathered = functional.all_gather_tensor(logits, 0, self.process_group)
            logits = torch.cat(gathered.split(logits.shape[0]), dim=1)
        return logits.argmax(-1).to(torch.int32)


@dataclass
class GroupCoordinator:
    world_size: int = 1
    rank_in_group: int = 0
    device_group: Any = None


def stand_in(
    monkeypatch: pytest.MonkeyPatch,
    group: GroupCoordinator | None = None,
    ep_degree: int = 1,
    dcp_size: int = 1,
    mesh: tuple[Any, Any] = (None, None),
) -> None:
    """Put the stand-ins where the native form imports from; `mesh` is groups of EP-TP and EP."""
    tensor, context = group or GroupCoordinator(), GroupCoordinator(dcp_size)
    rows, columns = (GroupCoordinator(device_group=each) for each in mesh)
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {
            "get_tp_group": lambda: tensor,
            "get_dcp_group": lambda: context,
        },
        "vllm_neuron": {},
        "vllm_neuron.model": {},
        "vllm_neuron.model.kv_cache": {
            each.__name__: each for each in (LayerSpec, RecurrentLayerSpec, KVSpec)
        },
        "vllm_neuron.functional": {
            each.__name__: each for each in (flash_attention, segmented_attention)
        },
        "vllm_neuron.nn": {},
        "vllm_neuron.nn.sampler": {"Sampler": Sampler},
        "vllm_neuron.parallel": {},
        "vllm_neuron.parallel.neuron_parallel_state": {
            "get_neuron_ep_degree": lambda: ep_degree,
            "get_neuron_ep_tp_group": lambda: rows,
            "get_neuron_ep_group": lambda: columns,
        },
        "vllm_neuron.utils": {},
        "vllm_neuron.utils.checkpoints": {"SafetensorsCheckpoint": SafetensorsCheckpoint},
        "vllm_neuron.utils.weight_loader": {
            "SafetensorsWeightLoader": SafetensorsWeightLoader,
            "set_weight_loader": set_weight_loader,
        },
    }
    for name, values in contents.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)

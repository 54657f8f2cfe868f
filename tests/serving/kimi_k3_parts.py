"""Compare parts of Kimi-K3 with vLLM's own, on a CPU; prints the largest difference of each.

vLLM's kernels run in Triton's interpreter, which TRITON_INTERPRET=1 requests before Triton is
imported; so this is a process of its own.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language
import vllm.triton_utils
from torch import Tensor, nn
from vllm.model_executor.layers.activation import SituAndMul

from neuron_moe.models.decoder import Tokens
from neuron_moe.models.delta_net import Inputs
from neuron_moe.models.loader import load_model

# Kernels of a CPU go without Triton otherwise.
vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language  # type: ignore[misc]

from vllm.models.kimi_k3.amd import linear  # noqa: E402
from vllm.models.kimi_k3.amd.ops.third_party.kda import fused_recurrent  # noqa: E402

# The interpreter replaces what kernels find in Triton's language, not other names of it.
fused_recurrent.exp = lambda value: triton.language.exp(value)
fused_recurrent.log = lambda value: triton.language.log(value)
TOKENS = 7


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def situ_error(model: Any) -> float:
    """A dense MLP whose activation is vLLM's `SituAndMul`."""
    mlp = next(layer.mlp for layer in model.layers if not layer.is_sparse)
    hidden_TH = torch.randn(TOKENS, model.config.hidden_size)
    gate, up = model.config.soft_caps
    both = torch.cat((mlp.gate_proj(hidden_TH), mlp.up_proj(hidden_TH)), dim=-1)
    act = SituAndMul.forward_native(_Caps(gate, up), both)  # type: ignore[arg-type]
    return error(mlp(hidden_TH), mlp.down_proj(act))


class _Caps:
    def __init__(self, gate: float, up: float) -> None:
        self.beta, self.linear_beta = gate, up or None


def memory_error(model: Any) -> float:
    """The recurrence, its decay and its rate, token by token through vLLM's kernel."""
    layer = next(layer.self_attn for layer in model.layers if layer.self_attn.reach is None)
    sizes = layer.sizes
    shape = 1, TOKENS, sizes.num_key_heads, sizes.key_size
    layer.conv_weight.zero_()[..., -1] = 1  # of the token itself
    query, key, value, step = (torch.randn(shape) for _ in range(4))
    rate_USN = torch.randn(shape[:3])
    mixed_USC = torch.cat([part.flatten(2) for part in (query, key, value)], dim=-1)
    log_decay = layer.log_decay(step + layer.dt_bias.view(shape[2:]))
    inputs = Inputs(mixed_USC, log_decay, rate_USN.sigmoid())
    ours, _ = layer.recur(inputs, layer.empty_state(1, mixed_USC))
    state = torch.zeros(2, *shape[2:], sizes.value_size)
    activated = [nn.functional.silu(part) for part in (query, key, value)]
    theirs = [
        fused_recurrent.fused_recurrent_kda(
            *(part[:, place : place + 1] for part in (*activated, step, rate_USN)),
            layer.A_log,
            layer.dt_bias,
            layer.lowest_decay,
            state,
            torch.tensor([0, 1]),
            torch.tensor([1]),
        )[0].clone()
        for place in range(TOKENS)
    ]
    return error(ours, torch.cat(theirs, dim=1))


class _Part(nn.Module):
    """Attention or feed-forward part that only turns its input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) / size**0.5)

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden @ self.weight


class _Attention(_Part):
    def forward(self, hidden: Any = None, *_: Any, hidden_states: Any = None, **__: Any) -> Tensor:
        return super().forward(hidden if hidden_states is None else hidden_states)


def residual_error(model: Any) -> float:
    """All layers' norms and residuals around parts that are the same in both, and the last mix."""
    config, size = model.config, model.config.hidden_size
    hidden_TH = torch.randn(TOKENS, size)
    ours = hidden_TH[None, :, None]
    count = -(-config.num_hidden_layers // config.attn_res_block_size)
    prefix, delta, blocks = hidden_TH.clone(), None, torch.zeros(TOKENS, count, size)
    nothing = Tokens(torch.zeros(1, TOKENS, dtype=torch.long), (hidden_TH, hidden_TH))
    for number, layer in enumerate(model.layers):
        layer.self_attn, fed = _Attention(size), _Part(size)
        layer.is_sparse, layer.mlp = False, fed
        ours = layer(ours, nothing)
        twin = _twin(layer, number, config.attn_res_block_size, config.rms_norm_eps)
        prefix, blocks, delta = twin.forward_attn_residual(None, prefix, blocks, delta)
    last = model.output_res
    pair = _linear(last), _norm(last.norm_weight, config.rms_norm_eps)
    theirs = linear._apply_attn_res(prefix, blocks, *pair, count, delta=delta)
    return error(model.output_res(ours)[0], theirs)


class _Norm(nn.Module):
    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(weight), eps


def _norm(weight: Tensor, eps: float) -> Any:
    return _Norm(weight, eps)


def _linear(residual: Any) -> Any:
    proj = nn.Linear(1, 1, bias=False)
    proj.weight = nn.Parameter(residual.query)
    return proj


def _twin(layer: Any, number: int, block: int, eps: float) -> Any:
    """Return vLLM's layer with the same weights, made without a server."""
    twin = linear.KimiDecoderLayer.__new__(linear.KimiDecoderLayer)
    nn.Module.__init__(twin)
    twin.self_attn, twin.mlp = layer.self_attn, layer.mlp
    twin.is_block_write_layer = number % block == 0
    twin.block_write_idx, twin.prev_valid_blocks = number // block, -(-number // block)
    for name in ("input_layernorm", "post_attention_layernorm"):
        setattr(twin, name, _norm(getattr(layer, name).weight, eps))
    for name, residual in (("self_attention", layer.attn_res), ("mlp", layer.mlp_res)):
        setattr(twin, f"{name}_res_norm", _norm(residual.norm_weight, eps))
        setattr(twin, f"{name}_res_proj", _linear(residual))
    return twin


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.no_grad():
        model = load_model(Path(sys.argv[1]), dtype=torch.float32)
        measured = (situ_error, memory_error, residual_error)
        print(json.dumps({each.__name__: each(model) for each in measured}))  # noqa: T201

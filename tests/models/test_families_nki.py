"""Every family through the kernels: prefill and decode against the torch backend.

Two bfloat16 runs of a model drift apart by roundings, up to where two logits of a router are nearer
than the drift: there one run takes another expert, and its token differs by 10 to 40 % however
exact the kernels are. So layers are compared on the same input, where no drift can build up, and
whole models with routers that leave no such tie: a token's embedding tells its experts.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from neuron_moe.models.decoder import DecoderModel
from neuron_moe.models.generation import pad_left
from neuron_moe.models.layers import RMSNorm
from neuron_moe.models.loader import load_model
from neuron_moe.router import Router
from neuron_moe.spec import Tuning
from tests.models.families import FAMILIES, GPT_OSS, names, write_checkpoint
from tests.rows import thinned
from tests.tolerances import BFLOAT16_FACTOR, rms_error

NUM_STEPS = 8
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [100, 42, 17]]  # one longer than a window or chunk
SIZES = {"hidden_size": 128, "head_dim": 32, "num_hidden_layers": 2}
ALL = {"gpt_oss": GPT_OSS, **FAMILIES}
# What differs within a family is mostly attention, which is no kernel's.
VARIANTS = {name for name in FAMILIES if "-" in name} - {"llama4-scout"}
# Of lists with an entry a layer, as many as SIZES says; and a K that divides E, see _leave_no_tie.
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        "layer_types": ["compressed_sparse_attention", "sliding_attention"],
        "mlp_layer_types": ["moe", "moe"],
        "num_experts_per_tok": 2,
        "index_head_dim": 16,
    },
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "hy_v4-biases": {"mlp_layer_types": ["sparse", "dense"]},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear-groups": {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "dense"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_experts_per_tok": 2},
    "laguna": {
        "layer_types": ["full_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [4, 6],
        "num_experts_per_tok": 2,
    },
    "laguna-elements": {
        "moe_router_logit_softcapping": 0.0,  # torch routes where logits are capped
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "dense"],
        "num_experts_per_tok": 2,
    },
    "mimo_v2_flash": {
        "layer_types": ["full_attention", "sliding_attention"],
        "num_experts_per_tok": 2,
    },
    "mimo_v2_flash-groups": {
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "dense"],
        "num_experts_per_tok": 2,
    },
    "step3p5": {
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["full_attention", "sliding_attention"],
        "num_experts_per_tok": 2,
        "swiglu_limits": [0, 0.5],
        "swiglu_limits_shared": [0.7, 0.4],
    },
    "step3p5-biases": {
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["full_attention", "sliding_attention"],
        "num_experts_per_tok": 2,
        "swiglu_limits_shared": [0.7, 0.4],
    },
    "minimax_m3_vl_text": {
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 16,
    },
}
# Whose layers are no launch each; tests/neuron_moe/test_new_formulas.py has theirs.
APART = {"nemotron_h", "nemotron_h-nano", "longcat_flash", "deepseek_v4-published-keys"}
APART |= {"kimi_k3", "kimi_k3-groups", "phimoe", "phimoe-longrope"}
# What a token's embedding says of its experts, and how loudly routers listen.
SIGNAL, GAIN = 300.0, 0.5


class Call(NamedTuple):
    """One call of a layer's experts: the residual stream before and after."""

    hidden: Tensor
    padding_mask: Tensor | None
    output: Tensor


class Run:
    """A model's prefill and decode: its logits, and the calls of each sparse layer's experts."""

    def __init__(self, folder: Path, **options: Any) -> None:
        model = load_model(folder, **options)
        assert isinstance(model, DecoderModel)
        self.model = model
        self.moes = [layer.moe for layer in model.layers if layer.is_sparse]
        _leave_no_tie(model.embed_tokens.weight, [moe.router for moe in self.moes])
        self.calls: list[list[Call]] = [[] for _ in self.moes]
        self.hooks = [
            moe.register_forward_hook(_keep_in(calls), with_kwargs=True)
            for moe, calls in zip(self.moes, self.calls, strict=True)
        ]

    def follow(self, steps_NU: Tensor | None = None) -> Tensor:
        """Run prompts and further tokens, or the model's own; return those tokens, [N, U]."""
        ids_US, real_US = pad_left(PROMPTS, 0)
        cache = self.model.new_cache(len(PROMPTS), ids_US.shape[1] + NUM_STEPS)
        parts = [self.model(ids_US, real_US=real_US, cache=cache)]
        tokens = []
        for step in range(NUM_STEPS):
            own_U = parts[-1][:, -1].argmax(-1)
            tokens.append(own_U if steps_NU is None else steps_NU[step])
            parts.append(self.model(tokens[-1][:, None], cache=cache))
        for hook in self.hooks:
            hook.remove()
        self.logits = torch.cat([parts[0][real_US], *(part[:, 0] for part in parts[1:])]).float()
        return torch.stack(tokens)

    def choices(self) -> list[list[list[int]]]:
        """Return the experts of each token of each call, in order of their numbers."""
        with_inputs = zip(self.moes, self.calls, strict=True)
        calls = [(moe, call) for moe, calls in with_inputs for call in calls]
        return [
            moe.router((moe.rmsnorm or nn.Identity())(call.hidden))
            .expert_index_TK[_real(call)]
            .sort(-1)
            .values.tolist()
            for moe, call in calls
        ]


def _leave_no_tie(embedding_VH: Tensor, routers: list[Router]) -> None:
    """Let every E / K-th token, and every E / K-th expert, share a direction of hidden space."""
    count = routers[0].num_experts // routers[0].top_k
    embedding_VH[:, :count] = SIGNAL * torch.eye(count)[torch.arange(len(embedding_VH)) % count]
    for router in routers:
        directions = torch.eye(count)[torch.arange(router.num_experts) % count]
        router.linear_router.weight[:, :count] = GAIN * directions


def _keep_in(calls: list[Call]) -> Any:
    def keep(_: Any, args: Any, kwargs: Any, out: Any) -> None:
        calls.append(Call(args[0], kwargs["padding_mask"], out[0]))

    return keep


def _real(call: Call) -> Tensor:
    """Return which tokens of a call are not padding, [T] bool."""
    if call.padding_mask is None:
        return torch.ones(call.hidden.shape[:2].numel(), dtype=torch.bool)
    return call.padding_mask.flatten()


@torch.inference_mode()
def follow_all(name: str, folder: Path) -> tuple[Run, Run, Run]:
    """Return runs in float32, in bfloat16, and in bfloat16 through the kernels, of one text."""
    write_checkpoint(ALL[name].config(**{**SIZES, **CHANGES.get(name, {})}), folder, seed=0)
    exact = Run(folder, dtype=torch.float32)
    in_blocks = Tuning(block_size=32)  # prompts as short as these would be decoded
    plain, kernels = Run(folder), Run(folder, backend="nki", tuning=in_blocks)
    tokens = exact.follow()
    plain.follow(tokens)
    kernels.follow(tokens)
    return exact, plain, kernels


def outputs(moe: Any, calls: list[Call], dtype: torch.dtype) -> Tensor:
    """Return what a layer makes of the inputs of some calls."""
    made = [moe(call.hidden.to(dtype), padding_mask=call.padding_mask)[0] for call in calls]
    return added(moe, calls, made)


def added(moe: Any, calls: list[Call], outputs: list[Tensor]) -> Tensor:
    """Return what outputs add to the stream of real tokens, where no signal is a part of it."""
    first = moe.router.num_experts // moe.router.top_k
    parts = [
        (output.float() - call.hidden.float() * (moe.rmsnorm is not None)).flatten(0, 1)[
            _real(call), first:
        ]
        for call, output in zip(calls, outputs, strict=True)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize(
    "name",
    thinned(
        ["gpt_oss", *(each for each in names(slow=VARIANTS) if each.values[0] not in APART)], 3
    ),
)
def test_the_kernels_compute_what_torch_computes(name: str, tmp_path: Path) -> None:
    exact, plain, kernels = follow_all(name, tmp_path)
    for moe in kernels.moes:
        assert moe.explain("prefill", 20).decision.kernel == "nki.prefill_layer"
        shown = moe.explain("decode", len(PROMPTS))
        assert shown.decision.kernel == "nki.decode_layer"
        has_plain_norm = type(moe.rmsnorm) is RMSNorm
        assert ("one kernel: rmsnorm, router, routed experts" in str(shown)) is has_plain_norm
        assert (", residual\n" in str(shown)) is has_plain_norm
    with torch.inference_mode():
        assert exact.choices() == plain.choices() == kernels.choices()
        for layer, calls in enumerate(kernels.calls):
            for phase in (calls[:1], calls[1:]):
                truth = outputs(exact.moes[layer], phase, torch.float32)
                theirs = outputs(plain.moes[layer], phase, torch.bfloat16)
                ours = added(kernels.moes[layer], phase, [call.output for call in phase])
                assert rms_error(ours, truth) < BFLOAT16_FACTOR * rms_error(theirs, truth)
    allowed = BFLOAT16_FACTOR * rms_error(plain.logits, exact.logits)
    assert rms_error(kernels.logits, exact.logits) < allowed

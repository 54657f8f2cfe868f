"""The GPT-OSS architecture in a form made for training: one grouped matmul an expert projection.

The inference model (models/gpt_oss.py) holds bf16 weights and routes blocks through kernels.
Training wants float32 master weights, gradients and large batches, so this file spells the same
mathematics once more, and `export_state_dict` hands it over under the checkpoint's names. A test
compares it with transformers on one set of weights.

Two things exist only here:

* Balance without an auxiliary loss. The router's linear bias takes no gradient. After each step it
  moves by a fixed amount, up for experts that saw fewer tokens than the mean and down for the
  others (L. Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts",
  arXiv 2408.15664). There the bias only selects and is not part of the weights; GPT-OSS has no
  such bias, so here it is the checkpoint's own router bias, which selects and weighs. Training
  sees exactly what inference computes, and nothing is lost in the export.
  With `backend` given, the layers are the library's own instead, computed by that back end: there
  the router has a bias for selection alone, as DeepSeek-V3's, and nothing is exported.
* Straight-through MXFP4. With `fake_mxfp4` set, the experts multiply by what their weights will be
  after quantisation, and the gradient passes to the float32 weights unchanged.

Letters: U sequences, S positions, T = U * S tokens, H hidden, I intermediate, E experts, K experts
per token, R = T * K rows sorted by expert, V vocabulary, D head size, d = D / 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK
from neuron_moe.models.rope import RopeConfig, apply_rope, rope_tables
from neuron_moe.train.balance import gather_expert_load, step_selection_biases

_YARN: dict[str, Any] = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_YARN_CONTEXT = 4096
_ROPE_THETA = 150000.0
_SWIGLU_ALPHA, _SWIGLU_LIMIT = 1.702, 7.0
_NORM_EPS = 1e-5
_INIT_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """Sizes of the small model; everything else is GPT-OSS's own.

    Attributes:
        vocab_size: entries of the tokenizer.
        hidden_size: H.
        intermediate_size: I of one expert.
        num_layers: layers, sliding and full attention in turn.
        num_experts: E.
        top_k: K.
        num_query_heads: Q.
        num_kv_heads: J.
        head_size: D.
        sliding_window: tokens a sliding layer sees back, itself included.
        max_length: longest context trained on, in tokens.
    """

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 128
    num_layers: int = 6
    num_experts: int = 32
    top_k: int = 4
    num_query_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 64
    sliding_window: int = 128
    max_length: int = 1024

    def window(self, layer: int) -> int | None:
        """Return how far layer `layer` sees back, or None for all the way."""
        return self.sliding_window if layer % 2 == 0 else None

    def hf_config(self, bos: int, eos: int, pad: int) -> dict[str, Any]:
        """Return config.json in the spelling that transformers 4.55 and later read."""
        kinds = ("sliding_attention", "full_attention")
        return {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_local_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "num_attention_heads": self.num_query_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "sliding_window": self.sliding_window,
            "layer_types": [kinds[layer % 2] for layer in range(self.num_layers)],
            "max_position_embeddings": int(_YARN["factor"]) * _YARN_CONTEXT,
            "rope_theta": _ROPE_THETA,
            "rope_scaling": {
                "rope_type": "yarn",
                **_YARN,
                "original_max_position_embeddings": _YARN_CONTEXT,
            },
            "rms_norm_eps": _NORM_EPS,
            "hidden_act": "silu",
            "swiglu_limit": _SWIGLU_LIMIT,
            "attention_bias": True,
            "attention_dropout": 0.0,
            "initializer_range": _INIT_STD,
            "router_aux_loss_coef": 0.0,
            "output_router_logits": False,
            "tie_word_embeddings": False,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "dtype": "bfloat16",
        }


class _Permute(torch.autograd.Function):
    """Reorder rows; the gradient is the inverse gather: deterministic, unlike a scatter."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse], None, None


def _permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    permuted: Tensor = _Permute.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return permuted


def fake_quantize(weight_EIO: Tensor) -> Tensor:
    """Return MXFP4's value of a weight, with the gradient of the weight itself.

    The same values as decoding `neuron_moe.quantize.encode_mxfp4`, which a test holds it to, but
    without codes: a few elementwise operations and no wait for the device.

    Args:
        weight_EIO: [E, in, out] float32; groups of 32 are along the input axis, as in the
            checkpoint, and are made from the weight in bf16, as the checkpoint is.

    Returns:
        [E, in, out] float32.
    """
    with torch.no_grad():
        E, num_in, num_out = weight_EIO.shape
        groups = weight_EIO.to(torch.bfloat16).float().view(E, num_in // 32, 32, num_out)
        scale = _floor_to_power_of_two(groups.abs().amax(2, keepdim=True)) / 4
        scaled = groups / scale.clamp(min=torch.finfo(torch.float32).tiny)
        # Codes are 0.5 apart up to 2, 1 apart up to 4, then 2 apart up to the last one, 6.
        step = _floor_to_power_of_two(scaled.abs()).clamp(1, 4) / 2
        rounded = ((scaled / step).round() * step).clamp(-6, 6) * scale
        error = rounded.view(weight_EIO.shape) - weight_EIO
    return weight_EIO + error


class TinyMoE(nn.Module):
    """Router and experts; counts the tokens of each expert for the balance step."""

    load_E: Tensor

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        H, I, E = config.hidden_size, config.intermediate_size, config.num_experts  # noqa: E741
        self.top_k = config.top_k
        self.router = nn.Linear(H, E)
        self.router.bias.requires_grad_(False)
        self.gate_up_proj_EH2I = nn.Parameter(torch.empty(E, H, 2 * I))  # gate first
        self.gate_up_bias_E2I = nn.Parameter(torch.zeros(E, 2 * I))
        self.down_proj_EIH = nn.Parameter(torch.empty(E, I, H))
        self.down_bias_EH = nn.Parameter(torch.zeros(E, H))
        self.fake_mxfp4 = False
        self.register_buffer("load_E", torch.zeros(E, dtype=torch.int64), persistent=False)

    def route(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts in float32.

        Returns:
            Weights [T, K] float32 that sum to one, and experts [T, K] int64.
        """
        logits_TE = F.linear(hidden_TH.float(), self.router.weight, self.router.bias)
        top_TK, expert_index_TK = logits_TE.topk(self.top_k, dim=-1)
        return top_TK.softmax(-1), expert_index_TK

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Return the experts' weighted sum, [T, H] float32."""
        affinities_TK, expert_index_TK = self.route(hidden_TH)
        num_experts, dtype = self.router.weight.shape[0], hidden_TH.dtype
        expert_of_row = expert_index_TK.flatten()
        order = expert_of_row.argsort(stable=True)
        inverse = order.argsort()
        experts = torch.arange(num_experts, device=order.device)
        # One row of ones and zeros a row: a matmul with it adds biases, forward and backward.
        member_RE = expert_of_row[order][:, None] == experts
        load_E = member_RE.sum(0)
        if self.training:
            self.load_E += load_E
        ends_E = load_E.cumsum(0).to(torch.int32)
        member_RE = member_RE.to(dtype)

        gate_up_EH2I: Tensor = self.gate_up_proj_EH2I
        down_EIH: Tensor = self.down_proj_EIH
        if self.fake_mxfp4:
            gate_up_EH2I, down_EIH = fake_quantize(gate_up_EH2I), fake_quantize(down_EIH)
        copies = hidden_TH[:, None].expand(-1, self.top_k, -1).reshape(-1, hidden_TH.shape[1])
        rows_RH = _permute(copies, order, inverse)
        gate_up_R2I = F.grouped_mm(rows_RH, gate_up_EH2I.to(dtype), offs=ends_E)
        gate_up_R2I = gate_up_R2I + member_RE @ self.gate_up_bias_E2I.to(dtype)
        gate_RI, up_RI = gate_up_R2I.chunk(2, dim=-1)
        gate_RI = gate_RI.clamp(max=_SWIGLU_LIMIT)
        up_RI = up_RI.clamp(-_SWIGLU_LIMIT, _SWIGLU_LIMIT)
        middle_RI = (up_RI + 1) * gate_RI * torch.sigmoid(_SWIGLU_ALPHA * gate_RI)
        out_RH = F.grouped_mm(middle_RI, down_EIH.to(dtype), offs=ends_E)
        out_RH = out_RH + member_RE @ self.down_bias_EH.to(dtype)
        out_TKH = _permute(out_RH, inverse, order).view(*affinities_TK.shape, -1)
        return (out_TKH.float() * affinities_TK[..., None]).sum(1)

    @torch.no_grad()
    def balance(self, step_size: float) -> Tensor:
        """Move the router's bias towards equal load, and forget the counts.

        Args:
            step_size: how far each expert's bias moves, in units of a logit.

        Returns:
            The load it saw as a share of the mean, [E] float32.
        """
        load_E = self.load_E.float()
        share_E = load_E / load_E.mean().clamp(min=1)
        self.router.bias.add_(torch.sign(1 - share_E), alpha=step_size)
        self.load_E.zero_()
        return share_E


class _Multiplied(nn.Module):
    """What a layer multiplies by, made of a float32 weight in every step."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.fake_mxfp4 = dtype, False

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight or its MXFP4 value in the compute dtype."""
        if self.fake_mxfp4 and weight.dim() == 3:
            weight = fake_quantize(weight)
        return weight.to(self.dtype)


class LibraryMoE(nn.Module):
    """The library's layer in the place of `TinyMoE`: float32 weights, arithmetic in `dtype`."""

    def __init__(self, config: TinyConfig, backend: str, dtype: torch.dtype) -> None:
        super().__init__()
        E, K, H = config.num_experts, config.top_k, config.hidden_size
        router = RouterTopK(E, K, H, act_fn="sigmoid", selection_bias=True, renormalize=True)
        sizes = RoutedExpertsMLPOpsConfig(
            num_experts=E,
            top_k=K,
            hidden_size=H,
            intermediate_size=config.intermediate_size,
            hidden_act="swiglu",
            glu_mlp=True,
            bias=True,
        )
        self.layer = MoE(router, ExpertMLPsV2(sizes, backend=backend))
        self.multiplied = [_Multiplied(dtype) for _ in range(4)]
        experts = self.layer.expert_mlps.mlp_op
        names = [(each, name) for each in experts.children() for name in ("weight", "bias")]
        for (linear, name), multiplied in zip(names, self.multiplied, strict=True):
            parametrize.register_parametrization(linear, name, multiplied, unsafe=True)

    @property
    def fake_mxfp4(self) -> bool:
        """Whether experts multiply by the MXFP4 values of their weights."""
        return self.multiplied[0].fake_mxfp4

    @fake_mxfp4.setter
    def fake_mxfp4(self, is_fake: bool) -> None:
        for each in self.multiplied:
            each.fake_mxfp4 = is_fake

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Return the experts' weighted sum, [T, H] float32."""
        self.layer.weights_changed()
        self.layer.enable_load_counters(self.training)
        with parametrize.cached():
            output: Tensor = self.layer(hidden_TH[None])[0]
        return output[0].float()

    @torch.no_grad()
    def balance(self, step_size: float) -> Tensor:
        """Move the selection bias towards equal load.

        Args:
            step_size: how far each expert's bias moves, in units of a score.

        Returns:
            The load of the last step as a share of the mean, [E] float32.
        """
        load_E = gather_expert_load(self.layer).float()
        step_selection_biases(self.layer, step_size)
        return load_E / load_E.mean().clamp(min=1)


class TinyAttention(nn.Module):
    """Grouped-query attention with a learned sink logit per head."""

    def __init__(self, config: TinyConfig, window: int | None) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_query_heads, config.num_kv_heads
        self.head_size, self.window = config.head_size, window
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_size)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_size)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_size)
        self.o_proj = nn.Linear(self.heads * self.head_size, config.hidden_size)
        self.sinks = nn.Parameter(torch.zeros(self.heads))

    def forward(self, hidden_USH: Tensor, cos_USd: Tensor, sin_USd: Tensor) -> Tensor:
        """Return the attention's output, [U, S, H] in the input's dtype."""
        U, S, _ = hidden_USH.shape
        dtype = hidden_USH.dtype
        query, key, value = (
            _linear(projection, hidden_USH).view(U, S, -1, self.head_size)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = apply_rope(query, cos_USd, sin_USd)
        key = apply_rope(key, cos_USd, sin_USd)
        # Queries that share a key/value head stand next to each other: [U, J, Q/J * S, D].
        group = self.heads // self.kv_heads
        query = query.view(U, S, self.kv_heads, group, -1).permute(0, 2, 3, 1, 4)
        query = query.reshape(U, self.kv_heads, group * S, -1)
        scores = query @ key.permute(0, 2, 3, 1) * self.head_size**-0.5
        scores = scores.view(U, self.heads, S, S) + self._mask(S, scores)
        sink = self.sinks.to(dtype).view(1, -1, 1, 1).expand(U, -1, S, 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(-1, dtype=torch.float32)[..., :-1]
        weights = weights.to(dtype).reshape(U, self.kv_heads, group * S, S)
        out = (weights @ value.transpose(1, 2)).view(U, self.heads, S, -1)
        return _linear(self.o_proj, out.transpose(1, 2).reshape(U, S, -1))

    def _mask(self, length: int, like: Tensor) -> Tensor:
        at = torch.arange(length, device=like.device)
        back = at[:, None] - at
        seen = (back >= 0) if self.window is None else (back >= 0) & (back < self.window)
        return torch.zeros_like(back, dtype=like.dtype).masked_fill(~seen, float("-inf"))


class TinyLayer(nn.Module):
    """One decoder layer; the residual stream is float32."""

    def __init__(
        self, config: TinyConfig, layer: int, dropout: float, moe: TinyMoE | LibraryMoE
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.input_norm = nn.RMSNorm(config.hidden_size, eps=_NORM_EPS)
        self.attention = TinyAttention(config, config.window(layer))
        self.post_attention_norm = nn.RMSNorm(config.hidden_size, eps=_NORM_EPS)
        self.moe = moe

    def forward(
        self, stream_USH: Tensor, cos_USd: Tensor, sin_USd: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return the residual stream after this layer, [U, S, H] float32."""
        normed = self.input_norm(stream_USH).to(dtype)
        attended: Tensor = self.attention(normed, cos_USd, sin_USd)
        stream_USH = stream_USH + F.dropout(attended, self.dropout, self.training)
        normed = self.post_attention_norm(stream_USH).to(dtype)
        mixed: Tensor = self.moe(normed.flatten(0, 1)).view(stream_USH.shape)
        return stream_USH + F.dropout(mixed, self.dropout, self.training)


class TinyModel(nn.Module):
    """Float32 master weights; the arithmetic runs in `compute_dtype`.

    Args:
        config: the sizes.
        compute_dtype: dtype of the activations and matmuls; the router, the softmax, the norms and
            the residual stream stay in float32.
        dropout: share of the embedding's and of each sub-layer's output that training drops.
        backend: of the library's layer, which takes the place of `TinyMoE`; None leaves that.
    """

    cos_USd: Tensor
    sin_USd: Tensor

    def __init__(
        self,
        config: TinyConfig,
        compute_dtype: torch.dtype = torch.bfloat16,
        dropout: float = 0.0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.config, self.compute_dtype, self.dropout = config, compute_dtype, dropout
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)

        def build_moe() -> TinyMoE | LibraryMoE:
            return LibraryMoE(config, backend, compute_dtype) if backend else TinyMoE(config)

        self.layers = nn.ModuleList(
            TinyLayer(config, layer, dropout, build_moe()) for layer in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=_NORM_EPS)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        rope = RopeConfig(
            theta=_ROPE_THETA,
            kind="yarn",
            original_max_position_embeddings=_YARN_CONTEXT,
            **_YARN,
        )
        cos, sin = rope_tables(rope, config.head_size, torch.arange(config.max_length)[None])
        self.register_buffer("cos_USd", cos, persistent=False)
        self.register_buffer("sin_USd", sin, persistent=False)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw all weights from one seed: normal, 0.02, what is added to the stream scaled down."""
        generator = torch.Generator().manual_seed(seed)
        depth = (2 * self.config.num_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() >= 2 and "bias" not in name:
                scale = depth if "o_proj" in name or "down_proj" in name else 1.0
                draw = torch.randn(weight.shape, generator=generator) * _INIT_STD * scale
                weight.copy_(draw)
            elif "norm" not in name:
                weight.zero_()

    def forward(self, tokens_US: Tensor) -> Tensor:
        """Return the logits, [U, S, V] in the compute dtype."""
        S = tokens_US.shape[1]
        cos_USd, sin_USd = self.cos_USd[:, :S], self.sin_USd[:, :S]
        stream_USH = F.dropout(self.embed(tokens_US), self.dropout, self.training)
        for layer in self.layers:
            stream_USH = layer(stream_USH, cos_USd, sin_USd, self.compute_dtype)
        return _linear(self.lm_head, self.norm(stream_USH).to(self.compute_dtype))

    def decoder_layers(self) -> list[TinyLayer]:
        """Return the layers, first to last."""
        return [module for module in self.modules() if isinstance(module, TinyLayer)]

    def moes(self) -> list[TinyMoE | LibraryMoE]:
        """Return the MoE of each layer."""
        return [layer.moe for layer in self.decoder_layers()]


def export_state_dict(model: TinyModel) -> dict[str, Tensor]:
    """Return bf16 weights under the names and in the layouts of a GPT-OSS checkpoint.

    Raises:
        ValueError: the layers are the library's.
    """
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embed.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.lm_head.weight,
    }
    for index, layer in enumerate(model.decoder_layers()):
        prefix, moe = f"model.layers.{index}.", layer.moe
        if not isinstance(moe, TinyMoE):
            raise ValueError(
                f"layer {index}: a {type(moe).__name__}, whose selection bias a GPT-OSS checkpoint"
                " cannot hold. Train without a backend."
            )
        tensors[prefix + "input_layernorm.weight"] = layer.input_norm.weight
        tensors[prefix + "post_attention_layernorm.weight"] = layer.post_attention_norm.weight
        tensors[prefix + "self_attn.sinks"] = layer.attention.sinks
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            projection: nn.Linear = getattr(layer.attention, name)
            tensors[f"{prefix}self_attn.{name}.weight"] = projection.weight
            tensors[f"{prefix}self_attn.{name}.bias"] = projection.bias
        tensors[prefix + "mlp.router.weight"] = moe.router.weight
        tensors[prefix + "mlp.router.bias"] = moe.router.bias
        experts = prefix + "mlp.experts."
        tensors[experts + "gate_up_proj"] = _interleave(moe.gate_up_proj_EH2I)
        tensors[experts + "gate_up_proj_bias"] = _interleave(moe.gate_up_bias_E2I)
        tensors[experts + "down_proj"] = moe.down_proj_EIH
        tensors[experts + "down_proj_bias"] = moe.down_bias_EH
    return {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in tensors.items()
    }


def _linear(projection: nn.Linear, hidden: Tensor) -> Tensor:
    """Multiply by float32 weights in the dtype of the activations."""
    bias = None if projection.bias is None else projection.bias.to(hidden.dtype)
    return F.linear(hidden, projection.weight.to(hidden.dtype), bias)


def _floor_to_power_of_two(positive: Tensor) -> Tensor:
    """Clear the mantissa: 2^floor(log2(x)) for normal numbers, 0 for 0."""
    return (positive.view(torch.int32) & 0x7F80_0000).view(torch.float32)


def _interleave(gate_then_up: Tensor) -> Tensor:
    """Turn [..., gate | up] into the checkpoint's [..., g0 u0 g1 u1 ...]."""
    gate, up = gate_then_up.chunk(2, dim=-1)
    return torch.stack((gate, up), dim=-1).flatten(-2)

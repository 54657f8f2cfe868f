"""Kimi-K3 put together of transformers' parts, which has no class of it.

Latent attention, delta rule, convolution, router and norms are Kimi-Linear's, the bounded decay is
GLM-5.3's: transformers' code. What stands between them is written here after vLLM 0.32
(`vllm/models/kimi_k3/amd/linear.py`), in its order of steps, and so is SiTU.
"""

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate
from transformers.models.kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear import modeling_kimi_linear as theirs


class Config(PreTrainedConfig):
    """A text section, made of keys that stand alone where there is none, and a vision section."""

    model_type = "kimi_k3"
    sub_configs: ClassVar = {"text_config": KimiLinearConfig}

    def __init__(self, text_config: Any = None, vision_config: Any = None, **keys: Any) -> None:
        if text_config is None:
            text_config, keys = keys, {}
        if isinstance(text_config, dict):
            usual = {"routed_scaling_factor": 1.0}  # vLLM's, not Kimi-Linear's in transformers
            text_config = KimiLinearConfig(**{**usual, **text_config, "model_type": "kimi_linear"})
        self.text_config = text_config
        self.vision_config = vision_config or {"vt_num_hidden_layers": 1}
        super().__init__(**keys)

    def to_diff_dict(self) -> dict[str, Any]:
        return {**super().to_diff_dict(), "text_config": self.text_config.to_diff_dict()}


class Attention(theirs.KimiLinearAttention):
    """What heads attend to is gated before it is projected."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.g_proj = nn.Linear(config.hidden_size, self.num_heads * self.v_head_dim, bias=False)
        self.o_proj.register_forward_pre_hook(lambda _, args: (args[0] * self.gate,))

    def forward(self, hidden_states: Tensor, **options: Any) -> Any:
        self.gate = self.g_proj(hidden_states).sigmoid()
        return super().forward(hidden_states, **options)


class DeltaAttention(theirs.KimiLinearDeltaAttention):
    """Under the published names, with a bounded decay and a gate of full rank."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        gate = self._modules["forget_gate"]
        for name in ("forget_gate", "conv1d", "g_a_proj", "g_b_proj"):
            del self._modules[name]
        self.activation = "silu"
        self.f_a_proj, self.f_b_proj, self.dt_bias = gate.f_a_proj, gate.f_b_proj, gate.dt_bias
        self.dt_bias.data.uniform_(-1.0, 1.0)
        self.A_log = nn.Parameter(torch.rand(max(self.head_dim, self.num_heads)))
        self.bound = config.linear_attn_config.get("gate_lower_bound")
        for name in "qkv":
            conv = nn.Conv1d(
                *(self.qkv_dim, self.qkv_dim, self.conv_kernel_size),
                groups=self.qkv_dim,
                bias=False,
            )
            self.add_module(f"{name}_conv1d", conv)
        self.g_proj = nn.Linear(config.hidden_size, self.qkv_dim, bias=False)

    @property
    def conv1d(self) -> Any:
        weights = [getattr(self, f"{name}_conv1d").weight for name in "qkv"]
        return SimpleNamespace(weight=torch.cat(weights), bias=None)

    @property
    def g_a_proj(self) -> Any:
        return nn.Identity()

    @property
    def g_b_proj(self) -> Any:
        return self.g_proj

    def forget_gate(self, hidden_states: Tensor) -> Tensor:
        names = ("head_dim", "num_heads", "f_a_proj", "f_b_proj", "dt_bias")
        gate = SimpleNamespace(**{name: getattr(self, name) for name in names})
        gate.A_log, gate.safe_gate_lower_bound = self.A_log[: self.num_heads], self.bound
        log_decay: Tensor = Glm5NextTextForgetGate.forward(gate, hidden_states)  # type: ignore[arg-type]
        return log_decay


class Activation(nn.Module):
    """SiTU, or a plain activation of the gate."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.plain = None if config.hidden_act == "situ" else ACT2FN[config.hidden_act]
        self.beta = getattr(config, "activation_situ_beta", None) or 1.0
        self.linear_beta = getattr(config, "activation_situ_linear_beta", None)

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.plain is not None:
            return self.plain(gate) * up  # type: ignore[no-any-return]
        dtype, gate, up = gate.dtype, gate.float(), up.float()
        gate = self.beta * torch.tanh(gate / self.beta) * torch.sigmoid(gate)
        if self.linear_beta is not None:
            up = self.linear_beta * torch.tanh(up / self.linear_beta)
        return (gate * up).to(dtype)


class MLP(nn.Module):
    """Gate, up and down projections under any names."""

    def __init__(self, config: Any, hidden: int, inner: int, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        for name, sizes in zip(names, ((hidden, inner),) * 2 + ((inner, hidden),), strict=True):
            self.add_module(name, nn.Linear(*sizes, bias=False))
        self.act_fn = Activation(config)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        out: Tensor = down(self.act_fn(gate(hidden), up(hidden)))
        return out


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Experts(nn.Module):
    """Routed experts in a latent, whose sum is normalised, and shared ones beside them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, latent = config.hidden_size, config.routed_expert_hidden_size
        inner = config.moe_intermediate_size
        self.gate = theirs.KimiLinearTopkRouter(config)
        experts = [
            MLP(config, latent, inner, ("w1", "w3", "w2")) for _ in range(config.num_experts)
        ]
        self.experts = nn.ModuleList(experts)
        self.routed_expert_down_proj = nn.Linear(size, latent, bias=False)
        self.routed_expert_up_proj = nn.Linear(latent, size, bias=False)
        self.routed_expert_norm = None
        if config.latent_moe_use_norm:
            self.routed_expert_norm = theirs.KimiLinearRMSNorm(latent, config.rms_norm_eps)
        self.shared_experts = MLP(config, size, inner * config.num_shared_experts, PROJECTIONS)

    def forward(self, hidden_USH: Tensor) -> Tensor:
        _, weights_TK, index_TK = self.gate(hidden_USH)
        latent_TL = self.routed_expert_down_proj(hidden_USH).flatten(0, 1)
        summed_TL = torch.zeros_like(latent_TL)
        for expert, module in enumerate(self.experts):
            tokens, places = torch.where(index_TK == expert)
            out = module(latent_TL[tokens]) * weights_TK[tokens, places, None]
            summed_TL.index_add_(0, tokens, out.to(summed_TL.dtype))
        if self.routed_expert_norm is not None:
            summed_TL = self.routed_expert_norm(summed_TL)
        routed = self.routed_expert_up_proj(summed_TL).view_as(hidden_USH)
        out_USH: Tensor = routed + self.shared_experts(hidden_USH)
        return out_USH


def attn_res(
    prefix_USH: Tensor, blocks: list[Tensor], norm: nn.Module, proj: nn.Linear, eps: float
) -> Tensor:
    """vLLM's kernel `attn_res`, by its formula: the prefix is the last source."""
    values = torch.stack([*blocks, prefix_USH], dim=-2).float()
    weight_H = norm.weight.float() * proj.weight.float()[0]
    scores = (values * weight_H).sum(-1) * torch.rsqrt(values.square().mean(-1) + eps)
    mixed = (scores.softmax(-1).unsqueeze(-1) * values).sum(-2)
    return mixed.to(prefix_USH.dtype)


class Layer(nn.Module):
    """A layer that shares the sums of blocks with all others."""

    def __init__(self, config: Any, layer: int, blocks: list[Tensor]) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.layer, self.blocks, self.eps = layer, blocks, eps
        self.block_size = config.attn_res_block_size
        self.is_full = config.layer_types[layer] == "full_attention"
        self.self_attn = (Attention if self.is_full else DeltaAttention)(config, layer)
        self.is_sparse = config.mlp_layer_types[layer] == "sparse"
        if self.is_sparse:
            self.block_sparse_moe = Experts(config)
        else:
            self.mlp = MLP(config, size, config.intermediate_size, PROJECTIONS)
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.add_module(name, theirs.KimiLinearRMSNorm(size, eps))
        for name in ("self_attention", "mlp"):
            self.add_module(f"{name}_res_norm", theirs.KimiLinearRMSNorm(size, eps))
            self.add_module(f"{name}_res_proj", nn.Linear(size, 1, bias=False))

    def mix(self, prefix_USH: Tensor, name: str) -> Tensor:
        norm, proj = (getattr(self, f"{name}_res_{part}") for part in ("norm", "proj"))
        return attn_res(prefix_USH, self.blocks, norm, proj, self.eps)

    def forward(
        self,
        prefix_USH: Tensor,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Tensor:
        if self.layer == 0:
            self.blocks.clear()
        inner = self.input_layernorm(self.mix(prefix_USH, "self_attention"))
        if self.is_full:
            out, _ = self.self_attn(
                inner, attention_mask=attention_mask, past_key_values=past_key_values, **options
            )
        else:
            out = self.self_attn(inner, past_key_values, attention_mask)
        if self.layer % self.block_size == 0:
            self.blocks.append(prefix_USH)
            prefix_USH = out
        else:
            prefix_USH = prefix_USH + out
        inner = self.post_attention_layernorm(self.mix(prefix_USH, "mlp"))
        fed: Tensor = (self.block_sparse_moe if self.is_sparse else self.mlp)(inner)
        return prefix_USH + fed


class TextModel(theirs.KimiLinearModel):
    """transformers' loop and masks around these layers."""

    def __init__(self, config: Any) -> None:
        theirs.KimiLinearPreTrainedModel.__init__(self, config)
        size, blocks, eps = config.hidden_size, list[Tensor](), config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        numbers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(Layer(config, layer, blocks) for layer in numbers)
        self.norm = theirs.KimiLinearRMSNorm(size, eps)
        self.output_attn_res_norm = theirs.KimiLinearRMSNorm(size, eps)
        self.output_attn_res_proj = nn.Linear(size, 1, bias=False)
        own = self.output_attn_res_norm, self.output_attn_res_proj
        self.norm.register_forward_pre_hook(lambda _, args: attn_res(args[0], blocks, *own, eps))
        self.post_init()


class TextForCausalLM(theirs.KimiLinearForCausalLM):
    """The text model and its head."""

    def __init__(self, config: Any) -> None:
        theirs.KimiLinearPreTrainedModel.__init__(self, config)
        self.model = TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class Model(PreTrainedModel, GenerationMixin):
    """Under the published names, without a vision tower."""

    config_class = Config
    base_model_prefix = "language_model"
    _is_stateful = True
    _supports_sdpa = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.language_model = TextForCausalLM(config.text_config)
        self.post_init()

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.language_model(*inputs, **options)


AutoConfig.register("kimi_k3", Config, exist_ok=True)
AutoModelForCausalLM.register(Config, Model, exist_ok=True)

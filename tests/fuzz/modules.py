"""A random MoE layer against its formula in float64, written once more, token by token.

Axes: T tokens, E experts, K choices, H hidden.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuron_moe import (
    BlockwiseMatmulConfig,
    ExpertMLPsV2,
    MoE,
    RoutedExpertsMLPOpsConfig,
    RouterTopK,
    SharedExperts,
)
from neuron_moe.backends.torch_backend import TorchBackend

SHORT = {  # of the largest output: float32 sums in another order; bfloat16 inputs, float32 sums
    "torch": 2e-5,
    "nki": 3e-2,
}
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "leaky_relu", "tanh")


@dataclass(frozen=True)
class Attack:
    """One random layer and its input."""

    layer: MoE
    hidden_BSH: Tensor
    mask_BS: Tensor | None
    phase: str | None
    text: str


def draw(seed: int, backend: str) -> Attack:
    """Return the layer of a seed."""
    rng = random.Random(f"{backend} {seed}")
    torch.manual_seed(seed)
    is_nki = backend == "nki"
    experts = rng.choice([1, 2, 4, 7, 8] if not is_nki else [2, 4, 8])
    top_k = rng.randint(1, min(experts, 4))
    hidden, inner = (128, 128) if is_nki else (rng.choice([8, 12, 33]), rng.choice([4, 10, 17]))
    mlp = _formula(rng, top_k)
    router: dict[str, Any] = {
        "act_fn": rng.choice(["softmax", "sigmoid"]),
        "apply_act_fn_over_topk": rng.random() < 0.3,
        "bias": rng.random() < 0.5,
        "renormalize": rng.random() < 0.3,
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
    }
    dtype = torch.bfloat16 if is_nki else torch.float32
    config = RoutedExpertsMLPOpsConfig(experts, hidden, inner, top_k, **mlp)
    block_size = rng.choice([32, 64] if is_nki else [1, 3, 16])
    engine = "nki" if is_nki else TorchBackend(static=rng.random() < 0.5)
    shared = SharedExperts(hidden, 8, 1, "silu", dtype=dtype) if rng.random() < 0.3 else None
    layer = MoE(
        RouterTopK(experts, top_k, hidden, **router),
        ExpertMLPsV2(
            config,
            BlockwiseMatmulConfig.from_kwargs(block_size=block_size),
            dtype=dtype,
            backend=engine,
        ),
        None if is_nki else shared,
        return_expert_index=True,
    ).eval()
    for parameter in layer.parameters():
        drawn = torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5
        parameter.data = drawn.to(torch.bfloat16).to(parameter.dtype)
    batch, seq = rng.choice([(1, 1), (3, 1), (1, 40), (2, 9), (1, 150)])
    mask = (torch.rand(batch, seq) > 0.3).int() if rng.random() < 0.4 else None
    phase = rng.choice([None, None, "prefill", "decode"])
    text = f"seed {seed}: {config} {router} block_size={block_size} {(batch, seq)} {phase}"
    return Attack(layer, torch.randn(batch, seq, hidden).to(dtype), mask, phase, text)


def _formula(rng: random.Random, top_k: int) -> dict[str, Any]:
    """Return the formula of the experts."""
    mlp: dict[str, Any] = {
        "hidden_act": rng.choice(ACTIVATIONS),
        "glu_mlp": rng.random() < 0.8,
        "bias": rng.random() < 0.5,
        "hidden_act_scaling_factor": rng.choice([1.0, 1.0, 0.7]),
        "early_expert_affinity_modulation": rng.random() < 0.2,
        "normalize_top_k_affinities": top_k > 1 and rng.random() < 0.3,
    }
    if mlp["glu_mlp"] and rng.random() < 0.4:
        mlp |= {"hidden_act": "sigmoid", "glu_type": "swiglu", "hidden_act_scaling_factor": 1.702}
        mlp |= {"hidden_act_bias": 1.0, "gate_clamp_upper_limit": rng.choice([None, 0.5])}
        mlp |= {"up_clamp_upper_limit": 0.4, "up_clamp_lower_limit": -0.4}
    return mlp


def _act(name: str, x: float) -> float:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    sigmoid = 1 / (1 + math.exp(-x)) if x > -700 else 0.0
    return {
        "silu": x * sigmoid,
        "gelu": 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
        "gelu_tanh": 0.5 * x * (1 + math.tanh(inner)),
        "relu": max(x, 0.0),
        "leaky_relu": x if x > 0 else 0.01 * x,
        "sigmoid": sigmoid,
        "tanh": math.tanh(x),
    }[name]


def _expert(layer: MoE, expert: int, x_H: Tensor) -> Tensor:
    """Return one expert's output for one row, in float64."""
    op, formula = layer.expert_mlps.mlp_op, layer.expert_mlps.spec.formula
    row = x_H @ op.first.weight[expert].double()
    if op.first.bias is not None:
        row = row + op.first.bias[expert].double()
    gate, up = row.chunk(2) if formula.has_gate else (row, row)

    def clamp(values: Tensor, limits: Any) -> Tensor:
        low = limits.lower if limits.has_lower else -math.inf
        return values.clamp(low, limits.upper if limits.has_upper else math.inf)

    source = clamp(gate, formula.gate_limits if formula.has_gate else formula.up_limits)
    inner = torch.tensor(
        [_act(formula.activation, float(v) * formula.scale) for v in source], dtype=torch.float64
    )
    if formula.gates_itself:
        inner = inner * source
    if formula.has_gate:
        inner = inner * (clamp(up, formula.up_limits) + formula.up_offset)
    output = inner @ op.down_proj.weight[expert].double()
    bias = op.down_proj.bias
    return output if bias is None else output + bias[expert].double()


def _affinities(layer: MoE, logits_E: Tensor, chosen: list[int]) -> list[float]:
    """Return the affinities of the choices of one token, in float64."""
    formula, spec = layer.router.spec.formula, layer.expert_mlps.spec
    act = torch.sigmoid if formula.act_fn == "sigmoid" else lambda x: x.softmax(-1)
    found = act(logits_E[chosen]) if formula.act_over_topk else act(logits_E)[chosen]
    if formula.renormalize:
        found = found / (found.sum() + formula.renormalize_eps)
    found = found * formula.routed_scaling_factor
    if spec.normalizes_affinities:
        found = found / found.sum().clamp(min=1e-12)
    return [float(value) for value in found]


def reference(attack: Attack, index_TK: Tensor) -> tuple[Tensor, str]:
    """Return the output in float64 for the choices made, and what is wrong with these."""
    layer = attack.layer
    spec, linear = layer.expert_mlps.spec, layer.router.linear_router
    x_TH = attack.hidden_BSH.flatten(0, 1).double()
    logits_TE = x_TH @ linear.weight.double().t()
    if linear.bias is not None:
        logits_TE = logits_TE + linear.bias.double()
    output_TH = torch.zeros_like(x_TH)
    mask_T = None if attack.mask_BS is None else attack.mask_BS.flatten()
    for token, row in enumerate(index_TK.tolist()):
        rest = [float(logits_TE[token, e]) for e in range(spec.num_experts) if e not in row]
        least = min(float(logits_TE[token, e]) for e in row)
        if len(set(row)) < len(row) or (rest and max(rest) > least + 1e-4):
            return output_TH, f"token {token} chooses {row} of {logits_TE[token].tolist()}"
        if mask_T is None or mask_T[token]:
            for expert, weight in zip(row, _affinities(layer, logits_TE[token], row), strict=True):
                x_H = x_TH[token] * (weight if spec.scales_input else 1.0)
                output = _expert(layer, expert, x_H)
                output_TH[token] += output if spec.scales_input else output * weight
    if layer.shared_experts is not None:
        output_TH += layer.shared_experts(attack.hidden_BSH.flatten(0, 1)).double()
    return output_TH, ""


def attack_module(seed: int, backend: str = "torch") -> str:
    """Compute the layer of a seed; say what is wrong with it."""
    try:
        attack = draw(seed, backend)
        with torch.no_grad():
            found = attack.layer(attack.hidden_BSH, attack.mask_BS, phase=attack.phase)
    except (ValueError, NotImplementedError) as error:
        return "" if len(str(error)) > 20 else f"seed {seed}: a refusal without a reason: {error}"
    with torch.no_grad():
        wanted_TH, problem = reference(attack, found.expert_index)
    if problem:
        return f"{attack.text}: {problem}"
    error = float((found.output.flatten(0, 1).double() - wanted_TH).abs().max())
    scale = float(wanted_TH.abs().max()) or 1.0
    if not error <= SHORT[backend] * scale:
        return f"{attack.text}: differs by {error / scale:.1e} of the largest output"
    return ""

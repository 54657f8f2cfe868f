"""A random MoE layer against its formula in float64, written once more, token by token.

Axes: T tokens, E experts, K choices, H hidden.
"""

import math
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuron_moe import (
    BlockwiseMatmulConfig,
    ExpertMLPsV2,
    GroupLimitedRouter,
    MoE,
    RoutedExpertsMLPOpsConfig,
    RouterTopK,
    SharedExperts,
)
from neuron_moe.backends.torch_backend import TorchBackend
from neuron_moe.models.layers import RMSNorm
from neuron_moe.router import Router

SHORT = {  # of the largest output: float32 sums in another order; bfloat16 inputs, float32 sums
    torch.float32: 2e-5,
    torch.bfloat16: 3e-2,
}
CLOSE = {False: 1e-4, True: 5e-2}  # logits that may swap places, by whether a norm rounded before
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "leaky_relu", "tanh")


class Weights(NamedTuple):
    """The routed experts' weights before they were packed; I is 2I with a gate.

    Attributes:
        first_EHI: [E, H, I].
        first_bias_EI: [E, I], or None.
        down_EIH: [E, I, H].
        down_bias_EH: [E, H], or None.
    """

    first_EHI: Tensor
    first_bias_EI: Tensor | None
    down_EIH: Tensor
    down_bias_EH: Tensor | None


@dataclass(frozen=True)
class Attack:
    """One random layer and its input.

    Attributes:
        layer: what is attacked.
        weights: of its experts.
        hidden_BSH: its input.
        residual_BSH: added to it first, or None.
        mask_BS: nonzero for real tokens, or None.
        phase: that it is given.
        is_direct: the experts are called on their own, with the router's choices and dense
            affinities.
        text: what it is.
    """

    layer: MoE
    weights: Weights
    hidden_BSH: Tensor
    residual_BSH: Tensor | None
    mask_BS: Tensor | None
    phase: str | None
    is_direct: bool
    text: str

    def input_TH(self) -> Tensor:
        """Return what router and experts get."""
        total = self.hidden_BSH
        total = total if self.residual_BSH is None else total + self.residual_BSH
        norm = self.layer.rmsnorm
        return (total if norm is None else norm(total)).flatten(0, 1)


def draw(seed: int, backend: str) -> Attack:
    """Return the layer of a seed."""
    rng = random.Random(f"{backend} {seed}")
    torch.manual_seed(seed)
    is_nki = backend == "nki"
    dtype = torch.bfloat16 if is_nki or rng.random() < 0.2 else torch.float32
    experts = rng.choice([1, 2, 4, 7, 8] if not is_nki else [2, 4, 8])
    top_k = rng.randint(1, min(experts, 4))
    hidden, inner = (128, 128) if is_nki else (rng.choice([8, 12, 33]), rng.choice([4, 10, 17]))
    mlp = _formula(rng, top_k)
    if not is_nki and rng.random() < 0.15:
        mlp["capacity_factor"] = rng.choice([0.5, 1.0, 1.5])
    config = RoutedExpertsMLPOpsConfig(experts, hidden, inner, top_k, **mlp)
    block_size = rng.choice([32, 64] if is_nki else [1, 3, 16])
    is_static = not is_nki and rng.random() < 0.5
    layer = MoE(
        _router(rng, experts, top_k, hidden),
        ExpertMLPsV2(
            config,
            BlockwiseMatmulConfig.from_kwargs(block_size=block_size),
            dtype=dtype,
            backend="nki" if is_nki else TorchBackend(static=is_static),
            compat=rng.choice([None, None, "nxd"]),
        ),
        SharedExperts(hidden, 128 if is_nki else 8, 1, "silu", dtype=dtype)
        if rng.random() < 0.3
        else None,
        RMSNorm(hidden, 1e-5, dtype) if rng.random() < 0.3 else None,
        return_expert_index=True,
    ).eval()
    _fill(layer)
    op = layer.expert_mlps.mlp_op
    # Packing leaves no numbers in the Parameters themselves.
    matrices = op.first.weight.detach(), op.down_proj.weight.detach()
    weights = Weights(matrices[0], op.first.bias, matrices[1], op.down_proj.bias)
    if not is_static and rng.random() < 0.3:
        layer.expert_mlps.pack_weights()
    batch, seq = rng.choice([(1, 1), (3, 1), (1, 40), (2, 9), (1, 150)])
    shape = (batch, seq, hidden)
    phase = rng.choice([None, None, "prefill", "decode", "speculation"])
    return Attack(
        layer,
        weights,
        torch.randn(shape).to(dtype),
        torch.randn(shape).to(dtype) if rng.random() < 0.2 else None,
        (torch.rand(batch, seq) > 0.3).int() if rng.random() < 0.4 else None,
        phase,
        rng.random() < 0.2,
        f"seed {seed}: {layer.router.spec} {config} block_size={block_size} {shape} {phase}",
    )


def _router(rng: random.Random, experts: int, top_k: int, hidden: int) -> Router:
    """Return one of the routers."""
    scale = rng.choice([1.0, 2.5])
    renormalizes = rng.random() < 0.3
    groups = [size for size in (2, 4) if experts % size == 0 and experts // size >= 2]
    if groups and rng.random() < 0.3:
        count = rng.choice(groups)
        kept = rng.randint(-(-top_k * count // experts), count)
        return GroupLimitedRouter(
            experts,
            top_k,
            hidden,
            count,
            kept,
            renormalize=renormalizes,
            routed_scaling_factor=scale,
        )
    over_topk = rng.random() < 0.3
    return RouterTopK(
        experts,
        top_k,
        hidden,
        act_fn=rng.choice(["softmax", "sigmoid"]),
        apply_act_fn_over_topk=over_topk,
        bias=rng.random() < 0.5,
        selection_bias=not over_topk and rng.random() < 0.2,
        renormalize=renormalizes,
        routed_scaling_factor=scale,
    )


def _fill(layer: MoE) -> None:
    """Draw the weights; all of them are bfloat16 numbers."""
    for parameter in layer.parameters():
        drawn = torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5
        parameter.data = drawn.to(torch.bfloat16).to(parameter.dtype)
    bias_E = layer.router.e_score_correction_bias
    if bias_E is not None:
        bias_E.data = torch.randn(bias_E.shape) * 0.1


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


def _expert(attack: Attack, expert: int, x_H: Tensor) -> Tensor:
    """Return one expert's output for one row, in float64."""
    formula, weights = attack.layer.expert_mlps.spec.formula, attack.weights
    row = x_H @ weights.first_EHI[expert].double()
    if weights.first_bias_EI is not None:
        row = row + weights.first_bias_EI[expert].double()
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
    output = inner @ weights.down_EIH[expert].double()
    bias_EH = weights.down_bias_EH
    return output if bias_EH is None else output + bias_EH[expert].double()


def _affinities(layer: MoE, logits_E: Tensor, chosen: list[int]) -> list[float]:
    """Return the affinities of the choices of one token, in float64."""
    formula = layer.router.spec.formula
    act = torch.sigmoid if formula.act_fn == "sigmoid" else lambda x: x.softmax(-1)
    found = act(logits_E[chosen]) if formula.act_over_topk else act(logits_E)[chosen]
    if formula.renormalize:
        found = found / (found.sum() + formula.renormalize_eps)
    found = found * formula.routed_scaling_factor
    return [float(value) for value in found]


def _ranked(layer: MoE, logits_E: Tensor) -> list[float]:
    """Return what the choice of one token is made by, in float64."""
    formula, bias_E = layer.router.spec.formula, layer.router.e_score_correction_bias
    if bias_E is None and formula.n_group == 1:
        return [float(value) for value in logits_E]
    scores = torch.sigmoid(logits_E) if formula.act_fn == "sigmoid" else logits_E.softmax(-1)
    ranked = [float(value) for value in (scores if bias_E is None else scores + bias_E.double())]
    size = len(ranked) // formula.n_group
    groups = [ranked[start : start + size] for start in range(0, len(ranked), size)]
    if formula.n_group > 1:
        sums = [sum(sorted(group)[-2:]) for group in groups]
        best = sorted(range(len(sums)), key=lambda number: -sums[number])[: formula.topk_group]
        groups = [
            group if number in best else [-math.inf] * size for number, group in enumerate(groups)
        ]
    return [value for group in groups for value in group]


def _fits(attack: Attack, index_TK: Tensor) -> list[list[bool]]:
    """Say which choices an expert has room for, in the order of the tokens."""
    layer, (tokens, top_k) = attack.layer, index_TK.shape
    spec, seq_len = layer.expert_mlps.spec, attack.hidden_BSH.shape[1]
    phase = attack.phase or ("decode" if seq_len == 1 else "prefill")
    room = tokens * top_k
    if layer.explain(phase, tokens).decision.path == "capacity":
        room = math.ceil(room * float(spec.capacity_factor or 0) / spec.num_experts)
    taken = [0] * spec.num_experts
    fits = []
    for token, row in enumerate(index_TK.tolist()):
        is_real = attack.mask_BS is None or bool(attack.mask_BS.flatten()[token])
        fits.append([is_real and taken[expert] < room for expert in row])
        for expert in row:
            taken[expert] += is_real
    return fits


def reference(attack: Attack, index_TK: Tensor) -> tuple[Tensor, str]:
    """Return the output in float64 for the choices made, and what is wrong with these."""
    layer = attack.layer
    spec, linear = layer.expert_mlps.spec, layer.router.linear_router
    input_TH = attack.input_TH()
    x_TH = input_TH.double()
    logits_TE = x_TH @ linear.weight.double().t()
    if linear.bias is not None:
        logits_TE = logits_TE + linear.bias.double()
    output_TH = torch.zeros_like(x_TH)
    fits_TK = _fits(attack, index_TK)
    close = CLOSE[layer.rmsnorm is not None and input_TH.dtype == torch.bfloat16]
    for token, row in enumerate(index_TK.tolist()):
        ranked = _ranked(layer, logits_TE[token])
        rest = [ranked[expert] for expert in range(spec.num_experts) if expert not in row]
        least = min(ranked[expert] for expert in row)
        if len(set(row)) < len(row) or (rest and max(rest) > least + close):
            return output_TH, f"token {token} chooses {row} of {ranked}"
        weights = _affinities(layer, logits_TE[token], row)
        weights = [w if fits else 0.0 for w, fits in zip(weights, fits_TK[token], strict=True)]
        if spec.normalizes_affinities:
            total = max(sum(weights), 1e-12)
            weights = [weight / total for weight in weights]
        for expert, weight in zip(row, weights, strict=True):
            if weight:
                x_H = x_TH[token] * (weight if spec.scales_input else 1.0)
                output = _expert(attack, expert, x_H)
                output_TH[token] += output if spec.scales_input else output * weight
    if layer.shared_experts is not None and not attack.is_direct:
        output_TH += layer.shared_experts(input_TH).double()
    return output_TH, ""


def _run(attack: Attack) -> tuple[Tensor, Tensor]:
    """Return output [T, H] and choices [T, K] of the layer, or of its experts."""
    layer = attack.layer
    if not attack.is_direct:
        made = layer(
            attack.hidden_BSH,
            attack.mask_BS,
            attack.phase == "speculation",
            attack.residual_BSH,
            phase=None if attack.phase == "speculation" else attack.phase,
        )
        return made.output.flatten(0, 1), made.expert_index
    input_TH = attack.input_TH()
    routing = layer.router(input_TH)
    index_TK = routing.expert_index_TK
    dense_TE = torch.zeros(len(index_TK), layer.router.spec.num_experts)
    dense_TE.scatter_(1, index_TK.long(), routing.expert_affinities_TK)
    output_TH = layer.expert_mlps(
        input_TH,
        dense_TE,
        index_TK,
        attack.hidden_BSH.shape[1],
        attack.mask_BS,
        expert_affinities_masked_full=dense_TE,
        phase=attack.phase,
    )
    return output_TH, index_TK


def attack_module(seed: int, backend: str = "torch") -> str:
    """Compute the layer of a seed; say what is wrong with it."""
    try:
        attack = draw(seed, backend)
        with torch.no_grad():
            found_TH, index_TK = _run(attack)
    except (ValueError, NotImplementedError) as error:
        return "" if len(str(error)) > 20 else f"seed {seed}: a refusal without a reason: {error}"
    with torch.no_grad():
        wanted_TH, problem = reference(attack, index_TK)
    if problem:
        return f"{attack.text}: {problem}"
    error = float((found_TH.double() - wanted_TH).abs().max())
    scale = float(wanted_TH.abs().max()) or 1.0
    if not error <= SHORT[found_TH.dtype] * scale:
        return f"{attack.text}: differs by {error / scale:.1e} of the largest output"
    return ""

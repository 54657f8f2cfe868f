"""MoE layers in NxD's own words: the same constructor calls build NxD's layer and ours.

Axes: E experts, K choices, H hidden, I intermediate, T tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

E, K, H, I = 8, 2, 32, 64  # noqa: E741  the axis letters
BLOCK_SIZE = 16  # small enough for NxD's blockwise path at 48 tokens: its others know no EP
CLAMPS = {
    "gate_clamp_upper_limit": 0.75,
    "up_clamp_upper_limit": 0.5,
    "up_clamp_lower_limit": -0.5,
}
SWIGLU = {"glu_type": "swiglu", "hidden_act": "sigmoid", "hidden_act_scaling_factor": 1.702}
GPT_OSS = {**SWIGLU, **CLAMPS, "bias": True, "hidden_act_bias": 1.0}
TOP_K_SOFTMAX = {"bias": True, "apply_act_fn_over_topk": True}


@dataclass(frozen=True)
class Case:
    """One layer.

    Attributes:
        router: arguments of the router beside its sizes.
        kind: its class.
        top_k: K.
        experts: keys of RoutedExpertsMLPOpsConfig beside its sizes.
        shared: arguments of SharedExperts beside its sizes, or None.
        norm: an RMSNorm in front.
        masks: the last tokens are padding.
        residual: one is added.
    """

    router: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "RouterTopK"
    top_k: int = K
    experts: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, Any] | None = None
    norm: bool = False
    masks: bool = False
    residual: bool = False


def _experts(**keys: Any) -> Case:
    return Case(experts=keys)


SHARED: dict[str, Any] = {"num_shared_experts": 1, "hidden_act": "silu"}
EARLY = {"early_expert_affinity_modulation": True}
GROUPS = {"n_group": 4, "topk_group": 2}
CASES: dict[str, Case] = {
    "plain": Case(),
    "softmax, normalised (Qwen3, Mixtral)": _experts(normalize_top_k_affinities=True),
    "softmax, top 4 normalised (DBRX)": Case(top_k=4, experts={"normalize_top_k_affinities": True}),
    "sigmoid": Case(router={"act_fn": "sigmoid"}),
    "sigmoid, top 1": Case(router={"act_fn": "sigmoid"}, top_k=1),
    "router bias": Case(router={"bias": True}),
    "softmax over the chosen": Case(router=TOP_K_SOFTMAX),
    "sigmoid over the chosen": Case(router={**TOP_K_SOFTMAX, "act_fn": "sigmoid"}),
    "groups (DeepSeek)": Case(router=GROUPS, kind="GroupLimitedRouter"),
    "groups, normalised": Case(
        router=GROUPS, kind="GroupLimitedRouter", experts={"normalize_top_k_affinities": True}
    ),
    "sinkhorn's argmax": Case(kind="RouterSinkhorn", top_k=1),
    "gelu": _experts(hidden_act="gelu"),
    "leaky relu": _experts(hidden_act="leaky_relu"),
    "relu": _experts(hidden_act="relu"),
    "tanh": _experts(hidden_act="tanh"),
    "sigmoid experts": _experts(hidden_act="sigmoid"),
    "no gate": _experts(glu_mlp=False, hidden_act="relu"),
    "expert bias": _experts(bias=True),
    "scaled gate": _experts(hidden_act_scaling_factor=1.5),
    "swiglu": _experts(**SWIGLU),
    "clamps": _experts(**CLAMPS),
    "lower clamp of the gate": _experts(gate_clamp_lower_limit=-0.25, gate_clamp_upper_limit=0.5),
    "swiglu, clamps, bias": _experts(**SWIGLU, **CLAMPS, bias=True),
    "gpt-oss": Case(router=TOP_K_SOFTMAX, experts=GPT_OSS),
    "gpt-oss, norm, residual": Case(
        router=TOP_K_SOFTMAX, experts=GPT_OSS, norm=True, residual=True
    ),
    "glu with an offset and bias": _experts(bias=True, hidden_act_bias=1.0, **CLAMPS),
    "input scaled, top 1": Case(router={"act_fn": "sigmoid"}, top_k=1, experts=EARLY),
    "llama4": Case(router={"act_fn": "sigmoid"}, top_k=1, experts=EARLY, shared=SHARED),
    "shared experts": Case(shared=SHARED),
    "two shared experts, fused": Case(
        shared={**SHARED, "num_shared_experts": 2, "fused_gate_up_projection": True}
    ),
    "shared experts, transposed": Case(shared={**SHARED, "transpose_weights": True}),
    "capacity 1": _experts(capacity_factor=1.0),
    "capacity 0.5, normalised": _experts(capacity_factor=0.5, normalize_top_k_affinities=True),
    "capacity 100": _experts(capacity_factor=100.0),
    "padding": Case(masks=True, experts={"normalize_top_k_affinities": True}),
    "norm": Case(norm=True),
}


class Norm(nn.Module):
    """RMSNorm with the attribute that NxD reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return x * scale * self.weight


def build(
    api: Any,
    case: Case,
    groups: Mapping[str, Any],
    whole_group: Any,
    *,
    is_part: bool = False,
    **experts_keys: Any,
) -> Any:
    """Build a layer from an API's classes.

    Args:
        api: NxD's names or ours.
        case: the layer.
        groups: arguments of ExpertMLPsV2.
        whole_group: ranks over which outputs are summed, which also split shared experts.
        is_part: with sequence parallelism.
        experts_keys: further arguments of ExpertMLPsV2.
    """
    parallel = {"sequence_parallel_enabled": is_part}
    sizes = {"num_experts": E, "top_k": case.top_k, "hidden_size": H}
    router = getattr(api, case.kind)(**sizes, sequence_dimension=1, **case.router, **parallel)
    if case.kind == "GroupLimitedRouter":
        router.e_score_correction_bias = nn.Parameter(torch.zeros(E))  # NxD leaves it to us
    experts = api.ExpertMLPsV2(
        api.RoutedExpertsMLPOpsConfig(
            intermediate_size=I,
            enable_spmd_rank=True,
            use_index_calc_kernel=False,  # a kernel, also on a CPU; NxDI leaves it off
            **{**sizes, "hidden_act": "silu", "glu_mlp": True, **case.experts},
        ),
        api.BlockwiseMatmulConfig.from_kwargs(block_size=BLOCK_SIZE),
        **groups,
        **parallel,
        **experts_keys,
    )
    shared = None
    if case.shared is not None:
        shared = api.SharedExperts(H, I, tensor_model_parallel_group=whole_group, **case.shared)
    return api.MoE(
        router,
        experts,
        shared,
        Norm() if case.norm else None,
        sequence_dimension=1,
        **parallel,
        return_router_logits=True,
        return_expert_index=True,
        tensor_model_parallel_group=whole_group,
    ).eval()


def draw_weights(case: Case) -> dict[str, Tensor]:
    """Return the state dict of the whole layer, as a converter from a checkpoint gives it."""
    halves = 2 if case.experts.get("glu_mlp", True) else 1
    first = "gate_up_proj" if halves == 2 else "up_proj"
    shapes: dict[str, tuple[int, ...]] = {
        "router.linear_router.weight": (E, H),
        f"expert_mlps.mlp_op.{first}.weight": (E, H, halves * I),
        "expert_mlps.mlp_op.down_proj.weight": (E, I, H),
    }
    if case.router.get("bias"):
        shapes["router.linear_router.bias"] = (E,)
    if case.kind == "GroupLimitedRouter":
        shapes["router.e_score_correction_bias"] = (E,)
    if case.experts.get("bias"):
        shapes[f"expert_mlps.mlp_op.{first}.bias"] = (E, halves * I)
        shapes["expert_mlps.mlp_op.down_proj.bias"] = (E, H)
    if case.norm:
        shapes["rmsnorm.weight"] = (H,)
    if case.shared is not None:
        width = I * case.shared["num_shared_experts"]
        is_fused = case.shared.get("fused_gate_up_projection")
        names = {"gate_up_proj": 2 * width} if is_fused else {"gate_proj": width, "up_proj": width}
        shapes |= {f"shared_experts.{name}.weight": (rows, H) for name, rows in names.items()}
        shapes["shared_experts.down_proj.weight"] = (H, width)
    stream = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=stream) for name, shape in shapes.items()}
    for name, weight in weights.items():
        is_matrix = name.endswith("weight") and weight.ndim > 1
        axis = 1 if weight.ndim == 3 else -1
        weight *= weight.shape[axis] ** -0.5 if is_matrix else 0.25
    # Biased scores of chosen groups stay positive: below zero NxD prefers experts outside them.
    if "router.e_score_correction_bias" in weights:
        weights["router.e_score_correction_bias"].abs_()
    return weights

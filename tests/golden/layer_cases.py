"""Random MoE layers for the golden outputs: each is drawn from its name and made by public names.

Nothing here may depend on the order of parameters, on torch's random numbers or on a file of the
packages but the public ones, so that a case means the same layer before and after a change.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuron_moe import (
    BlockwiseMatmulConfig,
    ExpertMLPsV2,
    GLUType,
    GroupLimitedRouter,
    MoE,
    MoEFusedTKGConfig,
    RoutedExpertsMLPOpsConfig,
    RouterTopK,
    SharedExperts,
)

BACKENDS = ("torch", "nki")
CASES_PER_BACKEND = 200
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """One call of a layer.

    Attributes:
        phase: prefill, decode or speculation.
        shape: B and S of the hidden states.
        has_mask: every third token or so is padding.
        has_residual: a residual is added.
        change: what happens to the weights before: '', 'all' (in place), 'one' (a single one in
            place), 'data' (past the eyes of torch), 'load' (a state dict), 'pack' (packed again).
        explains: `explain` is asked before.
        is_alone: the experts are called too, with NxD's dense affinities.
    """

    phase: str
    shape: tuple[int, int]
    has_mask: bool = False
    has_residual: bool = False
    change: str = ""
    explains: bool = False
    is_alone: bool = False


@dataclass(frozen=True)
class Case:
    """A layer, and how it is called.

    Attributes:
        name: draws everything else.
        backend: of the experts.
        sizes: H, I, E, K, and dtype of the weights.
        router: its class and arguments beside the sizes.
        mlp: configuration of the experts beside the sizes.
        tuning: of the blockwise path.
        options: further arguments of ExpertMLPsV2.
        shared: arguments of SharedExperts, or None.
        layer: further arguments of MoE.
        norm: an RMSNorm in front.
        weights: 'plain', 'packed' or 'fp8' (values of float8_e5m2, packed).
        pack: arguments of `pack_weights`.
        counts: load counters are on.
        trains: gradients are computed.
        is_static: torch's form for graphs.
        steps: the calls.
    """

    name: str
    backend: str
    sizes: Values
    router: Values
    mlp: Values
    tuning: Values
    options: Values
    shared: Values | None
    layer: Values
    norm: bool
    weights: str
    pack: Values
    counts: bool
    trains: bool
    is_static: bool
    steps: tuple[Step, ...] = field(default=())


def case_names(backend: str) -> list[str]:
    """Return the names of all cases of a back end."""
    return [f"{backend}-{number:03d}" for number in range(CASES_PER_BACKEND)]


def draw_case(name: str) -> Case:
    """Draw a case; most of them are legal."""
    backend = name.split("-")[0]
    draw = Random(f"neuron-moe {name}")
    grouped = draw.random() < 0.2
    sizes = _draw_sizes(draw, backend, grouped)
    trains = backend == "torch" and draw.random() < 0.12
    mlp = _draw_experts(draw, backend, sizes)
    tuning = _draw_tuning(draw, backend)
    weights, pack = _draw_weights(draw, backend, mlp, tuning)
    case = Case(
        name=name,
        backend=backend,
        sizes=sizes,
        router=_draw_router(draw, sizes, grouped),
        mlp=mlp,
        tuning=tuning,
        options={"compat": "nxd"} if draw.random() < 0.1 else {},
        shared=_draw_shared(draw, backend) if draw.random() < 0.35 else None,
        layer=_draw_layer(draw, backend),
        norm=draw.random() < 0.5,
        weights="plain" if trains else weights,
        pack=pack,
        counts=draw.random() < 0.2,
        trains=trains,
        is_static=backend == "torch" and weights == "plain" and draw.random() < 0.25,
    )
    return replace(case, steps=_draw_steps(draw, case))


def _draw_sizes(draw: Random, backend: str, grouped: bool) -> Values:
    if backend == "nki":
        hidden = draw.choice((64, 64, 128, 128, 192, 256, 320))
        width = draw.choice((16, 32, 48, 64, 64, 96, 130))
        experts = draw.choice((8, 16, 32) if grouped else (2, 4, 8, 8, 12, 16, 32))
        dtype = torch.float32 if draw.random() < 0.02 else torch.bfloat16
    else:
        hidden = draw.choice((8, 12, 16, 32, 48, 64, 100))
        width = draw.choice((4, 6, 10, 16, 24, 48))
        experts = draw.choice((8, 12, 16) if grouped else (1, 2, 3, 4, 6, 8, 9, 16))
        dtype = draw.choice((torch.float32, torch.bfloat16))
    top_k = draw.randint(1, min(4 if grouped else 8, experts))
    if draw.random() < 0.01:
        top_k = experts + 1
    return {"H": hidden, "I": width, "E": experts, "K": top_k, "dtype": dtype}


def _draw_router(draw: Random, sizes: Values, grouped: bool) -> Values:
    kept_in = draw.choice((torch.float32, sizes["dtype"]))
    found: dict[str, Any] = {"dtype": kept_in, "renormalize": draw.random() < 0.4}
    if draw.random() < 0.3:
        found["routed_scaling_factor"] = draw.choice((2.5, 0.5))
    if grouped:
        groups = draw.choice((2, 4))
        found |= {"n_group": groups, "topk_group": draw.randint(groups // 2, groups)}
        if draw.random() < 0.3:
            found["out_of_group_fill"] = 0.0
        return found
    found |= {"act_fn": draw.choice(("softmax", "sigmoid")), "bias": draw.random() < 0.5}
    if draw.random() < 0.3:
        found["apply_act_fn_over_topk"] = True
    elif draw.random() < 0.3:
        found["selection_bias"] = True
    return found


def _draw_experts(draw: Random, backend: str, sizes: Values) -> Values:
    common = ("silu", "silu", "sigmoid", "gelu", "gelu_pytorch_tanh", "relu", "tanh")
    act = draw.choice(common if draw.random() < 0.95 else ("leaky_relu", "swiglu"))
    has_gate = draw.random() < 0.85
    found: dict[str, Any] = {"hidden_act": act, "glu_mlp": has_gate, "bias": draw.random() < 0.5}
    if has_gate and draw.random() < 0.4:
        found |= {"hidden_act": "sigmoid", "glu_type": draw.choice((GLUType.SWIGLU, "swiglu"))}
        found["hidden_act_scaling_factor"] = draw.choice((1.702, 1.702, 1.0, 1.5))
    elif backend == "torch" and draw.random() < 0.3:
        found["hidden_act_scaling_factor"] = draw.choice((1.5, 0.7))
    if has_gate and draw.random() < 0.4:
        found["hidden_act_bias"] = draw.choice((1.0, 0.5))
    for kind in ("gate", "up") if has_gate else ("up",):
        if draw.random() < 0.35:
            found[f"{kind}_clamp_upper_limit"] = draw.choice((7.0, 0.75, 0.0))
        if draw.random() < 0.25:
            found[f"{kind}_clamp_lower_limit"] = draw.choice((-7.0, -0.5))
    found["early_expert_affinity_modulation"] = draw.random() < 0.15
    if sizes["K"] > 1 and draw.random() < 0.2:
        found["normalize_top_k_affinities"] = True
    if draw.random() < 0.12:
        found["capacity_factor"] = draw.choice((0.5, 1.0, 1.5))
    if draw.random() < 0.08:
        order = list(range(sizes["E"]))
        draw.shuffle(order)
        found["expert_distribution"] = [order + order[: draw.randint(0, 2)]]
    return found


def _draw_tuning(draw: Random, backend: str) -> Values:
    found: dict[str, Any] = {}
    if draw.random() < 0.75:
        found["block_size"] = draw.choice((32, 64, 128) if backend == "nki" else (1, 4, 16, 40))
    if draw.random() < 0.2:
        found["pad_num_blocks_to_even"] = True
    if backend == "torch":
        return found
    switches = (
        {"use_block_parallel": True},
        {"use_shard_on_block_dynamic_while": True},
        {"use_shard_on_block_dynamic_while": True, "block_sharding_strategy": "PING_PONG"},
        {"use_shard_on_block_dynamic_while": True, "skip_dma_weight": True},
        {"use_shard_on_intermediate_dynamic_while": True},
        {"logical_nc_config": 1},
    )
    return found | (draw.choice(switches) if draw.random() < 0.4 else {})


def _draw_shared(draw: Random, backend: str) -> Values:
    return {
        "intermediate_size": draw.choice((16, 48) if backend == "nki" else (6, 16)),
        "num_shared_experts": draw.choice((1, 1, 2)),
        "hidden_act": draw.choice(("silu", "silu", "gelu", "relu", "tanh")),
        "fused_gate_up_projection": draw.random() < 0.4,
        "is_gated": draw.random() < 0.3,
    }


def _draw_layer(draw: Random, backend: str) -> Values:
    found: dict[str, Any] = {}
    if draw.random() < (0.1 if backend == "nki" else 0.3):
        found["return_router_logits"] = True
    if draw.random() < 0.35:
        found["return_expert_index"] = True
    if backend == "nki" and draw.random() < 0.35:
        enabled = draw.choice((False, None, True))
        found["tkg_config"] = MoEFusedTKGConfig(quantized=False, moe_fused_kernel_enabled=enabled)
    return found


def _draw_weights(draw: Random, backend: str, mlp: Values, tuning: Values) -> tuple[str, Values]:
    if backend == "torch":
        return ("packed" if draw.random() < 0.15 else "plain"), {}
    if draw.random() < 0.55:
        return "plain", {}
    layouts = {"for_decode": draw.random() < 0.5, "for_prefill": draw.random() < 0.4}
    if _is_for_prefill(mlp) and draw.random() < 0.9:
        layouts["for_decode"] = False
    if set(tuning) - {"block_size", "pad_num_blocks_to_even"} and draw.random() < 0.9:
        layouts["for_prefill"] = False
    return ("fp8" if draw.random() < 0.65 else "packed"), layouts


def _draw_steps(draw: Random, case: Case) -> tuple[Step, ...]:
    count = 1 if case.trains else draw.choice((1, 1, 2, 3))
    return tuple(_draw_step(draw, case, number) for number in range(count))


def _draw_step(draw: Random, case: Case, number: int) -> Step:
    phases = ("prefill", "prefill", "decode", "decode", "decode", "speculation")
    if case.backend == "nki" and _is_for_prefill(case.mlp) and draw.random() < 0.9:
        phases = ("prefill",)
    phase = draw.choice(phases)
    if phase == "prefill":
        longest = 130 if case.backend == "nki" and draw.random() < 0.8 else 300
        batch = draw.choice((1, 1, 2, 3))
        shape = (batch, max(2, draw.randint(2, longest) // batch))
    elif phase == "decode":
        shape = (draw.choice((1, 2, 3, 5, 16, 40, 64, 130, 260)), 1)
    else:
        shape = (draw.choice((1, 2, 4)), draw.randint(2, 6))
    changes = ["load", "pack"] if case.weights != "plain" else ["all", "one", "data", "load"]
    if case.trains:
        changes = [""]
    return Step(
        phase,
        shape,
        has_mask=draw.random() < (0.25 if phase == "prefill" else 0.12),
        has_residual=draw.random() < 0.25,
        change=draw.choice(changes) if number and draw.random() < 0.5 else "",
        explains=draw.random() < 0.3,
        is_alone=not case.trains and draw.random() < 0.15,
    )


def _is_for_prefill(mlp: Values) -> bool:
    """Say whether experts are none that the decode kernel has."""
    scale = mlp.get("hidden_act_scaling_factor", 1.0)
    return not mlp["glu_mlp"] or scale not in (1.0, 1.702)


def make_layer(case: Case) -> MoE:
    """Build the layer of a case, with its weights, packed if it says so.

    Raises:
        ValueError: the configuration is not legal.
    """
    sizes = case.sizes
    grouped = "n_group" in case.router
    kind: Callable[..., Any] = GroupLimitedRouter if grouped else RouterTopK
    router = kind(num_experts=sizes["E"], top_k=sizes["K"], hidden_size=sizes["H"], **case.router)
    config = RoutedExpertsMLPOpsConfig(
        num_experts=sizes["E"],
        hidden_size=sizes["H"],
        intermediate_size=sizes["I"],
        top_k=sizes["K"],
        **case.mlp,
    )
    tuning = BlockwiseMatmulConfig.from_kwargs(**case.tuning)
    backend: Any = _static_backend() if case.is_static else case.backend
    experts = ExpertMLPsV2(config, tuning, dtype=sizes["dtype"], backend=backend, **case.options)
    shared = None
    if case.shared is not None:
        shared = SharedExperts(sizes["H"], dtype=sizes["dtype"], **case.shared)
    norm = nn.RMSNorm(sizes["H"], 1e-5, dtype=sizes["dtype"]) if case.norm else None
    layer = MoE(router, experts, shared, norm, **case.layer).train(case.trains)
    layer.load_state_dict(_state(layer, case, "first"))
    if case.weights != "plain":
        layer.expert_mlps.pack_weights(**case.pack)
    layer.enable_load_counters(case.counts)
    return layer


def run_step(layer: MoE, case: Case, number: int) -> dict[str, Tensor]:
    """Call the layer; return its outputs by name, and gradients if it trains.

    Raises:
        ValueError: the layer cannot compute this.
    """
    step = case.steps[number]
    _change_weights(layer, case, step.change, f"step {number}")
    batch, length = step.shape
    if step.explains:
        layer.explain(step.phase, batch * length)
    shape = (batch, length, case.sizes["H"])
    hidden = _normal(case, f"hidden {number}", shape).to(case.sizes["dtype"])
    mask = residual = None
    if step.has_mask:
        mask = _normal(case, f"mask {number}", (batch, length)) > -0.5
    if step.has_residual:
        residual = _normal(case, f"residual {number}", shape).to(case.sizes["dtype"])
    hidden.requires_grad_(case.trains)
    phase = "decode" if step.phase == "decode" else None
    with torch.set_grad_enabled(case.trains):
        result = layer(hidden, mask, step.phase == "speculation", residual, phase=phase)
    found = {name: value for name, value in result._asdict().items() if value is not None}
    if case.trains:
        _backward(result.output)
        named = {"hidden": hidden, **dict(layer.named_parameters())}
        grads = [named[name].grad for name in sorted(named)]
        found["gradients"] = torch.cat([g.float().reshape(-1) for g in grads if g is not None])
    if step.is_alone:
        found["experts"] = _experts_alone(layer, case, number, hidden)
    if case.counts and number == len(case.steps) - 1:
        found["load"] = layer.expert_load
    return {name: value.detach() for name, value in found.items()}


def fixed_vector(size: int) -> np.ndarray:
    """Return numbers in [-1, 1) that depend on their place alone."""
    return (np.arange(size, dtype=np.int64) * 7919 % 1000) / 500.0 - 1.0


def _experts_alone(layer: MoE, case: Case, number: int, hidden: Tensor) -> Tensor:
    hidden_TH = hidden.reshape(-1, hidden.shape[-1])
    scores_TE = _normal(case, f"scores {number}", (hidden_TH.shape[0], case.sizes["E"]))
    dense_TE = scores_TE.sigmoid()
    index_TK = dense_TE.topk(case.sizes["K"]).indices
    full_TE = None
    if case.sizes["K"] == case.sizes["E"]:  # those of the choices, in their order, as dense ones
        full_TE = torch.zeros_like(dense_TE).scatter(1, index_TK, dense_TE)
    with torch.no_grad():
        output: Tensor = layer.expert_mlps(
            hidden_TH, dense_TE, index_TK, case.steps[number].shape[1], None, full_TE
        )
    return output


def _backward(output: Tensor) -> None:
    weights = torch.from_numpy(fixed_vector(output.numel())).to(output.dtype)
    (output.reshape(-1) * weights).sum().backward()


def _change_weights(layer: MoE, case: Case, change: str, when: str) -> None:
    new = _state(layer, case, when) if change else {}
    if change == "load":
        layer.load_state_dict(new)
    elif change == "pack":
        layer.expert_mlps.pack_weights(**case.pack)
    elif change == "data":
        for parameter in (*layer.parameters(), *layer.buffers()):
            parameter.data.mul_(-0.5)
        layer.weights_changed()
    elif change:
        named = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        chosen = [sorted(named)[zlib.crc32(case.name.encode()) % len(named)]]
        with torch.no_grad():
            for name in named if change == "all" else chosen:
                named[name].copy_(new[name])


def _state(layer: MoE, case: Case, when: str) -> dict[str, Tensor]:
    """Return new weights by name; those of experts in values of float8_e5m2 if the case says so."""
    state = {}
    for name, old in layer.state_dict().items():
        is_norm = name.startswith("rmsnorm")
        drawn = _normal(case, f"{when} {name}", tuple(old.shape))
        spread = 0.1 if is_norm or "bias" in name else old.shape[-1] ** -0.5
        value = drawn * spread + float(is_norm)
        if case.weights == "fp8" and name.startswith("expert_mlps") and name.endswith("weight"):
            value = value.to(torch.float8_e5m2).float()
        state[name] = value.to(torch.bfloat16).to(old.dtype)
    return state


def _normal(case: Case, what: str, shape: tuple[int, ...]) -> Tensor:
    """Return float32 numbers that depend on the case and on what they are for."""
    stream = np.random.default_rng([zlib.crc32(case.name.encode()), zlib.crc32(what.encode())])
    return torch.from_numpy(stream.standard_normal(shape, dtype=np.float32))


def _static_backend() -> Any:
    from neuron_moe.backends.torch_backend import TorchBackend

    return TorchBackend(static=True)

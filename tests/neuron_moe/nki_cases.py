"""Small layers for tests of the nki backend."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import nki_sim
from neuron_moe import (
    BlockwiseMatmulConfig,
    ExpertMLPsV2,
    MoE,
    MoEFusedTKGConfig,
    RoutedExpertsMLPOpsConfig,
    RouterTopK,
    SharedExperts,
)
from neuron_moe.backends import Backend
from neuron_moe.backends.nki.launch import run
from neuron_moe.backends.nki.router import different_choices, router_launch
from neuron_moe.models.layers import RMSNorm
from neuron_moe.plan import Forms, LayerParts, Plan, Step
from neuron_moe.router import Router, Routing
from neuron_moe.spec import ExpertSpec, Tuning
from neuron_moe.weights import ExpertWeights
from tests.tolerances import rms_error

GPT_OSS: dict[str, Any] = {
    "hidden_act": "sigmoid",
    "glu_type": "swiglu",
    "hidden_act_scaling_factor": 1.702,
    "hidden_act_bias": 1.0,
    "gate_clamp_upper_limit": 7.0,
    "up_clamp_upper_limit": 7.0,
    "up_clamp_lower_limit": -7.0,
    "bias": True,
}
SILU: dict[str, Any] = {"hidden_act": "silu"}
LLAMA4: dict[str, Any] = {"hidden_act": "silu", "early_expert_affinity_modulation": True}
E, H, I = 8, 128, 64  # noqa: E741


SEPARATE: dict[str, Any] = {
    "tkg_config": MoEFusedTKGConfig(quantized=False, moe_fused_kernel_enabled=False)
}


def build(
    backend: str,
    mlp: dict[str, Any],
    tuning: dict[str, Any],
    dtype: torch.dtype,
    top_k: int = 2,
    *,
    router: Callable[[], Router] | None = None,
    shared: dict[str, Any] | None = None,
    norm: bool = False,
    **options: Any,
) -> MoE:
    """Return a layer whose weights depend on the sizes only.

    Args:
        backend: of the experts.
        mlp: their configuration, beside the sizes.
        tuning: of the blockwise path; block_size=None leaves the block size to the backend.
        dtype: of all weights but those of `router`.
        top_k: K, if `router` is not given.
        router: makes another router.
        shared: arguments of SharedExperts.
        norm: an RMSNorm in front.
        options: further arguments of MoE.
    """
    made = RouterTopK(E, top_k, H, bias=True, dtype=dtype) if router is None else router()
    config = RoutedExpertsMLPOpsConfig(
        num_experts=made.num_experts,
        hidden_size=H,
        intermediate_size=I,
        top_k=made.top_k,
        **{"glu_mlp": True, **mlp},
    )
    keys = {"block_size": 32, **tuning}
    if keys["block_size"] is None:
        del keys["block_size"]
    experts = ExpertMLPsV2(
        config,
        BlockwiseMatmulConfig.from_kwargs(**keys),
        dtype=dtype,
        backend=backend,
    )
    layer = MoE(
        made,
        experts,
        None if shared is None else SharedExperts(H, dtype=dtype, **shared),
        RMSNorm(H, 1e-5, dtype) if norm else None,
        **options,
    ).eval()
    torch.manual_seed(3)
    for parameter in (*layer.parameters(), *layer.buffers()):
        drawn = torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5
        parameter.data = drawn.to(torch.bfloat16).to(parameter.dtype)
    return layer


def three_outputs(
    mlp: dict[str, Any],
    hidden: Tensor,
    tuning: dict[str, Any],
    top_k: int = 2,
    *,
    built: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what nki, torch, and torch in float32 make of the same tokens and weights.

    Args:
        mlp: as in `build`.
        hidden: tokens in bfloat16.
        tuning: of nki.
        top_k: K.
        built: further arguments of `build`.
        options: of the call.
    """
    with torch.no_grad():
        nki, bf16, exact = (
            build(backend, mlp, tuning if backend == "nki" else {}, dtype, top_k, **(built or {}))(
                hidden.to(dtype), **options
            ).output.float()
            for backend, dtype in (
                ("nki", torch.bfloat16),
                ("torch", torch.bfloat16),
                ("torch", torch.float32),
            )
        )
    return nki, bf16, exact


def assert_as_right(nki: Tensor, bf16: Tensor, exact: Tensor) -> None:
    """Check that nki is no further from float32 than torch in bfloat16, but for a twentieth."""
    assert rms_error(nki, exact) <= 1.05 * rms_error(bf16, exact)


def plan_of(
    backend: Backend,
    weights: ExpertWeights,
    step: Step,
    *,
    top_k: int,
    scales_input: bool = False,
    block_size: int = 64,
    compat: str | None = None,
) -> Plan:
    """Return how a backend computes a step of experts that are nobody's."""
    experts, width, hidden_size = weights.down_proj_EIH.shape
    spec = ExpertSpec(
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=width,
        formula=weights.formula,
        scales_input=scales_input,
    )
    parts = LayerParts(
        spec=spec,
        weights=weights,
        tuning=Tuning(block_size=block_size),
        num_experts=experts,
        compat=compat,
    )
    return backend.plan(parts, step)


def route(router: Router, hidden_TH: Tensor) -> Routing:
    """Route through the kernel."""
    launch = router_launch(router, Forms(), hidden_TH.shape[0], hidden_TH.dtype, 2)
    affinities_TK, index_TK, logits_TE = run(launch, hidden=hidden_TH)
    return Routing(logits_TE, affinities_TK, different_choices(index_TK))


def watch_launches(
    monkeypatch: pytest.MonkeyPatch, result: Any = None
) -> list[tuple[str, dict[str, Any]]]:
    """Return the list to which every launch adds its kernel's name and its arguments by name.

    Args:
        monkeypatch: of the test.
        result: what launches return instead of running.
    """
    launched: list[tuple[str, dict[str, Any]]] = []
    run = nki_sim.run

    def watch(kernel: Any, lnc: int, **arguments: Any) -> Any:
        launched.append((kernel.__name__, arguments))
        if result is None:
            return run(kernel, lnc=lnc, **arguments)
        return SimpleNamespace(outputs=result)

    monkeypatch.setattr(nki_sim, "run", watch)
    return launched

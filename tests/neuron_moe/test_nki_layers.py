"""Layers of full size, one rank of them, through the nki backend on the simulator.

Only the number of tokens is small: hidden and intermediate size, experts and choices are those of
the published models on that many ranks.
"""

from typing import Any

import numpy as np
import pytest
import torch

from lab.check.kernel_cases import prefill
from lab.check.vendor_cases.case import Case, Limits
from neuron_moe import RouterTopK
from neuron_moe.backends.nki import NkiBackend
from neuron_moe.plan import Step
from neuron_moe.weights import ExpertWeights, LocalRouting
from nki_kernels.common.formula import ExpertFormula, limits
from tests.neuron_moe.nki_cases import plan_of, route
from tests.rows import thinned

LAYERS: dict[str, tuple[dict[str, Any], ExpertFormula]] = {
    "gpt-oss-120b-tp8": (
        {
            "hidden": 2880,
            "intermediate": 360,
            "experts": 128,
            "top_k": 4,
            "tokens": 12,
            "block_size": 128,
            "bias": True,
            "act_fn": "Swish",
            "up_offset": 1.0,
            "gate_clamp_upper": 7.0,
            "up_clamp_upper": 7.0,
            "up_clamp_lower": -7.0,
        },
        ExpertFormula(
            "sigmoid",
            1.702,
            gates_itself=True,
            gate_limits=limits(None, 7.0),
            up_limits=limits(-7.0, 7.0),
            up_offset=1.0,
        ),
    ),
    "llama4-scout-tp16": (
        {
            "hidden": 5120,
            "intermediate": 512,
            "experts": 16,
            "top_k": 1,
            "tokens": 40,
            "block_size": 256,
            "act_fn": "SiLU",
            "affinity_scaling_mode": "PRE_SCALE",
        },
        ExpertFormula("silu"),
    ),
}


def as_torch(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)


def error(output: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(output - exact))))


@pytest.mark.long
@pytest.mark.parametrize("name", thinned(LAYERS, 3, pytest.mark.slow))
def test_experts_of_full_size_are_as_right_as_torch(name: str) -> None:
    params, formula = LAYERS[name]
    case = Case.from_json({"id": name, "kernel": "moe_cte", "params": params})
    problem, _ = prefill.build(case, Limits(macs=1e12))
    assert problem.hidden_TH.shape == (params["tokens"], params["hidden"])
    weights = ExpertWeights(*problem.weights.rounded(), formula)
    routing = LocalRouting(
        torch.from_numpy(problem.index_TK),
        torch.from_numpy(problem.affinities_TK),
        problem.scaling == "PRE_SCALE",
    )
    hidden_TH = as_torch(problem.hidden_TH)
    tokens, top_k = problem.index_TK.shape
    with torch.no_grad():
        prefill_TH, decode_TH = (
            plan_of(
                NkiBackend(),
                weights,
                Step(phase, tokens),
                top_k=top_k,
                scales_input=routing.scales_input,
                block_size=problem.block_size,
            ).experts(hidden_TH, routing)
            for phase in ("prefill", "decode")
        )
    exact = prefill.formula(problem)
    allowed = 1.05 * error(prefill.torch_path(problem), exact)
    assert error(prefill_TH.float().numpy(), exact) <= allowed
    assert error(decode_TH.numpy(), exact) <= allowed


@pytest.mark.parametrize(
    ("hidden_size", "num_experts", "top_k", "act_fn"),
    [(2880, 128, 4, "softmax"), (5120, 16, 1, "sigmoid")],
)
def test_routers_of_full_size_choose_as_torch(
    hidden_size: int, num_experts: int, top_k: int, act_fn: str
) -> None:
    router = RouterTopK(
        num_experts, top_k, hidden_size, bias=True, act_fn=act_fn, apply_act_fn_over_topk=True
    ).eval()
    hidden_TH = torch.randn(200, hidden_size).bfloat16()
    with torch.no_grad():
        nki, wanted = route(router, hidden_TH), router(hidden_TH)
    assert torch.equal(nki.expert_index_TK, wanted.expert_index_TK)
    torch.testing.assert_close(
        nki.expert_affinities_TK, wanted.expert_affinities_TK, rtol=1e-5, atol=1e-5
    )

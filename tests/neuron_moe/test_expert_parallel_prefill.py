"""Prefill on a rank of expert parallelism: splits of drawn layers against float64, both forms."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from neuron_moe.backends.nki import prefill
from neuron_moe.backends.nki.backend import NkiBackend
from neuron_moe.backends.nki.times import draw_choices
from neuron_moe.experts import RoutedExperts
from neuron_moe.plan import Step
from neuron_moe.spec import ExpertFormula, ExpertSpec, Tuning
from neuron_moe.weights import LocalRouting

ROUNDING = 0.01  # of the largest output: bfloat16 rows, weighted sums
QUICK, MORE = 2, 40


@dataclass(frozen=True)
class Split:
    """A rank's share of a layer, and the tokens that come to it; drawn of a seed."""

    seed: int
    ep: int
    num_experts: int
    top_k: int
    tokens: int
    hidden: int
    width: int
    is_sent: bool
    columns: int
    num_cores: int

    @classmethod
    def of(cls, seed: int) -> "Split":
        """Draw one."""
        rng = random.Random(seed)
        ep, top_k = rng.choice((8, 16, 32, 64)), rng.choice((1, 2, 4, 8))
        num_experts = rng.choice((64, 128))
        return cls(
            seed,
            ep,
            num_experts,
            top_k,
            rng.randint(300, 900),
            64 * rng.randint(1, 3),
            32 * rng.randint(1, 3),
            rng.random() < 0.5,
            rng.randint(0, min(top_k, num_experts // ep)),
            rng.choice((1, 2, 2)),
        )


@pytest.mark.parametrize(
    "seed", [*range(QUICK), *(pytest.param(n, marks=pytest.mark.long) for n in range(QUICK, MORE))]
)
def test_a_rank_of_any_split_equals_float64(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split = Split.of(seed)
    monkeypatch.setattr(prefill, "columns_of", lambda *_: split.columns)
    torch.manual_seed(seed)
    spec = ExpertSpec(
        num_experts=split.num_experts,
        top_k=split.top_k,
        hidden_size=split.hidden,
        intermediate_size=split.width,
        formula=ExpertFormula(),
    )
    tuning = Tuning(num_cores=split.num_cores)
    whole = RoutedExperts(spec, tuning, backend="nki", dtype=torch.bfloat16).parts("prefill")
    E, weights = split.num_experts // split.ep, whole.weights
    own = replace(
        weights,
        gate_up_proj_EHI=weights.gate_up_proj_EHI[:E].detach(),
        down_proj_EIH=weights.down_proj_EIH[:E].detach(),
    )
    index = draw_choices(split.tokens, split.num_experts, split.top_k, seed)
    index_TK = np.where(index < E, index, -1)
    if split.is_sent:
        index_TK = index_TK[(index_TK >= 0).any(1)]
    rows = len(index_TK)
    step = Step("prefill", split.tokens, rows=rows if split.is_sent else 0)
    plan = NkiBackend().plan(replace(whole, weights=own), step)
    hidden_NH = torch.randn(rows, split.hidden).to(torch.bfloat16)
    affinities = np.where(index_TK < 0, 0.0, np.random.default_rng(seed).random(index_TK.shape))
    affinities_TK = torch.from_numpy(affinities.astype(np.float32))
    routing = LocalRouting(torch.from_numpy(index_TK.astype(np.int32)), affinities_TK)
    output_NH = plan.experts(hidden_NH, routing).double()
    expected_NH = torch.zeros_like(output_NH)
    for expert in range(E):
        gate, up = (hidden_NH.double() @ own.gate_up_proj_EHI[expert].double()).chunk(2, 1)
        made = (torch.nn.functional.silu(gate) * up) @ own.down_proj_EIH[expert].double()
        chosen = (routing.expert_index_TK == expert) * affinities_TK
        expected_NH += chosen.sum(1, keepdim=True).double() * made
    assert (output_NH - expected_NH).abs().max() <= ROUNDING * expected_NH.abs().max()

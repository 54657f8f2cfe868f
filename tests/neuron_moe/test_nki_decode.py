"""Decode through the nki backend, on the simulator: values, ranks, and what it says of itself."""

from typing import Any

import pytest
import torch
from torch import Tensor

from neuron_moe import ExpertMLPsV2, MoE, MoEFusedTKGConfig
from neuron_moe.backends.nki import NkiBackend
from neuron_moe.backends.torch_backend import TorchBackend
from neuron_moe.parallel import ParallelConfig, parallel_state
from neuron_moe.paths import choose_path
from neuron_moe.plan import Step
from neuron_moe.sharded.sharding import shard_state_dict
from neuron_moe.weights import LocalRouting
from nki_kernels.decode import DecodeConfig
from tests.neuron_moe.nki_cases import (
    GPT_OSS,
    LLAMA4,
    SEPARATE,
    SILU,
    E,
    H,
    assert_as_right,
    build,
    plan_of,
    three_outputs,
    watch_launches,
)

CASES: dict[str, tuple[dict[str, Any], int]] = {
    "gpt-oss": (GPT_OSS, 4),
    "silu": (SILU, 3),
    "llama4": (LLAMA4, 1),
    "llama4-top-2": (LLAMA4, 2),
}


def step_of(mlp: dict[str, Any], top_k: int, *shape: int, **options: Any) -> tuple[Tensor, ...]:
    """Return the outputs of a decode step of separate kernels: nki, torch, torch in float32."""
    hidden = torch.randn(*shape, H).bfloat16()
    return three_outputs(mlp, hidden, {}, top_k, built=SEPARATE, **options)


@pytest.mark.parametrize("batch", [1, 2, 5, 16, 130, 256])
@pytest.mark.parametrize("name", CASES)
def test_decode_is_as_right_as_torch(name: str, batch: int) -> None:
    assert_as_right(*step_of(*CASES[name], batch, 1))


@pytest.mark.parametrize("window", [2, 5])
def test_speculation_windows_are_as_right_as_torch(window: int) -> None:
    assert_as_right(*step_of(GPT_OSS, 4, 3, window, is_speculative_decoding=True))


def test_padding_tokens_get_zero() -> None:
    mask = (torch.arange(6) % 3 != 0)[:, None]
    nki, bf16, exact = step_of(GPT_OSS, 2, 6, 1, padding_mask=mask)
    assert (nki[~mask] == 0).all()
    assert_as_right(nki, bf16, exact)


@pytest.mark.parametrize("options", [SEPARATE, {}], ids=["separate", "fused"])
@pytest.mark.parametrize(("phase", "tokens"), [("decode", 2), ("prefill", 40)])
def test_everything_is_laid_out_before_the_first_step(
    phase: str, tokens: int, options: dict[str, Any]
) -> None:
    layer = build("nki", GPT_OSS, {}, torch.bfloat16, **options)
    layer.router.float()
    plan = layer.plan(Step(phase, tokens))
    layer.prepare(phase, tokens)
    kept = set(plan.parts.forms._kept)
    assert "router" in kept
    with torch.no_grad():
        layer(
            torch.randn(tokens, 1, H).bfloat16()
            if phase == "decode"
            else torch.randn(1, tokens, H).bfloat16()
        )
    assert set(plan.parts.forms._kept) == kept
    experts = layer.expert_mlps.plan(Step(phase, tokens))
    experts.prepare()  # they have no router
    assert "router" not in experts.parts.forms._kept


@pytest.mark.parametrize(("mode", "tokens"), [("selective", 2), ("all_experts", 7)])
def test_both_modes_give_what_torch_gives(mode: str, tokens: int) -> None:
    weights = build("torch", GPT_OSS, {}, torch.bfloat16).expert_mlps.weights()
    index_TK = torch.rand(tokens, E).argsort(1)[:, :3].to(torch.int32)
    index_TK[0] = -1
    index_TK[1:, 0] = 2  # one expert of all tokens
    routing = LocalRouting(index_TK, torch.rand(tokens, 3) * (index_TK >= 0))
    hidden_TH = torch.randn(tokens, H).bfloat16()
    step = Step("decode", tokens)
    plans = [
        plan_of(backend, weights, step, top_k=3, compat="nxd")
        for backend in (NkiBackend(), TorchBackend())
    ]
    assert [plan.path for plan in plans] == [mode] * 2
    with torch.no_grad():
        nki, wanted = (plan.experts(hidden_TH, routing) for plan in plans)
    assert (nki[0] == 0).all()
    torch.testing.assert_close(nki, wanted, rtol=0.03, atol=0.03 * wanted.abs().max().item())


def split(ranks: int, tensor: int = 1, **options: Any) -> tuple[ExpertMLPsV2, list[ExpertMLPsV2]]:
    """Return whole experts on the torch backend, and the parts of every rank on the nki backend."""
    whole = build("torch", GPT_OSS, {}, torch.bfloat16, 4).expert_mlps
    state = whole.state_dict()
    parts = []
    for rank in range(ranks * tensor):
        with parallel_state.as_rank(ParallelConfig(ep=ranks, tp=tensor, **options), rank):
            part = build("nki", GPT_OSS, {}, torch.bfloat16, 4).expert_mlps
        part.load_state_dict(shard_state_dict(part, state))
        parts.append(part)
    return whole, parts


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (4, 1), (8, 1), (2, 2)])
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_the_parts_of_all_ranks_add_up_to_the_layer(ranks: int, tensor: int, batch: int) -> None:
    whole, parts = split(ranks, tensor)
    hidden_TH = torch.randn(batch, H).bfloat16()
    index_TK = torch.rand(batch, E).argsort(1)[:, :4]
    affinities_TK = torch.rand(batch, 4)
    with torch.no_grad():
        wanted = whole(hidden_TH, affinities_TK, index_TK, 1).float()
        found = [part(hidden_TH, affinities_TK, index_TK, 1).float() for part in parts]
    for rank, part in enumerate(parts):
        mine = part.local_experts("decode")
        is_hit = ((index_TK >= mine[0]) & (index_TK <= mine[-1])).any(1)
        assert (found[rank][~is_hit] == 0).all()
    scale = wanted.abs().max().item()
    torch.testing.assert_close(sum(found), wanted, rtol=0.03, atol=0.03 * scale)


def test_one_compiled_kernel_serves_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    _, parts = split(4)
    launches = watch_launches(monkeypatch, torch.zeros(2, H))
    for part in parts:
        with torch.no_grad():
            part(torch.randn(2, H).bfloat16(), torch.rand(2, 4), torch.arange(4).expand(2, 4), 1)
    launched = [(args["config"], int(args["first_expert"])) for _, args in launches]
    assert [first for _, first in launched] == [0, 2, 4, 6]
    assert all(config is launched[0][0] for config, _ in launched)


def layer(**options: Any) -> MoE:
    return build("nki", GPT_OSS, {}, torch.bfloat16, **{**SEPARATE, **options})


@pytest.mark.parametrize(("phase", "tokens"), [("decode", 1), ("decode", 64), ("speculation", 6)])
def test_explain_names_the_mode_that_runs_and_why(
    phase: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    moe = layer()
    shown = moe.explain(phase, tokens)
    assert shown.decision.kernel == "nki.decode_moe"
    assert shown.path in ("selective", "all_experts")
    assert any("cost model of decode_moe" in reason for reason in shown.decision.reasons)
    assert any("T*K = " in reason for reason in shown.decision.reasons)
    assert any(
        f"plan: {'all' if shown.path == 'all_experts' else 'selective'} mode" in note
        for note in shown.notes
    )
    launches = watch_launches(monkeypatch)
    hidden = torch.randn(tokens, 1, H).bfloat16()
    with torch.no_grad():
        moe(hidden, phase=phase)
    modes = [
        value.mode
        for _, args in launches
        for value in args.values()
        if isinstance(value, DecodeConfig)
    ]
    assert modes == ["all" if shown.path == "all_experts" else "selective"]


def test_the_rule_of_nxd_is_followed_where_asked() -> None:
    moe = layer()
    moe.expert_mlps.compat = "nxd"
    assert moe.explain("decode", 3).path == "selective"
    assert moe.explain("decode", 4).path == "all_experts"
    assert "cost model" not in str(moe.explain("decode", 3).decision)


def test_steps_too_long_for_the_decode_kernel_go_through_blocks() -> None:
    decision = choose_path("decode", 257, 4, 128, backend="nki")
    assert (decision.path, decision.kernel) == ("blockwise", "nki.blockwise_moe")
    assert "T=257 > 256, the most of decode_moe" in decision.reasons[0]
    assert choose_path("decode", 256, 4, 128, backend="nki").kernel == "nki.decode_moe"
    assert_as_right(*step_of(GPT_OSS, 2, 260, 1))


IN_BLOCKS: dict[str, tuple[dict[str, Any], str]] = {
    "swiglu-of-another-scale": (
        {"glu_type": "swiglu", "hidden_act": "sigmoid", "hidden_act_scaling_factor": 1.3},
        "activation='sigmoid', scale=1.3",
    ),
    "no-gate": ({"glu_mlp": False, "hidden_act": "relu"}, "has_gate=False"),
}


@pytest.mark.parametrize("batch", [3, 40])
@pytest.mark.parametrize("case", IN_BLOCKS)
def test_formulas_that_only_the_prefill_kernel_has_go_through_blocks(case: str, batch: int) -> None:
    mlp, reason = IN_BLOCKS[case]
    shown = build("nki", mlp, {}, torch.bfloat16).explain("decode", batch)
    assert (shown.decision.path, shown.decision.kernel) == ("blockwise", "nki.prefill_layer")
    assert reason in shown.decision.reasons[0]
    assert_as_right(*step_of(mlp, 2, batch, 1))


def test_one_launch_that_was_asked_for_names_the_formula_it_lacks() -> None:
    mlp = IN_BLOCKS["no-gate"][0]
    switches = MoEFusedTKGConfig(quantized=False, moe_fused_kernel_enabled=True)
    layer = build("nki", mlp, {}, torch.bfloat16, tkg_config=switches)
    with pytest.raises(ValueError, match=r"moe_fused_kernel_enabled=True: .*has_gate=False"):
        layer.explain("decode", 3)


def test_what_the_decode_kernel_cannot_do_is_refused() -> None:
    hidden = torch.randn(2, 1, H)
    with torch.no_grad(), pytest.raises(ValueError, match=r"float32 must be bfloat16"):
        build("nki", GPT_OSS, {}, torch.float32)(hidden)

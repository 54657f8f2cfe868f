"""Plans of `neuron-moe tune`: written, read, refused, and the very ones that run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from neuron_moe import BlockwiseMatmulConfig, ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig
from neuron_moe import RouterTopK as Router
from neuron_moe.models.expert_load import moe_layers
from neuron_moe.models.loader import load_model
from neuron_moe.models.shipped import shipped_checkpoint
from neuron_moe.paths import DENSE_STREAM_TOKENS
from neuron_moe.spec import Tuning
from neuron_moe.tuned import TunedDecode, TunedModel, TunedPlans, TunedPrefill, read_tuned

E, K, H, I = 8, 2, 128, 64  # noqa: E741  the axis letter
CHOICE = TunedPrefill(
    tokens=300,
    block_size=64,
    shard_plan="intermediate",
    loop_plan="sorted",
    work_tile=2,
    loaded_parts=(1, 1),
    weight_buffers=1,
    weights="plain",
)
PLANS = TunedPlans(
    prefill=(
        CHOICE,
        replace(CHOICE, tokens=1000, block_size=32, shard_plan="hidden", weight_buffers=2),
    ),
    decode=(TunedDecode(tokens=4, mode="all_experts"),),
)


def write(path: Path, **changes: Any) -> Path:
    found = TunedModel(model="m", tp=1, ep=1, lnc=2, plans=PLANS)
    replace(found, **changes).write(path, "made by a test\nof two lines")
    return path


def layer(config: BlockwiseMatmulConfig) -> MoE:
    sizes = RoutedExpertsMLPOpsConfig(
        num_experts=E, hidden_size=H, intermediate_size=I, top_k=K, hidden_act="silu", glu_mlp=True
    )
    torch.manual_seed(0)
    experts = ExpertMLPsV2(sizes, config, dtype=torch.bfloat16, backend="nki")
    router = Router(E, K, H, sequence_parallel_enabled=False, sequence_dimension=1)
    return MoE(router, experts, sequence_parallel_enabled=False).eval()


def tuned_layer(folder: Path, *prefill: TunedPrefill) -> MoE:
    """Return a layer of a file with these plans of prefill, or with all of PLANS."""
    plans = TunedPlans(prefill=prefill) if prefill else PLANS
    return layer(BlockwiseMatmulConfig.from_tuned(write(folder / "tuned.yaml", plans=plans)))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "tuned.yaml")
    assert read_tuned(path).plans == PLANS
    assert path.read_text().startswith("# made by a test\n# of two lines\n")


@pytest.mark.parametrize(("tokens", "number"), [(129, 0), (300, 0), (301, 1), (1000, 1)])
def test_a_layer_reports_and_runs_exactly_the_tuned_plan(
    tokens: int, number: int, tmp_path: Path
) -> None:
    shown = tuned_layer(tmp_path).explain("prefill", tokens)
    wanted = PLANS.prefill[number]
    assert shown.chosen == {**wanted.to_dict(), "tokens": tokens}
    assert shown.block_size == wanted.block_size
    assert f"tuned for up to {wanted.tokens} tokens" in str(shown)


def test_a_tuned_plan_computes_what_any_plan_computes(tmp_path: Path) -> None:
    tuned = tuned_layer(tmp_path, replace(CHOICE, tokens=64))
    free = layer(BlockwiseMatmulConfig())
    hidden = torch.randn(1, 40, H).bfloat16()
    with torch.no_grad():
        found, wanted = tuned(hidden)[0], free(hidden)[0]
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0.05, atol=0.02)


def test_a_model_that_is_loaded_with_the_plans_reports_them() -> None:
    folder = shipped_checkpoint()
    assert folder is not None
    tuned = replace(CHOICE, tokens=64, shard_plan="balanced")
    tuning = Tuning(tuned=TunedPlans(prefill=(tuned,)))
    model = load_model(folder, backend="nki", tuning=tuning)
    for layer_of_model in moe_layers(model):
        assert layer_of_model.explain("prefill", 64).chosen == tuned.to_dict()


def test_longer_prompts_are_left_to_the_cost_model(tmp_path: Path) -> None:
    assert "the cost model's choice" in str(tuned_layer(tmp_path).explain("prefill", 1001))


def test_a_plan_for_short_prompts_sends_them_through_blocks(tmp_path: Path) -> None:
    for tokens, path in (
        (DENSE_STREAM_TOKENS, "blockwise"),
        (DENSE_STREAM_TOKENS + 1, "all_experts"),
    ):
        built = tuned_layer(tmp_path, replace(CHOICE, tokens=tokens))
        assert built.explain("prefill", 64).path == path


@pytest.mark.parametrize("mode", ["selective", "all_experts"])
def test_a_decode_mode_that_is_asked_for_runs_and_is_told(mode: str) -> None:
    for tokens in (1, 16):
        shown = layer(BlockwiseMatmulConfig(decode_mode=mode)).explain("decode", tokens)
        assert shown.path == mode == shown.chosen["mode"]
        ends = shown.decision.reasons[0], shown.decision.reasons[-1]
        assert any(f"decode_mode={mode!r} was requested" in reason for reason in ends)
        assert any(change.startswith("mode: decode_mode=") for change in shown.changes)


def test_a_tuned_decode_mode_holds_for_the_steps_it_covers(tmp_path: Path) -> None:
    built = tuned_layer(tmp_path)
    assert built.explain("decode", 4).path == "all_experts"
    assert "cost model" in " ".join(built.explain("decode", 5).decision.reasons)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "by parts"}, r"Call pack_weights\(for_prefill=True\)"),
        ({"loaded_parts": (7, 1)}, "does not fit a core with H=128, I=64"),
    ],
    ids=["weights are not by parts", "too large"],
)
def test_plans_that_the_layer_cannot_run_say_why(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        tuned_layer(tmp_path, replace(CHOICE, **change)).explain("prefill", 300)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("just words", "must hold names and values"),
        ("a: [", "is no YAML"),
        ("model: m\ntp: 1\nep: 1", "lnc is missing"),
        ("model: m\ntp: 1\nep: 1\nlnc: 2\nprefil: []", "unknown key 'prefil'"),
        ("model: m\ntp: 1\nep: 1\nlnc: 2\nprefill: [{tokens: 3}]", "block_size is missing"),
        ("model: m\ntp: 0\nep: 1\nlnc: 2", "tp=0"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_tuned(path)


def test_what_contradicts_tuned_plans_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "tuned.yaml")
    with pytest.raises(ValueError, match="tuned for lnc=2, not for lnc=1"):
        BlockwiseMatmulConfig.from_tuned(path, logical_nc_config=1)
    with pytest.raises(ValueError, match="block_size=64 beside tuned plans"):
        layer(BlockwiseMatmulConfig.from_tuned(path, block_size=64))

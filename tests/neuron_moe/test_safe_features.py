"""Plans that use only what public kernels show, and what of them is opened again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from neuron_moe import BlockwiseMatmulConfig, MoE
from neuron_moe.backends.nki import features
from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.plan import Plan
from neuron_moe.spec import Tuning
from neuron_moe.tools.models import read_model
from neuron_moe.tuned import TunedPlans
from neuron_moe.verdicts import FEATURES, PROBES, Verdict, opened_by, write_verdicts
from tests.golden.layer_cases import Case, Step, draw_case, make_layer

BF16_TOLERANCE = 2e-2  # of the norm of a token: three roundings of 2^-8 and their products
NAMES = [f"nki-{number:03d}" for number in range(30)]
STEPS = (Step("decode", (5, 1)), Step("prefill", (1, 12)), Step("prefill", (1, 150)))
DYNAMIC_WHILES = ("use_shard_on_block_dynamic_while", "use_shard_on_intermediate_dynamic_while")


def build(case: Case, backend: str, dtype: torch.dtype, word: str) -> MoE:
    sizes, tuning = {**case.sizes, "dtype": dtype}, {**case.tuning, "features": word}
    return make_layer(replace(case, backend=backend, sizes=sizes, tuning=tuning))


@pytest.mark.parametrize(
    "name",
    [
        *NAMES[:6],
        *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[6:16]),
        *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[16:]),
    ],
)
@torch.no_grad()
def test_layers_compute_the_same(name: str) -> None:
    drawn = draw_case(name)
    layer = {"return_expert_index": True}
    case = replace(drawn, weights="plain", pack={}, counts=False, layer=layer, steps=STEPS[-1:])
    nki = build(case, "nki", torch.bfloat16, "safe")
    rounded = build(case, "torch", torch.bfloat16, "open")
    exact = build(case, "torch", torch.float32, "open")
    state = nki.state_dict()
    rounded.load_state_dict(state)
    exact.load_state_dict(
        {key: value.to(exact.state_dict()[key].dtype) for key, value in state.items()}
    )
    for step in STEPS:
        draw = torch.Generator().manual_seed(7)
        hidden = torch.randn(*step.shape, case.sizes["H"], generator=draw).bfloat16()
        (found, found_K), (wanted, wanted_K), (_, rounded_K) = (
            outcome(*each) for each in ((nki, hidden), (exact, hidden.float()), (rounded, hidden))
        )
        is_alike = (found_K == wanted_K).all(1)
        # Rounded tokens may choose otherwise between experts that are nearly alike, as torch does.
        assert int((~is_alike & (found_K != rounded_K).any(1)).sum()) <= len(found) // 100, step
        off_T = ((found - wanted).norm(dim=1) / wanted.norm(dim=1))[is_alike]
        assert is_alike.sum() >= 0.7 * len(found), step
        assert float(off_T.max()) <= BF16_TOLERANCE, (step, off_T.max())


def outcome(layer: MoE, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output [T, H] and experts [T, K] of a layer, these in order."""
    layer.eval()
    output, *_, index = layer(hidden)
    return output.double().flatten(0, -2), index.flatten(0, -2).sort(1).values


def plan(phase: str, tokens: int, model: str = "qwen3_30b_a3b", **tuning: Any) -> Plan:
    made = Tuning(**tuning)
    return RankLayer(read_model(model)[0], model, tp=8, backend="nki", tuning=made).plan(
        phase, tokens
    )


def test_prefill_leaves_out_what_no_public_kernel_shows() -> None:
    loop = plan("prefill", 512)._compiled.config.loop  # type: ignore[attr-defined]
    assert (loop.is_dynamic, loop.iterations, loop.missing) == (True, "alone", "skip")


@pytest.mark.long
def test_shared_experts_of_prefill_do_likewise() -> None:
    shared = plan("prefill", 256, "llama4_scout").shared_config  # type: ignore[attr-defined]
    assert shared.loop.iterations == "alone"


def test_a_tuned_plan_opens_nothing() -> None:
    tuned = TunedPlans(prefill=(plan("prefill", 512)._tuned(),))  # type: ignore[attr-defined]
    loop = plan("prefill", 512, tuned=tuned)._compiled.config.loop  # type: ignore[attr-defined]
    assert loop.iterations == "alone"


def test_what_a_chip_was_seen_to_have_is_opened_again(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.json"
    found: dict[str, Verdict] = {probe: "works" for probes in PROBES.values() for probe in probes}
    write_verdicts(file, found, "trn2", ())
    assert opened_by(file) == FEATURES
    opened = Tuning(features=opened_by(file))
    assert features.prefill_request(opened).iterations == "ahead"
    write_verdicts(file, {**found, "loads for the next iteration": "fails"}, "trn2", ())
    closed = Tuning(features=opened_by(file))
    assert features.prefill_request(closed).iterations == "alone"


@pytest.mark.parametrize("features", ["closed", frozenset({"loops"}), ["open"], None])
def test_an_unknown_feature_is_refused(features: Any) -> None:
    with pytest.raises(ValueError, match="must be 'open', 'safe', or a frozenset of 'loads"):
        Tuning(features=features)
    with pytest.raises(ValueError, match="must be 'open', 'safe'"):
        BlockwiseMatmulConfig(features=features)


def named(**switches: Any) -> str:
    """Return what is said of a prefill of NxD's switches under the safe profile."""
    case = replace(draw_case("nki-000"), weights="plain", pack={}, layer={}, shared=None)
    switches = {"block_size": 128, "features": "safe", **switches}
    return str(make_layer(replace(case, tuning=switches)).explain("prefill", 300))


@pytest.mark.parametrize("switch", DYNAMIC_WHILES)
def test_a_dynamic_while_has_a_precedent(switch: str) -> None:
    shown = named(**{switch: True})
    assert "plan: dynamic loop" in shown
    assert "no public kernel" not in shown


def test_what_has_no_precedent_is_told() -> None:
    shown = named(features="open", use_shard_on_block_dynamic_while=True)
    assert (
        "no public kernel has a precedent of: an iteration of a loop loads for the next one"
        in shown
    )
    assert "no public kernel" not in str(plan("decode", 4).explain())


def test_e5m2_weights_stay_and_are_told() -> None:
    config = plan("decode", 4).config.moe  # type: ignore[attr-defined]
    narrow = replace(config, weights=replace(config.weights, format="float8_e5m2"))
    (shown,) = features.decode_notes(narrow)
    assert "products with float8_e5m2 weights" in shown

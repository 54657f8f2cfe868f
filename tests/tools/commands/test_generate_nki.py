"""neuron-moe generate --backend nki: the tokens of the torch backend, through the kernels."""

import json
from pathlib import Path
from typing import Any

import pytest

from neuron_moe.models.sample_checkpoint import make_checkpoint, sample_config
from neuron_moe.tools import cli
from neuron_moe.tools.commands import generate

SMALL = {
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_local_experts": 8,
    "sliding_window": 8,
}


def run(
    folder: Path, capsys: pytest.CaptureFixture[str], backend: str, *options: str
) -> tuple[str, Any]:
    arguments = ["--model", str(folder), "--json", "--backend", backend]
    assert generate.main([*arguments, *options]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return "\n".join(lines), json.loads(last)


def test_a_tiny_model_generates_the_same_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # With this seed the two largest logits are 0.15 apart at every step, in float32 and in bfloat16
    # whatever the plan; roundings move a logit by 0.06 at most. With most seeds a plan that adds up
    # partial sums may turn a token.
    folder = make_checkpoint(tmp_path, {**sample_config(), **SMALL}, seed=1)
    prompts = ["--prompt", "Once upon a time there was a router", "--prompt", "Tokens"]
    prompts += ["--max-new-tokens", "3"]
    _, wanted = run(folder, capsys, "torch", *prompts)
    text, got = run(folder, capsys, "nki", *prompts, "--explain")
    tokens = [[answer["token_ids"] for answer in result["answers"]] for result in (wanted, got)]
    assert tokens[0] == tokens[1]
    prefill, decode = got["explain"]
    assert (prefill["path"], prefill["kernel"]) == ("all_experts", "nki.decode_layer")
    assert "weights: float8_e5m2, re-coded without loss, a scale per expert" in prefill["notes"]
    assert decode["kernel"] == "nki.decode_layer"
    assert "device_us" not in wanted or set(wanted["device_us"]) == {"kind"}
    assert got["device_us"]["kind"] == "simulated"
    assert 0 < got["device_us"]["decode"] < got["device_us"]["prefill"]
    assert "of a step on the device" in text
    assert "cost model of decode_layer" in text


def test_the_shipped_model_generates_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[3] / "models" / "tiny_gpt_oss"
    prompts = ["--prompt", "def main(argv):", "--prompt", "lantern, n.", "--max-new-tokens", "6"]
    _, wanted = run(folder, capsys, "torch", *prompts)
    _, got = run(folder, capsys, "nki", *prompts)
    tokens = [[answer["token_ids"] for answer in result["answers"]] for result in (wanted, got)]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        pytest.param("nki", (1, 4), marks=pytest.mark.long),
        pytest.param("nki", (2, 2), marks=pytest.mark.slow),
        ("torch", (2, 2)),
        ("torch", (1, 3)),  # two ranks of 11 experts, and one of 10 and a replica
    ],
)
def test_ranks_that_share_the_experts_generate_the_same_tokens(
    backend: str, layout: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(__file__).parents[3] / "models" / "tiny_gpt_oss"
    prompts = ["--prompt", "def main(argv):", "--max-new-tokens", "3"]
    tp, ep = layout
    _, wanted = run(folder, capsys, "torch", *prompts)
    _, got = run(folder, capsys, backend, *prompts, "--tp", str(tp), "--ep", str(ep), "--explain")
    assert [a["token_ids"] for a in got["answers"]] == [a["token_ids"] for a in wanted["answers"]]
    assert (got["config"]["tp"], got["config"]["ep"]) == layout
    kernels = [shown["kernel"] for shown in got["explain"]]
    if backend == "nki":
        assert kernels == ["nki.decode_layer", "nki.decode_layer"]
    assert f"for the {-(-32 // ep)} experts here" in " ".join(got["explain"][1]["reasons"])


def test_no_ranks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", "tiny_gpt_oss", "--prompt", "a"]
    assert cli.main([*arguments, "--ep", "0"]) == 2
    assert "--ep=0: must be" in capsys.readouterr().err


def test_the_decode_mode_is_the_one_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(tmp_path, {**sample_config(), **SMALL}, seed=1)
    asked = ["--prompt-ids", "1,2", "--max-new-tokens", "2", "--explain"]
    for mode in ("selective", "all_experts"):
        _, got = run(folder, capsys, "nki", *asked, "--decode-mode", mode)
        assert got["explain"][-1]["path"] == mode

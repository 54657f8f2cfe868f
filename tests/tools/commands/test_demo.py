"""neuron-moe demo, end to end on the checkpoint it makes, and what it says when ours is wrong."""

import contextlib
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread

from neuron_moe.models.loader import load_model
from neuron_moe.models.sample_checkpoint import make_checkpoint
from neuron_moe.models.text import TextCodec
from neuron_moe.tools import cli, reference
from neuron_moe.tools.commands import demo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint")


@dataclass
class Run:
    """One run of the command: exit status, what people read, the last line as an object."""

    out: Path
    status: int
    text: str
    result: dict[str, Any]


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("out")
    printed = io.StringIO()
    options = ["--model", str(folder), "--out", str(out), "--max-new-tokens", "8", "--json"]
    with contextlib.redirect_stdout(printed):
        status = demo.main(options)
    *lines, last = printed.getvalue().splitlines()
    return Run(out, status, "\n".join(lines), json.loads(last))


def test_the_demo_ends_with_equal_tokens_and_names_its_pictures(run: Run) -> None:
    assert run.status == 0
    table = run.text[run.text.rindex("| tokens equal") :]
    assert re.search(r"tokens equal to transformers: (\d+)/\1\b", table)
    for name in ("fp32", "bf16"):
        assert re.search(rf"largest logit difference, {name}: \d\.\d\de[-+]\d\d", table)
    for picture in ("expert_load.png", "padding_overhead.png"):
        assert f"picture: {run.out / picture}" in table
        assert imread(run.out / picture).std() > 0.01  # something is drawn


def test_the_numbers_of_the_demo_are_those_of_rounding(run: Run) -> None:
    result = run.result
    assert result["tokens_equal"] == result["tokens_total"] == 8 * len(demo.PROMPTS)
    assert 0 < result["float32"]["largest"] < 1e-4 * result["float32"]["scale"]
    assert result["bfloat16"]["rms"] < 1.5 * result["reference_bfloat16"]["rms"]
    assert result["kind"] == "measured"


def test_the_demo_shows_every_dropless_path_and_why(run: Run) -> None:
    explained = run.result["explain"]
    paths = [(explanation["phase"], explanation["path"]) for explanation in explained]
    assert paths == [("prefill", "blockwise"), ("decode", "all_experts"), ("decode", "selective")]
    for explanation in explained:
        assert all(reason in run.text for reason in explanation["reasons"])


def test_without_a_shipped_checkpoint_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "shipped_checkpoint", lambda: None)
    folder, origin = demo.find_checkpoint(None, tmp_path)
    assert folder == tmp_path / "checkpoint"
    assert "random weights" in origin
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert (folder / "tokenizer.json").is_file()


def test_a_shipped_checkpoint_is_preferred(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "shipped_checkpoint", lambda: folder)
    assert demo.find_checkpoint(None, tmp_path)[0] == folder
    assert demo.find_checkpoint(tmp_path, tmp_path)[0] == tmp_path


def test_prompts_that_come_with_a_checkpoint_are_used(tmp_path: Path) -> None:
    assert demo.read_prompts(tmp_path) == demo.PROMPTS
    (tmp_path / demo.PROMPTS_FILE).write_text('["In the beginning"]')
    assert demo.read_prompts(tmp_path) == ["In the beginning"]
    (tmp_path / demo.PROMPTS_FILE).write_text('{"text": 1}')
    with pytest.raises(ValueError, match="must be a JSON list of strings"):
        demo.read_prompts(tmp_path)


def test_a_wrong_model_is_found_out(folder: Path) -> None:
    """Without sinks the arithmetic is wrong: neither tokens nor logits may pass."""
    codec = TextCodec(folder)
    model = load_model(folder, dtype=torch.float32)
    with torch.inference_mode():
        for layer in model.layers:
            layer.self_attn.sinks.zero_()
    prompts = [codec.encode(text) for text in demo.PROMPTS[:3]]
    options = demo.GenerationOptions(max_new_tokens=8, stop_token_ids=codec.stop_token_ids)
    answers = demo.generate_and_explain(model, prompts, options)[1].token_ids
    outcome = demo.compare(folder, model, prompts, answers, options)
    assert not outcome.is_good
    assert outcome.tokens_equal < outcome.tokens_total
    assert outcome.float32.largest > 1e-2


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([[1, 2, 3]], [[1, 2, 3]], (3, 3)),
        ([[1, 9, 3]], [[1, 2, 3]], (1, 3)),
        ([[1, 2]], [[1, 2, 3]], (2, 3)),
        ([[1], [5, 6]], [[1], [5, 7]], (2, 3)),
    ],
    ids=["equal", "chance-hit-after-a-difference", "one-is-shorter", "two-prompts"],
)
def test_tokens_count_until_the_first_difference(
    ours: list[list[int]], theirs: list[list[int]], expected: tuple[int, int]
) -> None:
    assert reference.count_equal(ours, theirs) == expected


def test_deviation_leaves_padding_out() -> None:
    exact = torch.tensor([[[9.0, 0.0], [1.0, -3.0]]])
    logits = torch.tensor([[[0.0, 0.0], [1.5, 2.0]]])
    found = reference.deviation(logits, exact, torch.tensor([[False, True]]))
    assert (found.largest, found.scale, found.same_choice) == (5.0, 3.0, 0.0)


def test_a_missing_reference_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference.importlib.util, "find_spec", lambda _name: None)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    assert "pip install 'neuron-moe[demo]'" in capsys.readouterr().err

"""Odd configurations that transformers runs: ours runs them alike, or refuses them by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from neuron_moe.models.generation import GenerationOptions, generate
from neuron_moe.models.loader import load_model
from tests.models.families import reference_of, write_checkpoint
from tests.models.odd_configs import BASES, configs
from tests.rows import thinned

REFUSED = {
    *((name, "biases") for name in ("qwen3_5_moe", "qwen3_next")),
    *(("kimi_linear", change) for change in ("one-layer", "tied")),
    *(("kimi_k3", change) for change in ("gelu", "gelu-tanh", "relu", "relu2", "biases")),
    ("bailing_hybrid", "tied"),
    ("hy_v3", "one-layer"),  # a dense one: no MoE
    ("exaone_moe", "one-layer"),
    ("glm4_moe_lite", "one-layer"),
    ("afmoe", "one-layer"),
    ("laguna", "one-layer"),
    ("mimo_v2_flash", "one-layer"),
    ("deepseek_v4", "all-kv-heads"),
    ("hy_v4", "one-layer"),
    ("step3p5", "one-layer"),
}
FEW = {  # a change, and the family that it is tried with in the default run
    "tied": "gpt_oss",
    "no-head-dim": "qwen3_moe",
    "gelu": "deepseek_v3",
    "gelu-tanh": "dbrx",
    "relu": "granitemoehybrid",
    "relu2": "qwen3_next",
    "linear": "mixtral",
    "dynamic": "dbrx",
    "llama3": "ernie4_5_moe",
    "yarn": "llama4-scout",
    "yarn-of-the-context": "minimax_m2",
    "many-experts": "qwen3_moe",
}


def compare(values: dict[str, Any], folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of transformers and ours of a tiny random checkpoint; ours may refuse it."""
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(0, min(values["vocab_size"], 99), (2, 24), generator=rng)
    write_checkpoint(values, folder, seed=3)
    reference = reference_of(folder)
    reference.set_experts_implementation("eager")
    with torch.no_grad():
        theirs = reference(input_ids=ids, use_cache=False).logits
        return theirs, load_model(folder, dtype=torch.float32)(ids)


@pytest.mark.parametrize(("change", "base"), FEW.items())
def test_a_change_is_read_as_transformers_reads_it(change: str, base: str, tmp_path: Path) -> None:
    theirs, ours = compare(dict(configs(base))[change], tmp_path)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


def test_a_dynamic_embedding_goes_beyond_the_context_as_transformers_does(tmp_path: Path) -> None:
    values = BASES["glm4_moe"] | {"max_position_embeddings": 16}
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
    write_checkpoint(values | {"rope_parameters": rope}, tmp_path, seed=3)
    ours = load_model(tmp_path, dtype=torch.float32)
    for size in (12, 30):  # crosses the context while it decodes, or begins beyond
        reference = reference_of(tmp_path)  # which remembers how long a sequence was
        ids = torch.arange(7, 7 + size)[None]
        options = {"max_new_tokens": 48 - size, "do_sample": False, "pad_token_id": 0}
        expected = reference.generate(ids, **options)[0, size:].tolist()
        prompts = [[5, 6], ids[0].tolist()]  # what another sequence does changes nothing
        found = generate(ours, prompts, GenerationOptions(max_new_tokens=48 - size)).token_ids
        assert found[1] == expected
    with pytest.raises(ValueError, match=r"exceed max_position_embeddings=16 x 3 \(dynamic rope\)"):
        generate(ours, [[1] * 48], GenerationOptions(max_new_tokens=1))


@pytest.mark.parametrize("base", ["qwen3_moe", "deepseek_v4"])
def test_a_head_of_its_own_is_refused_where_the_embedding_is_the_head(
    base: str, tmp_path: Path
) -> None:
    write_checkpoint(BASES[base] | {"tie_word_embeddings": False}, tmp_path, seed=3)
    config = tmp_path / "config.json"
    values = json.loads(config.read_text()) | {"tie_word_embeddings": True}
    config.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"head\.weight: differs from .*Set tie_word_embeddings"):
        load_model(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("base", thinned(BASES, 6, pytest.mark.slow))
def test_every_change_is_read_as_transformers_reads_it(base: str, tmp_path: Path) -> None:
    refused, wrong = set(), []
    for change, values in configs(base):
        folder = tmp_path / change
        try:
            theirs, ours = compare(values, folder)
        except ValueError as error:
            if str(folder) not in str(error):  # transformers', not ours, refused it
                raise
            refused.add((base, change))
            continue
        error_share = float((ours - theirs).abs().max() / theirs.abs().max())
        if error_share > 2e-4:  # float32, after memories that hold little: up to 1.0e-4
            wrong.append(f"{change}: {error_share:.1e}")
    assert not wrong
    assert refused == {case for case in REFUSED if case[0] == base}

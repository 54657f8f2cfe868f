"""Every family against transformers on the same files: logits, tokens, cache, storage."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from neuron_moe.checkpoint import save_checkpoint, unique_parameters
from neuron_moe.models.generation import GenerationOptions, generate, pad_left
from neuron_moe.models.loader import find_model_file, load_model
from tests.models.families import FAMILIES, GPT_OSS, names, reference_of, write_checkpoint
from tests.models.flat_form import assert_flat_form_agrees
from tests.rows import thinned

PROMPT = torch.arange(40)[None] * 7 % 290  # five windows or chunks long
SHORT = (torch.arange(240) * 7 % 290).view(20, 12)  # each longer than a window or chunk
RAGGED = [[5, 6, 7], [100, *range(30)], [42], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12]]
NUM_TOKENS = 64
ALL = {"gpt_oss": GPT_OSS, **FAMILIES}  # test_gpt_oss.py has more of it

Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Return the checkpoint of a family, made once."""
    known: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in known:
            known[name] = tmp_path_factory.mktemp("family")
            write_checkpoint(ALL[name].config(), known[name], seed=len(name))
        return known[name]

    return make


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


def typical_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square error of the median token.

    Where two logits of a router are nearer than roundings, either side may take another expert, and
    the error of that token says nothing of how it computes.
    """
    per_token = (actual.float() - exact).square().mean(-1).sqrt()
    return float(per_token.median())


def reference_tokens(
    reference: Any, prompts: list[list[int]], count: int = NUM_TOKENS
) -> list[list[int]]:
    """Greedy tokens of transformers for a left-padded batch, no stop token."""
    ids, real = pad_left(prompts, 0)
    reference.generation_config.eos_token_id = None
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    out = reference.generate(ids, attention_mask=real.long(), **options)
    tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize("name", ["gpt_oss", *names()])
def test_logits_are_those_of_transformers(name: str, made: Checkpoints) -> None:
    folder = made(name)
    ours = load_model(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference_of(folder)(PROMPT).logits
        assert relative_error(ours(PROMPT), expected) < 1e-4


@pytest.mark.parametrize("name", thinned(names(is_long=True), 2))
def test_greedy_tokens_are_those_of_transformers(name: str, made: Checkpoints) -> None:
    folder = made(name)
    exact = reference_of(folder)
    batches = [RAGGED] if FAMILIES[name].pads_alike else [[prompt] for prompt in RAGGED]
    expected = [tokens for batch in batches for tokens in reference_tokens(exact, batch)]
    ours = load_model(folder, dtype=torch.float32)
    result = generate(ours, RAGGED, GenerationOptions(max_new_tokens=NUM_TOKENS))
    assert result.token_ids == expected


@pytest.mark.parametrize("name", ["gpt_oss", *names()])
def test_decode_continues_what_prefill_began(name: str, made: Checkpoints) -> None:
    model = load_model(made(name), dtype=torch.float32)
    with torch.inference_mode():
        whole = model(PROMPT)
        cache = model.new_cache(1, 40)
        parts = [model(PROMPT[:, :13], cache=cache), model(PROMPT[:, 13:30], cache=cache)]
        parts += [model(PROMPT[:, place : place + 1], cache=cache) for place in range(30, 40)]
    assert relative_error(torch.cat(parts, dim=1), whole) < 5e-5  # a wrong cache: above 1e-2


@pytest.mark.parametrize("name", ["gpt_oss", *names()])
def test_the_flat_form_is_the_padded_batch(name: str, made: Checkpoints) -> None:
    assert_flat_form_agrees(load_model(made(name), dtype=torch.float32), 300)


@pytest.mark.parametrize("name", names())
def test_bfloat16_is_as_near_to_float32_as_transformers(name: str, made: Checkpoints) -> None:
    folder = made(name)
    ours = load_model(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        exact = reference_of(folder)(SHORT).logits
        theirs = reference_of(folder, torch.bfloat16)(SHORT).logits
        ours_USV = ours(SHORT)
    assert typical_error(ours_USV, exact) < 1.5 * typical_error(theirs, exact)


# Of DeepSeek-V3.2 and GLM-5, see docs/checkpoints.md; of a vision tower.
LEFT_OUT = re.compile(r"self_attn\.indexer\.|vision_model\.|_projector\.")


@pytest.mark.parametrize("name", names(is_saved=True))
def test_what_is_saved_again_is_what_was_read(name: str, made: Checkpoints, tmp_path: Path) -> None:
    folder, family = made(name), FAMILIES[name]
    model = load_model(folder)
    weight_map = find_model_file(family.model_type).weight_map(model.config)
    parameters = unique_parameters(model)
    save_checkpoint(parameters, weight_map, tmp_path, variant=family.variant)
    published = load_file(folder / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    published = {key: kept for key, kept in published.items() if not LEFT_OUT.search(key)}
    assert saved.keys() == published.keys()
    for key, tensor in published.items():
        assert saved[key].dtype == tensor.dtype, key
        assert torch.equal(saved[key], tensor), key


@pytest.mark.parametrize("name", names())
def test_every_storage_form_loads_alike(name: str, made: Checkpoints, tmp_path: Path) -> None:
    folder, family = made(name), FAMILIES[name]
    model = load_model(folder)
    weight_map = find_model_file(family.model_type).weight_map(model.config)
    for variant in weight_map.variants():
        target = tmp_path / variant
        save_checkpoint(unique_parameters(model), weight_map, target, variant=variant)
        (target / "config.json").write_text((folder / "config.json").read_text())
        again = load_model(target).state_dict()
        for key, tensor in model.state_dict().items():
            assert torch.equal(again[key], tensor), key


FEW = ("mixtral", "hy_v3", "nemotron_h", "step3p5", "kimi_linear", "deepseek_v4")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            *each.values, marks=[*each.marks, *(() if name in FEW else [pytest.mark.long])]
        )
        for each in names(slow=())
        if (name := str(each.values[0])) == FAMILIES[name].model_type
    ],
)
def test_modules_that_transformers_does_not_convert_back_load_alike(
    name: str, made: Checkpoints, tmp_path: Path
) -> None:
    reference_of(made(name)).save_pretrained(tmp_path, save_original_format=False)
    again = load_model(tmp_path, dtype=torch.float32).state_dict()
    for key, tensor in load_model(made(name), dtype=torch.float32).state_dict().items():
        assert torch.equal(again[key], tensor), key


@pytest.mark.parametrize("name", names(is_saved=True))
def test_transformers_reads_what_we_save(name: str, made: Checkpoints, tmp_path: Path) -> None:
    folder = made(name)
    model = load_model(folder)
    weight_map = find_model_file(FAMILIES[name].model_type).weight_map(model.config)
    parameters = unique_parameters(model)
    save_checkpoint(parameters, weight_map, tmp_path, variant=FAMILIES[name].variant)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    again = reference_of(tmp_path).state_dict()
    for key, tensor in reference_of(folder).state_dict().items():
        if LEFT_OUT.search(key):
            continue
        assert torch.equal(again[key], tensor), key

"""Our models inside vLLM against our own `generate`, token by token; `make test-vllm`."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neuron_moe.models.loader import build_model
from neuron_moe.models.shipped import TINY_NAME
from neuron_moe.serving.options import block_size_of
from tests.serving.conftest import Folders, own_tokens, prompts_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
MAX_TOKENS = 12
Run = Callable[..., Any]


def _request(folder: Any, **settings: Any) -> dict[str, Any]:
    return {
        "model": str(folder),
        "prompts": prompts_of(folder),
        "max_tokens": MAX_TOKENS,
        "passes": 2,  # the second finds its prefixes in the cache
        "settings": {
            "dtype": "float32",
            "max_num_batched_tokens": 64,
            "block_size": block_size_of(build_model(folder)),
            **settings,
        },
    }


@pytest.mark.parametrize(
    "name",
    [
        TINY_NAME,
        "qwen3_moe",
        "qwen3_moe-sliding-dense-layers",
        "glm4_moe",
        "llama4-scout",
        "llama4-temperature",
        "mixtral",
        "minimax_m2",
        "ernie4_5_moe",
        "dbrx",
    ],
)
def test_tokens_equal_our_own(name: str, folder_of: Folders, run_vllm: Run) -> None:
    folder = folder_of(name)
    request = _request(folder)
    expected = own_tokens(folder, request["prompts"], MAX_TOKENS)
    first, second = run_vllm(request)
    assert first == expected
    assert second == expected


@pytest.mark.parametrize("splits_experts", [False, True], ids=["tp2", "ep2"])
@pytest.mark.parametrize("name", [TINY_NAME, "qwen3_moe", "glm4_moe", "llama4-scout"])
def test_two_ranks_give_the_same_tokens(
    name: str, splits_experts: bool, folder_of: Folders, run_vllm: Run
) -> None:
    folder = folder_of(name)
    request = _request(folder, tensor_parallel_size=2, enable_expert_parallel=splits_experts)
    expected = own_tokens(folder, request["prompts"], MAX_TOKENS)
    assert run_vllm(request, ranks=2) == [expected, expected]


def test_bfloat16_measures_the_forms_of_its_products(
    folder_of: Folders,
    run_vllm: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing was measured before
    request = _request(folder_of("qwen3_moe"), dtype="bfloat16") | {"passes": 1}
    (answers,) = run_vllm(request)
    assert [len(answer) for answer in answers] == [MAX_TOKENS] * len(request["prompts"])
    assert any(tmp_path.rglob("*"))


def test_sinks_that_are_not_those_of_the_checkpoint_are_seen(
    folder_of: Folders, run_vllm: Run
) -> None:
    folder = folder_of(TINY_NAME)
    request = _request(folder) | {"passes": 1, "stale_sinks": True}
    expected = own_tokens(folder, request["prompts"], MAX_TOKENS)
    (answers,) = run_vllm(request)
    wrong = sum(answer != own for answer, own in zip(answers, expected, strict=True))
    assert wrong > len(expected) // 2


def test_registering_twice_and_an_unknown_architecture(folder_of: Folders, run_vllm: Run) -> None:
    folder = folder_of(TINY_NAME)
    request = _request(folder, hf_overrides={"architectures": ["NeuronMoeForCausalLMs"]})
    with pytest.raises(AssertionError, match="NeuronMoeForCausalLMs"):
        run_vllm(request | {"registrations": 2})

"""Our models inside vLLM against our own `generate`, token by token; `make test-vllm`."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from neuron_moe.models.loader import build_model
from neuron_moe.models.shipped import TINY_NAME
from neuron_moe.serving.options import architecture_of, block_size_of
from tests.serving.conftest import FIRST, MAX_TOKENS, OTHERS, RECURRENT, Folders, asked

pytestmark = pytest.mark.vllm
TP2: dict[str, Any] = {"tensor_parallel_size": 2}
EP2: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
PLAIN = {"product_form": "plain"}  # nothing is measured first
VLLMS = {"product_form": "vllm"}  # its kernel for experts, and its dense products
JOINED = {"joins": True, "metrics": True}
FORMS = {
    "in graphs": PLAIN | {"graph_tokens": 8, "graph_compiler": "eager"},
    "joined": PLAIN | JOINED | {"graph_compiler": "eager"},
    "measured, joined": JOINED | {"graph_compiler": "eager"},
    "vLLM's": VLLMS,
    "vLLM's, joined": VLLMS | JOINED | {"graph_compiler": "eager"},
}
COMPILED = JOINED  # by inductor, as `serve --compile`
MEASURED, STALE, UNKNOWN = "bfloat16, forms measured", "stale sinks", "unknown architecture"
# vLLM's kernel knows no biases, which the experts of GPT-OSS have.
IN_FORMS = [(TINY_NAME, how) for how in FORMS if "vLLM" not in how]
IN_FORMS += [("qwen3_moe", how) for how in FORMS if how != "measured, joined"]
IN_FORMS += [("glm4_moe", "measured, joined")]  # shared experts among vLLM's dense products
MEASURED_TOO = ", measured"
AT_ONCE = 5  # other families that one process serves
Run = Callable[..., Any]
Answers = dict[str, dict[str, Any]]


def _request(folder: Path, options: dict[str, Any] = PLAIN, **settings: Any) -> dict[str, Any]:
    """Return a request; `options` are those of our model, `settings` of vLLM."""
    model: Any = build_model(folder)
    return {
        "model": str(folder),
        "architecture": architecture_of(model),
        "prompts": asked(folder)[0],
        "max_tokens": MAX_TOKENS,
        "passes": 2,  # the second finds its prefixes in the cache
        "settings": {
            "dtype": "float32",
            "max_num_batched_tokens": 64,
            "additional_config": {"neuron_moe": options},
            "block_size": block_size_of(model),
            **settings,
        },
    }


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the process of `answers` keeps what it measures: nothing was before."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def answers(folder_of: Folders, run_vllm: Run, cache_folder: Path) -> Answers:
    """Return what one process answered to what needs one rank alone."""
    unknown = {"architectures": ["NeuronMoeForCausalLMs"]}
    tiny = folder_of(TINY_NAME)
    requests = {name: _request(folder_of(name)) for name in FIRST}
    for name, how in IN_FORMS:
        requests[f"{name} {how}"] = _request(folder_of(name), FORMS[how], max_num_seqs=8)
    requests[MEASURED] = _request(folder_of("qwen3_moe"), {}, dtype="bfloat16") | {"passes": 1}
    requests[STALE] = _request(tiny) | {"passes": 1, "stale_sinks": True}
    requests[UNKNOWN] = _request(tiny, hf_overrides=unknown) | {"registrations": 2}
    made = run_vllm([*requests.values()], XDG_CACHE_HOME=str(cache_folder))
    return dict(zip(requests, made, strict=True))


@pytest.mark.parametrize("name", FIRST)
def test_tokens_equal_our_own(name: str, answers: Answers, folder_of: Folders) -> None:
    _, expected = asked(folder_of(name))
    assert answers[name] == {"tokens": [expected, expected]}


@pytest.fixture(scope="module")
def answers_of_others(folder_of: Folders, run_vllm: Run) -> Callable[[str], Answers]:
    """Return what answers for one of the other families, some of them in one process."""

    @cache
    def answers(part: int) -> Answers:
        names = OTHERS[part * AT_ONCE : (part + 1) * AT_ONCE]
        requests = {
            name + form: _request(folder_of(name), options)
            for name in names
            for form, options in (("", PLAIN), (MEASURED_TOO, {}))
        }
        return dict(zip(requests, run_vllm([*requests.values()]), strict=True))

    return lambda name: answers(OTHERS.index(name) // AT_ONCE)


@pytest.mark.long
@pytest.mark.parametrize("form", ["", MEASURED_TOO])
@pytest.mark.parametrize("name", OTHERS)
def test_tokens_of_all_families_equal_our_own(
    name: str, form: str, answers_of_others: Callable[[str], Answers], folder_of: Folders
) -> None:
    _, expected = asked(folder_of(name))
    assert answers_of_others(name)[name + form] == {"tokens": [expected, expected]}


@pytest.mark.parametrize(("name", "how"), IN_FORMS)
def test_each_form_gives_the_same_tokens_and_captures_no_graph_late(
    name: str, how: str, answers: Answers, folder_of: Folders
) -> None:
    _, expected = asked(folder_of(name))
    assert answers[f"{name} {how}"] == {"tokens": [expected, expected]}


@pytest.mark.long
@pytest.mark.parametrize("name", FIRST[:2])
def test_compiled_models_give_the_same_tokens(name: str, folder_of: Folders, run_vllm: Run) -> None:
    folder = folder_of(name)
    _, expected = asked(folder)
    (answer,) = run_vllm([_request(folder, COMPILED)])
    assert answer == {"tokens": [expected, expected]}


CACHED = {"enable_prefix_caching": True, "max_num_batched_tokens": 512, "block_size": 32}
BEGUN = ", prefixes cached"
SHORT = ", few pages"
FEW = 6, 4  # prompts: their own recurrences take most of the time


RECURRENT_FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "": (PLAIN, {}),
    MEASURED_TOO: ({}, {}),
    BEGUN: (PLAIN, CACHED),
    ", joined": (FORMS["joined"], {}),
    # Eight sequences take more of these pages than there are: some wait, or begin anew.
    SHORT: (PLAIN, CACHED | {"num_gpu_blocks_override": 8}),
}
TWO_RANKS = ("qwen3_5_moe", "nemotron_h", "deepseek_v4")  # each keeps all of its states
RECURRENT_CASES = [
    (name, form)
    for name in RECURRENT
    for form in RECURRENT_FORMS
    if form != SHORT or name == "deepseek_v4"  # others' pages are of tokens, too
]


@pytest.fixture(scope="module")
def answers_of_recurrent(folder_of: Folders, run_vllm: Run) -> Callable[[str], Answers]:
    """Return what answers for a family whose layers keep states, eight at once, in one process."""

    @cache
    def answers(name: str) -> Answers:
        folder, prompts = folder_of(name), asked(folder_of(name), *FEW)[0]
        requests = {
            form: _request(folder, options, max_num_seqs=8, **settings)
            | {"prompts": prompts, "counts": True}
            for form, (options, settings) in RECURRENT_FORMS.items()
            if (name, form) in RECURRENT_CASES
        }
        return dict(zip(requests, run_vllm([*requests.values()]), strict=True))

    return answers


@pytest.mark.long
@pytest.mark.parametrize(("name", "form"), RECURRENT_CASES)
def test_tokens_of_recurrent_families_equal_our_own(
    name: str, form: str, answers_of_recurrent: Callable[[str], Answers], folder_of: Folders
) -> None:
    _, expected = asked(folder_of(name), *FEW)
    answer = answers_of_recurrent(name)[form]
    assert answer["tokens"] == [expected, expected]
    assert answer["cached"] > 0 or form != BEGUN  # blocks may be longer than what prompts share


def _cases() -> list[Any]:
    slow = partial(pytest.param, marks=pytest.mark.slow)
    return [
        pytest.param(TINY_NAME, TP2, id="gpt_oss-tp2"),
        pytest.param("qwen3_moe", EP2, id="qwen3_moe-ep2", marks=pytest.mark.long),
        slow(TINY_NAME, EP2, id="gpt_oss-ep2"),
        slow("qwen3_moe", TP2, id="qwen3_moe-tp2"),
        *(
            slow(name, ranks, id=f"{name}-{'ep2' if ranks is EP2 else 'tp2'}")
            for name in (
                "glm4_moe",
                "deepseek_v3",
                "llama4-scout",
                "mixtral",
                "minimax_m2",
                "ernie4_5_moe",
            )
            for ranks in (TP2, EP2)
        ),
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_with_states_give_the_same_tokens(
    name: str, folder_of: Folders, run_vllm: Run
) -> None:
    folder = folder_of(name)
    prompts, expected = asked(folder, *FEW)
    request = _request(folder, max_num_seqs=8, **TP2) | {"prompts": prompts}
    assert run_vllm([request], ranks=2) == [{"tokens": [expected, expected]}]


@pytest.mark.parametrize(("name", "ranks"), _cases())
def test_two_ranks_give_the_same_tokens(
    name: str, ranks: dict[str, Any], folder_of: Folders, run_vllm: Run
) -> None:
    folder = folder_of(name)
    _, expected = asked(folder)
    forms = (PLAIN, FORMS["joined"])
    for answer in run_vllm([_request(folder, form, **ranks) for form in forms], ranks=2):
        assert answer == {"tokens": [expected, expected]}


def test_bfloat16_measures_the_forms_of_its_products(answers: Answers, cache_folder: Path) -> None:
    (tokens,) = answers[MEASURED]["tokens"]
    assert {len(each) for each in tokens} == {MAX_TOKENS}
    assert any(cache_folder.rglob("product_forms.json"))


def test_sinks_that_are_not_those_of_the_checkpoint_are_seen(
    answers: Answers, folder_of: Folders
) -> None:
    (tokens,) = answers[STALE]["tokens"]
    _, expected = asked(folder_of(TINY_NAME))
    wrong = sum(answer != own for answer, own in zip(tokens, expected, strict=True))
    assert wrong > len(expected) // 2


def test_registering_twice_more_and_an_unknown_architecture(answers: Answers) -> None:
    assert "NeuronMoeForCausalLMs" in answers[UNKNOWN]["error"]

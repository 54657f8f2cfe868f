"""Generation over a model of a few lines whose next token is known in advance."""

from types import SimpleNamespace

import pytest
import torch

from neuron_moe.models.attention import KVCache
from neuron_moe.models.generation import (
    GenerationOptions,
    choose_tokens,
    generate,
    pad_left,
)

VOCAB = 50


class Counter:
    """Likeliest next token: the sum of all real tokens so far, modulo the vocabulary."""

    config = SimpleNamespace(
        vocab_size=VOCAB, max_position_embeddings=64, longest=64, length_reason=""
    )

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], list[list[bool]] | None]] = []

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        return KVCache([((1, 1),)], batch_size=batch_size, capacity=capacity, like=torch.zeros(1))

    def __call__(
        self,
        input_ids_US: torch.Tensor,
        *,
        real_US: torch.Tensor | None = None,
        cache: KVCache | None = None,
        last_only: bool = False,
    ) -> torch.Tensor:
        assert cache is not None
        self.calls.append((input_ids_US.tolist(), None if real_US is None else real_US.tolist()))
        real = torch.ones_like(input_ids_US, dtype=torch.bool) if real_US is None else real_US
        start, end = cache.reserve(real)
        cache.layers[0][0][:, 0, start:end, 0] = (input_ids_US * real).float()
        sums = cache.layers[0][0][:, 0, :end, 0].sum(dim=1).long() % VOCAB
        logits = torch.linspace(0, 1, VOCAB).repeat(len(sums), 1)
        logits[torch.arange(len(sums)), sums] += 3
        return logits[:, None]


def expected_tokens(prompt: list[int], count: int, stop: tuple[int, ...] = ()) -> list[int]:
    total, tokens = sum(prompt), []
    while len(tokens) < count:
        tokens.append(total % VOCAB)
        total += tokens[-1]
        if tokens[-1] in stop:
            break
    return tokens


PROMPTS = [[3, 4], [1], [9, 9, 9, 9, 8]]


def test_greedy_continues_every_prompt_of_a_padded_batch() -> None:
    result = generate(Counter(), PROMPTS, GenerationOptions(max_new_tokens=6, pad_token_id=7))
    assert result.token_ids == [expected_tokens(prompt, 6) for prompt in PROMPTS]
    assert result.finish_reasons == ["length"] * 3
    assert result.num_decode_steps == 5
    assert result.prefill_s > 0
    assert result.decode_s > 0


def test_a_stop_token_ends_its_sequence_only() -> None:
    stop = (expected_tokens(PROMPTS[0], 3)[2],)
    options = GenerationOptions(max_new_tokens=6, stop_token_ids=stop)
    result = generate(Counter(), PROMPTS, options)
    assert result.token_ids == [expected_tokens(prompt, 6, stop) for prompt in PROMPTS]
    assert result.finish_reasons == ["stop", "length", "length"]


def test_decoding_ends_with_the_last_sequence() -> None:
    prompts = [[3, 4], [3, 4, 50 - 7, 7]]
    options = GenerationOptions(max_new_tokens=50, stop_token_ids=(28,))
    model = Counter()
    assert generate(model, prompts, options).token_ids == [[7, 14, 28]] * 2
    assert len(model.calls) == 3


def test_finished_sequences_go_along_as_padding() -> None:
    model = Counter()
    stop = (expected_tokens(PROMPTS[0], 1)[0],)
    options = GenerationOptions(max_new_tokens=3, stop_token_ids=stop, pad_token_id=2)
    generate(model, PROMPTS, options)
    for ids, real in model.calls[1:]:
        assert ids[0] == [2]
        assert real == [[False], [True], [True]]


def test_prompts_of_one_length_need_no_mask() -> None:
    model = Counter()
    generate(model, [[1, 2], [3, 4]], GenerationOptions(max_new_tokens=2))
    assert [real for _, real in model.calls] == [None, None]


def test_tokens_are_reported_as_they_come() -> None:
    seen: list[tuple[int, int]] = []
    options = GenerationOptions(max_new_tokens=2)
    result = generate(Counter(), PROMPTS[:2], options, lambda row, token: seen.append((row, token)))
    first, second = result.token_ids
    assert seen == [(0, first[0]), (1, second[0]), (0, first[1]), (1, second[1])]


def sample(prompts: list[list[int]], **options: float) -> list[list[int]]:
    settings = GenerationOptions(max_new_tokens=8, **options)  # type: ignore[arg-type]
    return generate(Counter(), prompts, settings).token_ids


def test_a_seed_repeats_a_draw_and_another_does_not() -> None:
    assert sample(PROMPTS, temperature=1.0, seed=5) == sample(PROMPTS, temperature=1.0, seed=5)
    assert sample(PROMPTS, temperature=1.0, seed=5) != sample(PROMPTS, temperature=1.0, seed=6)


def test_a_draw_does_not_depend_on_the_other_prompts() -> None:
    alone = sample(PROMPTS[:1], temperature=1.0, seed=5)
    assert sample(PROMPTS, temperature=1.0, seed=5)[0] == alone[0]


def test_a_tiny_temperature_is_greedy() -> None:
    assert sample(PROMPTS, temperature=1e-3) == sample(PROMPTS)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()[None].repeat(6000, 1)
    streams = [torch.Generator().manual_seed(row) for row in range(6000)]
    options = GenerationOptions(max_new_tokens=1, temperature=1.0)
    counts = torch.bincount(torch.tensor(choose_tokens(logits, options, streams)), minlength=3)
    assert torch.allclose(counts / 6000, torch.tensor([0.5, 0.3, 0.2]), atol=0.03)


@pytest.mark.parametrize(
    ("top_p", "allowed"),
    [(0.4, {0}), (0.49, {0}), (0.6, {0, 1}), (0.81, {0, 1, 2}), (1.0, {0, 1, 2})],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, allowed: set[int]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).double().log()[None].repeat(500, 1)
    streams = [torch.Generator().manual_seed(row) for row in range(500)]
    options = GenerationOptions(max_new_tokens=1, temperature=1.0, top_p=top_p)
    assert set(choose_tokens(logits, options, streams)) == allowed


def test_padding_goes_left() -> None:
    ids, real = pad_left([[5], [6, 7]], 9)
    assert ids.tolist() == [[9, 5], [6, 7]]
    assert real.tolist() == [[False, True], [True, True]]


BAD_OPTIONS = {
    "no-tokens": ({"max_new_tokens": 0}, "max_new_tokens=0"),
    "not-an-int": ({"max_new_tokens": 1.5}, "max_new_tokens=1.5"),
    "negative-temperature": ({"max_new_tokens": 1, "temperature": -1.0}, "temperature=-1.0"),
    "nan-temperature": ({"max_new_tokens": 1, "temperature": float("nan")}, "temperature=nan"),
    "top-p-zero": ({"max_new_tokens": 1, "top_p": 0.0}, "top_p=0.0"),
    "top-p-large": ({"max_new_tokens": 1, "top_p": 1.5}, "top_p=1.5"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_are_refused(case: str) -> None:
    options, message = BAD_OPTIONS[case]
    with pytest.raises(ValueError, match=message):
        GenerationOptions(**options)  # type: ignore[arg-type]


BAD_PROMPTS = {
    "none": ([], {}, "prompts=.*at least one prompt"),
    "empty": ([[1], []], {}, r"prompts\[1\]=\[\]: an empty prompt"),
    "outside-vocabulary": ([[1, VOCAB]], {}, "token 50: must be below vocab_size=50"),
    "negative": ([[-1]], {}, "token -1"),
    "too-long": ([[1] * 60], {}, "60 tokens and max_new_tokens=5.*max_position_embeddings=64"),
    "padding-outside": ([[1]], {"pad_token_id": 99}, "pad_token_id=99"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_bad_prompts_are_refused(case: str) -> None:
    prompts, options, message = BAD_PROMPTS[case]
    with pytest.raises(ValueError, match=message):
        generate(Counter(), prompts, GenerationOptions(max_new_tokens=5, **options))  # type: ignore[arg-type]

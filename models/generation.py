"""Batched generation: prefill of left-padded prompts, then one token a step for all of them.

Letters: U sequences, S prompt length after padding, V vocabulary.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from neuron_moe.errors import check_positive_int
from neuron_moe.models.attention import KVCache

_SMALLEST_TEMPERATURE = 1e-6  # logits over it stay far from infinity
_SEED_LIMIT = 1 << 62


class Decoder(Protocol):
    """What `generate` asks of a model; every `Model` of this package answers to it."""

    @property
    def config(self) -> Any:
        """Facts of `DecoderConfig`, with the longest sequence among them."""

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        """Return an empty cache."""

    def __call__(
        self,
        input_ids_US: Tensor,
        *,
        real_US: Tensor | None = None,
        cache: KVCache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Return logits `[U, S, V]`, or `[U, 1, V]` with `last_only`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How tokens are chosen and when to stop.

    Attributes:
        max_new_tokens: at most this many tokens a prompt.
        temperature: 0 takes the likeliest token (the lowest id of a tie); larger draws.
        top_p: draw among the likeliest tokens that together reach this probability.
        seed: each prompt draws from a stream of its own, so its text does not depend on the others.
        stop_token_ids: tokens that end a sequence; the token itself is returned too.
        pad_token_id: filler of the padding and of finished sequences; has no influence.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        check_positive_int("max_new_tokens", self.max_new_tokens)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature={self.temperature}: must be at least 0."
                " Use 0 for the likeliest token."
            )
        if 0 < self.temperature < _SMALLEST_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature}: must be 0 or at least {_SMALLEST_TEMPERATURE}."
                " Use 0 for the likeliest token."
            )
        if not abs(self.seed) < _SEED_LIMIT:
            raise ValueError(f"seed={self.seed}: must be below 2^62 in size. Choose a smaller one.")
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p={self.top_p}: must be above 0 and at most 1."
                " Use 1 to draw among all tokens."
            )


@dataclass(slots=True)
class Generation:
    """What came out, prompt by prompt, and how long it took (measured wall time).

    Attributes:
        token_ids: new tokens of each prompt, a stop token included.
        finish_reasons: "stop" or "length" for each prompt.
        prefill_s: time of the prompt pass, seconds.
        decode_s: time of all decode steps, seconds.
        num_decode_steps: passes after the prompt pass.
    """

    token_ids: list[list[int]]
    finish_reasons: list[str]
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_decode_steps: int = field(default=0)


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    on_token: Callable[[int, int], None] | None = None,
) -> Generation:
    """Continue every prompt; stop each at a stop token or at `max_new_tokens`.

    Args:
        model: any `Model` of this package.
        prompts: token ids, one sequence a prompt; lengths may differ.
        options: choice and end of tokens.
        on_token: called as (prompt index, token id) as soon as a token is known.

    Raises:
        ValueError: no prompt, an empty one, a token outside the vocabulary, or too long a text.
    """
    result = Generation([], [])
    for row, token in stream(model, prompts, options, result):
        if on_token is not None:
            on_token(row, token)
    return result


def stream(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    result: Generation | None = None,
) -> Iterator[tuple[int, int]]:
    """Do what `generate` does, one token after the other, whenever the next is requested.

    Args:
        model: as in `generate`.
        prompts: the same.
        options: the same.
        result: filled on the way.

    Returns:
        An iterator over (prompt index, token id).

    Raises:
        ValueError: as `generate`, at once.
    """
    _check_prompts(model, prompts, options)
    return _steps(model, prompts, options, Generation([], []) if result is None else result)


@torch.inference_mode()
def _steps(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    result: Generation,
) -> Iterator[tuple[int, int]]:
    """Yield (prompt index, token id); inference mode lasts while a token is computed."""
    input_ids_US, real_US = pad_left(prompts, options.pad_token_id)
    num_prompts, prompt_size = input_ids_US.shape
    streams = [torch.Generator().manual_seed(options.seed + row) for row in range(num_prompts)]
    result.token_ids = [[] for _ in prompts]
    result.finish_reasons = ["length"] * num_prompts
    cache = model.new_cache(num_prompts, prompt_size + options.max_new_tokens)
    mask_US = None if bool(real_US.all()) else real_US
    began = time.perf_counter()
    logits_UV = model(input_ids_US, real_US=mask_US, cache=cache, last_only=True)[:, -1]
    result.prefill_s = time.perf_counter() - began
    running = set(range(num_prompts))
    began = time.perf_counter()
    while True:
        chosen = choose_tokens(logits_UV, options, streams)
        for row in sorted(running):
            result.token_ids[row].append(chosen[row])
            if chosen[row] in options.stop_token_ids:
                result.finish_reasons[row] = "stop"
                running.discard(row)
            yield row, chosen[row]
        if not running or len(result.token_ids[min(running)]) == options.max_new_tokens:
            break
        logits_UV = _decode(model, cache, chosen, running, options.pad_token_id)
        result.num_decode_steps += 1
    result.decode_s = time.perf_counter() - began


def pad_left(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Return token ids `[U, S]` int64 and where they are real `[U, S]` bool; padding goes left."""
    size = max(len(prompt) for prompt in prompts)
    rows = [[pad_token_id] * (size - len(prompt)) + list(prompt) for prompt in prompts]
    real = [[False] * (size - len(prompt)) + [True] * len(prompt) for prompt in prompts]
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(real)


def choose_tokens(
    logits_UV: Tensor, options: GenerationOptions, streams: Sequence[torch.Generator]
) -> list[int]:
    """Return one token a row: the likeliest at temperature 0, else a draw from its stream."""
    if options.temperature == 0:
        return [int(token) for token in logits_UV.argmax(dim=-1)]
    # float64 on the CPU: a draw must not depend on the dtype of the sum or on the device.
    weights_UV = (logits_UV.double().cpu() / options.temperature).softmax(dim=-1)
    if options.top_p < 1:
        sorted_UV, order_UV = weights_UV.sort(dim=-1, descending=True, stable=True)
        outside_UV = sorted_UV.cumsum(dim=-1) - sorted_UV >= options.top_p
        weights_UV.scatter_(1, order_UV, sorted_UV.masked_fill(outside_UV, 0.0))
    return [
        int(torch.multinomial(row, 1, generator=stream))
        for row, stream in zip(weights_UV, streams, strict=True)
    ]


def _decode(
    model: Decoder, cache: KVCache, tokens: list[int], running: set[int], pad_token_id: int
) -> Tensor:
    """Feed one token a sequence; finished sequences go along as padding, to no expert."""
    rows = range(len(tokens))
    ids = [tokens[row] if row in running else pad_token_id for row in rows]
    real_U1 = None
    if len(running) < len(tokens):
        real_U1 = torch.tensor([[row in running] for row in rows])
    return model(torch.tensor(ids)[:, None], real_US=real_U1, cache=cache)[:, -1]


def _check_prompts(
    model: Decoder, prompts: Sequence[Sequence[int]], options: GenerationOptions
) -> None:
    if not prompts:
        raise ValueError("prompts=[]: there is nothing to continue. Pass at least one prompt.")
    vocab_size, limit = model.config.vocab_size, model.config.longest
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(
                f"prompts[{row}]=[]: an empty prompt has no last token to continue from. Start it"
                " with the tokenizer's beginning-of-text token."
            )
        outside = [token for token in prompt if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(
                f"prompts[{row}] holds token {outside[0]}: must be below vocab_size={vocab_size}."
                " Use the tokenizer of this checkpoint."
            )
        if len(prompt) + options.max_new_tokens > limit:
            positions = model.config.max_position_embeddings
            factor = f" x {model.config.rope.factor:g} (dynamic rope)" if limit > positions else ""
            raise ValueError(
                f"prompts[{row}] has {len(prompt)} tokens and max_new_tokens="
                f"{options.max_new_tokens}: together they exceed max_position_embeddings="
                f"{positions}{factor}{model.config.length_reason}. Shorten one of them."
            )
    if not 0 <= options.pad_token_id < vocab_size:
        raise ValueError(
            f"pad_token_id={options.pad_token_id}: must be below vocab_size={vocab_size}."
            " Any token of the vocabulary will do."
        )

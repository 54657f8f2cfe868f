"""The same checkpoint in transformers and in ours: logits of both, token by token.

transformers is imported here only, and only when requested: it is the reference of the demo and of
the tests, not something the product needs.

Letters: U sequences, S positions, V vocabulary.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuron_moe.models.generation import pad_left


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far logits are from exact ones.

    Attributes:
        largest: largest absolute difference.
        rms: root mean square of the difference.
        scale: largest absolute exact logit.
        same_choice: share of positions whose likeliest token is the exact one.
    """

    largest: float
    rms: float
    scale: float
    same_choice: float


def deviation(logits_USV: Tensor, exact_USV: Tensor, real_US: Tensor) -> Deviation:
    """Compare logits at the positions that hold a token."""
    logits, exact = logits_USV[real_US].double(), exact_USV[real_US].double()
    difference = (logits - exact).abs()
    same = (logits.argmax(-1) == exact.argmax(-1)).double().mean()
    rms = difference.square().mean().sqrt()
    return Deviation(*map(float, (difference.max(), rms, exact.abs().max(), same)))


def count_equal(ours: list[list[int]], theirs: list[list[int]]) -> tuple[int, int]:
    """Return how many tokens agree until each sequence first differs, and how many there are.

    After the first difference the two continue different texts; a chance hit there counts nothing.
    A token that only one of them has is a difference.
    """
    equal = total = 0
    for left, right in zip(ours, theirs, strict=True):
        total += max(len(left), len(right))
        for one, other in zip(left, right, strict=False):
            if one != other:
                break
            equal += 1
    return equal, total


def check_installed() -> None:
    """Raise ValueError if transformers, or what it needs to read MXFP4, is missing."""
    missing = [n for n in ("transformers", "accelerate") if importlib.util.find_spec(n) is None]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)}: not installed; the comparison needs them as the reference."
            " Run pip install 'neuron-moe[demo]'."
        )


class Reference:
    """transformers' model of a checkpoint folder, first in bfloat16, then widened to float32.

    Every tensor of a published checkpoint is bfloat16 or exact in it, so widening loses nothing.
    """

    def __init__(self, folder: Path) -> None:
        check_installed()
        with quiet():
            transformers: Any = importlib.import_module("transformers")
            self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, local_files_only=True
            ).eval()

    def widen(self) -> None:
        """Turn the weights into float32."""
        self._model = self._model.float()

    def logits(self, input_ids_US: Tensor, real_US: Tensor) -> Tensor:
        """Return logits [U, S, V] of left-padded sequences."""
        with torch.inference_mode(), quiet():
            out = self._model(input_ids_US, attention_mask=real_US.long())
        logits_USV: Tensor = out.logits
        return logits_USV

    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        stop_token_ids: tuple[int, ...],
        pad_token_id: int,
    ) -> list[list[int]]:
        """Return the greedy tokens of each prompt, its stop token included."""
        ids_US, real_US = pad_left(prompts, pad_token_id)
        self._model.generation_config.eos_token_id = list(stop_token_ids) or None
        with torch.inference_mode(), quiet():
            out = self._model.generate(
                ids_US,
                attention_mask=real_US.long(),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=pad_token_id,
            )
        rows = out[:, ids_US.shape[1] :].tolist()
        return [_up_to_stop(row, stop_token_ids) for row in rows]

    def stream(
        self,
        prompt: list[int],
        new_tokens: int,
        on_token: Callable[[], object],
        *,
        implementation: str,
    ) -> list[int]:
        """Return greedy tokens of one prompt that nothing stops, telling when each is there.

        Args:
            prompt: token ids.
            new_tokens: how many.
            on_token: called after each new token.
            implementation: of the experts, by transformers' name.
        """
        self._model.set_experts_implementation(implementation)
        self._model.generation_config.eos_token_id = None
        with torch.inference_mode(), quiet():
            out = self._model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=_Streamer(on_token),
            )
        token_ids: list[int] = out[0, len(prompt) :].tolist()
        return token_ids


class _Streamer:
    """What transformers calls with the prompt, then with each new token."""

    def __init__(self, on_token: Callable[[], object]) -> None:
        self._on_token = on_token
        self._is_prompt = True

    def put(self, _token_ids: Tensor) -> None:
        if not self._is_prompt:
            self._on_token()
        self._is_prompt = False

    def end(self) -> None:
        pass


def _up_to_stop(token_ids: list[int], stop_token_ids: tuple[int, ...]) -> list[int]:
    for position, token in enumerate(token_ids):
        if token in stop_token_ids:
            return token_ids[: position + 1]
    return token_ids


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' own log and bars; its errors still come through."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()

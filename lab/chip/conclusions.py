"""Conclusions of ours that rest on the simulator's coefficients, held against others.

Each is a choice between two ways to compute the same: what the benchmarks publish as the faster one
with the coefficients as they are. On another chip it holds if it is still the faster one. Queues
are in the order of the source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from lab.bench.decode.cases import DecodeCase
from lab.bench.decode.ours import decode_plan, launch_ours
from lab.bench.decode.work import OPTIONS
from lab.bench.prefill.ours import prefill_plan
from neuron_moe.tools.timing.layers import MODELS, choose_experts
from neuron_moe.tools.timing.plans import launches_of
from nki_sim.hardware import Hardware
from nki_sim.time.timeline import Timeline, schedule

_MODELS: Final = {model.name: model for model in MODELS}
TOKENS: Final = 256  # more than the decode kernel takes of a prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """That one way is faster than another.

    Attributes:
        text: in words.
        faster, slower: simulate the two.
    """

    text: str
    faster: Callable[[], Timeline]
    slower: Callable[[], Timeline]


def _prefill(name: str, layout: str) -> Timeline:
    """Simulate a prefill with weights in a layout."""
    model = _MODELS[name]
    index_TK = choose_experts("uniform", TOKENS, model.E, model.K)
    ((_, run),) = launches_of(prefill_plan(model, TOKENS, layout), index_TK)
    found: Timeline = run.timeline
    return found


def _decode(
    name: str, tokens: int, form: str = "bf16", mode: str = "auto", layout: str = "packed"
) -> Timeline:
    """Simulate a decode step."""
    case = DecodeCase(
        kernel="decode_moe", model=_MODELS[name], B=tokens, routing="uniform", format=form
    )
    found: Timeline = launch_ours(case, decode_plan(case, mode, layout), OPTIONS).timeline
    return found


def _claim(text: str, faster: Any, slower: Any) -> Claim:
    return Claim(text=text, faster=faster, slower=slower)


_D = functools.partial
CLAIMS: Final = (
    _claim(
        "prefill, Mixtral TP8: packed weights beat plain ones",
        _D(_prefill, "mixtral-8x7b", "packed"),
        _D(_prefill, "mixtral-8x7b", "plain"),
    ),
    _claim(
        "decode, GPT-OSS-20B TP8, 4 tokens: packed weights beat plain ones",
        _D(_decode, "gpt-oss-20b", 4),
        _D(_decode, "gpt-oss-20b", 4, layout="plain"),
    ),
    _claim(
        "decode, GPT-OSS-120B TP8, 4 tokens: the chosen experts beat all of them",
        _D(_decode, "gpt-oss-120b", 4, mode="selective"),
        _D(_decode, "gpt-oss-120b", 4, mode="all"),
    ),
    _claim(
        "decode, Mixtral-8x7B TP8, 4 tokens: float8 weights beat bfloat16",
        _D(_decode, "mixtral-8x7b", 4, "fp8"),
        _D(_decode, "mixtral-8x7b", 4),
    ),
    _claim(
        "decode, GPT-OSS-120B TP8, 4 tokens: float8 weights beat bfloat16",
        _D(_decode, "gpt-oss-120b", 4, "fp8"),
        _D(_decode, "gpt-oss-120b", 4),
    ),
)


def hold_against(chip: Hardware) -> list[dict[str, Any]]:
    """Return every conclusion with its ratio as published and on a chip."""
    found = []
    for claim in CLAIMS:
        faster, slower = claim.faster(), claim.slower()
        ratio = slower.total_ns / faster.total_ns
        here = _on(slower, chip) / _on(faster, chip)
        holds = (here > 1.0) == (ratio > 1.0)
        found.append({"claim": claim.text, "ratio": ratio, "ratio_here": here, "holds": holds})
    return found


def _on(timeline: Timeline, chip: Hardware) -> float:
    """Return the time of a recorded run on another chip."""
    return schedule(timeline.trace, chip, timeline.options).total_ns

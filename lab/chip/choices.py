"""What the estimates choose for the benchmarks' models: plan, block size, decode mode.

All choices read the coefficients in force (`nki_kernels.common.chip.core`), so on a measured chip
some come out otherwise.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from lab.bench.decode.cases import DecodeCase
from lab.bench.decode.ours import config_of, decode_plan
from lab.bench.prefill.ours import prefill_plan
from neuron_moe.tools.timing.layers import MODELS, Model
from nki_sim.hardware import TRN2, Hardware
from nki_sim.hardware_file import using

PREFILL_TOKENS: Final = (256, 1024, 8192)  # up to 128 take the decode kernel
DECODE_TOKENS: Final = (4, 64)


def choices_on(chip: Hardware) -> dict[str, str]:
    """Return every choice by what it is of, made for a chip."""
    with using(chip):
        found = {}
        for model in MODELS:
            for tokens in PREFILL_TOKENS:
                found[f"prefill, {model.name} TP{model.tp}, {tokens} tokens"] = _prefill(
                    model, tokens
                )
            for tokens in DECODE_TOKENS:
                found[f"decode, {model.name} TP{model.tp}, {tokens} tokens"] = _decode(
                    model, tokens
                )
        return found


def flipped(chip: Hardware) -> list[dict[str, Any]]:
    """Return the choices that are others on a chip than with our coefficients."""
    ours, here = _ours(), choices_on(chip)
    return [
        {"choice": name, "ours": ours[name], "here": one}
        for name, one in here.items()
        if one != ours[name]
    ]


@functools.cache
def _ours() -> dict[str, str]:
    return choices_on(TRN2)


def _prefill(model: Model, tokens: int) -> str:
    """Return block size and plan for plain weights and uniform routing."""
    chosen = prefill_plan(model, tokens, "plain").chosen()
    return f"blocks of {chosen['block_size']}, {chosen['shard_plan']} shards"


def _decode(model: Model, tokens: int) -> str:
    """Return the mode and what the cores split."""
    case = DecodeCase(kernel="decode_moe", model=model, B=tokens, routing="uniform", format="bf16")
    config = config_of(decode_plan(case))
    return f"{config.mode}, the cores split the {config.shard}"

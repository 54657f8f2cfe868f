"""What of a plan is left out where it may use only what public kernels show (`Tuning.features`).

Here alone it is decided; estimates then choose among what is left. What a configuration names
runs, with or without a precedent, and `explain()` says so.
"""

from dataclasses import replace
from typing import Any

from neuron_moe.spec import Tuning
from nki_kernels.decode import DecodeConfig, DecodeRequest
from nki_kernels.prefill import PlanRequest, PrefillConfig

_NONE = "no public kernel has a precedent of it"


def prefill_request(tuning: Tuning) -> PlanRequest:
    """Return what all candidates of prefill share."""
    opened = tuning.opened
    is_looped = "dynamic loops" in opened or tuning.loop_plan == "dynamic"
    return PlanRequest(
        loop_plan=tuning.loop_plan if is_looped else "static",
        missing=_missing(tuning),
    )


def shared_request(tuning: Tuning) -> PlanRequest:
    """Return what shared experts of prefill ask for: loops of their own, whatever was named."""
    return prefill_request(replace(tuning, loop_plan="sorted"))


def decode_request(tuning: Tuning, **others: Any) -> DecodeRequest:
    """Return what a decode step asks for, and what others say of it."""
    return DecodeRequest(
        sums="auto" if "sums over trips" in tuning.opened else "sbuf",
        loops="dynamic" if "dynamic loops" in tuning.opened else "unrolled",
        missing=_missing(tuning),
        **others,
    )


def _missing(tuning: Tuning) -> str:
    may_skip = "skipped entries" in tuning.opened or tuning.skip_weights
    return tuning.missing if may_skip else "spare"


def prefill_notes(tuning: Tuning, config: PrefillConfig) -> tuple[str, ...]:
    """Say what prefill does without, and what was named and has no precedent."""
    loop, found = config.loop, []
    if "dynamic loops" not in tuning.opened:
        found.append("loops written out for the worst case instead of run-time trips")
        if loop.is_dynamic:
            found[0] = f"loop_plan={tuning.loop_plan!r} was asked for by name and runs: {_NONE}"
    if "skipped entries" not in tuning.opened:
        found.append("spare rows and experts instead of transfers left out")
        if loop.skips_weights:
            found[-1] = f"skip_weights=True was asked for by name and runs: {_NONE}"
    return _told(tuning, found, config.weight_format)


def decode_notes(tuning: Tuning, config: DecodeConfig) -> tuple[str, ...]:
    """Say what decode does without."""
    instead = {
        "dynamic loops": "loops written out for all experts that a step may touch",
        "skipped entries": "a spare expert instead of transfers left out",
        "sums over trips": "sums in SBUF",
    }
    found = [text for name, text in instead.items() if name not in tuning.opened]
    return _told(tuning, found, config.weights.format)


def _told(tuning: Tuning, found: list[str], weight_format: str) -> tuple[str, ...]:
    if not found:
        return ()
    if weight_format == "float8_e5m2":
        found.append(f"products with float8_e5m2 weights stay: {_NONE}; bfloat16 weights do")
    name = tuning.features if isinstance(tuning.features, str) else sorted(tuning.features)
    return (f"features={name!r}: {'; '.join(found)}",)

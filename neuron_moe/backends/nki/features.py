"""What of a plan is left out where it may use only what public kernels show (`Tuning.features`).

Here alone it is decided; estimates then choose among what is left. What a configuration names
runs, with or without a precedent, and `explain()` says so.
"""

from dataclasses import replace

from neuron_moe.spec import Tuning
from nki_kernels.decode import DecodeConfig
from nki_kernels.prefill import PlanRequest, PrefillConfig


def prefill_request(tuning: Tuning) -> PlanRequest:
    """Return what all candidates of prefill share."""
    return PlanRequest(
        loop_plan=tuning.loop_plan,
        missing=tuning.missing,
        iterations="ahead" if "loads for the next iteration" in tuning.opened else "alone",
    )


def shared_request(tuning: Tuning) -> PlanRequest:
    """Return what shared experts of prefill need: loops of their own, whatever was named."""
    return prefill_request(replace(tuning, loop_plan="sorted"))


def prefill_notes(config: PrefillConfig) -> tuple[str, ...]:
    """Say what prefill does that no public kernel shows."""
    is_ahead = config.loop.is_dynamic and config.loop.iterations == "ahead"
    found = ["an iteration of a loop loads for the next one"] if is_ahead else []
    return _remarks(found, config.weight_format)


def decode_notes(config: DecodeConfig) -> tuple[str, ...]:
    """Say what decode does that no public kernel shows."""
    return _remarks([], config.weights.format)


def _remarks(found: list[str], weight_format: str) -> tuple[str, ...]:
    if weight_format == "float8_e5m2":
        found.append("products with float8_e5m2 weights; bfloat16 weights do without")
    return (f"no public kernel has a precedent of: {'; '.join(found)}",) if found else ()

"""Which form each step takes on a CPU: the fastest of what was measured, in the memory there is."""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from neuron_moe.backends import compiled_products
from neuron_moe.backends.custom_kernels import custom_kernels_for
from neuron_moe.backends.form_times import (
    Times,
    form_times,
    linear_forms,
    linear_times,
    machine,
)
from neuron_moe.errors import check_choice
from neuron_moe.plan import LayerParts
from neuron_moe.weights.expert_weights import ExpertWeights
from neuron_moe.weights.packed import PackedMatrices
from neuron_moe.weights.product_forms import (
    BUCKETS,
    COMPILED,
    FORMS,
    MEASURED,
    PACKED_FORMS,
    PARALLEL,
    STRAIGHT_FORMS,
    TRANSPOSED_FORMS,
    ProductForms,
)

_UNSURE = 1.1  # what wakes threads hangs on what else runs: such a form has to win by more
_SMALL_LOSS = 1.05  # another form of a dense projection is not taken for less
_LARGE_LOSS = 2.0  # nor with such a loss at few rows or many, whatever it gains at the others
_WORTH_A_COPY = 1.5  # a second layout, twice the memory of the experts, is not kept for less
_SHARE_LEFT = 0.5  # of the machine's memory, that a second layout must leave


def settle_forms(parts: LayerParts, form: str) -> ProductForms | None:
    """Return the form of each step.

    Args:
        parts: the layer; its weights plain.
        form: 'measured', or one of FORMS for all steps.

    Returns:
        None where there is nothing to choose: packed or quantised weights, or not on a CPU.

    Raises:
        ValueError: an unknown form, or one that cannot be here.
    """
    weights = parts.weights
    custom = {kernel.name: kernel for kernel in custom_kernels_for(weights, parts.num_experts)}
    check_choice("form", form, (MEASURED, *FORMS, *custom))
    if weights.packed_down is not None or weights.down_proj_EIH.device.type != "cpu":
        return None
    if form in custom:
        return ProductForms.custom(form, custom[form].prepare(weights))
    if form != MEASURED:
        if form in PACKED_FORMS:
            PackedMatrices(weights.down_proj_EIH[:1])  # refuses what cannot be packed
        if form == COMPILED:
            compiled_products.refuse_if_missing()
        if form.removeprefix(PARALLEL) == "grouped":
            _refuse_odd_rows(weights)
        return ProductForms.fixed(form)
    times = form_times(weights, parts.spec.top_k, parts.num_experts)
    matrices = (weights.gate_up_proj_EHI, weights.down_proj_EIH)
    second_bytes = sum(matrix.numel() * matrix.element_size() for matrix in matrices)
    forms = choose(times, lambda: _leaves_enough(second_bytes))
    chosen = custom.keys() & set(forms.by_bucket.values())
    return replace(forms, compute=custom[chosen.pop()].prepare(weights)) if chosen else forms


def _refuse_odd_rows(weights: ExpertWeights) -> None:
    """Raise ValueError where rows are no multiples of the 16 bytes that grouped products want."""
    _, width, hidden_size = weights.down_proj_EIH.shape
    itemsize = weights.down_proj_EIH.element_size()
    first_outputs = weights.gate_up_proj_EHI.shape[2]
    odd = [size for size in (hidden_size, width, first_outputs) if size * itemsize % 16]
    if odd:
        raise ValueError(
            f"form='grouped': rows of {odd[0]} numbers take {odd[0] * itemsize} bytes, which must"
            " be a multiple of 16. Use form='measured' or 'plain'."
        )


def choose(times: Times, may_keep_both: Callable[[], bool]) -> ProductForms:
    """Return the fastest form of each bucket.

    Two layouts at once cost memory: where one alone loses less than half in every bucket, or both
    may not be kept, the one with the least loss in the mean is taken. A custom kernel's is always
    the second.
    """
    alone = (PACKED_FORMS, TRANSPOSED_FORMS, STRAIGHT_FORMS)
    custom = sorted({form for each in times.values() for form in each}.difference(FORMS))
    pairs = [PACKED_FORMS + TRANSPOSED_FORMS, PACKED_FORMS + STRAIGHT_FORMS]
    pairs += [(*forms, kernel) for forms in alone for kernel in custom]
    allowed, pair = _best_of(times, alone), _best_of(times, pairs)
    losses = [
        _fastest_time(times, bucket, allowed) / _fastest_time(times, bucket, pair)
        for bucket in BUCKETS
    ]
    if max(losses) > _WORTH_A_COPY and may_keep_both():
        allowed = pair
    by_bucket, reasons = {}, {}
    for bucket in BUCKETS:
        found = _judged(times[bucket], allowed)
        by_bucket[bucket] = min(found, key=lambda form: found[form])
        reasons[bucket] = _reason(times, bucket, allowed)
    return ProductForms(by_bucket, reasons)


def form_of_linear(weight_nk: Tensor) -> str:
    """Return how a dense projection is multiplied: 'plain', 'packed' or 'compiled'.

    Not as a plain one only where that is faster in the mean, and nowhere twice as slow.
    """
    forms = linear_forms(weight_nk)
    if forms == ["plain"]:
        return "plain"
    times = linear_times(weight_nk)
    gains = {
        form: [each["plain"] / each[form] for each in times.values()]
        for form in forms
        if all(form in each for each in times.values())
    }
    even = [form for form in gains if min(gains[form]) > 1 / _LARGE_LOSS]
    best = max(even, key=lambda form: math.prod(gains[form]))
    return best if math.prod(gains[best]) > _SMALL_LOSS else "plain"


def _best_of(times: Times, layouts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the forms of the layout that is fastest in the mean over buckets."""
    return min(
        layouts,
        key=lambda forms: math.prod(_fastest_time(times, bucket, forms) for bucket in BUCKETS),
    )


def _fastest_time(times: Times, bucket: int, forms: Iterable[str]) -> float:
    return min(_judged(times[bucket], forms).values(), default=math.inf)


def _judged(times: Mapping[str, float], forms: Iterable[str]) -> dict[str, float]:
    """Return the times of some forms, those of parallel ones with the surplus they need."""
    return {
        form: times[form] * (_UNSURE if form.startswith(PARALLEL) else 1.0)
        for form in forms
        if form in times
    }


def _reason(times: Times, bucket: int, allowed: Iterable[str]) -> str:
    in_order = sorted(times[bucket].items(), key=lambda each: each[1])
    times_text = ", ".join(f"{form} {seconds * 1e3:.3g} ms" for form, seconds in in_order)
    left_out = [form for form in times[bucket] if form not in allowed]
    why = f"; {' and '.join(left_out)} would need a second layout" if left_out else ""
    return f"a sample took {times_text}{why}  [measured on {machine()}]"


def _leaves_enough(num_bytes: int) -> bool:
    """Say whether so many bytes more leave the machine its share; no where that is not known."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        values = dict(line.split(":", 1) for line in lines)
        available = int(values["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return False
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return available - num_bytes >= _SHARE_LEFT * total

"""Faults of the vendor's library that a case is known to meet; docs/vendor_kernels.md tells each.

A failure of such a case is reported as `library fault <name>: ...` and is not held against the
simulator. Each entry was found by a one-line correction of the library that makes the case agree,
or by reading the code and running the smallest input that shows it.
"""

from collections.abc import Callable
from typing import NamedTuple

from lab.check.vendor_cases.case import Case, Job


class Fault(NamedTuple):
    """A fault of the library.

    Attributes:
        name: as in docs/vendor_kernels.md.
        text: what goes wrong.
        meets: whether a case meets it.
    """

    name: str
    text: str
    meets: Callable[[Case], bool]


def _short_last_tile(case: Case) -> bool:
    """Return whether the last PSUM tile of the down projection holds fewer rows than the others."""
    tokens = int(case.get("tokens", 1))
    rows = int(case.get("hidden", 0)) // 128 // case.cores()
    per_bank = max(512 // min(tokens, 128), 1)
    return rows > per_bank and rows % per_bank != 0


def _prefill(*variants: str) -> Callable[[Case], bool]:
    return lambda case: case.kernel == "moe_cte" and case.variant in variants


FAULTS = (
    Fault(
        "row-scale-slice",
        "fp8 row scales of the last, short PSUM tile are taken from the wrong place",
        lambda case: (
            case.kernel == "moe_tkg"
            and "all_expert" in case.variant
            and case.get("quant_type") == "ROW"
            and _short_last_tile(case)
        ),
    ),
    Fault(
        "pre-scale-skip",
        "with skipped tokens every affinity address becomes invalid, so the output is zero",
        lambda case: (
            _prefill("shard_on_block")(case)
            and case.get("affinity_scaling_mode") == "PRE_SCALE"
            and case.get("skip_mode", 0) & 1
        ),
    ),
    Fault(
        "block-fp8",
        "the fp8 scales of the weights are dropped",
        lambda case: _prefill("shard_on_block")(case) and bool(case.get("quantize")),
    ),
    Fault(
        "prefill-gelu",
        "GELU is accepted but leaves the activation unwritten",
        lambda case: case.kernel == "moe_cte" and "GELU" in str(case.get("act_fn")),
    ),
    Fault(
        "pre-scale-bias",
        "affinity is applied after the bias, or the bias is left out, unlike in the reference",
        lambda case: (
            _prefill("shard_on_i", "shard_on_i_hybrid", "shard_on_block")(case)
            and bool(case.get("bias"))
            and case.get("affinity_scaling_mode") != "POST_SCALE"
        ),
    ),
    Fault(
        "block-remainder",
        "the final reduction slices whole 128-row tiles",
        lambda case: (
            _prefill("shard_on_block")(case)
            and case.get("tokens", 0) % 128 != 0
            and case.get("top_k", 1) > 1
        ),
    ),
)


def explain(case: Case, job: Job, reason: str) -> str:
    """Return the reason of a failure, preceded by the library's fault where one is known."""
    for fault in FAULTS:
        if fault.meets(case):
            return f"library fault {fault.name} ({fault.text}): {reason}"
    return reason

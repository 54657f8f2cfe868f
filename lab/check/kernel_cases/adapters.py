"""One adapter per family of kernels: a case's parameters in, a verdict on our kernels out.

`ADAPTERS` maps a case's `kernel` to the function that draws inputs, runs our kernels on the
simulator and holds them against the formula in float64. Case files name kernels and variants of the
vendor's library; ours compute the same formula with other interfaces, so what only concerns an
interface (layouts, whether an operand starts in SBUF) has no counterpart here.
"""

from collections.abc import Callable

from lab.check.kernel_cases import (
    combine,
    decode,
    decode_block,
    index,
    prefill,
    router,
    splits,
)
from lab.check.kernel_cases.verdict import Verdict
from lab.check.vendor_cases.case import Case, Limits, Skipped

ADAPTERS: dict[str, Callable[[Case, Limits], Verdict]] = {
    "moe_cte": prefill.run,
    "moe_tkg": decode.run,
    "moe_block_tkg": decode_block.run,
    "split": splits.run,
    "router_topk": router.run,
    "find_nonzero_indices": index.run,
    "find_nonzero_indices_with_count": index.run,
    "indexed_flatten": index.run,
    "topk_reduce": combine.run,
}


def run(case: Case, limits: Limits) -> Verdict:
    """Run one case.

    Raises:
        Skipped: none of our kernels is meant by the case.
    """
    if case.kernel not in ADAPTERS:
        raise Skipped(
            f"kernel {case.kernel!r}: not a MoE, router or index kernel; known are"
            f" {', '.join(sorted(ADAPTERS))}"
        )
    return ADAPTERS[case.kernel](case, limits)

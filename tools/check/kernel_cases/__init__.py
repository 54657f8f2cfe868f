"""One adapter per family of kernels: a case's parameters in, a verdict on our kernels out.

`ADAPTERS` maps a case's `kernel` to the module whose `run(case, limits)` draws inputs, runs our
kernels on the simulator and holds them against the formula in float64. Case files name kernels and
variants of the vendor's library; ours compute the same formula with other interfaces, so what only
concerns an interface (layouts, whether an operand starts in SBUF) has no counterpart here.
"""

import importlib

from neuron_moe.tools.check.kernel_cases.verdict import Verdict
from neuron_moe.tools.check.vendor_cases.case import Case, Limits, Skipped

ADAPTERS = {
    "moe_cte": "prefill",
    "moe_tkg": "decode",
    "moe_block_tkg": "decode_block",
    "router_topk": "router",
    "find_nonzero_indices": "index",
    "find_nonzero_indices_with_count": "index",
    "indexed_flatten": "index",
    "topk_reduce": "combine",
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
    module = importlib.import_module(f"neuron_moe.tools.check.kernel_cases.{ADAPTERS[case.kernel]}")
    verdict: Verdict = module.run(case, limits)
    return verdict

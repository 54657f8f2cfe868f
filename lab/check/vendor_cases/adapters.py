"""One adapter per family of the vendor's MoE kernels, which benchmarks time beside ours: a case's
parameters in, inputs, kernel and reference out. Other kernels: `nki-sim vendor-tests`.

`ADAPTERS` maps a case's `kernel` to the function that builds a `Job` from it. Adapters hold
layouts and input distributions only; kernels, references and enumerations come from the user's
checkout at run time.
"""

from collections.abc import Callable

from lab.check.vendor_cases import moe_block, moe_decode, moe_prefill
from lab.check.vendor_cases.case import Case, Job, Limits, Skipped
from lab.check.vendor_cases.library import VendorLibrary

ADAPTERS: dict[str, Callable[[Case, VendorLibrary, Limits], Job]] = {
    "moe_cte": moe_prefill.build,
    "moe_tkg": moe_decode.build,
    "moe_block_tkg": moe_block.build,
}


def build_job(case: Case, library: VendorLibrary, limits: Limits) -> Job:
    """Build the run of one case.

    Raises:
        Skipped: no adapter knows the kernel or its variant.
    """
    if case.kernel not in ADAPTERS:
        raise Skipped(
            f"kernel {case.kernel!r}: no adapter; known are {', '.join(sorted(ADAPTERS))}. The"
            f" library's own tests run others: nki-sim vendor-tests -k {case.kernel}"
        )
    return ADAPTERS[case.kernel](case, library, limits)

"""One adapter per family of the vendor's kernels: a case's parameters in, inputs, kernel and
reference out.

`ADAPTERS` maps a case's `kernel` to the function that builds a `Job` from it. Adapters hold
layouts and input distributions only; kernels, references and enumerations come from the user's
checkout at run time.
"""

from collections.abc import Callable

from lab.check.vendor_cases import (
    attention,
    index,
    mlp,
    moe_backward,
    moe_block,
    moe_decode,
    moe_prefill,
    norm,
    qkv,
    router,
)
from lab.check.vendor_cases.case import Case, Job, Limits, Skipped
from lab.check.vendor_cases.library import VendorLibrary

ADAPTERS: dict[str, Callable[[Case, VendorLibrary, Limits], Job]] = {
    "moe_cte": moe_prefill.build,
    "moe_tkg": moe_decode.build,
    "moe_block_tkg": moe_block.build,
    "moe_bwd": moe_backward.build,
    "router_topk": router.build,
    "find_nonzero_indices": index.build,
    "find_nonzero_indices_with_count": index.build,
    "indexed_flatten": index.build,
    "cumsum": index.build,
    "topk_reduce": index.build,
    "rmsnorm": norm.build,
    "rmsnorm_tkg": norm.build,
    "rmsnorm_quant": norm.build,
    "mlp": mlp.build,
    "mlp_tkg": mlp.build,
    "mlp_cte": mlp.build,
    "attention": attention.build,
    "attention_cte": attention.build,
    "qkv": qkv.build,
    "qkv_tkg": qkv.build,
    "qkv_cte": qkv.build,
}


def build_job(case: Case, library: VendorLibrary, limits: Limits) -> Job:
    """Build the run of one case.

    Raises:
        Skipped: no adapter knows the kernel or its variant.
    """
    if case.kernel not in ADAPTERS:
        raise Skipped(
            f"kernel {case.kernel!r}: no adapter; known are {', '.join(sorted(ADAPTERS))}"
        )
    return ADAPTERS[case.kernel](case, library, limits)

"""One adapter per family of the vendor's kernels: a case's parameters in, inputs, kernel and
reference out.

`ADAPTERS` maps a case's `kernel` to the function that builds a `Job` from it. Adapters hold
layouts and input distributions only; kernels, references and enumerations come from the user's
checkout at run time.
"""

import importlib

from neuron_moe.tools.check.vendor_cases.case import Case, Job, Limits, Skipped
from neuron_moe.tools.check.vendor_cases.library import VendorLibrary

ADAPTERS = {
    "moe_cte": "moe_prefill",
    "moe_tkg": "moe_decode",
    "moe_block_tkg": "moe_block",
    "moe_bwd": "moe_backward",
    "router_topk": "router",
    "find_nonzero_indices": "index",
    "find_nonzero_indices_with_count": "index",
    "indexed_flatten": "index",
    "cumsum": "index",
    "topk_reduce": "index",
    "rmsnorm": "norm",
    "rmsnorm_tkg": "norm",
    "rmsnorm_quant": "norm",
    "mlp": "mlp",
    "mlp_tkg": "mlp",
    "mlp_cte": "mlp",
    "attention": "attention",
    "attention_cte": "attention",
    "qkv": "qkv",
    "qkv_tkg": "qkv",
    "qkv_cte": "qkv",
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
    module = importlib.import_module(f"neuron_moe.tools.check.vendor_cases.{ADAPTERS[case.kernel]}")
    job: Job = module.build(case, library, limits)
    return job

"""The vendor's kernels, unmodified, agree with their own references on the simulator.

Needs a checkout of the vendor's library, named by NKI_LIBRARY_PATH; nothing of it is in this
repository. The cases are small ones of every kernel family; `neuron-moe check vendor` runs full
lists.
"""

import os
import resource
from pathlib import Path

import numpy as np
import pytest

import nki_sim
from lab.check.case_file import read_cases
from lab.check.vendor import run_case
from lab.check.vendor_cases.adapters import build_job
from lab.check.vendor_cases.case import Case, Limits
from lab.check.vendor_cases.launch import launch
from lab.check.vendor_cases.library import LIBRARY_VARIABLE, VendorLibrary

CASES = read_cases(Path(__file__).with_name("vendor_cases.json"))

pytestmark = [
    pytest.mark.skipif(
        LIBRARY_VARIABLE not in os.environ,
        reason=f"{LIBRARY_VARIABLE} is not set: it names a checkout of the vendor's kernel library",
    ),
    # The references are the vendor's code: what they warn about is not ours to change.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def library():
    return VendorLibrary(Path(os.environ[LIBRARY_VARIABLE]))


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.kernel}-{c.variant}-{c.id}")
def test_a_vendor_kernel_agrees_with_its_own_reference(case, library):
    outcome = run_case(case, library, Limits())
    assert outcome.outcome == "passed", outcome.reason
    assert outcome.simulated_us > 0


GPT_OSS_120B_TP8_PREFILL = Case.from_json(
    {
        "id": "gpt-oss-120b-tp8",
        "kernel": "moe_cte",
        "variant": "shard_on_block",
        "params": {
            "hidden": 3072,  # 2880, padded to the kernel's multiple of 512
            "intermediate": 384,  # 2880 / 8, padded to a multiple of 128
            "tokens": 1024,
            "experts": 128,
            "top_k": 4,
            "block_size": 256,
            "skip_mode": 1,
            "bias": True,
            "act_fn": "Swish",
            "gate_clamp_upper": 7.0,
            "up_clamp_upper": 8.0,
            "up_clamp_lower": -6.0,
        },
    }
)


def test_a_prefill_of_gpt_oss_120b_is_timed_in_six_gib(library):
    job = build_job(GPT_OSS_120B_TP8_PREFILL, library, Limits(macs=1e13))
    for name, value in job.inputs.items():
        if isinstance(value, np.ndarray) and value.dtype.kind not in "iu":
            job.inputs[name] = nki_sim.TensorSpec(value.shape, value.dtype)
    launched = launch(job, "trn2", mode="indices")
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    shown = (
        f"{len(launched.run.trace):,} instructions, peak {peak_gib:.2f} GiB, "
        f"simulated {launched.simulated_us:,.0f} us"
    )
    assert peak_gib < 6, shown

"""The vendor's kernels, unmodified, agree with their own references on the simulator.

Needs a checkout of the vendor's library, named by NKI_LIBRARY_PATH; nothing of it is in this
repository. The cases are small ones of every kernel family; `neuron-moe check vendor` runs full
lists.
"""

import os
from pathlib import Path

import pytest

from neuron_moe.tools.check_vendor import LIBRARY_VARIABLE, read_cases, run_case
from neuron_moe.tools.vendor_cases.case import Limits
from neuron_moe.tools.vendor_cases.library import VendorLibrary

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

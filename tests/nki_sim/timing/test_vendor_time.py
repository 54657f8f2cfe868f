"""A whole kernel of the vendor against its published profile.

The profile is in nki/library/specs/design-rmsnorm-quant of aws-neuron/aws-neuron-sdk
(profile_overall.png): batch 1, 160 rows of 16,384 bf16, quantised to fp8 on two cores; from the
first trigger at 27.0 us to the end of the last store at 113 us.
"""

import os
from pathlib import Path

import ml_dtypes
import pytest

import nki_sim
from neuron_moe.tools.vendor_cases.library import VendorLibrary

LIBRARY = os.environ.get("NKI_LIBRARY_PATH", "")
PUBLISHED_US = 86.0
MODULE = "core.rmsnorm.rmsnorm_quant"


@pytest.mark.skipif(not LIBRARY, reason="NKI_LIBRARY_PATH names no checkout of nki-library")
def test_the_quantising_norm_takes_the_time_of_its_profile() -> None:
    library = VendorLibrary(Path(LIBRARY))
    hidden = nki_sim.TensorSpec((1, 160, 16384), ml_dtypes.bfloat16)
    gamma = nki_sim.TensorSpec((1, 16384), ml_dtypes.bfloat16)
    run = nki_sim.run(
        library.get(MODULE, "rmsnorm_quant_kernel"),
        hidden,
        gamma,
        library.get(MODULE, "RmsNormQuantKernelArgs")(),
        lnc=2,
        options=nki_sim.SimOptions(mode="indices"),
    )
    assert run.timeline.total_us == pytest.approx(PUBLISHED_US, rel=0.15)

"""A whole kernel of the vendor against its published times.

They are in nki/library/specs/design-rmsnorm-quant of aws-neuron/aws-neuron-sdk, on two cores of a
Trn2: a profile (profile_overall.png) of 160 rows of 16,384 bf16, quantised to fp8, from the first
trigger at 27.0 us to the end of the last store at 113 us; and times for longer sequences, whose
tiles follow one another without overlap.
"""

import os
from pathlib import Path

import ml_dtypes
import pytest

import nki_sim
from lab.check.vendor_cases.library import VendorLibrary
from nki_sim.hardware import TRN2
from nki_sim.time.timeline import TimelineOptions, schedule

LIBRARY = os.environ.get("NKI_LIBRARY_PATH", "")
MODULE = "core.rmsnorm.rmsnorm_quant"


pytestmark = pytest.mark.skipif(
    not LIBRARY, reason="NKI_LIBRARY_PATH names no checkout of nki-library"
)


def quantising_norm(rows: int, columns: int) -> nki_sim.Run:
    library = VendorLibrary(Path(LIBRARY))
    return nki_sim.run(
        library.get(MODULE, "rmsnorm_quant_kernel"),
        nki_sim.TensorSpec((1, rows, columns), ml_dtypes.bfloat16),
        nki_sim.TensorSpec((1, columns), ml_dtypes.bfloat16),
        library.get(MODULE, "RmsNormQuantKernelArgs")(),
        lnc=2,
        options=nki_sim.SimOptions(mode="indices"),
    )


def test_one_tile_takes_the_time_of_its_profile() -> None:
    assert quantising_norm(160, 16384).timeline.total_us == pytest.approx(86.0, rel=0.15)


@pytest.mark.parametrize(
    ("rows", "columns", "published_us"),
    [(2048, 8192, 458.2), (32768, 8192, 6287.0), (2048, 16384, 866.81)],
    ids=["2048x8192", "32768x8192", "2048x16384"],
)
def test_many_tiles_take_the_published_time_with_early_reuse(
    rows: int, columns: int, published_us: float
) -> None:
    trace = quantising_norm(rows, columns).trace
    timeline = schedule(trace, TRN2, TimelineOptions(reuse="early"))
    assert timeline.total_us == pytest.approx(published_us, rel=0.15)

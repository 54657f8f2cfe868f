"""Fingerprints of what times depend on."""

import dataclasses

from neuron_moe.tools.timing.sources import Sources
from nki_sim.hardware import NEUTRAL, TRN2


def test_what_changes_no_time_leaves_the_fingerprint_of_the_coefficients_alone() -> None:
    fields = {name: getattr(TRN2, name) for name in NEUTRAL}
    assert fields == NEUTRAL
    plain = Sources.now(TRN2, None, ()).coefficients
    changed = dataclasses.replace(TRN2, psum_accumulate_factor=1.1)
    assert Sources.now(changed, None, ()).coefficients != plain
    slower = dataclasses.replace(TRN2, hwdge_ns=601.0)
    assert Sources.now(slower, None, ()).coefficients != plain

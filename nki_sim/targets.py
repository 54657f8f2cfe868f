"""The sizes and rules of each NeuronCore generation that a kernel must respect.

Only what decides whether a kernel is legal is here; what decides how long it takes is in
`hardware.py`. Sources: architecture guides of Trainium 1, 2 and 3; the usable SBUF bytes are those
of the open compiler front end (leanprover/KLR, KLR/Trace.lean), smaller than the physical memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from nki_sim.constants import nc_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One generation.

    Attributes:
        name: the instance family, "trn2".
        version: the generation as kernels see it.
        sbuf_bytes: bytes of one SBUF partition that a kernel may use.
        sbuf_physical_bytes: bytes of one SBUF partition that exist.
        psum_banks: PSUM banks.
        psum_bank_bytes: bytes of one bank in one partition.
        moving_max: columns of the moving operand of a matmul into float32.
        moving_max_bf16: the same into bfloat16, where that is possible.
    """

    name: str
    version: nc_version
    sbuf_bytes: int
    sbuf_physical_bytes: int
    psum_banks: int = 8
    psum_bank_bytes: int = 2048
    moving_max: int = 512
    moving_max_bf16: int = 512

    @property
    def psum_bytes(self) -> int:
        """Bytes of one PSUM partition."""
        return self.psum_banks * self.psum_bank_bytes


TRN1: Final = Target(
    name="trn1", version=nc_version.gen2, sbuf_bytes=180_224, sbuf_physical_bytes=196_608
)
TRN2: Final = Target(
    name="trn2", version=nc_version.gen3, sbuf_bytes=212_984, sbuf_physical_bytes=229_376
)
TRN3: Final = Target(
    name="trn3",
    version=nc_version.gen4,
    sbuf_bytes=245_752,
    sbuf_physical_bytes=262_144,
    moving_max=4096,
    moving_max_bf16=8192,
)
_BY_NAME: Final = {
    "trn1": TRN1, "inf2": TRN1, "gen2": TRN1,
    "trn2": TRN2, "gen3": TRN2,
    "trn3": TRN3, "gen4": TRN3,
}  # fmt: skip


def find_target(name: str | None) -> Target:
    """Return the target called `name`; None asks NEURON_PLATFORM_TARGET_OVERRIDE, else trn2.

    The variable is the language's own way to choose a generation.

    Raises:
        ValueError: no such target.
    """
    chosen = name or os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE") or "trn2"
    if chosen not in _BY_NAME:
        raise ValueError(f"target={chosen!r}: must be one of {', '.join(_BY_NAME)}.")
    return _BY_NAME[chosen]

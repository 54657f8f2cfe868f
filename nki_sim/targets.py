"""What a kernel may use on each NeuronCore generation: the sizes of `hardware.py`, as limits."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from nki_sim import hardware
from nki_sim.constants import nc_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The limits of one generation.

    Attributes:
        name: the instance family, "trn2".
        version: the generation as kernels see it.
        sbuf_bytes: bytes of one SBUF partition that a kernel may use.
        psum_banks: PSUM banks.
        psum_bank_bytes: bytes of one bank in one partition.
        moving_max: columns of the moving operand of a matmul into float32.
        moving_max_bf16: the same into bfloat16, where that is possible.
    """

    name: str
    version: nc_version
    sbuf_bytes: int
    psum_banks: int
    psum_bank_bytes: int
    moving_max: int
    moving_max_bf16: int

    @property
    def psum_bytes(self) -> int:
        """Bytes of one PSUM partition."""
        return self.psum_banks * self.psum_bank_bytes


def find_target(name: str | None) -> Target:
    """Return the target called `name`; None asks NEURON_PLATFORM_TARGET_OVERRIDE, else trn2.

    The variable is the language's own way to choose a generation.

    Raises:
        ValueError: no such target.
    """
    return _target(name or os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE") or "trn2")


@functools.cache
def _target(name: str) -> Target:
    chip = hardware.find(name)
    version = nc_version(chip.generation)
    is_wide = version >= nc_version.gen4  # nki.isa.nc_matmul, NKI 0.6: 4096, or 8192 into bfloat16
    return Target(
        name=chip.name,
        version=version,
        sbuf_bytes=chip.sbuf_usable_bytes_per_partition,
        psum_banks=chip.psum_banks,
        psum_bank_bytes=chip.psum_bank_bytes,
        moving_max=4096 if is_wide else 512,
        moving_max_bf16=8192 if is_wide else 512,
    )

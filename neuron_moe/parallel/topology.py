"""The machines that layouts are checked against and planned for."""

from dataclasses import dataclass

from neuron_moe.errors import check_choice
from nki_sim.hardware import TRN1, TRN2, TRN3, Hardware


@dataclass(frozen=True, slots=True)
class Instance:
    """One machine.

    Args:
        name: as the cloud calls it.
        chips: chips of one node.
        max_nodes: nodes joined by NeuronLink.
        chip: the numbers of its cores.
        source: where chip and node counts come from.
        lncs: physical cores that a logical core can have, the usual number last.
        refuses: why our kernels do not run there; empty where they do.
    """

    name: str
    chips: int
    max_nodes: int
    chip: Hardware
    source: str
    lncs: tuple[int, ...] = (1, 2)
    refuses: tuple[str, ...] = ()

    def logical_cores_per_chip(self, lnc: int) -> int:
        """Return the logical cores of a chip with `lnc` physical cores each.

        Raises:
            ValueError: the chip has no such logical cores.
        """
        if isinstance(lnc, bool) or lnc not in self.lncs:
            counts = " or ".join(map(str, self.lncs))
            raise ValueError(
                f"lnc={lnc!r}: must be {counts} physical cores per logical core of {self.name}. Use"
                f" {self.lncs[-1]}."
            )
        return self.chip.cores_per_chip // lnc

    def logical_cores(self, lnc: int) -> int:
        """Return the logical cores of one node."""
        return self.chips * self.logical_cores_per_chip(lnc)

    def hbm_bytes_per_logical_core(self, lnc: int) -> int:
        """Return a logical core's share of the chip's memory."""
        return self.chip.hbm_bytes_per_core * lnc


INSTANCES = {
    "trn2.3xlarge": Instance(
        "trn2.3xlarge", 1, 1, TRN2, "aws-neuron-sdk about-neuron/arch/neuron-hardware: one Trn2"
    ),
    "trn2.48xlarge": Instance(
        "trn2.48xlarge", 16, 1, TRN2, "aws-neuron-sdk about-neuron/arch/neuron-hardware: 16 Trn2"
    ),
    "trn2u.48xlarge": Instance(
        "trn2u.48xlarge",
        16,
        4,
        TRN2,
        "aws-neuron-sdk about-neuron/arch/neuron-hardware: UltraServer of four nodes, 64 Trn2",
    ),
    "trn1.32xlarge": Instance(
        "trn1.32xlarge",
        16,
        1,
        TRN1,
        "aws-neuron-sdk about-neuron/arch/neuron-hardware: 16 Trainium of two cores and 32 GiB",
        lncs=(1,),
        refuses=(
            "decode_moe makes descriptors in hardware (dge_mode.hwdge) and lists experts by"
            " nonzero_with_count, blockwise_moe gathers rows by numbers in SBUF (vector_offset):"
            " Trn1 has none of these",
            "buffers are fitted to the 208 KiB of a partition of Trn2; Trn1 has 176 KiB",
        ),
    ),
    "trn3": Instance(
        "trn3",
        1,
        1,
        TRN3,
        "aws-neuron-sdk about-neuron/arch/neuron-hardware: one chip, whatever server it is in",
        refuses=("they are fitted to Trn2 and timed for it; on Trn3 nothing was checked",),
    ),
}


def instance(name: str) -> Instance:
    """Return a machine by name.

    Raises:
        ValueError: the name is not known.
    """
    return INSTANCES[check_choice("instance", name, INSTANCES)]

"""The Trn2 machines that layouts are checked against and planned for."""

from dataclasses import dataclass

from neuron_moe.errors import check_choice
from nki_sim.hardware import TRN2, Hardware


@dataclass(frozen=True, slots=True)
class Instance:
    """One machine.

    Args:
        name: as the cloud calls it.
        chips: chips of one node.
        max_nodes: nodes joined by NeuronLink.
        chip: the numbers of its cores.
        source: where chip and node counts come from.
    """

    name: str
    chips: int
    max_nodes: int
    chip: Hardware
    source: str

    def logical_cores_per_chip(self, lnc: int) -> int:
        """Return the logical cores of a chip with `lnc` physical cores each."""
        if isinstance(lnc, bool) or lnc not in (1, 2):
            raise ValueError(f"lnc={lnc!r}: must be 1 or 2 physical cores per logical core. Use 2.")
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
}


def instance(name: str) -> Instance:
    """Return a machine by name.

    Raises:
        ValueError: the name is not known.
    """
    return INSTANCES[check_choice("instance", name, INSTANCES)]

"""The numbers of the planner's cost model, each with its source, and the machine they make up.

Chip numbers are those of `nki_sim.hardware`. A rank is a logical core of `lnc` physical ones.
"""

from dataclasses import dataclass, replace

from neuron_moe.parallel.topology import Instance
from nki_sim.hardware import TRN2, Hardware


@dataclass(frozen=True, slots=True)
class Coefficient:
    """One number of the model.

    Args:
        value: the number.
        unit: its unit.
        kind: documented, measured (by others, published) or assumed.
        source: where it comes from.
    """

    value: float
    unit: str
    kind: str
    source: str


def _of_chip(field: str, unit: str, factor: float = 1.0) -> Coefficient:
    provenance = TRN2.provenance(field)
    value = float(getattr(TRN2, field)) * factor
    return Coefficient(value, unit, provenance.kind, provenance.source)


COEFFICIENTS = {
    "tensor_clock_ghz": _of_chip("tensor_clock_ghz", "GHz"),
    "tile_rows": _of_chip("array_rows", "rows"),
    "tile_columns": _of_chip("array_columns", "columns"),
    "least_columns": _of_chip("matmul_floor_cycles", "columns"),
    "fp32_passes": _of_chip("fp32_passes", "passes"),
    "hbm_bytes_per_ns": _of_chip("hbm_bytes_per_ns", "bytes/ns of two physical cores"),
    "hbm_bytes_per_core": _of_chip("hbm_bytes_per_core", "bytes of a physical core"),
    "collective_base_ns": _of_chip("collective_base_ns", "ns a collective"),
    "collective_bytes_per_ns": Coefficient(
        TRN2.collective_bytes_per_ns,
        "bytes/ns into a rank, within a node",
        "assumed",
        "a tenth of the chip's NeuronLink rate; the published 8-rank all-gather sample gives 131,"
        " the 32-rank one 31 (nccom-test.rst, platform not named)",
    ),
    "node_base_ns": Coefficient(
        15000.0, "ns more between nodes", "documented", "CC: about 15 us a hop between instances"
    ),
    "node_bytes_per_ns": Coefficient(
        32.0,
        "bytes/ns into a rank, from other nodes of an UltraServer",
        "assumed",
        "half of a quarter of 256 GB/s a chip between instances (CHIP); the half as within a node",
    ),
    "all_to_all_share": Coefficient(
        0.5,
        "of the all-gather's rate",
        "assumed",
        "uneven parts on a torus; the variable all-to-all of the Neuron SDK is announced only",
    ),
    "reserve_bytes": Coefficient(
        4.0 * 2**30, "bytes a rank", "assumed", "key/value cache, activations and scratch"
    ),
}


def use_measured(chip: Hardware, source: str) -> None:
    """Plan with the numbers of a measured chip, as far as they differ from ours.

    Args:
        chip: as `nki_sim.hardware_file` reads it.
        source: what to say of them.
    """
    for name, field in (
        ("least_columns", "matmul_floor_cycles"),
        ("hbm_bytes_per_ns", "hbm_bytes_per_ns"),
    ):
        value = float(getattr(chip, field))
        if value != COEFFICIENTS[name].value:
            COEFFICIENTS[name] = replace(
                COEFFICIENTS[name], value=value, kind="measured", source=source
            )


@dataclass(frozen=True, slots=True)
class Machine:
    """Ranks, and what they compute, read and exchange in a nanosecond.

    Args:
        instance: one node.
        nodes: how many, of an UltraServer if more than one.
        lnc: physical cores per rank.
        hbm_bytes_per_ns: of one rank.
        bytes_per_ns: into a rank from its own node.
        node_bytes_per_ns: into a rank from other nodes.
        all_to_all_share: of these rates in an all-to-all.
    """

    instance: Instance
    nodes: int
    lnc: int
    hbm_bytes_per_ns: float
    bytes_per_ns: float
    node_bytes_per_ns: float
    all_to_all_share: float

    @classmethod
    def build(cls, instance: Instance, nodes: int = 1, lnc: int = 2) -> "Machine":
        """Build from the coefficients.

        Raises:
            ValueError: more nodes than are joined by NeuronLink.
        """
        if not 1 <= nodes <= instance.max_nodes:
            raise ValueError(
                f"nodes={nodes}: {instance.name} joins at most {instance.max_nodes}. Use"
                " trn2u.48xlarge for up to 4."
            )
        instance.logical_cores(lnc)  # checks lnc
        share = lnc / 2  # rates of a pair of physical cores
        return cls(
            instance,
            nodes,
            lnc,
            COEFFICIENTS["hbm_bytes_per_ns"].value * share,
            COEFFICIENTS["collective_bytes_per_ns"].value * share,
            COEFFICIENTS["node_bytes_per_ns"].value * share,
            COEFFICIENTS["all_to_all_share"].value,
        )

    @property
    def ranks_per_node(self) -> int:
        """Logical cores of a node."""
        return self.instance.logical_cores(self.lnc)

    @property
    def ranks(self) -> int:
        """Logical cores of all nodes."""
        return self.ranks_per_node * self.nodes

    @property
    def hbm_bytes(self) -> int:
        """Memory of a rank."""
        return self.instance.hbm_bytes_per_logical_core(self.lnc)

    def with_faster_links(self, factor: float) -> "Machine":
        """Return the machine with other link rates, to see what depends on them."""
        return replace(
            self,
            bytes_per_ns=self.bytes_per_ns * factor,
            node_bytes_per_ns=self.node_bytes_per_ns * factor,
        )

    def gather_ns(self, total_bytes: float, ranks: int) -> float:
        """Return the time of an all-gather whose result, or a reduce-scatter whose input, is so
        large; an all-reduce is one after the other.

        Between nodes each rank fetches its share of the other nodes' parts, then shares it with its
        own node.
        """
        if ranks == 1:
            return 0.0
        local = min(ranks, self.ranks_per_node)
        nodes = ranks // local
        time_ns = COEFFICIENTS["collective_base_ns"].value
        time_ns += total_bytes * (local - 1) / local / self.bytes_per_ns
        if nodes > 1:
            time_ns += COEFFICIENTS["node_base_ns"].value
            time_ns += total_bytes * (nodes - 1) / nodes / local / self.node_bytes_per_ns
        return time_ns

    def exchange_ns(self, received_bytes: float, ranks: int, stride: int = 1) -> float:
        """Return the time of an all-to-all in which the busiest rank receives so many bytes.

        Args:
            received_bytes: rows of the rank itself included.
            ranks: of the group.
            stride: distance of its ranks.
        """
        if ranks == 1:
            return 0.0
        local = max(1, min(ranks, self.ranks_per_node // stride))
        nodes = ranks // local
        rate = self.bytes_per_ns * self.all_to_all_share
        time_ns = COEFFICIENTS["collective_base_ns"].value
        time_ns += received_bytes / nodes * (local - 1) / local / rate
        if nodes > 1:
            time_ns += COEFFICIENTS["node_base_ns"].value
            rate = self.node_bytes_per_ns * self.all_to_all_share
            time_ns += received_bytes * (nodes - 1) / nodes / rate
        return time_ns

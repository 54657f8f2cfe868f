"""What one rank owns of the routed experts."""

from dataclasses import dataclass

from neuron_moe.errors import check_positive_int


@dataclass(frozen=True)
class ExpertShard:
    """This rank's part of the routed experts: a slice of I (tensor parallel) of some experts
    (expert parallel).

    Args:
        tp_rank: position among the ranks that split the intermediate axis.
        tp_size: number of these ranks.
        ep_rank: position among the ranks that split the experts.
        ep_size: number of these ranks.
    """

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "ep"):
            size, rank = getattr(self, f"{axis}_size"), getattr(self, f"{axis}_rank")
            check_positive_int(f"{axis}_size", size)
            if not 0 <= rank < size:
                raise ValueError(f"{axis}_rank={rank}: must be in [0, {axis}_size={size}).")

    def columns(self, intermediate_size: int) -> range:
        """Return this rank's run of the intermediate axis; runs differ by one at most.

        Raises:
            ValueError: there are more ranks than columns.
        """
        if intermediate_size < self.tp_size:
            raise ValueError(
                f"intermediate_size={intermediate_size}: must be at least the tensor-parallel size"
                f" {self.tp_size}. Lower the tensor-parallel size."
            )
        start, stop = (
            intermediate_size * rank // self.tp_size for rank in (self.tp_rank, self.tp_rank + 1)
        )
        return range(start, stop)

    def local_experts(self, num_experts: int) -> range:
        """Return the experts of this rank, a contiguous run."""
        size = num_experts // self.ep_size
        return range(self.ep_rank * size, (self.ep_rank + 1) * size)

"""The collectives an MoE layer needs, behind one small protocol.

Everything in `neuron_moe.parallel` moves data through the four methods of `Collectives`. Here they
are `torch.distributed` (gloo on a CPU, nccl on a GPU, the Neuron backend on Trainium); whoever has
another transport implements these four. All of them work on axis 0 and give new tensors.

A method moves numbers and knows no gradient: one that would flow back through it raises instead of
being wrong. The functions below are differentiable whatever the transport, for the way back of each
is another of the four: gathered rows come back summed, exchanged rows come back exchanged.

What a loss is: ranks with different tokens each have a part of it, and gradients are those of the
sum of the parts; ranks with the same tokens all compute the same loss, which counts once. So
`enter_common` stands where ranks begin to work on different parts of the same tokens, and
`sum_common` where they have one result again.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as functional

from neuron_moe.device import is_captured, is_exporting
from neuron_moe.parallel.failure import describe_failure, note_collective
from neuron_moe.parallel.xla import XlaCollectives, is_xla

_BYTES_ONLY = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
)

_Way = Callable[[Tensor], Tensor]


@runtime_checkable
class Collectives(Protocol):
    """One group of ranks and what they can do together.

    Attributes:
        name: what messages call the group.
        rank: this process's position in it.
        size: number of ranks.
        ranks: their global ranks; empty where there are no processes.
        is_traced: one process makes the graph of all ranks: it stands in the place of rank 0, and
            nothing may depend on that.
    """

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    is_traced: bool

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, the same on every rank."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the ranks' equally shaped tensors joined along axis 0, in rank order."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's equal part, along axis 0, of the sum over ranks."""

    def all_to_all(
        self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        """Send rows of axis 0 to each rank; return the rows from each rank, in rank order."""


class SingleRank:
    """A group of one: nothing moves."""

    is_traced = False

    def __init__(self, name: str = "single") -> None:
        self.name = name
        self.rank = 0
        self.size = 1
        self.ranks: tuple[int, ...] = ()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    all_gather = reduce_scatter = all_reduce

    def all_to_all(
        self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        """Return x."""
        return x


class TorchCollectives:
    """Collectives of a `torch.distributed` process group.

    Eager calls use the ordinary collectives; while a graph is captured the functional ones, which
    `torch.export` and `torch.compile` take.

    Args:
        group: two ranks or more; this process is one of them.
        name: what messages call the group.
    """

    is_traced = False

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self.group = group
        self.name = name
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, the same on every rank."""
        _check_sums(x)
        if is_captured():
            summed: Tensor = functional.all_reduce(x, "sum", self.group)
            return summed
        output = x.detach().clone()
        self._call("all_reduce", lambda: dist.all_reduce(output, group=self.group))
        return _without_gradient(x, output)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the ranks' equally shaped tensors joined along axis 0, in rank order."""
        if is_captured():
            return functional.all_gather_tensor(x, 0, self.group)
        carrier = _as_carrier(x.detach())
        output = carrier.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._call("all_gather", lambda: _ALL_GATHER(output, carrier, group=self.group))
        return _without_gradient(x, output.view(x.dtype))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's equal part, along axis 0, of the sum over ranks."""
        _check_sums(x)
        if x.shape[0] % self.size:
            raise ValueError(
                f"x: axis 0 of shape {tuple(x.shape)} must divide by the {self.size} ranks of group"
                f" {self.name!r}. Use reduce_scatter_rows() for uneven parts."
            )
        if is_captured():
            scattered: Tensor = functional.reduce_scatter_tensor(x, "sum", 0, self.group)
            return scattered
        source = x.detach().contiguous()
        output = source.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        self._call("reduce_scatter", lambda: _REDUCE_SCATTER(output, source, group=self.group))
        return _without_gradient(x, output)

    def all_to_all(
        self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        """Send rows of axis 0 to each rank; return the rows from each rank, in rank order."""
        carrier = _as_carrier(x.detach())
        output = carrier.new_empty((sum(receive_counts), *x.shape[1:]))
        self._call(
            "all_to_all",
            lambda: dist.all_to_all_single(
                output, carrier, list(receive_counts), list(send_counts), group=self.group
            ),
        )
        return _without_gradient(x, output.view(x.dtype))

    def _call(self, collective: str, run: Callable[[], Any]) -> None:
        started = time.monotonic()
        note_collective(collective, self.name)
        try:
            run()
        except RuntimeError as error:
            seconds = time.monotonic() - started
            raise describe_failure(collective, self.name, self.ranks, seconds, error) from error


def _renamed(new: str, old: str) -> Callable[..., Any]:
    """Return a collective by the name torch 2.13 gave it, or by the one before, now deprecated."""
    found: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return found


_ALL_GATHER = _renamed("all_gather_single", "all_gather_into_tensor")
_REDUCE_SCATTER = _renamed("reduce_scatter_single", "reduce_scatter_tensor")


def as_collectives(group: "ProcessGroup | Collectives | None", name: str) -> Collectives:
    """Return collectives for a process group; None and groups of one need no communication."""
    if group is None:
        return SingleRank(name)
    if isinstance(group, Collectives):
        return group
    if is_xla(group):
        return SingleRank(name) if group.size() == 1 else XlaCollectives(group, name)
    return SingleRank(name) if dist.get_world_size(group) == 1 else TorchCollectives(group, name)


def process_group_of(collectives: object) -> ProcessGroup | None:
    """Return the process group of collectives that have one."""
    if isinstance(collectives, TorchCollectives | XlaCollectives):
        return collectives.group
    return None


def is_recorded(x: Tensor) -> bool:
    """Say whether a gradient may flow back to x; exported graphs are for inference."""
    return torch.is_grad_enabled() and x.requires_grad and not is_exporting()


def all_gather_rows(group: Collectives, x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Join parts of different length along axis 0.

    Every part is padded to the longest, so the transfer itself is an ordinary all-gather.

    Args:
        group: the ranks.
        x: [lengths[rank], ..] this rank's part.
        lengths: rows of each rank.
    """
    if group.size == 1:
        return x
    if is_recorded(x):
        return _moved(
            x,
            lambda x: all_gather_rows(group, x, lengths),
            lambda gradient: reduce_scatter_rows(group, gradient, lengths),
        )
    longest = max(lengths)
    gathered = group.all_gather(_pad_rows(x, longest))
    if min(lengths) == longest:
        return gathered
    rows = gathered.view(group.size, longest, *x.shape[1:])
    return torch.cat([part[:length] for part, length in zip(rows, lengths, strict=True)])


def reduce_scatter_rows(group: Collectives, x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sum over ranks and return this rank's part, parts of different length along axis 0.

    Args:
        group: the ranks.
        x: [sum(lengths), ..].
        lengths: rows of each rank.
    """
    if group.size == 1:
        return x
    if is_recorded(x):
        return _moved(
            x,
            lambda x: reduce_scatter_rows(group, x, lengths),
            lambda gradient: all_gather_rows(group, gradient, lengths),
        )
    longest = max(lengths)
    if min(lengths) < longest:
        x = torch.cat([_pad_rows(part, longest) for part in torch.split(x, list(lengths))])
    return group.reduce_scatter(x)[: lengths[group.rank]]


def all_to_all_rows(
    group: Collectives, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> Tensor:
    """Send rows of axis 0 to each rank; return the rows from each rank, in rank order.

    Args:
        group: the ranks.
        x: [sum(send_counts), ..].
        send_counts: rows to each rank.
        receive_counts: rows from each rank.
    """
    if group.size == 1:
        return x
    if is_recorded(x):
        return _moved(
            x,
            lambda x: group.all_to_all(x, send_counts, receive_counts),
            lambda gradient: group.all_to_all(gradient, receive_counts, send_counts),
        )
    return group.all_to_all(x, send_counts, receive_counts)


def enter_common(group: Collectives, x: Tensor) -> Tensor:
    """Return x, of which each rank will use a part in its own way; its gradients are summed.

    Args:
        group: ranks that hold the same x.
        x: any shape.
    """
    if group.size == 1 or not is_recorded(x):
        return x
    return _moved(x, lambda x: x.view_as(x), group.all_reduce)


def sum_common(group: Collectives, x: Tensor) -> Tensor:
    """Return the sum over ranks, which all of them go on with alike.

    Args:
        group: the ranks.
        x: any shape, this rank's summand.
    """
    if group.size == 1:
        return x
    if is_recorded(x):
        return _moved(x, group.all_reduce, lambda gradient: gradient)
    return group.all_reduce(x)


def gather_common(group: Collectives, x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Join parts along axis 0 to what all ranks go on with alike.

    Args:
        group: the ranks.
        x: [lengths[rank], ..] this rank's part.
        lengths: rows of each rank.
    """
    if group.size == 1 or not is_recorded(x):
        return all_gather_rows(group, x, lengths)
    start, length = sum(lengths[: group.rank]), lengths[group.rank]
    return _moved(
        x,
        lambda x: all_gather_rows(group, x, lengths),
        lambda gradient: gradient[start : start + length],
    )


def share_common(group: Collectives, x: Tensor) -> Tensor:
    """Return x, which each rank computed alike; each takes its share of the gradient.

    Between `enter_common` and here gradients are summed over ranks, and would count once each.

    Args:
        group: ranks that hold the same x.
        x: any shape.
    """
    if group.size == 1 or not is_recorded(x):
        return x
    return _moved(x, lambda x: x.view_as(x), lambda gradient: gradient / group.size)


def gather_lengths(group: Collectives, length: int, device: torch.device) -> tuple[int, ...]:
    """Return how many rows each rank holds.

    While a graph is captured or traced, shapes are static and every rank is taken to hold as many
    as this one.
    """
    if group.size == 1 or group.is_traced or is_captured():
        return (length,) * group.size
    lengths = group.all_gather(torch.tensor([length], dtype=torch.int64, device=device))
    return tuple(lengths.tolist())


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    missing = rows - x.shape[0]
    return x if missing == 0 else torch.cat([x, x.new_zeros((missing, *x.shape[1:]))])


def _as_carrier(x: Tensor) -> Tensor:
    """Return x contiguous, in a dtype that transports accept: float8 travels as uint8."""
    x = x.contiguous()
    return x.view(torch.uint8) if x.dtype in _BYTES_ONLY else x


def _check_sums(x: Tensor) -> None:
    if x.dtype in _BYTES_ONLY:
        raise ValueError(
            f"x: dtype {x.dtype} cannot be summed over ranks. Decode it to bfloat16 or float32"
            " first; only gathers and all-to-all move float8."
        )


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Way, back: _Way) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _moved(x: Tensor, there: _Way, back: _Way) -> Tensor:
    """Return what `there` makes of x; its gradient goes the way `back`."""
    result: Tensor = _Moved.apply(x, there, back)  # type: ignore[no-untyped-call]
    return result


def _refuse_gradient(gradient: Tensor) -> Tensor:
    raise NotImplementedError(
        "backward through a method of Collectives: it moves numbers alone. Call the"
        " function of neuron_moe.parallel.collectives that takes the group instead."
    )


def _without_gradient(source: Tensor, output: Tensor) -> Tensor:
    if not (torch.is_grad_enabled() and source.requires_grad):
        return output
    return _moved(source, lambda _source: output, _refuse_gradient)

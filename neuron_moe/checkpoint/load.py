"""Reading parameters from a checkpoint, a piece at a time and all or nothing."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from neuron_moe.checkpoint.lazy import Selection, everything, is_within, pieces, take
from neuron_moe.checkpoint.problems import Problems
from neuron_moe.checkpoint.reader import Checkpoint
from neuron_moe.checkpoint.weight_map import Assignment, WeightMap
from neuron_moe.quantize.bf16 import is_finite

PIECE_BYTES = 32 << 20

Progress = Callable[[int, int], None]
"""Called with the bytes of parameters that are filled and the bytes of all of them."""

Match = tuple[Assignment, Selection, torch.dtype]
"""What fills a parameter, the part of it to read, and the dtype to store."""

Shard = Callable[[str, tuple[int, ...]], Selection]
"""Given the name and the full shape of a parameter, returns the indices this rank holds."""


def load_weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    *,
    shard: Shard | None = None,
    progress: Progress | None = None,
) -> None:
    """Fill every parameter and persistent buffer of a module; on any error the module is untouched.

    The module may be on the meta device. Each tensor takes the dtype the module declares for it.

    Args:
        module: what to fill; shapes are those of this rank if `shard` is given.
        checkpoint: where from.
        weight_map: how.
        shard: which part of each parameter this rank holds; without it, all.
        progress: called after each piece.

    Raises:
        ValueError: naming every tensor that is missing, extra, or of the wrong shape or dtype; or
            the first one that holds NaN or infinity.
    """
    unique = unique_parameters(module)
    filled = read_parameters(checkpoint, weight_map, unique, shard=shard, progress=progress)
    loaded = {
        id(tensor): nn.Parameter(filled[name], requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else filled[name]
        for name, tensor in unique.items()
    }
    state = module.state_dict(keep_vars=True)
    module.load_state_dict(
        {name: loaded[id(tensor)] for name, tensor in state.items()}, assign=True
    )


def unique_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; one that has several names by its first."""
    unique: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        unique.setdefault(id(tensor), (name, tensor))
    return dict(unique.values())


def read_parameters(
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    parameters: Mapping[str, Tensor],
    *,
    shard: Shard | None = None,
    progress: Progress | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> dict[str, Tensor]:
    """Read parameters; beyond the result, memory holds a few pieces of `piece_bytes`.

    Args:
        checkpoint: where from.
        weight_map: how.
        parameters: shape and dtype of each one wanted; may be on the meta device.
        shard: which part of each parameter this rank holds; without it, all.
        progress: called after each piece.
        piece_bytes: how much of a parameter is converted at once.

    Returns:
        New tensors by name.

    Raises:
        ValueError: naming every tensor that is missing, extra, or of the wrong shape or dtype,
            before any is read; or the first one that holds NaN or infinity.
    """
    work = match_parameters(checkpoint, weight_map, parameters, shard=shard)
    return read_matched(work, progress=progress, piece_bytes=piece_bytes)


def read_matched(
    work: Sequence[Match], *, progress: Progress | None = None, piece_bytes: int = PIECE_BYTES
) -> dict[str, Tensor]:
    """Read what `match_parameters` returned, or part of it; see `read_parameters`."""
    filled: dict[str, Tensor] = {}
    for assignment, selection, dtype in work:
        filled[assignment.target] = torch.empty(tuple(map(len, selection)), dtype=dtype)
    report = _Reporter(filled.values(), progress)
    for assignment, selection, dtype in work:
        for piece, place in pieces(selection, dtype.itemsize, piece_bytes):
            target = take(filled[assignment.target], place)
            _fill(target, assignment, piece)
            report(target)
    return filled


def stream_parameters(
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    parameters: Mapping[str, Tensor],
    *,
    shard: Shard | None = None,
    progress: Progress | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> Iterator[tuple[str, Selection, Tensor]]:
    """Read parameters as `read_parameters` does, in their order, and keep none of them.

    Whoever moves each piece to a device before requesting the next one holds no more than a few
    pieces, whatever the size of the model.

    Yields:
        Name of the parameter, place of the piece in it, and the piece.

    Raises:
        ValueError: as `read_parameters`.
    """
    order = {name: number for number, name in enumerate(parameters)}
    work = match_parameters(checkpoint, weight_map, parameters, shard=shard)
    work.sort(key=lambda item: order[item[0].target])
    report = _Reporter((parameters[a.target] for a, _, _ in work), progress)
    for assignment, selection, dtype in work:
        for piece, place in pieces(selection, dtype.itemsize, piece_bytes):
            target = torch.empty(tuple(map(len, piece)), dtype=dtype)
            _fill(target, assignment, piece)
            report(target)
            yield assignment.target, place, target


class _Reporter:
    """Tell how many bytes are filled."""

    def __init__(self, tensors: Iterable[Tensor], progress: Progress | None) -> None:
        self._total = sum(tensor.nbytes for tensor in tensors)
        self._done, self._progress = 0, progress

    def __call__(self, tensor: Tensor) -> None:
        self._done += tensor.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def _fill(target: Tensor, assignment: Assignment, piece: Selection) -> None:
    """Read a piece of a parameter into memory."""
    _copy(target, assignment.source.read(piece))
    _check_narrowing(target, assignment)


def match_parameters(
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    parameters: Mapping[str, Tensor],
    *,
    shard: Shard | None = None,
) -> list[Match]:
    """Say what fills each parameter: names, shapes and dtypes only, no tensor is read.

    Args:
        checkpoint: where from.
        weight_map: how.
        parameters: shape and dtype of each one wanted; may be on the meta device.
        shard: which part of each parameter this rank holds; without it, all.

    Returns:
        For each parameter its source, the part to read, and the dtype to store.

    Raises:
        ValueError: naming every tensor that is missing, extra, or of the wrong shape or dtype.
    """
    work = []
    problems = Problems(checkpoint.path)
    for assignment in weight_map.resolve(checkpoint, parameters):
        shape = assignment.source.shape
        selection = shard(assignment.target, shape) if shard else everything(shape)
        held = tuple(len(indices) for indices in selection)
        wanted = parameters[assignment.target]
        if not is_within(selection, shape):
            problems.add("shard", f"{assignment.target}: the shard must be within {list(shape)}")
        elif held != tuple(wanted.shape):
            problems.add("shape", f"{_describe(assignment, held)} must be {list(wanted.shape)}")
        is_float = assignment.source.dtype.is_floating_point
        if wanted.dtype.is_floating_point != is_float:
            kind = "a float dtype" if is_float else "torch.int64"
            problems.add("dtype", f"{assignment.target}: {wanted.dtype} must be {kind}")
        work.append((assignment, selection, wanted.dtype))
    problems.raise_if_any()
    return work


def _describe(assignment: Assignment, held: tuple[int, ...]) -> str:
    """Say what a parameter would get, and from which tensors."""
    full = assignment.source.shape
    part = "" if held == full else f", of which this rank holds {list(held)}"
    return f"{assignment.source.name}: gives {assignment.target} {list(full)}{part},"


def _copy(target: Tensor, values: Tensor) -> None:
    """Copy and convert; without leading axes of size one, torch transposes matrices several times
    faster."""
    while target.ndim > 2 and target.shape[0] == 1:
        target, values = target[0], values[0]
    target.copy_(values.to(target.dtype))


def _check_narrowing(target: Tensor, assignment: Assignment) -> None:
    """Refuse values that overflow the dtype of the parameter; sources are finite already."""
    if target.dtype in (assignment.source.dtype, torch.float32):
        return
    if not is_finite(target):
        raise ValueError(
            f"{assignment.source.name}: values exceed {torch.finfo(target.dtype).max}, the largest "
            f"{target.dtype} of {assignment.target}; must fit. Load with dtype=torch.float32."
        )

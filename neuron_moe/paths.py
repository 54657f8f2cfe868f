"""Which path computes the routed experts, and why.

`choose_path` is a pure function of sizes. Two rule tables exist: ours, the default, and NxD's
(`compat="nxd"`), which is
reproduced line by line, its errors included, for people who compare the two.

The nki backend's kernels of experts are two: decode_moe where few tokens read each weight once, up
to 256 of them, in prefill as in decode; blockwise_moe for more, and where blocks are requested. The
mode of the first is settled by its cost model, which knows sizes and formats.

Ours, first match wins (P = pairs of this rank in the mean = T * K * E_local / E):

| phase | condition | path | why |
| --- | --- | --- | --- |
| prefill | capacity_factor drops tokens | capacity | the configuration requests dropping |
| any | P < E_local | selective | fewer experts are touched than this rank holds |
| decode, speculation | otherwise | all_experts | every weight is read once, in full runs |
| prefill | T <= 128 | all_experts | T columns ride along a weight stream that bounds the time |
| prefill | otherwise | blockwise | rows are sorted, padding is bounded by the blocks |

128 tokens: an expert becomes compute bound at peak * bytes / (2 * bandwidth) = 78.6e12 * 2 / (2 *
362.5e9) = 217 rows per
core in bfloat16 (computed from documented peaks). Up to the 128 columns of one matrix tile all of T
fits under that.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from neuron_moe.blocks import num_blocks
from neuron_moe.errors import check_choice, check_positive_int
from neuron_moe.spec import DEFAULT_BLOCK_SIZE, check_capacity, check_top_k

PHASES = ("prefill", "decode", "speculation", "training")
DECODE_PHASES = ("decode", "speculation")  # a speculation window is decoded
PATHS = ("blockwise", "selective", "all_experts", "capacity")
FEW_TOKEN_PATHS = ("selective", "all_experts")
DENSE_STREAM_TOKENS = 128
DECODE_KERNEL_TOKENS = 256  # most tokens of a launch of decode_moe

Reasons = Callable[[], tuple[str, ...]]
"""Sentences, composed when somebody reads them."""


@dataclass(frozen=True)
class Workload:
    """The sizes `choose_path` looks at.

    Args:
        phase: one of PHASES; speculation is a window of several tokens per sequence during decode.
        tokens: T that reach this rank.
        top_k: K.
        num_experts: E of the model.
        num_local_experts: experts of this rank; E without expert parallelism.
        block_size: B of the blockwise path.
        capacity_factor: None, or the factor of the dropping path.
    """

    phase: str
    tokens: int
    top_k: int
    num_experts: int
    num_local_experts: int
    block_size: int = DEFAULT_BLOCK_SIZE
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        check_choice("phase", self.phase, PHASES)
        check_top_k(self.top_k, self.num_experts)
        for name in ("tokens", "num_local_experts", "block_size"):
            check_positive_int(name, getattr(self, name))
        if self.capacity_factor is not None and self.phase != "training":
            check_capacity(self.capacity_factor)
        if self.num_local_experts > self.num_experts:
            raise ValueError(
                f"num_local_experts={self.num_local_experts}: must not exceed"
                f" num_experts={self.num_experts}."
            )

    @property
    def pairs(self) -> float:
        """Mean number of (token, expert) pairs of this rank."""
        return self.tokens * self.top_k * self.num_local_experts / self.num_experts

    @property
    def drops_tokens(self) -> bool:
        """Whether the capacity factor is below the dropless E / K."""
        return (
            self.capacity_factor is not None
            and self.capacity_factor < self.num_experts / self.top_k
        )


@dataclass(frozen=True)
class Decision:
    """One answer of `choose_path`.

    Attributes:
        path: one of PATHS.
        kernel: what the backend runs for it.
        work: the sizes it was made for.
        why: composes the reasons.
    """

    path: str
    kernel: str
    work: Workload
    why: Reasons = field(repr=False, compare=False)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why this path, most important first."""
        return self.why()

    @property
    def rejected(self) -> tuple[tuple[str, str], ...]:
        """(path, why not) for every other path."""
        others = [path for path in PATHS if path != self.path]
        if self.path == "blockwise" and self.kernel.startswith("nki."):
            few = (
                f"is for up to {DENSE_STREAM_TOKENS} tokens of a prefill, unless blocks are asked"
                f" for, and {DECODE_KERNEL_TOKENS} of a decode step"
            )
            return tuple(
                (other, few if other in FEW_TOKEN_PATHS else _why_not(other, self.path, self.work))
                for other in others
            )
        return tuple((other, _why_not(other, self.path, self.work)) for other in others)


def choose_path(
    phase: str,
    tokens: int,
    top_k: int,
    num_experts: int,
    *,
    num_local_experts: int | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    capacity_factor: float | None = None,
    backend: str = "torch",
    compat: str | None = None,
) -> Decision:
    """Decide how the routed experts are computed.

    Args:
        phase: 'prefill', 'decode', 'speculation' or 'training'.
        tokens: T that reach this rank.
        top_k: K.
        num_experts: E of the model.
        num_local_experts: experts of this rank (default: E).
        block_size: B of the blockwise path.
        capacity_factor: None (dropless) or the factor of the dropping path.
        backend: 'torch', 'nki' or 'cuda'; names the kernel. nki takes blocks for what is too long
            for its decode kernel; cuda takes sorted rows in any phase.
        compat: None for our rules, 'nxd' for NxD's.

    Returns:
        The decision with reasons.

    Raises:
        ValueError: an argument out of range.
        NotImplementedError: with compat='nxd', where NxD raises it.
    """
    work = Workload(
        phase,
        tokens,
        top_k,
        num_experts,
        num_experts if num_local_experts is None else num_local_experts,
        block_size,
        capacity_factor,
    )
    check_compat(compat)
    check_choice("backend", backend, ("torch", "nki", "cuda"))
    return decide(work, backend, compat)


def decide(work: Workload, backend: str, compat: str | None = None) -> Decision:
    """Decide how a workload is computed; see `choose_path`."""
    path, why = _rules_nxd(work) if compat == "nxd" else _rules(work)
    if backend == "nki" and path in FEW_TOKEN_PATHS and work.tokens > DECODE_KERNEL_TOKENS:
        most = f"T={work.tokens} > {DECODE_KERNEL_TOKENS}, the most of decode_moe: in blocks"
        path, why = "blockwise", lambda: (most,)
    if backend == "cuda" and path in FEW_TOKEN_PATHS:
        path, why = "blockwise", lambda: ("the cuda kernels take sorted rows at any T",)
    return Decision(path, _kernel_name(path, backend), work, why)


def settle_mode(decision: Decision, mode: str, reason: str, kernel: str) -> Decision:
    """Return a decision for few tokens as a backend's cost model takes it.

    Args:
        decision: from `choose_path`, with one of FEW_TOKEN_PATHS.
        mode: one of FEW_TOKEN_PATHS.
        reason: why, in the words of the cost model.
        kernel: what runs.
    """

    def why() -> tuple[str, ...]:
        if mode == decision.path:
            return (*decision.reasons, reason)
        return reason, f"by T*K alone it would be {decision.path}: {decision.reasons[0]}"

    return Decision(mode, kernel, decision.work, why)


def check_compat(compat: str | None) -> None:
    """Raise ValueError unless `compat` names a rule table."""
    if compat not in (None, "nxd"):
        raise ValueError(f"compat={compat!r}: must be None (our rules) or 'nxd'. Use None.")


def _rules(work: Workload) -> tuple[str, Reasons]:
    """Our table; see the module."""
    if work.phase in ("prefill", "training") and work.drops_tokens:
        return "capacity", lambda: (f"capacity_factor={work.capacity_factor:g} requests dropping",)
    if work.phase == "training":
        return "blockwise", lambda: ("training computes every choice",)
    if work.pairs < work.num_local_experts:
        few = "fewer experts are touched than are held"
        return "selective", lambda: (_bound_of(work), few)
    if work.phase in DECODE_PHASES:
        return "all_experts", lambda: (_bound_of(work), _read_once(work))
    if work.tokens <= DENSE_STREAM_TOKENS:
        return "all_experts", lambda: (
            f"T={work.tokens} <= {DENSE_STREAM_TOKENS}: the weight stream bounds the time, all"
            " tokens ride along",
        )
    return "blockwise", lambda: (
        f"T={work.tokens} > {DENSE_STREAM_TOKENS}: rows sorted by expert, in blocks of"
        f" {work.block_size}",
    )


def _bound_of(work: Workload) -> str:
    return (
        f"T*K = {work.tokens}*{work.top_k} over E={work.num_experts} leaves {work.pairs:g} pairs"
        f" for the {work.num_local_experts} experts here"
    )


def _read_once(work: Workload) -> str:
    touched = f"{_expected_touched(work):.1f} of {work.num_local_experts} experts are touched"
    return f"{touched} (mean): read each weight once, in full runs"


def _rules_nxd(work: Workload) -> tuple[str, Reasons]:
    """NxD's table: `ExpertMLPsV2.forward`, with the global expert count in the threshold."""
    filled = work.tokens * work.top_k / work.num_experts
    if work.phase == "training":
        return _training_nxd(work)
    if work.phase == "decode":
        return _decode_nxd(work, filled)
    if work.drops_tokens:
        factor = work.capacity_factor
        return "capacity", lambda: (f"prefill 1: capacity_factor={factor:g}",)
    if filled < 1.0:
        return "selective", lambda: (f"prefill 2: T*K/E = {filled:g} < 1",)
    pairs = work.tokens * work.top_k
    if pairs < work.block_size:
        return "all_experts", lambda: (f"prefill 3: T*K = {pairs} < block_size={work.block_size}",)
    return "blockwise", lambda: ("prefill 4: none of the others",)


def _training_nxd(work: Workload) -> tuple[str, Reasons]:
    factor = work.capacity_factor
    if factor is None:
        return "all_experts", lambda: ("training 1: capacity_factor is None",)
    path = "blockwise" if factor <= 0 else "capacity"
    return path, lambda: (f"training: capacity_factor={factor:g}",)


def _decode_nxd(work: Workload, filled: float) -> tuple[str, Reasons]:
    is_ep = work.num_local_experts < work.num_experts
    if filled >= 1.0:
        rule = "decode 1" if is_ep else "decode 2"
        return "all_experts", lambda: (f"{rule}: T*K/E = {filled:g} >= 1",)
    if is_ep:
        least = -(-work.num_experts // work.top_k)
        raise NotImplementedError(
            f"tokens={work.tokens}: NxD has no selective loading under expert parallelism"
            f" (T*K/E = {filled:g} < 1). Batch at least {least} tokens, or drop compat='nxd': our"
            " rules take any batch."
        )
    return "selective", lambda: (f"decode 4: T*K/E = {filled:g} < 1",)


def _why_not(other: str, path: str, work: Workload) -> str:
    """Say why `other` lost against `path`."""
    touched = _expected_touched(work)
    if other == "capacity":
        if work.capacity_factor is None:
            return "capacity_factor=None: every choice is computed"
        if not work.drops_tokens:
            return f"capacity_factor={work.capacity_factor:g} >= E/K drops nothing"
        return f"capacity applies to prefill, not to {work.phase}"
    if path == "capacity":
        return f"capacity_factor={work.capacity_factor:g} requests dropping"
    if other == "selective":
        return f"{work.pairs:g} pairs would read weights for {touched:.1f} distinct experts"
    if other == "all_experts":
        if path == "selective":
            return (
                f"would read all {work.num_local_experts} experts, {touched:.1f} are touched (mean)"
            )
        return f"would compute {work.tokens} rows for each of {work.num_local_experts} experts"
    blocks = num_blocks(work.tokens, work.top_k, work.num_local_experts, work.block_size)
    return f"{blocks} blocks of {work.block_size} slots for {work.pairs:g} pairs"


def _expected_touched(work: Workload) -> float:
    """Mean number of local experts chosen by at least one token, choices drawn uniformly."""
    missed = (1.0 - work.top_k / work.num_experts) ** work.tokens
    return work.num_local_experts * (1.0 - missed)


def _kernel_name(path: str, backend: str) -> str:
    if backend == "nki":
        return "nki.decode_moe" if path in FEW_TOKEN_PATHS else "nki.blockwise_moe"
    return f"{backend}.{path}"

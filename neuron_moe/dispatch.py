"""Which path computes the routed experts, and why.

`choose_path` is a pure function of sizes. Two rule tables exist: ours, the default, and NxD's
(`compat="nxd"`), which is
reproduced line by line, its errors included, for people who compare the two.

The nki backend's kernels are two: blockwise_moe for any prefill, decode_moe for steps of up to 256
tokens, whose mode its cost model settles with what this table does not know: sizes and formats.

Ours, first match wins (P = pairs of this rank in the mean = T * K * E_local / E):

| phase | condition | path | why |
| --- | --- | --- | --- |
| prefill | capacity_factor drops tokens | capacity | the configuration asks for dropping |
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

from neuron_moe.blocks import PaddingOverhead, num_blocks, padding_overhead
from neuron_moe.config import DEFAULT_BLOCK_SIZE, check_top_k
from neuron_moe.errors import check_choice, check_finite, check_positive_int

PHASES = ("prefill", "decode", "speculation", "training")
PATHS = ("blockwise", "selective", "all_experts", "capacity")
FEW_TOKEN_PATHS = ("selective", "all_experts")
DENSE_STREAM_TOKENS = 128
DECODE_KERNEL_TOKENS = 256  # most tokens of a launch of decode_moe
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024)
_LARGEST_PERCENT = 10.0  # 1000 %
BREAK_EVEN_ROWS = 217  # rows at which an expert's matrix multiplies last as long as its load


@dataclass(frozen=True)
class Decision:
    """One answer of `choose_path`.

    Attributes:
        path: one of PATHS.
        kernel: what the backend runs for it.
        reasons: why this path, most important first.
        rejected: (path, why not) for every other path.
    """

    path: str
    kernel: str
    reasons: tuple[str, ...]
    rejected: tuple[tuple[str, str], ...]


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
        if self.capacity_factor is not None:
            check_finite("capacity_factor", self.capacity_factor)
            if self.capacity_factor <= 0 and self.phase != "training":
                raise ValueError(
                    f"capacity_factor={self.capacity_factor!r}: must be None (dropless) or > 0"
                    " (dropping). Use None to compute every choice."
                )
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
        backend: 'torch' or 'nki'; names the kernel. nki prefill takes blocks at any T, and so do
            decode steps too long for its decode kernel.
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
    rules: Callable[[Workload], tuple[str, tuple[str, ...]]]
    rules = _rules_nxd if compat == "nxd" else _rules
    path, reasons = rules(work)
    check_choice("backend", backend, ("torch", "nki"))
    if backend == "nki" and path in FEW_TOKEN_PATHS:
        if phase == "prefill":
            why = f"the nki kernels compute any prefill in blocks: {path} is for decode"
            path, reasons = "blockwise", (why, *reasons)
        elif tokens > DECODE_KERNEL_TOKENS:
            why = f"T={tokens} > {DECODE_KERNEL_TOKENS}, the most of decode_moe: in blocks"
            path, reasons = "blockwise", (why, *reasons)
    return _decide(work, path, backend, reasons)


def settle_mode(decision: Decision, work: Workload, mode: str, reason: str) -> Decision:
    """Return a decision for few tokens as a backend's cost model takes it.

    Args:
        decision: from `choose_path`, with one of FEW_TOKEN_PATHS.
        work: the sizes it was made for.
        mode: one of FEW_TOKEN_PATHS.
        reason: why, in the words of the cost model.
    """
    if mode == decision.path:
        reasons = (*decision.reasons, reason)
    else:
        reasons = (reason, f"by T*K alone it would be {decision.path}: {decision.reasons[0]}")
    return _decide(work, mode, "nki", reasons)


def _decide(work: Workload, path: str, backend: str, reasons: tuple[str, ...]) -> Decision:
    rejected = tuple((other, _why_not(other, path, work)) for other in PATHS if other != path)
    return Decision(path, _kernel_name(path, backend), reasons, rejected)


def check_compat(compat: str | None) -> None:
    """Raise ValueError unless `compat` names a rule table."""
    if compat not in (None, "nxd"):
        raise ValueError(f"compat={compat!r}: must be None (our rules) or 'nxd'. Use None.")


def _rules(work: Workload) -> tuple[str, tuple[str, ...]]:
    bounded = (
        f"T*K = {work.tokens}*{work.top_k} over E={work.num_experts} leaves {work.pairs:g} pairs"
        f" for the {work.num_local_experts} experts here"
    )
    if work.phase in ("prefill", "training") and work.drops_tokens:
        return "capacity", (f"capacity_factor={work.capacity_factor:g} asks for dropping",)
    if work.phase == "training":
        return "blockwise", ("training computes every choice",)
    if work.pairs < work.num_local_experts:
        return "selective", (bounded, "fewer experts are touched than are held")
    if work.phase in ("decode", "speculation"):
        touched = f"{_expected_touched(work):.1f} of {work.num_local_experts} experts are touched"
        return "all_experts", (bounded, f"{touched} (mean): read each weight once, in full runs")
    if work.tokens <= DENSE_STREAM_TOKENS:
        return "all_experts", (
            f"T={work.tokens} <= {DENSE_STREAM_TOKENS}: the weight stream bounds the time, all"
            f" tokens"
            " ride along",
        )
    return "blockwise", (
        f"T={work.tokens} > {DENSE_STREAM_TOKENS}: rows sorted by expert, in blocks of"
        f" {work.block_size}",
    )


def _rules_nxd(work: Workload) -> tuple[str, tuple[str, ...]]:
    """NxD's table: `ExpertMLPsV2.forward`, with the global expert count in the threshold."""
    filled = work.tokens * work.top_k / work.num_experts
    is_ep = work.num_local_experts < work.num_experts
    ratio = f"T*K/E = {filled:g}"
    if work.phase == "training":
        if work.capacity_factor is None:
            return "all_experts", ("training 1: capacity_factor is None",)
        path = "blockwise" if work.capacity_factor <= 0 else "capacity"
        return path, (f"training: capacity_factor={work.capacity_factor:g}",)
    if work.phase == "decode":
        if filled >= 1.0:
            rule = "decode 1" if is_ep else "decode 2"
            return "all_experts", (f"{rule}: {ratio} >= 1",)
        if is_ep:
            least = -(-work.num_experts // work.top_k)
            raise NotImplementedError(
                f"tokens={work.tokens}: NxD has no selective loading under expert parallelism"
                f" ({ratio} < 1). Batch at least {least} tokens, or drop compat='nxd': our rules"
                f" take any"
                " batch."
            )
        return "selective", (f"decode 4: {ratio} < 1",)
    if work.drops_tokens:
        return "capacity", (f"prefill 1: capacity_factor={work.capacity_factor:g}",)
    if filled < 1.0:
        return "selective", (f"prefill 2: {ratio} < 1",)
    if work.tokens * work.top_k < work.block_size:
        pairs = work.tokens * work.top_k
        return "all_experts", (f"prefill 3: T*K = {pairs} < block_size={work.block_size}",)
    return "blockwise", ("prefill 4: none of the others",)


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
        return f"capacity_factor={work.capacity_factor:g} asks for dropping"
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
    return f"torch.{path}"


@dataclass(frozen=True)
class Explanation:
    """What `MoE.explain` tells; print it, or read its fields.

    Attributes:
        phase: one of PHASES.
        tokens: T.
        decision: the path, the kernel and the reasons.
        block_size: B.
        num_blocks: N, static.
        padding: overhead at this block size.
        padding_by_block_size: overhead at each of BLOCK_SIZES.
        notes: what else a user should know.
    """

    phase: str
    tokens: int
    decision: Decision
    block_size: int
    num_blocks: int
    padding: PaddingOverhead
    padding_by_block_size: dict[int, PaddingOverhead] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """One of PATHS."""
        return self.decision.path

    def __str__(self) -> str:
        blocks = f"block_size={self.block_size}, N={self.num_blocks} (static)"
        if self.decision.path not in ("blockwise", "capacity"):
            blocks = f"none on this path; blockwise would take {blocks}"
        lines = [
            f"{self.phase}, {self.tokens} tokens: {self.decision.path} ({self.decision.kernel})",
            *(f"  because  {reason}" for reason in self.decision.reasons),
            *(f"  not      {path}: {why}" for path, why in self.decision.rejected),
            f"  blocks   {blocks}",
            "  padding  " + _describe_padding(self.padding) + "  [computed]",
        ]
        return "\n".join(lines + [f"  note     {note}" for note in self.notes])

    def to_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        return {
            "phase": self.phase,
            "tokens": self.tokens,
            "path": self.decision.path,
            "kernel": self.decision.kernel,
            "reasons": list(self.decision.reasons),
            "rejected": dict(self.decision.rejected),
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "padding_overhead": {
                "worst": self.padding.worst,
                "expected": self.padding.expected,
                "actual": self.padding.actual,
            },
            "notes": list(self.notes),
        }


def _describe_padding(padding: PaddingOverhead) -> str:
    actual = "not recorded" if padding.actual is None else _share(padding.actual)
    return f"worst {_share(padding.worst)}, expected {_share(padding.expected)}, actual {actual}"


def _share(overhead: float) -> str:
    """Return an overhead in percent, or as a multiple where percent are hard to read."""
    return f"{overhead:.1%}" if overhead < _LARGEST_PERCENT else f"{overhead:,.0f} x"


def suggest_block_size(padding_by_block_size: dict[int, PaddingOverhead]) -> int:
    """Return the block size with the least computed time on one core.

    A block lasts as long as its rows or the load of its expert's weights, whichever is longer, so
    the time is proportional to blocks * max(block_size, BREAK_EVEN_ROWS). Blocks are those of the
    recorded load, or the expected ones; a tie goes to the smaller size.
    """

    def time_in_rows(block_size: int) -> float:
        padding = padding_by_block_size[block_size]
        overhead = padding.expected if padding.actual is None else padding.actual
        blocks = padding.pairs * (1.0 + overhead) / block_size
        return blocks * max(block_size, BREAK_EVEN_ROWS)

    return min(sorted(padding_by_block_size), key=time_in_rows)


def explain_path(
    work: Workload,
    decision: Decision,
    *,
    tokens_per_expert: list[int] | None = None,
    notes: tuple[str, ...] = (),
    suggests_size: bool = True,
) -> Explanation:
    """Put a decision, the block count and the padding overhead together.

    Args:
        work: the sizes the decision was made for.
        decision: from `choose_path`.
        tokens_per_expert: a recorded load of this rank, for the actual overhead.
        notes: further lines.
        suggests_size: name a better block size by rows alone, if there is one.
    """

    def overhead(block_size: int) -> PaddingOverhead:
        return padding_overhead(
            work.tokens,
            work.top_k,
            work.num_local_experts,
            block_size,
            num_routed=work.num_experts,
            tokens_per_expert=tokens_per_expert,
        )

    blocks = num_blocks(work.tokens, work.top_k, work.num_local_experts, work.block_size)
    by_size = {size: overhead(size) for size in BLOCK_SIZES}
    better = suggest_block_size(by_size)
    if suggests_size and decision.path == "blockwise" and better != work.block_size:
        notes += (
            f"block_size={better} would be faster on one core: padding"
            f" {_describe_padding(by_size[better])}  [computed]",
        )
    return Explanation(
        work.phase,
        work.tokens,
        decision,
        work.block_size,
        blocks,
        overhead(work.block_size),
        by_size,
        notes,
    )

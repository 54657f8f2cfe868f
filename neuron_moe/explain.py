"""What `MoE.explain` shows: the plan that runs, why, and what its blocks and padding cost."""

from dataclasses import dataclass, field

from neuron_moe.blocks import PaddingOverhead, num_blocks, padding_overhead
from neuron_moe.paths import Decision

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024)
_LARGEST_PERCENT = 10.0  # 1000 %
_BREAK_EVEN_ROWS = 217  # rows at which an expert's matrix multiplies last as long as its load


@dataclass(frozen=True)
class Explanation:
    """What `MoE.explain` shows; print it, or read its fields.

    Attributes:
        phase: one of PHASES.
        tokens: T.
        decision: the path, the kernel and the reasons.
        block_size: B.
        num_blocks: N, static.
        padding: overhead at this block size.
        padding_by_block_size: overhead at each of BLOCK_SIZES.
        notes: what else a user should know.
        chosen: what the kernels are compiled for, in the words of a tuned plan.
        changes: how to get another path, block size or plan.
    """

    phase: str
    tokens: int
    decision: Decision
    block_size: int
    num_blocks: int
    padding: PaddingOverhead
    padding_by_block_size: dict[int, PaddingOverhead] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    chosen: dict[str, object] = field(default_factory=dict)
    changes: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """One of PATHS."""
        return self.decision.path

    def __str__(self) -> str:
        lines = [
            f"{self.phase}, {self.tokens} tokens: {self.decision.path} ({self.decision.kernel})",
            *(f"  because  {reason}" for reason in self.decision.reasons),
            *(f"  not      {path}: {why}" for path, why in self.decision.rejected),
        ]
        if self.decision.path in ("blockwise", "capacity"):
            lines += [
                f"  blocks   block_size={self.block_size}, N={self.num_blocks} (static)",
                "  padding  " + _describe_padding(self.padding) + "  [computed]",
            ]
        lines += [f"  note     {note}" for note in self.notes]
        return "\n".join(lines + [f"  change   {change}" for change in self.changes])

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
            "plan": dict(self.chosen),
            "changes": list(self.changes),
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
    the time is proportional to blocks * max(block_size, _BREAK_EVEN_ROWS). Blocks are those of the
    recorded load, or the expected ones; a tie goes to the smaller size.
    """

    def time_in_rows(block_size: int) -> float:
        padding = padding_by_block_size[block_size]
        overhead = padding.expected if padding.actual is None else padding.actual
        blocks = padding.pairs * (1.0 + overhead) / block_size
        return blocks * max(block_size, _BREAK_EVEN_ROWS)

    return min(sorted(padding_by_block_size), key=time_in_rows)


def explain_path(
    decision: Decision,
    *,
    tokens_per_expert: list[int] | None = None,
    notes: tuple[str, ...] = (),
    suggests_size: bool = True,
    chosen: dict[str, object] | None = None,
    changes: tuple[str, ...] = (),
) -> Explanation:
    """Put a decision, the block count and the padding overhead together.

    Args:
        decision: from `choose_path`, or of a plan.
        tokens_per_expert: a recorded load of this rank, for the actual overhead.
        notes: further lines.
        suggests_size: name a better block size by rows alone, if there is one.
        chosen: what the kernels are compiled for.
        changes: how to get another plan.
    """
    work = decision.work

    def overhead(block_size: int) -> PaddingOverhead:
        return padding_overhead(
            work.tokens,
            work.top_k,
            work.num_local_experts,
            block_size,
            num_routed=work.num_experts,
            tokens_per_expert=tokens_per_expert,
        )

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
        num_blocks(work.tokens, work.top_k, work.num_local_experts, work.block_size),
        overhead(work.block_size),
        by_size,
        notes,
        chosen or {},
        changes,
    )

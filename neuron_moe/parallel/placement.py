"""Which expert sits where on which rank: the logical-to-physical expert map.

Routers choose logical experts; ranks hold physical experts, a contiguous run each. A logical expert
may have several physical ones (replicas); its tokens then take turns. Nothing but this map changes
when load is rebalanced.

`place_experts` computes a placement from a load trace, offline. Replicas first, to the expert with
the largest load per replica; then packing, heaviest first, onto the rank with the least load that
still has room (longest processing time first); then swaps between the busiest and other ranks
while they help.

Axes: E logical experts, P physical experts, T tokens, K choices, W ranks, L layers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from neuron_moe.blocks import NO_EXPERT
from neuron_moe.errors import check_positive_int

MAX_SWAPS = 1000  # a guard; a swap must lower the busiest rank, so the loop ends by itself


@dataclass(frozen=True)
class ExpertPlacement:
    """Which logical expert each physical one is.

    Args:
        physical: [P] logical expert of each physical one, rank after rank.
        num_ranks: W; each rank holds P / W physical experts.
        num_experts: E.
    """

    physical: tuple[int, ...]
    num_ranks: int
    num_experts: int

    def __post_init__(self) -> None:
        check_positive_int("num_ranks", self.num_ranks)
        check_positive_int("num_experts", self.num_experts)
        if len(self.physical) % self.num_ranks:
            raise ValueError(
                f"physical: {self.num_physical} experts must divide by"
                f" num_ranks={self.num_ranks}. Give every rank the same number."
            )
        wrong = sorted({e for e in self.physical if not 0 <= e < self.num_experts})
        if wrong:
            raise ValueError(f"physical: {wrong[0]} must be an expert in [0, {self.num_experts}).")
        missing = sorted(set(range(self.num_experts)) - set(self.physical))
        if missing:
            raise ValueError(
                f"physical: expert {missing[0]} must be among them; its tokens would vanish."
            )

    @classmethod
    def from_distribution(cls, distribution: Sequence[Sequence[int]]) -> "ExpertPlacement":
        """Build from NxD's `expert_distribution`: the experts of each rank, in order."""
        sizes = {len(experts) for experts in distribution}
        if len(sizes) != 1:
            raise ValueError(
                f"expert_distribution: ranks hold {sorted(sizes)} experts; must be equally many."
                " Repeat an expert to fill a rank."
            )
        physical = tuple(expert for experts in distribution for expert in experts)
        return cls(physical, len(distribution), max(physical) + 1)

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> "ExpertPlacement":
        """Return equal runs; where experts do not divide, the first have replicas at the end."""
        num_physical = -(-num_experts // num_ranks) * num_ranks
        return cls(tuple(n % num_experts for n in range(num_physical)), num_ranks, num_experts)

    @property
    def num_physical(self) -> int:
        """P."""
        return len(self.physical)

    @property
    def num_per_rank(self) -> int:
        """P / W."""
        return self.num_physical // self.num_ranks

    @property
    def extra_share(self) -> float:
        """Replicas as a share of the experts."""
        return self.num_physical / self.num_experts - 1.0

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Return the logical experts that a rank holds."""
        return self.physical[rank * self.num_per_rank : (rank + 1) * self.num_per_rank]

    def replica_table(self) -> tuple[Tensor, Tensor]:
        """Return each expert's physical ones [E, R] int64, repeated to fill, and how many [E]."""
        replicas: list[list[int]] = [[] for _ in range(self.num_experts)]
        for number, expert in enumerate(self.physical):
            replicas[expert].append(number)
        width = max(map(len, replicas))
        table = [[each[r % len(each)] for r in range(width)] for each in replicas]
        return torch.tensor(table), torch.tensor([len(each) for each in replicas])

    def to_physical(self, index_TK: Tensor, first_token: int = 0) -> Tensor:
        """Return the physical expert of each choice; replicas take turns over the tokens.

        Args:
            index_TK: [T, K] logical expert, or NO_EXPERT.
            first_token: number of the first token, so that ranks with other tokens take other
                turns.
        """
        if self.num_physical == self.num_experts:
            physical_E = self.replica_table()[0][:, 0].to(index_TK)
            physical_TK = physical_E[index_TK.clamp(min=0).long()]
            return torch.where(index_TK < 0, NO_EXPERT, physical_TK)
        table_ER, count_E = (t.to(index_TK.device) for t in self.replica_table())
        expert_TK = index_TK.to(torch.int64).clamp(min=0)
        token_T1 = torch.arange(index_TK.shape[0], device=index_TK.device).unsqueeze(1)
        # A plain turn would always give even tokens of a sequence the same replica; the multiply
        # spreads tokens whatever their stride (Knuth's multiplicative hash).
        turn_TK = ((token_T1 + first_token) * 2654435761 % 4294967296 >> 8) % count_E[expert_TK]
        physical_TK = table_ER[expert_TK, turn_TK]
        return torch.where(index_TK < 0, NO_EXPERT, physical_TK).to(index_TK.dtype)

    def rank_load(self, load_E: Tensor) -> Tensor:
        """Return the expected load of each rank [W], replicas sharing their expert's load."""
        _, count_E = self.replica_table()
        share_E = load_E.to(torch.float64) / count_E
        return share_E[torch.tensor(self.physical)].view(self.num_ranks, -1).sum(1)

    def to_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        distribution = [list(self.experts_of(rank)) for rank in range(self.num_ranks)]
        return {"num_experts": self.num_experts, "expert_distribution": distribution}

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> "ExpertPlacement":
        """Read what `to_dict` wrote."""
        distribution = values.get("expert_distribution")
        if not isinstance(distribution, list):
            raise ValueError(
                "placement: must hold 'expert_distribution', a list of lists of experts."
            )
        placed = cls.from_distribution(distribution)
        if placed.num_experts != values.get("num_experts", placed.num_experts):
            raise ValueError(
                f"placement: num_experts={values['num_experts']} must be {placed.num_experts}, the"
                " experts that are placed."
            )
        return placed


def place_experts(
    load_E: Tensor, num_ranks: int, *, extra_experts: int = 0, max_swaps: int = MAX_SWAPS
) -> ExpertPlacement:
    """Place experts so that ranks are loaded evenly.

    Args:
        load_E: [E] tokens each expert gets, any unit.
        num_ranks: W.
        extra_experts: replicas; E + extra_experts must divide by W.
        max_swaps: upper limit of the last step.

    Raises:
        ValueError: the physical experts do not divide, or a load is negative.
    """
    loads = [float(value) for value in load_E.tolist()]
    num_experts = len(loads)
    check_positive_int("num_ranks", num_ranks)
    if extra_experts < 0 or (num_experts + extra_experts) % num_ranks:
        up = -(num_experts + max(extra_experts, 0)) % num_ranks + max(extra_experts, 0)
        raise ValueError(
            f"extra_experts={extra_experts}: {num_experts} experts + extra_experts must divide by"
            f" num_ranks={num_ranks}. Use extra_experts={up}."
        )
    if min(loads) < 0:
        raise ValueError(f"load_E: {min(loads)} must not be negative.")
    replicas = replicate_hot_experts(loads, extra_experts)
    shares = sorted(
        ((loads[e] / replicas[e], e) for e in range(num_experts) for _ in range(replicas[e])),
        key=lambda item: (-item[0], item[1]),
    )
    ranks = _pack(shares, num_ranks, len(shares) // num_ranks)
    _swap_down(ranks, max_swaps)
    physical = tuple(expert for rank in ranks for expert in sorted(e for _, e in rank))
    return ExpertPlacement(physical, num_ranks, num_experts)


def replicate_hot_experts(loads: Sequence[float], extra_experts: int) -> list[int]:
    """Return the replicas of each expert: each extra one goes where a replica carries most."""
    replicas = [1] * len(loads)
    for _ in range(extra_experts):
        hottest = max(range(len(loads)), key=lambda e: (loads[e] / replicas[e], -e))
        replicas[hottest] += 1
    return replicas


_Rank = list[tuple[float, int]]


def _pack(shares: list[tuple[float, int]], num_ranks: int, num_per_rank: int) -> list[_Rank]:
    """Give each share, heaviest first, to the least loaded rank that has room.

    A rank that already has a replica of the expert comes last: a second one there helps nobody.
    """
    ranks: list[_Rank] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    for share, expert in shares:
        free = [r for r in range(num_ranks) if len(ranks[r]) < num_per_rank]
        best = min(free, key=lambda r: (any(e == expert for _, e in ranks[r]), load[r], r))
        ranks[best].append((share, expert))
        load[best] += share
    return ranks


def _swap_down(ranks: list[_Rank], max_swaps: int) -> None:
    """Swap experts between the busiest rank and another one as long as that lowers the busier."""
    load = [sum(share for share, _ in rank) for rank in ranks]
    for _ in range(max_swaps):
        busy = max(range(len(ranks)), key=lambda r: load[r])
        best: tuple[float, int, int, int] | None = None
        for other in range(len(ranks)):
            if other == busy:
                continue
            for i, (ours, our_expert) in enumerate(ranks[busy]):
                for j, (theirs, their_expert) in enumerate(ranks[other]):
                    moved = ours - theirs
                    if moved <= 0 or our_expert == their_expert:
                        continue
                    peak = max(load[busy] - moved, load[other] + moved)
                    if peak < load[busy] - 1e-9 * load[busy] and (best is None or peak < best[0]):
                        best = (peak, other, i, j)
        if best is None:
            return
        _, other, i, j = best
        moved = ranks[busy][i][0] - ranks[other][j][0]
        ranks[busy][i], ranks[other][j] = ranks[other][j], ranks[busy][i]
        load[busy] -= moved
        load[other] += moved


def save_placements(path: str | Path, placements: Sequence[ExpertPlacement]) -> None:
    """Write one placement per layer as JSON."""
    text = json.dumps({"layers": [placement.to_dict() for placement in placements]}, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")


def load_placements(path: str | Path) -> list[ExpertPlacement]:
    """Read what `save_placements` wrote.

    Raises:
        ValueError: the file is no such JSON.
    """
    values = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(values, dict) or not isinstance(values.get("layers"), list):
        raise ValueError(
            f"{path}: must be a JSON object with a list 'layers'. Save placements again."
        )
    return [ExpertPlacement.from_dict(entry) for entry in values["layers"]]

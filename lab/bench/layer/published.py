"""Times of a layer that others published, and the simulated row that each stands beside."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A time of one layer in decode with one token, measured on a chip by others.

    Attributes:
        what: was timed.
        machine: it was timed on.
        us: microseconds of a layer.
        source: where it was published.
        model, tp: of the simulated row, which holds the MoE layer alone.
    """

    what: str
    machine: str
    us: float
    source: str
    model: str
    tp: int


_MEGAKERNEL = "Qwen3-30B-A3B, batch 1, TP 4: a decoder layer with attention, in one kernel"
PUBLISHED = (
    Published(
        what="moe_block_tkg, T = 1, H 4,096, E 128, I 384: norm, router, experts",
        machine="Trn2",
        us=231.19,
        source="awslabs/nki-autotune, benchmark/nakb_moe_block_tkg.py",
        model="qwen3_235b_a22b",
        tp=4,
    ),
    Published(
        what=_MEGAKERNEL,
        machine="Trn2, about",
        us=150.0,
        source="KevGomes1403/nki-moe-megakernel",
        model="qwen3_30b_a3b",
        tp=4,
    ),
    Published(
        what=_MEGAKERNEL,
        machine="Trn3",
        us=134.5,
        source="KevGomes1403/nki-moe-megakernel",
        model="qwen3_30b_a3b",
        tp=4,
    ),
    Published(
        what="GPT-OSS-120B, batch 1, 64 ranks: a 36th of a token at 43.7 tokens/s, all that a step"
        " takes, at 24.9 % of the bandwidth",
        machine="Trn2",
        us=1e6 / 43.7 / 36,
        source="nkipy, pull request 83",
        model="gpt_oss_120b",
        tp=64,
    ),
)

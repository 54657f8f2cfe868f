"""What a MoE layer is: a few frozen records, checked when they are built.

The formulas of routers and experts are those of `nki_kernels.common.formula`: kernels, references
and modules hold the same object. How a layer is spread over ranks is `neuron_moe.parallel`'s, how
its kernels are tuned `Tuning`'s.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from neuron_moe.errors import check_bools, check_choice, check_finite, check_positive_int
from neuron_moe.tuned import DECODE_MODES, LOOP_PLANS, SHARD_PLANS, TunedPlans
from neuron_moe.verdicts import FEATURES
from nki_kernels.common.formula import (
    EXPERT_ACTIVATIONS,
    ROUTER_ACTIVATIONS,
    ExpertFormula,
    Limits,
    RouterFormula,
    limits,
    num_projections,
    why_no_expert,
)

__all__ = [
    "ExpertFormula",
    "ExpertSpec",
    "InitMethods",
    "LatentSpec",
    "RouterFormula",
    "RouterSpec",
    "SharedSpec",
    "Tuning",
    "as_dtype",
    "check_top_k",
    "limits",
    "num_projections",
]

DEFAULT_BLOCK_SIZE = 512
_LIMITS = ("gate_limits", "up_limits")
_PLAIN = tuple(each.name for each in fields(ExpertFormula) if each.name not in _LIMITS)
_CLAMP = tuple(each.name for each in fields(Limits))
DEFAULT_LNC_SIZE = 2  # Trn2 and Trn3 expose two physical cores as one logical core
MISSING = ("skip", "spare")

InitMethods = tuple[Callable[..., Any] | None, Callable[..., Any] | None]
"""How the first and the down projections are drawn; None: kaiming-uniform."""


def as_dtype(name: str, value: torch.dtype | str) -> torch.dtype:
    """Return the dtype of weights from a dtype or its name ('bfloat16', 'torch.bfloat16')."""
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(
            f"{name}={value!r}: must be a float torch dtype or its name, such as 'bfloat16'."
        )
    return found


def check_top_k(top_k: int, num_experts: int) -> None:
    """Raise ValueError unless 1 <= top_k <= num_experts."""
    check_positive_int("num_experts", num_experts)
    check_positive_int("top_k", top_k)
    if top_k > num_experts:
        raise ValueError(
            f"top_k={top_k}: must not exceed num_experts={num_experts}."
            " A token cannot choose an expert twice; lower top_k."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """A router apart from its weights: sizes and formula.

    Args:
        num_experts: E.
        hidden_size: H.
        formula: how K experts are chosen and weighed.
        num_identity: Z further classes behind the experts, which give a token itself (LongCat).
        table_size: V, if a table [V, K] of token ids chooses the experts, which scores weigh
            (DeepSeek-V4's first layers); 0 if scores choose.
        mixer_jitter: e, if two experts are chosen and weighed by sparsemixer (Phi-3.5): each by a
            softmax over what is left and is no more than a share of 2 e below the highest
            logit; None if not.
        logit_softcap: c, if logits l are c * tanh(l / c) (Laguna); 0 if not.

    Raises:
        ValueError: a size or a term of the formula out of range.
    """

    num_experts: int
    hidden_size: int
    formula: RouterFormula
    num_identity: int = 0
    table_size: int = 0
    mixer_jitter: float | None = None
    logit_softcap: float = 0.0

    def __post_init__(self) -> None:
        formula = self.formula
        for name in ("num_identity", "table_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}={value!r}: must be a whole number, 0 for none.")
        check_top_k(formula.top_k, self.num_experts)
        ranks_scores = formula.has_selection_bias or formula.n_group > 1
        if self.table_size and (ranks_scores or formula.act_over_topk or self.num_identity):
            raise ValueError(
                f"table_size={self.table_size}: a table chooses among experts, so selection bias,"
                " groups, act_over_topk and identities do not apply. Drop one of them."
            )
        if self.mixer_jitter is not None:
            self._check_mixer()
        check_finite("logit_softcap", self.logit_softcap)
        if self.logit_softcap < 0:
            raise ValueError(f"logit_softcap={self.logit_softcap}: must be at least 0, 0 for none.")
        check_positive_int("hidden_size", self.hidden_size)
        check_choice("act_fn", formula.act_fn, ROUTER_ACTIVATIONS)
        check_bools(formula, ("act_over_topk", "has_bias", "has_selection_bias", "renormalize"))
        for name in ("renormalize_eps", "routed_scaling_factor"):
            check_finite(name, getattr(formula, name))
        if formula.act_over_topk and (formula.has_selection_bias or formula.n_group > 1):
            raise ValueError(
                "act_over_topk=True: the choice is made on logits, so selection bias and expert"
                " groups (which rank scores) do not apply. Drop one of them."
            )
        self._check_groups()

    @property
    def why_torch(self) -> str:
        """Why torch routes whatever the back end, which plans experts on their own; '' if not."""
        if self.table_size:
            return "looks up a table of token ids"
        if self.mixer_jitter is not None:
            return "computes sparsemixer, which no kernel has"
        return "caps logits, which no kernel does" if self.logit_softcap else ""

    def _check_mixer(self) -> None:
        jitter = self.mixer_jitter or 0.0
        check_finite("mixer_jitter", jitter)
        is_plain = self.formula == RouterFormula(top_k=2)
        if not is_plain or self.num_identity or self.table_size or jitter < 0:
            raise ValueError(
                f"mixer_jitter={self.mixer_jitter}, formula={self.formula}: sparsemixer chooses two"
                " experts by their logits, and weighs them by a formula of its own. Use"
                " RouterFormula(top_k=2), no identities or table, and a jitter of at least 0."
            )

    def _check_groups(self) -> None:
        formula = self.formula
        check_positive_int("n_group", formula.n_group)
        check_positive_int("topk_group", formula.topk_group)
        if formula.topk_group > formula.n_group:
            raise ValueError(
                f"topk_group={formula.topk_group}: must not exceed n_group={formula.n_group}."
                " Lower topk_group."
            )
        if formula.out_of_group_fill not in (0.0, float("-inf")):
            raise ValueError(
                f"out_of_group_fill={formula.out_of_group_fill!r}: must be 0.0 or float('-inf')."
            )
        if formula.n_group == 1:
            return
        size, rest = divmod(self.num_classes, formula.n_group)
        if rest or size < 2:
            raise ValueError(
                f"n_group={formula.n_group}: num_experts={self.num_classes} must split into equal"
                " groups of at least 2 experts."
            )
        if formula.top_k > formula.topk_group * size:
            raise ValueError(
                f"top_k={formula.top_k}: topk_group={formula.topk_group} groups of {size} experts"
                f" offer only {formula.topk_group * size}. Raise topk_group or lower top_k."
            )

    @property
    def top_k(self) -> int:
        """K."""
        return self.formula.top_k

    @property
    def num_classes(self) -> int:
        """E + Z: logits of a token."""
        return self.num_experts + self.num_identity


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """The routed experts of one layer apart from their weights.

    Args:
        num_experts: E of the whole model.
        top_k: K.
        hidden_size: H.
        intermediate_size: I of the whole expert, before any sharding.
        formula: what an expert computes.
        scales_input: affinities multiply the experts' input instead of their output (Llama4).
        normalizes_affinities: the K affinities of a token are divided by their sum.
        capacity_factor: None computes every choice; > 0 drops what exceeds
            ceil(T * K * capacity_factor / E) tokens of an expert.

    Attributes:
        formula_text: the formula as a line of words, made while its numbers are numbers: in a graph
            that is captured they may be symbols.

    Raises:
        ValueError: a value out of range.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    formula: ExpertFormula
    scales_input: bool = False
    normalizes_affinities: bool = False
    capacity_factor: float | None = None
    formula_text: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "formula_text", text_of(self.formula))
        for name in ("num_experts", "hidden_size", "intermediate_size", "top_k"):
            check_positive_int(name, getattr(self, name))
        check_top_k(self.top_k, self.num_experts)
        check_formula(self.formula)
        if self.capacity_factor is not None:
            check_capacity(self.capacity_factor)


def check_formula(formula: ExpertFormula) -> None:
    """Raise ValueError unless an expert's formula has a known activation and fits itself."""
    check_choice("activation", formula.activation, EXPERT_ACTIVATIONS)
    for name in ("scale", "up_offset", "gate_softcap", "up_softcap"):
        check_finite(name, getattr(formula, name))
    why = why_no_expert(formula)
    if why:
        raise ValueError(why)


def text_of(formula: ExpertFormula) -> str:
    """Return a formula as a line of words: the activation, other fields, clamps."""
    values = [getattr(formula, each.name) for each in fields(formula)]
    plain = [value for value in values if not isinstance(value, Limits)]
    clamps = [
        getattr(limit, each.name)
        for limit in (formula.gate_limits, formula.up_limits)
        for each in fields(limit)
    ]
    return " ".join(map(str, [*plain, *clamps]))


@functools.cache
def formula_of(text: str) -> ExpertFormula:
    """Return the formula that `text_of` made a line of."""
    activation, *words = text.split()
    values: list[Any] = [
        word == "True" if word in ("True", "False") else float(word) for word in words
    ]
    plain = dict(zip(_PLAIN[1:], values, strict=False))
    gate, up = values[len(plain) : -len(_CLAMP)], values[-len(_CLAMP) :]
    return ExpertFormula(activation, **plain, gate_limits=Limits(*gate), up_limits=Limits(*up))


def check_capacity(factor: float) -> None:
    """Raise ValueError unless a capacity factor is a positive number."""
    check_finite("capacity_factor", factor)
    if factor <= 0:
        raise ValueError(
            f"capacity_factor={factor!r}: must be None (dropless) or > 0 (dropping). Use None to"
            " compute every choice."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSpec:
    """The shared experts of one layer apart from their weights.

    Args:
        hidden_size: H.
        intermediate_size: I of all of them together.
        formula: what they compute, without biases.
        is_fused: gate and up projections are one matrix.
        is_gated: each token is scaled by sigmoid(shared_expert_gate(x)) (Qwen2-MoE, Qwen3-Next).
    """

    hidden_size: int
    intermediate_size: int
    formula: ExpertFormula = field(default_factory=ExpertFormula)
    is_fused: bool = False
    is_gated: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size"):
            check_positive_int(name, getattr(self, name))
        check_formula(self.formula)
        check_bools(self, ("is_fused", "is_gated"))
        if self.formula.has_gate_up_bias or self.formula.has_down_bias:
            raise ValueError(
                "formula: shared experts have no biases, has_gate_up_bias and has_down_bias must be"
                " False. Leave them out."
            )
        if self.is_fused and not self.formula.has_gate:
            raise ValueError(
                "is_fused=True, has_gate=False: there is one projection. Use is_fused=False."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Projections around the routed experts, whose hidden size is then the latent one.

    Args:
        hidden_size: H of the layer.
        latent_size: L of the experts.
        norm_eps: of an RMSNorm of the experts' sum; None: no norm.
    """

    hidden_size: int
    latent_size: int
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "latent_size"):
            check_positive_int(name, getattr(self, name))
        if self.norm_eps is not None:
            check_finite("norm_eps", self.norm_eps)


def open_features(features: str | frozenset[str]) -> frozenset[str]:
    """Return the names of FEATURES that a value of `Tuning.features` stands for.

    Raises:
        ValueError: it is neither a word for some nor names of them.
    """
    words = {"open": FEATURES, "safe": frozenset[str]()}
    found = words.get(features) if isinstance(features, str) else features
    if not isinstance(found, frozenset) or found - FEATURES:
        raise ValueError(
            f"features={features!r}: must be {', '.join(map(repr, words))}, or a frozenset of"
            f" {', '.join(map(repr, sorted(FEATURES)))}."
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How the kernels of a layer go about their work; the results never depend on it.

    Args:
        block_size: B; None is what the backend prefers.
        pad_num_blocks_to_even: an even number of blocks.
        num_cores: physical cores of a logical core (LNC).
        shard_plan: how prefill spreads over cores: 'balanced' (work tiles of equal size side by
            side), 'block', 'intermediate', 'hidden', or 'auto', the choice of the cost model.
        loop_plan: 'sorted' (run-time iterations, weights stay for all row tiles of a work tile),
            'dynamic' (run-time iterations, one row tile each) or 'static' (the worst case).
        in_halves: with 'block', core 0 takes the first half of the blocks; else every second one.
        skip_weights: an expert's weights stay for its next row tile.
        decode_mode: 'selective' (a list of the experts that were chosen), 'all_experts' (each is
            read once), or 'auto', the choice of the cost model.
        tuned: plans of `neuron-moe tune`, for the steps they are long enough for.
        missing: what stands for no token or expert: a number that transfers leave out ('skip'), or
            a spare row ('spare'), for a compiler or chip that leaves out nothing.
        features: what of the compiler and chip plans may use: 'safe' (what public kernels show or
            its pages document), 'open' (whatever the pages do not exclude), or a frozenset of those
            of FEATURES that a chip was seen to have: `neuron_moe.verdicts.opened_by`.
        save_percent: of the first projections' results, how many a forward pass keeps for the
            backward pass, 0 to 100; the rest is computed again, and nothing else but the routing is
            kept. None: what autograd keeps, several times as much as 100.
        remarks: sentences for `explain()` about what was requested and changes nothing.
    """

    block_size: int | None = None
    pad_num_blocks_to_even: bool = False
    num_cores: int = DEFAULT_LNC_SIZE
    shard_plan: str = "auto"
    loop_plan: str = "sorted"
    in_halves: bool = False
    skip_weights: bool = False
    decode_mode: str = "auto"
    tuned: TunedPlans = field(default_factory=TunedPlans)
    missing: str = "skip"
    features: str | frozenset[str] = "safe"
    save_percent: int | None = None
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.block_size is not None:
            check_positive_int("block_size", self.block_size)
            if self.tuned.prefill:
                raise ValueError(
                    f"block_size={self.block_size} beside tuned plans, which have their own. Set"
                    " one of them."
                )
        if isinstance(self.num_cores, bool) or self.num_cores not in (1, 2):
            raise ValueError(f"num_cores={self.num_cores!r}: must be 1 or 2. Use 2 on Trn2.")
        check_choice("shard_plan", self.shard_plan, ("auto", *SHARD_PLANS))
        check_choice("loop_plan", self.loop_plan, LOOP_PLANS)
        check_choice("decode_mode", self.decode_mode, ("auto", *DECODE_MODES))
        check_choice("missing", self.missing, MISSING)
        open_features(self.features)
        check_bools(self, ("pad_num_blocks_to_even", "in_halves", "skip_weights"))
        percent = self.save_percent
        if percent is not None and (isinstance(percent, bool) or percent not in range(101)):
            raise ValueError(
                f"save_percent={percent!r}: must be a whole number from 0 (keep nothing, compute"
                " again) to 100, or None. Use 0 where memory is short."
            )

    @property
    def opened(self) -> frozenset[str]:
        """Which of FEATURES plans may use."""
        return open_features(self.features)

    def __str__(self) -> str:
        halves = ", in halves" if self.in_halves else ""
        stay = ", weights stay for the next block" if self.skip_weights else ""
        shards = f"{self.shard_plan} shards over {self.num_cores} core(s)"
        spare = ", spare rows for padding" if self.missing == "spare" else ""
        return f"{self.loop_plan} loop, {shards}{halves}{stay}{spare}"

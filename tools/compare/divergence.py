"""Layer by layer, how far a model is from a reference, and whether rounding explains it.

The exact result is the reference's in float32. What rounding does to the reference itself, run in
bfloat16, is the measure: a layer may be 1.5 times as far from exact (the three-way rule). Each
layer is judged on the exact input, so that what went wrong before it does not count, and by the
tokens that go to the same experts: where two experts score alike, rounding decides, and the token's
output says nothing of how either computes. Such flips are counted apart.

Letters: U sequences, S tokens of each, T tokens of all, H hidden, K experts per token.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from neuron_moe.models.layerwise import LayerRun
from neuron_moe.router import Router, selection_margin, selection_scores, top_k_lowest_first

ALLOWED = 1.5  # times the reference's own error in bfloat16
FLOOR = 1e-6  # relative: below it, float32 itself rounds
FLIPS_FLOOR = 0.05  # of the tokens, beside ALLOWED times the reference's own flips


class Runner(Protocol):
    """A model that runs one layer at a time, such as `LayerwiseModel`."""

    @property
    def num_layers(self) -> int:
        """How many layers there are."""

    def embed(self, input_ids_US: Tensor) -> Tensor:
        """Return [U, S, H]."""

    def run_layer(self, index: int, hidden_USH: Tensor) -> LayerRun:
        """Run one layer."""

    def compute_logits(self, hidden_USH: Tensor) -> Tensor:
        """Return [U, S, V]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The runs that are compared.

    Attributes:
        ours: the model in question.
        exact: the reference in float32.
        rounded: the reference in bfloat16.
        our_router: returns our router of a layer, None where it is dense.
        exact_router: the reference's.
    """

    ours: Runner
    exact: Runner
    rounded: Runner
    our_router: Callable[[int], Router | None]
    exact_router: Callable[[int], Router | None]


class Distance(NamedTuple):
    """How far a tensor is from the exact one.

    Attributes:
        largest: largest absolute difference.
        rms: root mean square of the difference over that of the exact tensor.
        cosine: mean over tokens of the cosine between the two.
    """

    largest: float
    rms: float
    cosine: float


class Flips(NamedTuple):
    """Tokens that go to other experts than in the exact run.

    Attributes:
        num_tokens: how many.
        largest_margin: the largest gap, in the exact run, between the score of the last expert
            chosen and the first one not; None without flips.
    """

    num_tokens: int
    largest_margin: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One stage: the embedding, a layer, or the logits.

    Attributes:
        name: "embedding", the layer's number, or "logits".
        drift: of our run of the whole model.
        rounded_drift: of the reference in bfloat16.
        alone_rms: of the stage alone on the exact input, tokens that flip there left out.
        allowed_rms: 1.5 times that of the reference in bfloat16.
        flips: of our run of the whole model.
        rounded_flips: of the reference in bfloat16.
        exceeds: the stage alone is farther away than allowed, or more tokens flip.
    """

    name: str
    drift: Distance
    rounded_drift: Distance
    alone_rms: float
    allowed_rms: float
    flips: Flips
    rounded_flips: Flips
    exceeds: bool


class _Streams(NamedTuple):
    """Residual streams so far, [U, S, H]."""

    ours: Tensor
    exact: Tensor
    rounded: Tensor


@torch.inference_mode()
def compare_layers(
    models: Models, input_ids_US: Tensor, progress: Callable[[int, int], None] | None = None
) -> list[Row]:
    """Return a row for each stage, first to last.

    Args:
        models: their runs.
        input_ids_US: [U, S] token ids, no padding.
        progress: called with the stages done and all of them.
    """
    total = models.exact.num_layers + 2
    streams = _Streams(*(each.embed(input_ids_US) for each in _runs(models)))
    rows = [_row("embedding", streams, streams, _NO_CHOICES)]
    for index in range(models.exact.num_layers):
        row, streams = _compare_layer(models, index, streams)
        rows.append(row)
        if progress:
            progress(len(rows), total)
    after = [
        models.ours.compute_logits(_beside(streams.ours, streams.exact)),
        models.exact.compute_logits(streams.exact),
        models.rounded.compute_logits(_beside(streams.rounded, streams.exact)),
    ]
    whole, alone = _unpack(after)
    return [*rows, _row("logits", whole, alone, _NO_CHOICES)]


def first_over(rows: list[Row]) -> Row | None:
    """Return the first stage that exceeds the rule."""
    return next((row for row in rows if row.exceeds), None)


class _Choice(NamedTuple):
    """Experts of tokens, in order of their numbers, and how clear the choice was."""

    index_TK: Tensor
    margin_T: Tensor


_NO_CHOICES: list[_Choice | None] = [None] * 6


def _runs(models: Models) -> tuple[Runner, Runner, Runner]:
    return models.ours, models.exact, models.rounded


def _beside(own_USH: Tensor, exact_USH: Tensor) -> Tensor:
    """Return both streams as one batch, [2 U, S, H], in the dtype of the first."""
    return torch.cat((own_USH, exact_USH.to(own_USH.dtype)))


def _unpack(after: list[Tensor]) -> tuple[_Streams, _Streams]:
    """Take apart what `_beside` joined: the whole runs, and the stage alone."""
    (ours, ours_alone), (rounded, rounded_alone) = (after[place].chunk(2) for place in (0, 2))
    return _Streams(ours, after[1], rounded), _Streams(ours_alone, after[1], rounded_alone)


def _compare_layer(models: Models, index: int, streams: _Streams) -> tuple[Row, _Streams]:
    """Run one layer of each model; return its row and the streams behind it."""
    ours = models.ours.run_layer(index, _beside(streams.ours, streams.exact))
    exact = models.exact.run_layer(index, streams.exact)
    rounded = models.rounded.run_layer(index, _beside(streams.rounded, streams.exact))
    whole, alone = _unpack([ours.hidden_USH, exact.hidden_USH, rounded.hidden_USH])
    our_router, exact_router = models.our_router(index), models.exact_router(index)
    our_inputs, rounded_inputs = (run.feed_forward_in_USH.chunk(2) for run in (ours, rounded))
    pairs = (
        (our_router, our_inputs[0]),
        (exact_router, exact.feed_forward_in_USH),
        (exact_router, rounded_inputs[0]),
        (our_router, our_inputs[1]),
        (exact_router, exact.feed_forward_in_USH),
        (exact_router, rounded_inputs[1]),
    )
    choices = [None if router is None else _choose(router, given) for router, given in pairs]
    return _row(str(index), whole, alone, choices), whole


def _choose(router: Router, hidden_USH: Tensor) -> _Choice:
    """Return the experts of each token."""
    formula, logits_TE = router.spec.formula, router.get_router_logits(hidden_USH)
    ranked_TE = selection_scores(logits_TE, formula, router.e_score_correction_bias)
    _, index_TK = top_k_lowest_first(ranked_TE, formula.top_k)
    return _Choice(index_TK.sort(dim=-1).values, selection_margin(ranked_TE, formula.top_k))


def _row(name: str, whole: _Streams, alone: _Streams, choices: list[_Choice | None]) -> Row:
    """Measure one stage.

    Args:
        name: of the stage.
        whole: outputs of the runs of the whole model.
        alone: outputs of the stage on the exact input.
        choices: of our, the exact and the rounded run, of the whole model and of the stage alone.
    """
    flips = _flips(choices[0], choices[1]), _flips(choices[2], choices[1])
    moved = [_moved(choice, choices[4]) for choice in (choices[3], choices[5])]
    alone_flips = [0 if each is None else int(each.sum()) for each in moved]
    num_tokens = alone.exact.shape[:2].numel()
    kept_T = torch.ones(num_tokens, dtype=torch.bool)
    for each in moved:
        kept_T = kept_T if each is None else kept_T & ~each
    rms = _distance(alone.ours, alone.exact, kept_T).rms
    allowed = max(ALLOWED * _distance(alone.rounded, alone.exact, kept_T).rms, FLOOR)
    many = ALLOWED * alone_flips[1] + FLIPS_FLOOR * num_tokens
    return Row(
        name=name,
        drift=_distance(whole.ours, whole.exact),
        rounded_drift=_distance(whole.rounded, whole.exact),
        alone_rms=rms,
        allowed_rms=allowed,
        flips=flips[0],
        rounded_flips=flips[1],
        exceeds=not rms <= allowed or alone_flips[0] > many,
    )


def _moved(choice: _Choice | None, exact: _Choice | None) -> Tensor | None:
    """Return which tokens chose other experts, [T] bool."""
    if choice is None or exact is None:
        return None
    return (choice.index_TK != exact.index_TK).any(dim=-1)


def _flips(choice: _Choice | None, exact: _Choice | None) -> Flips:
    moved_T = _moved(choice, exact)
    if moved_T is None or exact is None or not moved_T.any():
        return Flips(0, None)
    margin = float(exact.margin_T[moved_T].max())
    return Flips(int(moved_T.sum()), margin if math.isfinite(margin) else None)


def _distance(tensor: Tensor, exact: Tensor, kept_T: Tensor | None = None) -> Distance:
    """Measure [U, S, ..] against the exact one, at some tokens or at all; in float64."""
    rows, truth = (part.double().flatten(0, 1) for part in (tensor, exact))
    if kept_T is not None:
        rows, truth = rows[kept_T], truth[kept_T]
    if not len(rows):
        return Distance(0.0, 0.0, 1.0)
    difference = rows - truth
    scale = truth.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    cosine = torch.nn.functional.cosine_similarity(rows, truth, dim=-1).mean()
    rms = difference.square().mean().sqrt() / scale
    return Distance(float(difference.abs().max()), float(rms), float(cosine))

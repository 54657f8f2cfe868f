"""Expert weights in MX words, as checkpoints have them, for a chip that multiplies words."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lab.check.kernel_cases.prefill_weights import BF16, Weights, draw_weights
from lab.check.kernel_cases.verdict import NO_WORSE, rms
from lab.check.launcher import chip
from lab.check.vendor_cases import mx
from lab.check.vendor_cases.case import Case, difference
from lab.check.vendor_cases.inputs import Draw
from nki_kernels.common.formula import ExpertFormula
from nki_kernels.common.mx import MxForm
from nki_kernels.common.mx_layout import pack_mx_down, pack_mx_gate_up
from nki_kernels.common.weight_formats import MX_GROUP, MX_WORD_BYTES
from nki_kernels.decode import decode_moe_ref

MX_CHIP = "trn3"  # which multiplies words
GROUP_WORDS = MX_GROUP // mx.PACK


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A stack of matrices [X, n], summed over n.

    Attributes:
        words: [E, X, n/4], four neighbours each; whole groups of 8, zeros past the end of n.
        scales: [E, X, n/32] uint8.
    """

    words: np.ndarray
    scales: np.ndarray

    def values(self, expert: int, name: str) -> np.ndarray:
        """Return [X, n] float64 of one expert."""
        elements = mx.unpack(self.words[expert], name).astype(np.float64)
        powers = np.exp2(self.scales[expert].astype(np.float64) - 127)
        return np.asarray(elements * np.repeat(powers, MX_GROUP, axis=-1))


@dataclasses.dataclass(slots=True, kw_only=True)
class MxWeights(Weights):
    """The experts in MX words; `gate_up` and `down` have the shapes alone.

    Attributes:
        gate_up_words: channels [2I], gate first, over H.
        down_words: channels [H] over I.
    """

    gate_up_words: Words
    down_words: Words

    def exact(
        self, expert: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Return gate_up [H, 2I], down [I, H] and the biases of one expert, in float64."""
        gate_up = self.gate_up_words.values(expert, self.format).T
        down = self.down_words.values(expert, self.format).T[: self.down.shape[1]]
        biases = (self.gate_up_bias, self.down_bias)
        first, second = (None if b is None else b[expert].astype(np.float64) for b in biases)
        return gate_up, down, first, second

    def packed(self, form: MxForm) -> tuple[np.ndarray, np.ndarray]:
        """Return gate_up and down as the kernels take them; experts nobody chose are 0."""
        stacks: list[np.ndarray] = []
        for expert in self.touched:
            own = slice(expert, expert + 1)
            bias = None
            if self.gate_up_bias is not None:
                bias = self.gate_up_bias[own].astype(np.float32)
            first, second = self.gate_up_words, self.down_words
            parts = (
                pack_mx_gate_up(form, first.words[own], first.scales[own], bias),
                pack_mx_down(form, second.words[own], second.scales[own]),
            )
            E = len(self.gate_up)
            stacks = stacks or [np.zeros((E, *part.shape[1:]), part.dtype) for part in parts]
            for stack, part in zip(stacks, parts, strict=True):
                stack[expert] = part[0]
        return stacks[0], stacks[1]


def is_native(case: Case) -> bool:
    """Whether the chip that the check is about multiplies the weights of a case as stored."""
    return chip() == MX_CHIP and case.get("weight_dtype") in MX_WORD_BYTES


def draw_for_chip(
    case: Case,
    draw: Draw,
    num_experts: int,
    H: int,
    I: int,  # noqa: E741  the axis letter
    touched: Sequence[int],
) -> tuple[Weights, str]:
    """Draw the weights of a case; words of MX formats stay what they are if the chip has them."""
    drawer = draw_mx_weights if is_native(case) else draw_weights
    return drawer(case, draw, num_experts, H, I, touched)


def draw_mx_weights(
    case: Case,
    draw: Draw,
    num_experts: int,
    H: int,
    I: int,  # noqa: E741  the axis letter
    touched: Sequence[int],
) -> tuple[MxWeights, str]:
    """Draw the weights of a case in the MX format that it names; see `draw_weights`."""
    name = str(case.get("weight_dtype"))
    touched = touched or [0]
    weights = MxWeights(
        format=name,
        touched=touched,
        gate_up=np.broadcast_to(np.zeros(1, BF16), (num_experts, H, 2 * I)),
        down=np.broadcast_to(np.zeros(1, BF16), (num_experts, I, H)),
        gate_up_words=_draw_words(draw, (num_experts, 2 * I, H), name, touched),
        down_words=_draw_words(draw, (num_experts, H, I), name, touched),
    )
    if case.get("bias"):
        weights.gate_up_bias = draw.uniform((num_experts, 2 * I), -1.0, 1.0, BF16)
        weights.down_bias = draw.uniform((num_experts, H), -1.632, 1.4375, BF16)
    return weights, f"{name} words as stored"


def _draw_words(
    draw: Draw, shape: tuple[int, int, int], name: str, touched: Sequence[int]
) -> Words:
    """Return random words, zeros past the end of the last axis; of the touched experts alone."""
    E, X, n = shape
    form, groups = mx.FORMATS[name], math.ceil(n / MX_GROUP)
    words = np.zeros((E, X, groups * GROUP_WORDS), form.word)
    scales = np.zeros((E, X, groups), np.uint8)
    whole = n // mx.PACK
    for expert in touched:
        drawn = mx.draw_words(draw, (X, words.shape[2]), name)
        words[expert, :, :whole] = drawn[:, :whole]
        if n % mx.PACK:
            kept = form.word((1 << (form.bits * (n % mx.PACK))) - 1)
            words[expert, :, whole] = drawn[:, whole] & kept
        scales[expert] = mx.draw_scales(draw, (X, groups), name)
    return Words(words=words, scales=scales)


def quantized_formula(problem: Any) -> np.ndarray:
    """Return [T, H] float64 with activations quantised where the kernels do it.

    Args:
        problem: of the decode cases, with `MxWeights`.
    """
    output_TH = np.zeros(problem.hidden_TH.shape)
    scaling = {"POST_SCALE": "post", "PRE_SCALE": "pre", "NO_SCALE": "none"}[problem.scaling]
    for expert in np.unique(problem.index_TK[problem.index_TK >= 0]):
        gate_up, down, gate_up_bias, down_bias = problem.weights.exact(int(expert))
        output_TH += decode_moe_ref(
            problem.hidden_TH.astype(np.float64),
            gate_up[None],
            down[None],
            np.where(problem.index_TK == expert, 0, -1),
            problem.affinities_TK.astype(np.float64),
            _formula_of(problem),
            scaling=scaling,
            gate_up_bias_E2I=None if gate_up_bias is None else gate_up_bias[None],
            down_bias_EH=None if down_bias is None else down_bias[None],
            in_words=True,
        )
    return output_TH


def _formula_of(problem: Any) -> ExpertFormula:
    formula: ExpertFormula = problem.formula
    return formula


def judge_quantized(
    name: str, actual: np.ndarray, quantized: np.ndarray, exact: np.ndarray, case: Case
) -> tuple[str, str]:
    """Return why an output is wrong, or "", and how far quantised activations are from the formula.

    It must be within the case's tolerance of the formula with activations quantised, and no further
    from the formula without than that is, by root mean square.

    Args:
        name: of the output.
        actual: from our kernel.
        quantized: by the formula in float64, with activations quantised.
        exact: by the formula in float64.
        case: has the tolerance.
    """
    size = max(rms(exact, np.zeros_like(exact)), 1e-30)
    ours, theirs = rms(actual, exact), rms(quantized, exact)
    note = f"activations quantised: rms error {ours / size:.2%} of the formula's rms"
    why = difference(actual, quantized, case.rtol, case.atol)
    if why:
        return f"{name}: {why}", note
    if ours > NO_WORSE * theirs + 1e-3 * size:
        return f"{name}: rms error {ours:.3g}, that of the quantised formula is {theirs:.3g}", note
    return "", note

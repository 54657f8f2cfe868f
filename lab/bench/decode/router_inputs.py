"""Hidden states and a router that choose given experts, for blocks that route by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lab.bench.decode.cases import ROUTERS, DecodeCase

BF16 = ml_dtypes.bfloat16
STEP = 2.0  # between the logits of a token's choices; the others are below 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterInputs:
    """What a block takes in front of its experts.

    Attributes:
        hidden_TH: [T, H] bfloat16.
        norm_1H: [1, H] bfloat16 ones.
        weight_EH: [E, H] bfloat16.
        bias_1E: [1, E] float32 zeros if the router has a bias.
    """

    hidden_TH: NDArray[Any]
    norm_1H: NDArray[Any]
    weight_EH: NDArray[Any]
    bias_1E: NDArray[np.float32] | None

    @classmethod
    def of(cls, case: DecodeCase, hidden_size: int) -> RouterInputs:
        """Return inputs by which the tokens of a case choose its experts, in order.

        The router's rows are orthonormal signs (Hadamard), so that hidden states which are sums of
        them have the wanted logits; the columns beyond the model's are zero.
        """
        index_TK, model = case.expert_index(), case.model
        logits_TE = np.full((case.B, model.E), -1.0)
        order_K = STEP * np.arange(model.K, 0, -1)
        np.put_along_axis(logits_TE, index_TK, order_K[None].repeat(case.B, 0), axis=1)
        rows_EH = np.zeros((model.E, hidden_size))
        span = 1 << (model.E - 1).bit_length()
        rows_EH[:, :span] = _signs(span)[: model.E]
        hidden_TH = logits_TE @ rows_EH / span
        has_bias = ROUTERS[model.name].get("has_bias")
        return cls(
            hidden_TH=hidden_TH.astype(BF16),
            norm_1H=np.ones((1, hidden_size), BF16),
            weight_EH=rows_EH.astype(BF16),
            bias_1E=np.zeros((1, model.E), np.float32) if has_bias else None,
        )


def _signs(size: int) -> NDArray[np.float64]:
    """Return the Hadamard matrix of a power of two."""
    found = np.ones((1, 1))
    while len(found) < size:
        found = np.block([[found, found], [found, -found]])
    return found

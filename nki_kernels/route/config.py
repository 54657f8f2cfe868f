"""What the router kernel is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from nki.language import NKIObject

from nki_kernels.common.formula import RouterFormula

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class RouterConfig(NKIObject):
    """Compile-time constants of `router_topk`.

    Attributes:
        formula: how experts are chosen and weighed.
        num_experts: E.
        hidden_size: H.
        has_norm: RMSNorm in front.
        norm_eps: its epsilon.
        returns_logits: also return the logits.
        hidden_dtype: element type of hidden_TH, one of DTYPES.
        weight_dtype: element type of router_weight_EH, one of DTYPES.
        num_cores: physical cores of the launch (LNC).
        marks_broken: also mark tokens whose logits are not all numbers; `router_topk` does so by
            affinities of NaN.
        has_gate: also compute sigmoid(x . w), one number a token; only with `marks_broken`.
    """

    formula: RouterFormula
    num_experts: int
    hidden_size: int
    has_norm: bool = False
    norm_eps: float = 1e-6
    returns_logits: bool = False
    hidden_dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    num_cores: int = 2
    marks_broken: bool = False
    has_gate: bool = False


def num_rows(config: RouterConfig) -> int:
    """Return the rows of what tokens are multiplied with: the router's, and the gate's."""
    return config.num_experts + int(config.has_gate)


def item_bytes(dtype: str) -> int:
    """Return the bytes of an element."""
    return 4 if dtype == "float32" else 2

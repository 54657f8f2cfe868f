"""vLLM's product with a matrix that oneDNN has packed, for the dense projections of a model.

It runs inside a graph of torch.compile without a detour through Python. Projections of one input,
queries, keys and values, are one product.

Letters: n rows in, k columns in, m columns out.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from vllm._custom_ops import _supports_onednn, create_onednn_mm, onednn_mm

from neuron_moe.models.decoder import DecoderModel, GroupedAttention
from neuron_moe.models.dense_forms import dense_linears

_MOST_SHAPES = 32  # numbers of rows whose products are kept ready


class VllmLinear(nn.Module):
    """A linear layer for inference on a CPU, its weight only for vLLM's operator to read.

    Args:
        linears: on the CPU, in one dtype, of the same input; their outputs are joined.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self.in_features = linears[0].in_features
        self.sizes = [linear.out_features for linear in linears]
        self.out_features = sum(self.sizes)
        weight_mk = torch.cat([linear.weight.detach() for linear in linears])
        self._matrix = create_onednn_mm(weight_mk.t(), _MOST_SHAPES)
        self._bias_m = _join_biases(linears)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [.., m] of hidden states [.., k]."""
        output: Tensor = onednn_mm(self._matrix, hidden, self._bias_m)
        return output


def _join_biases(linears: Sequence[nn.Linear]) -> Tensor | None:
    """Return the biases one after the other, zeros where a projection has none; None of none."""
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
            for linear in linears
        ]
    ).detach()


class JointProducts:
    """Queries, keys and values of grouped attention as one product; see its `products`."""

    def __init__(self, attention: GroupedAttention) -> None:
        self._joint = VllmLinear(attention.q_proj, attention.k_proj, attention.v_proj)

    def __call__(self, hidden_USH: Tensor) -> tuple[Tensor, ...]:
        """Return the parts, [U, S, heads * D] each."""
        return torch.split(self._joint(hidden_USH), self._joint.sizes, dim=-1)


@cache
def can_take_linears(dtype: torch.dtype) -> bool:
    """Say whether vLLM's operator is there, for this dtype on this processor.

    Without AVX-512 there is none for bfloat16.
    """
    if not _supports_onednn or dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        create_onednn_mm(torch.zeros(32, 32, dtype=dtype).t(), 1)
    except RuntimeError:
        return False
    return True


def take_linears(model: DecoderModel) -> None:
    """Let vLLM's operator compute the dense projections of a model.

    Args:
        model: filled, for inference; its plain weights are given up.
    """
    for attention in model.attentions:
        if _has_three_products(attention):
            attention.products = JointProducts(attention)
            del attention.q_proj, attention.k_proj, attention.v_proj
    for parent, name, linear in list(dense_linears(model)):
        parent.add_module(name, VllmLinear(linear))


def _has_three_products(attention: nn.Module) -> bool:
    """Say whether it projects as `GroupedAttention` does, in plain products."""
    base = GroupedAttention
    return (
        isinstance(attention, base)
        and type(attention).forward is base.forward
        and type(attention).products is base.products
    )

"""Compiled kernels of whoever runs a model, such as a server with some of its own.

One call computes all chosen experts of a step: one more form of the products on a CPU, measured
beside those of `product_forms`, and with a layout of the matrices of its own.
"""

from collections.abc import Iterator
from typing import Protocol

from neuron_moe.weights.expert_weights import ExpertWeights
from neuron_moe.weights.product_forms import Compute


class CustomKernel(Protocol):
    """A kernel for experts without biases that are all on this rank."""

    @property
    def name(self) -> str:
        """What its form is called, unlike all others."""

    def computes(self, weights: ExpertWeights) -> bool:
        """Say whether it can: sizes, dtype, formula."""

    def prepare(self, weights: ExpertWeights) -> Compute:
        """Copy plain weights into its layout; return what computes with them."""


_kernels: dict[str, CustomKernel] = {}


def register(kernel: CustomKernel) -> None:
    """Let experts be multiplied by a kernel where that is measured to be fastest."""
    _kernels[kernel.name] = kernel


def custom_kernels_for(weights: ExpertWeights, num_experts: int) -> Iterator[CustomKernel]:
    """Yield the kernels that can compute a layer.

    Args:
        weights: of this rank, plain.
        num_experts: E of all ranks.
    """
    if weights.num_experts == num_experts:
        yield from (kernel for kernel in _kernels.values() if kernel.computes(weights))

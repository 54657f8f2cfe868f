"""Backends do the arithmetic of a MoE layer: torch (anywhere, the reference), nki (the kernels, on
the chip or on the simulator) and cuda (Triton kernels). What a backend decides for a step is a
`Plan`, which runs it.
"""

from typing import Protocol

from torch import Tensor

from neuron_moe.errors import check_choice
from neuron_moe.plan import LayerParts, Plan, Step
from neuron_moe.spec import ExpertSpec, RouterSpec
from neuron_moe.weights.expert_weights import Packed
from neuron_moe.weights.laid_out import LaidOut
from neuron_moe.weights.product_forms import ProductForms

BACKENDS = ("torch", "nki", "cuda")


class Backend(Protocol):
    """The arithmetic of MoE layers on one rank; a further back end implements just this.

    Attributes:
        name: what `get_backend` calls it.
        has_gradient: whether outputs can be differentiated.
        plans_ahead: whether plans are made before torch.compile captures what they launch.
    """

    name: str
    has_gradient: bool
    plans_ahead: bool

    def check(self, experts: ExpertSpec, router: RouterSpec) -> None:
        """Raise ValueError for a layer of which this backend computes no step, when it is built."""

    def plan(self, parts: LayerParts, step: Step) -> Plan:
        """Decide how a step of a layer is computed, and prepare it.

        Raises:
            ValueError: what this backend cannot compute.
        """

    def pack(self, first_EHI: Tensor, down_EIH: Tensor) -> tuple[Packed, Packed] | str:
        """Return plain weights in the form this backend likes best, or why they stay as they are.

        The numbers do not change.
        """

    def settle_forms(self, parts: LayerParts, form: str) -> ProductForms | None:
        """Return in which form steps multiply with the experts; None if there is no choice.

        Raises:
            ValueError: a form that this machine or backend does not know.
        """

    def lay_out(self, parts: LayerParts, phase: str) -> LaidOut | None:
        """Return the experts as 'prefill' or 'decode' reads them; None if nothing is gained.

        Raises:
            ValueError: this backend reads one layout.
        """


def get_backend(name: str | Backend) -> Backend:
    """Return the backend called `name`, or the one given.

    Raises:
        ValueError: an unknown name.
    """
    if not isinstance(name, str):
        return name
    check_choice("backend", name, BACKENDS)
    if name == "nki":
        from neuron_moe.backends.nki import NkiBackend

        return NkiBackend()
    if name == "cuda":
        from neuron_moe.backends.cuda import CudaBackend

        return CudaBackend()
    from neuron_moe.backends.torch_backend import TorchBackend

    return TorchBackend()

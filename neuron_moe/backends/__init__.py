"""Backends do the arithmetic of a MoE layer: torch (anywhere, the reference) and nki (the kernels,
on the chip or on the simulator).
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from neuron_moe.activations import ActivationSpec
from neuron_moe.backends.laid_out import LaidOut
from neuron_moe.backends.narrow import NarrowMatrices
from neuron_moe.backends.packing import PackedMatrices
from neuron_moe.blocks import BlockMapping
from neuron_moe.config import BlockwiseMatmulConfig
from neuron_moe.dispatch import Workload
from neuron_moe.errors import check_choice
from neuron_moe.routing import RouterBase, Routing

Packed = PackedMatrices | NarrowMatrices


@dataclass(frozen=True)
class ExpertWeights:
    """The routed experts of one rank.

    Attributes:
        gate_up_proj_EHI: [E, H, 2I], gate columns first ([E, H, I] without GLU); on the meta
            device if packed.
        down_proj_EIH: [E, I, H]; on the meta device if packed.
        gate_up_bias_EI: [E, 2I] or None, as in the checkpoint.
        down_bias_EH: [E, H] or None, as in the checkpoint.
        activation: what happens between the projections.
        down_bias_scale: 1 / ranks that add the same down bias before a sum over ranks.
        packed_gate_up: in another form, see `Backend.pack`; None if plain.
        packed_down: likewise.
        why_plain: why packing left them as they were; empty if it did not, or was not asked.
        decode_copy: the same in the order of the decode kernel, if there is one.
        prefill_copy: the same in the order of the prefill kernel, if there is one.
    """

    gate_up_proj_EHI: Tensor
    down_proj_EIH: Tensor
    gate_up_bias_EI: Tensor | None
    down_bias_EH: Tensor | None
    activation: ActivationSpec
    down_bias_scale: float = 1.0
    packed_gate_up: Packed | None = None
    packed_down: Packed | None = None
    why_plain: str = ""
    decode_copy: LaidOut | None = None
    prefill_copy: LaidOut | None = None

    @property
    def num_experts(self) -> int:
        """Experts of this rank."""
        return self.gate_up_proj_EHI.shape[0]


class LocalRouting(NamedTuple):
    """A routing in the numbering of this rank.

    Attributes:
        expert_index_TK: [T, K] int32 local expert; -1 for padding tokens and for experts of other
            ranks.
        expert_affinities_TK: [T, K] float32; 0 where the index is -1.
        scales_input: affinities multiply the expert's input instead of its output (Llama4).
        model_index_TK: [T, K] int32 the choices before, in the numbering of all ranks; None where
            that is the same.
        first_expert: this rank's first expert in that numbering.
        num_experts: experts in that numbering.
    """

    expert_index_TK: Tensor
    expert_affinities_TK: Tensor
    scales_input: bool = False
    model_index_TK: Tensor | None = None
    first_expert: int = 0
    num_experts: int = 0


@dataclass(frozen=True)
class BlockPlan:
    """How the blockwise path is cut; backends without blocks ignore it, the result never depends on
    it.
    """

    block_size: int
    pad_num_blocks_to_even: bool = False


class Backend(Protocol):
    """The arithmetic of one MoE layer on one rank. Outputs are [T, H] float32 partial sums of this
    rank's experts.

    Attributes:
        name: what `get_backend` calls it.
        has_gradient: whether outputs can be differentiated.
    """

    name: str
    has_gradient: bool

    def route(self, hidden_TH: Tensor, router: RouterBase) -> Routing:
        """Route T tokens."""

    def index_blocks(
        self, expert_index_TK: Tensor, num_experts: int, plan: BlockPlan
    ) -> BlockMapping:
        """Place every (token, choice) pair in a slot of a block."""

    def blockwise(
        self, hidden_TH: Tensor, routing: LocalRouting, weights: ExpertWeights, plan: BlockPlan
    ) -> Tensor:
        """Compute many tokens, rows sorted by expert."""

    def few_tokens(
        self, hidden_TH: Tensor, routing: LocalRouting, weights: ExpertWeights, mode: str
    ) -> Tensor:
        """Compute few tokens; mode is 'selective' or 'all_experts'."""

    def forget_weights(self) -> None:
        """Forget every form of weights that was kept."""

    def pack(self, first_EHI: Tensor, down_EIH: Tensor) -> tuple[Packed, Packed] | str:
        """Return plain weights in the form this backend likes best, or why they stay as they are.

        The numbers do not change.
        """


@runtime_checkable
class TellsPlan(Protocol):
    """A backend that has more to tell about a path than the name of its kernel."""

    def notes(
        self, path: str, work: Workload, weights: ExpertWeights, scales_input: bool
    ) -> tuple[str, ...]:
        """Return lines for `MoE.explain`."""


@runtime_checkable
class ChoosesMode(Protocol):
    """A backend that knows which of the two modes for few tokens is faster."""

    def choose_mode(
        self, work: Workload, weights: ExpertWeights, scales_input: bool
    ) -> tuple[str, str]:
        """Return 'selective' or 'all_experts', and why."""


@runtime_checkable
class ChoosesBlocks(Protocol):
    """A backend that knows which block size is fastest."""

    def choose_block_size(self, work: Workload, weights: ExpertWeights, scales_input: bool) -> int:
        """Return the slots of a block where nobody chose them."""


@runtime_checkable
class LaysOut(Protocol):
    """A backend whose kernels read other layouts than the plain one faster."""

    def lay_out(self, weights: ExpertWeights, phase: str, top_k: int) -> LaidOut | None:
        """Return the experts as 'prefill' or 'decode' reads them; None if nothing is gained."""


def get_backend(name: str, config: BlockwiseMatmulConfig | None = None) -> Backend:
    """Return the backend called `name`.

    Args:
        name: 'torch' or 'nki'.
        config: tuning of the blockwise path, which the nki backend follows; None: defaults.

    Raises:
        ValueError: an unknown name, or a configuration that contradicts the backend.
    """
    check_choice("backend", name, ("torch", "nki"))
    if name == "nki":
        from neuron_moe.backends.nki_backend import NkiBackend

        return NkiBackend(config)
    from neuron_moe.backends.torch_backend import TorchBackend

    return TorchBackend()

"""The nki backend: a MoE layer through the kernels of `nki_kernels`.

Where the vendor's `nki` is missing, the kernels run on the simulator: the same instructions on
CPU tensors, exact to the rounding of each instruction, and slow. With the vendor's package they are
launched through `nki.jit`; that way has not been tried, for want of a device.

| step | kernels |
| --- | --- |
| route | router_topk |
| index_blocks | index_blocks |
| blockwise (prefill) | index_blocks, blockwise_moe, combine |
| few_tokens (decode, speculation) | decode_moe |
| block (the same, with norm, router and shared experts) | decode_block |

There is no gradient: training uses the torch backend. In prefill a token that is not finite spoils
the up to 127 others that combine adds up with it; in decode it spoils its own row only.
"""

from typing import Any

from torch import Tensor

from neuron_moe.backends import (
    BlockPlan,
    ExpertWeights,
    LocalRouting,
    Packed,
    nki_block,
    nki_decode,
    nki_prefill,
    nki_router,
)
from neuron_moe.backends.block import BlockLayer, BlockOutput
from neuron_moe.backends.laid_out import LaidOut
from neuron_moe.backends.nki_launch import check_call, launch
from neuron_moe.backends.nki_plan import PrefillPlan
from neuron_moe.backends.nki_weights import format_note, narrow_weights
from neuron_moe.backends.prepared import Prepared
from neuron_moe.backends.torch_backend import TorchBackend
from neuron_moe.blocks import BlockMapping
from neuron_moe.config import BlockwiseMatmulConfig
from neuron_moe.dispatch import FEW_TOKEN_PATHS, Workload
from neuron_moe.errors import check_choice
from neuron_moe.routing import RouterBase, Routing

__all__ = ["NkiBackend", "PrefillPlan"]


class NkiBackend:
    """See the module's docstring.

    Args:
        config: tuning of the blockwise path; None takes the defaults.

    Raises:
        ValueError: the configuration contradicts itself or this backend.
    """

    name = "nki"
    has_gradient = False

    def __init__(self, config: BlockwiseMatmulConfig | None = None) -> None:
        self.plan = PrefillPlan.from_config(config or BlockwiseMatmulConfig.default())
        self._prepared = Prepared()

    def notes(
        self, path: str, work: Workload, weights: ExpertWeights, scales_input: bool
    ) -> tuple[str, ...]:
        """Say what runs on a path beyond its kernel's name."""
        if path in FEW_TOKEN_PATHS:
            config = self._decode_config(work, weights, scales_input, path)
            return (
                nki_decode.describe(config),
                "kernels: router_topk in front of it",
                format_note(weights),
            )
        plan = f"plan: {self.plan}"
        better: tuple[str, ...] = ()
        if self.plan.shard_plan == "auto":
            plan = nki_prefill.describe(self._rank(work, weights, scales_input, work.block_size))
            best = self._rank(work, weights, scales_input)[0]
            if best.block_size != work.block_size:
                better = (
                    f"block_size={best.block_size} would take {best.estimated_us:.0f} us"
                    " [estimated]",
                )
        around = "kernels: router_topk, index_blocks, combine around it"
        return (plan, around, format_note(weights), *better)

    def choose_block_size(self, work: Workload, weights: ExpertWeights, scales_input: bool) -> int:
        """Return the block size of the plan that the cost model takes; as it is if one is given."""
        if self.plan.shard_plan != "auto":
            return work.block_size
        best = self._rank(work, weights, scales_input)[0]
        return int(best.block_size)

    def _rank(
        self, work: Workload, weights: ExpertWeights, scales_input: bool, *block_sizes: int
    ) -> list[Any]:
        top_k = work.top_k * work.num_local_experts / work.num_experts
        return nki_prefill.rank_plans(
            self.plan, weights, scales_input, work.tokens, top_k, block_sizes
        )

    def choose_mode(
        self, work: Workload, weights: ExpertWeights, scales_input: bool
    ) -> tuple[str, str]:
        """Return the mode of decode_moe that its cost model takes, and why."""
        config = self._decode_config(work, weights, scales_input, None)
        return nki_decode.path_of(config), f"cost model of decode_moe: {config.reason}"

    def _decode_config(
        self, work: Workload, weights: ExpertWeights, scales_input: bool, mode: str | None
    ) -> Any:
        return nki_decode.decode_config(
            work.tokens,
            work.top_k,
            work.num_experts,
            weights,
            scales_input,
            self.plan.num_cores,
            mode,
        )

    def route(self, hidden_TH: Tensor, router: RouterBase) -> Routing:
        """Route T tokens in float32."""
        check_call(hidden_TH)
        hidden_TH = hidden_TH.reshape(-1, router.hidden_size)
        if not hidden_TH.shape[0]:  # a rank without tokens has nothing to launch
            return TorchBackend().route(hidden_TH, router)
        return nki_router.route(
            self._launch, hidden_TH, router, self._prepared, self.plan.num_cores
        )

    def index_blocks(
        self, expert_index_TK: Tensor, num_experts: int, plan: BlockPlan
    ) -> BlockMapping:
        """Place every (token, choice) pair in a slot of a block."""
        dims = nki_prefill.block_dims(expert_index_TK, num_experts, plan)
        return nki_prefill.index(self._launch, expert_index_TK, dims, self.plan.num_cores)[0]

    def blockwise(
        self, hidden_TH: Tensor, routing: LocalRouting, weights: ExpertWeights, plan: BlockPlan
    ) -> Tensor:
        """Compute many tokens, rows sorted by expert; return [T, H] float32."""
        check_call(hidden_TH)
        return nki_prefill.compute(self._launch, hidden_TH, routing, weights, plan, self.plan)

    def few_tokens(
        self, hidden_TH: Tensor, routing: LocalRouting, weights: ExpertWeights, mode: str
    ) -> Tensor:
        """Compute few tokens, each expert read once; return [T, H] float32."""
        check_choice("mode", mode, FEW_TOKEN_PATHS)
        check_call(hidden_TH)
        return nki_decode.compute(
            self._launch, hidden_TH, routing, weights, mode, self.plan.num_cores
        )

    def refuses_block(self, layer: BlockLayer, tokens: int) -> str:
        """Say why decode_block does not compute T tokens of a layer; '' if it does."""
        try:
            nki_block.block_config(layer, tokens, self.plan.num_cores, None, self._prepared)
        except ValueError as error:
            return str(error)
        return ""

    def block(self, hidden_TH: Tensor, layer: BlockLayer, mode: str) -> BlockOutput:
        """Compute norm, router, experts and shared experts of few tokens in one launch."""
        check_call(hidden_TH)
        config = nki_block.block_config(
            layer, hidden_TH.shape[0], self.plan.num_cores, mode, self._prepared
        )
        return nki_block.compute(self._launch, hidden_TH, layer, config, self._prepared)

    def choose_block_mode(self, layer: BlockLayer, tokens: int) -> tuple[str, str]:
        """Return the mode of decode_block that its cost model takes, and why."""
        config = nki_block.block_config(layer, tokens, self.plan.num_cores, None, self._prepared)
        return nki_decode.path_of(config.moe), f"cost model of decode_block: {config.moe.reason}"

    def block_notes(self, layer: BlockLayer, tokens: int, mode: str) -> tuple[str, ...]:
        """Say how decode_block goes through the experts, and what else it computes."""
        config = nki_block.block_config(layer, tokens, self.plan.num_cores, mode, self._prepared)
        return (*nki_block.describe(layer, config), format_note(layer.weights))

    def forget_weights(self) -> None:
        """Forget routers and shared experts in the order of the kernels."""
        self._prepared.clear()

    def pack(self, first_EHI: Tensor, down_EIH: Tensor) -> tuple[Packed, Packed] | str:
        """Return both matrices as fp8 codes, if no weight loses a bit; else why they stay."""
        return narrow_weights(first_EHI, down_EIH)

    def lay_out(self, weights: ExpertWeights, phase: str, top_k: int) -> LaidOut | None:
        """Return the experts in the layout of a phase's kernel; None if nothing is gained."""
        if phase == "decode":
            return nki_decode.lay_out(weights, top_k, self.plan.num_cores)
        return nki_prefill.lay_out(weights, self.plan)

    def _launch(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return launch(self.plan.num_cores, kernel, *args, **kwargs)

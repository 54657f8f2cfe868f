"""A whole decode step of a layer in one kernel, where layer, ranks and step allow it."""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from neuron_moe.backends.block import BlockLayer, FusesDecode, norm_of
from neuron_moe.config import MoEFusedTKGConfig
from neuron_moe.dispatch import FEW_TOKEN_PATHS, Decision, settle_mode
from neuron_moe.parallel.hybrid import DECODE_PHASES

if TYPE_CHECKING:
    from neuron_moe.moe import MoE


class FusedOutput(NamedTuple):
    """What the kernel gave, summed over ranks.

    Attributes:
        output_TH: [T, H] in the dtype of the hidden states.
        index_TK: [T, K] int32 experts of the model, if the layer returns them.
    """

    output_TH: Tensor
    index_TK: Tensor | None


class FusedDecode:
    """Decides for each step of a layer whether one kernel computes it, and runs it.

    Args:
        layer: an MoE.
        switches: NxD's; `moe_fused_kernel_enabled` forces or forbids the kernel.

    Raises:
        ValueError: switches that contradict the layer or its backend.
    """

    def __init__(self, layer: "MoE", switches: MoEFusedTKGConfig | None) -> None:
        self.layer = layer
        self.switches = switches
        if switches is not None:
            _check_switches(switches, layer)

    def refusal(self, phase: str, tokens: int, *, has_padding: bool = False) -> str:
        """Say why separate kernels compute a step; '' if one does, or the backend has none.

        Args:
            phase: one of dispatch.PHASES.
            tokens: T.
            has_padding: a padding mask is given.

        Raises:
            ValueError: moe_fused_kernel_enabled=True, and it cannot; or quantized=True, and the
                weights are not.
        """
        is_quantized = self.layer.expert_mlps.weights(phase).packed_down is not None
        if self.switches is not None and self.switches.quantized and not is_quantized:
            raise ValueError(
                "quantized=True: the expert weights are plain. Load fp8 codes with their scale,"
                " call pack_weights() for those of an MXFP4 checkpoint, or set quantized=False."
            )
        reason = self._refusal(phase, tokens, has_padding)
        forced = self.switches is not None and self.switches.moe_fused_kernel_enabled
        if reason and forced and phase in DECODE_PHASES:
            raise ValueError(
                f"moe_fused_kernel_enabled=True: {reason}. Leave it None, which takes the fused"
                " kernel where it can run."
            )
        return reason

    def _refusal(self, phase: str, tokens: int, has_padding: bool) -> str:
        layer, experts = self.layer, self.layer.expert_mlps
        if phase not in DECODE_PHASES:
            return f"{phase} is computed in blocks"
        if self.switches is not None and self.switches.moe_fused_kernel_enabled is False:
            return "moe_fused_kernel_enabled=False"
        if experts.choose_by_sizes(phase, tokens)[1].path not in FEW_TOKEN_PATHS:
            return f"{tokens} tokens are too many for it"
        strategy = layer.parallel.strategy(phase, False)
        shared = layer.shared_experts
        refused = (
            (has_padding, "padding tokens are told apart between router and experts"),
            (
                strategy.name != "replicate" or strategy.spread.gather.size > 1,
                "tokens travel between ranks after routing",
            ),
            (layer.shuffle is not None, "tokens are shuffled between ranks"),
            (experts.placement is not None, "experts are placed or replicated by load"),
            (experts.config.normalize_top_k_affinities, "affinities are normalised after routing"),
            (layer.return_router_logits, "logits are returned, which it keeps on chip"),
            (
                shared is not None
                and (
                    shared.sequence_parallel_enabled
                    or shared.group.size != strategy.groups.model.size
                ),
                "shared experts are not split over all ranks that are summed; give them"
                " tensor_model_parallel_group=parallel_state.get_world_group()",
            ),
            (
                layer.rmsnorm is not None and norm_of(layer.rmsnorm) is None,
                "rmsnorm is another norm than x * weight / rms(x)",
            ),
        )
        for is_refused, why in refused:
            if is_refused:
                return why
        backend = experts.backend
        assert isinstance(backend, FusesDecode)
        return backend.refuses_block(self.describe(phase), tokens)

    def decide(self, phase: str, tokens: int) -> Decision:
        """Return the mode of a step that one kernel computes, as that kernel's cost model takes it.

        It differs from the one of the experts alone: weights load while the kernel still routes.
        """
        experts = self.layer.expert_mlps
        work, decision = experts.choose_by_sizes(phase, tokens)
        backend = experts.backend
        assert isinstance(backend, FusesDecode)
        if experts.compat is None:
            mode, reason = backend.choose_block_mode(self.describe(phase), tokens)
            decision = settle_mode(decision, work, mode, reason)
        return replace(decision, kernel="nki.decode_block")

    def describe(self, phase: str) -> BlockLayer:
        """Return what the kernel computes."""
        layer, experts = self.layer, self.layer.expert_mlps
        slots = experts.shards.of(phase).local_experts(experts.num_slots)
        return BlockLayer(
            layer.router,
            experts.weights(phase),
            slots.start,
            experts.num_slots,
            experts.scales_input,
            layer.rmsnorm,
            layer.shared_experts,
            layer.return_expert_index or experts.expert_load_E is not None,
        )

    def run(self, hidden_TH: Tensor, phase: str) -> FusedOutput:
        """Compute a step of T tokens, which every rank holds."""
        experts = self.layer.expert_mlps
        experts.check_mode()
        experts.check_hidden(hidden_TH)
        mode = self.decide(phase, hidden_TH.shape[0]).path
        backend = experts.backend
        assert isinstance(backend, FusesDecode)
        partial = backend.block(hidden_TH, self.describe(phase), mode)
        if partial.index_TK is not None:
            experts.record_load(partial.index_TK)
        output_TH = self.layer.parallel.sum_over_ranks(
            partial.output_TH.to(hidden_TH.dtype), hidden_TH, phase
        )
        wants_index = self.layer.return_expert_index
        return FusedOutput(output_TH, partial.index_TK if wants_index else None)


def _check_switches(switches: MoEFusedTKGConfig, layer: "MoE") -> None:
    """Raise ValueError for switches that backend='nki' cannot follow."""
    if not isinstance(layer.expert_mlps.backend, FusesDecode):
        return
    renormalizes = layer.router.spec.renormalize
    normalizes = layer.expert_mlps.config.normalize_top_k_affinities
    refused = (
        (
            switches.is_mxfp4_compute,
            "is_mxfp4_compute=True: Trainium 2 multiplies no MXFP4. Leave it None:"
            " pack_weights() keeps MXFP4 weights in 8 bits without loss.",
        ),
        (
            switches.router_topk_kernel_enabled is False
            or switches.expert_mlp_kernel_enabled is False,
            "router_topk_kernel_enabled=False or expert_mlp_kernel_enabled=False with"
            " backend='nki', which is these kernels. Leave them None, or use backend='torch'.",
        ),
        (
            switches.shared_mlp_kernel_enabled and layer.shared_experts is None,
            "shared_mlp_kernel_enabled=True: the layer has no shared experts. Leave it None.",
        ),
        (
            switches.shared_mlp_kernel_enabled and switches.moe_fused_kernel_enabled is False,
            "shared_mlp_kernel_enabled=True, moe_fused_kernel_enabled=False: only the fused kernel"
            " computes shared experts. Leave one of them None.",
        ),
        (
            switches.norm_topk_prob and not (renormalizes or normalizes),
            "norm_topk_prob=True: neither the router renormalises nor the experts"
            " (normalize_top_k_affinities). Set it where the layer is configured.",
        ),
        (
            torch.float32 != switches.router_mm_dtype,
            f"router_mm_dtype={switches.router_mm_dtype}: routing is computed in float32. Leave it"
            " float32.",
        ),
    )
    for is_refused, message in refused:
        if is_refused:
            raise ValueError(message)

"""The nki backend: a MoE layer through the kernels of `nki_kernels`.

Where the vendor's `nki` is missing, the kernels run on the simulator: the same instructions on
CPU tensors, exact to the rounding of each instruction, and slow. With the vendor's package they are
launched through `nki.jit`; that way has not been tried, for want of a device.

| step | kernel | until it exists |
| --- | --- | --- |
| route | router_topk | |
| index_blocks | index_blocks | |
| blockwise (prefill) | index_blocks, blockwise_moe, combine | the visits are grouped on the host |
| few_tokens (decode, speculation) | none yet | the torch backend, on the same device |

There is no gradient: training uses the torch backend.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from neuron_moe.activations import ActivationSpec
from neuron_moe.backends import BlockPlan, ExpertWeights, LocalRouting
from neuron_moe.backends.torch_backend import TorchBackend
from neuron_moe.blocks import BlockMapping, num_blocks
from neuron_moe.config import BlockShardStrategy, BlockwiseMatmulConfig, GLUType
from neuron_moe.routing import RouterBase, Routing

SWIGLU_OAI_SCALE = 1.702  # of the one scaled sigmoid the kernels know


@dataclass(frozen=True)
class PrefillPlan:
    """How blockwise_moe spreads blocks over cores and goes through them.

    Attributes:
        num_cores: physical cores of a logical core.
        shard_plan: 'balanced' (visits of equal size side by side), 'block' or 'intermediate'.
        loop_plan: 'sorted' (run-time trips, weights stay for all row tiles of a visit), 'dynamic'
            (run-time trips, one row tile each) or 'static' (the worst case).
        in_halves: with 'block', core 0 takes the first half of the blocks; else every second one.
    """

    num_cores: int
    shard_plan: str
    loop_plan: str
    in_halves: bool

    @classmethod
    def from_config(cls, config: BlockwiseMatmulConfig) -> "PrefillPlan":
        """Read the plan out of NxD's switches.

        Raises:
            ValueError: switches that contradict each other or this backend.
        """
        _check_config(config)
        if config.use_shard_on_intermediate_dynamic_while:
            return cls(config.logical_nc_config, "intermediate", "dynamic", False)
        in_halves = config.block_sharding_strategy is BlockShardStrategy.HI_LO
        if config.use_shard_on_block_dynamic_while:
            return cls(config.logical_nc_config, "block", "dynamic", in_halves)
        if config.use_block_parallel:
            return cls(config.logical_nc_config, "block", "static", in_halves)
        return cls(config.logical_nc_config, "balanced", "sorted", False)

    def __str__(self) -> str:
        halves = ", in halves" if self.in_halves else ""
        return (
            f"{self.loop_plan} loop, {self.shard_plan} shards over {self.num_cores} core(s){halves}"
        )


def _check_config(config: BlockwiseMatmulConfig) -> None:
    """Raise ValueError for what this backend cannot honour."""
    shards_blocks = config.use_block_parallel or config.use_shard_on_block_dynamic_while
    by_intermediate = config.use_shard_on_intermediate_dynamic_while
    refused = (
        (
            config.use_torch_block_wise,
            "use_torch_block_wise=True with backend='nki': they name different code. Use"
            " backend='torch', or leave it False.",
        ),
        (
            config.blockwise_nki_autograd_cls is not None,
            "blockwise_nki_autograd_cls: backend='nki' runs its own kernels and has no gradient."
            " Leave it None; train with backend='torch'.",
        ),
        (
            config.use_block_parallel and by_intermediate,
            "use_block_parallel=True, use_shard_on_intermediate_dynamic_while=True: the two cores"
            " split either the blocks or the intermediate axis. Set one of them.",
        ),
        (
            config.logical_nc_config == 1 and (shards_blocks or by_intermediate),
            "logical_nc_config=1: one core has nothing to shard. Leave use_block_parallel and"
            " use_shard_on_*_dynamic_while False, or set logical_nc_config=2.",
        ),
        (
            config.block_sharding_strategy is BlockShardStrategy.PING_PONG and not shards_blocks,
            "block_sharding_strategy='PING_PONG': applies where blocks are sharded. Set"
            " use_block_parallel or use_shard_on_block_dynamic_while, or leave 'HI_LO'.",
        ),
        (
            config.skip_dma_weight and (shards_blocks or by_intermediate),
            "skip_dma_weight=True: the loops of use_block_parallel and"
            " use_shard_on_*_dynamic_while load an expert's weights for each row tile. Leave these"
            " False: the default plan loads them once per visit.",
        ),
        (
            config.num_static_blocks is not None,
            f"num_static_blocks={config.num_static_blocks}: no kernel here has a static part"
            " before a dynamic one. Leave it None.",
        ),
        (
            config.always_augment_inputs_for_blockwise_matmul,
            "always_augment_inputs_for_blockwise_matmul=True: padding slots hold -1 here, there is"
            " no extra row. Leave it False.",
        ),
        (
            not config.parallelize_token_to_block_mapping
            or not config.optimized_block_to_token_mapping,
            "parallelize_token_to_block_mapping, optimized_block_to_token_mapping: must stay True"
            " with backend='nki', where both cores compute the mapping.",
        ),
    )
    for is_refused, message in refused:
        if is_refused:
            raise ValueError(message)


class NkiBackend:
    """See the module's docstring.

    Args:
        config: tuning of the blockwise path; None takes the defaults.

    Raises:
        ValueError: the configuration contradicts itself or this backend.
    """

    name = "nki"

    def __init__(self, config: BlockwiseMatmulConfig | None = None) -> None:
        self.plan = PrefillPlan.from_config(config or BlockwiseMatmulConfig.default())
        self._few_tokens = TorchBackend()
        self._router_weights = WeakTensorKeyDictionary()

    def notes(self, path: str) -> tuple[str, ...]:
        """Say what runs on a path beyond its kernel's name."""
        if path in ("blockwise", "capacity"):
            return (f"plan: {self.plan}", "kernels: router_topk, index_blocks, combine around it")
        return ("no decode kernel yet: the experts run in the torch backend",)

    def route(self, hidden_TH: Tensor, router: RouterBase) -> Routing:
        """Route T tokens in float32."""
        from nki_kernels.router_choice import RouterFormula
        from nki_kernels.router_topk import check_router_topk, router_topk

        _check_call(hidden_TH)
        if router.training and router.jitter_eps:
            raise ValueError(
                f"jitter_eps={router.jitter_eps}: is for training, which backend='nki' does not"
                " do. Call eval(), or use backend='torch'."
            )
        spec, linear = router.spec, router.linear_router
        formula = RouterFormula(
            top_k=spec.top_k,
            act_fn=spec.act_fn,
            act_over_topk=spec.act_over_topk,
            has_bias=spec.has_bias,
            has_selection_bias=spec.has_selection_bias,
            n_group=spec.n_group,
            topk_group=spec.topk_group,
            out_of_group_fill=spec.out_of_group_fill,
            renormalize=spec.renormalize,
            renormalize_eps=spec.renormalize_eps,
            routed_scaling_factor=spec.routed_scaling_factor,
            returns_logits=True,
        )
        hidden_TH = hidden_TH.reshape(-1, spec.hidden_size)
        if not hidden_TH.shape[0]:  # a rank without tokens has nothing to launch
            return TorchBackend().route(hidden_TH, router)
        weight_EH = linear.weight
        if hidden_TH.dtype == torch.bfloat16:
            weight_EH = self._shortened(weight_EH)
        check_router_topk(
            hidden_TH.shape[0],
            spec.hidden_size,
            spec.num_experts,
            formula,
            _dtype_name(hidden_TH),
            _dtype_name(weight_EH),
            self.plan.num_cores,
        )
        bias, selection_bias = linear.bias, router.e_score_correction_bias
        affinities_TK, index_TK, logits_TE = self._launch(
            router_topk,
            hidden_TH,
            weight_EH,
            None if bias is None else bias.view(1, -1),
            None if selection_bias is None else selection_bias.view(1, -1),
            None,
            formula,
        )
        return Routing(logits_TE, affinities_TK, index_TK)

    def _shortened(self, weight: Tensor) -> Tensor:
        """Return a float32 weight whose values are all bfloat16 numbers in bfloat16.

        The products are the same, in one pass of the tensor engine instead of four. Looked up once
        per weight: checkpoints in bfloat16 often feed routers that are kept in float32.
        """
        if weight.dtype != torch.float32:
            return weight
        is_known = weight in self._router_weights
        if not is_known or self._router_weights[weight][0] != weight._version:
            short = weight.detach().to(torch.bfloat16)
            is_exact = torch.equal(short.float(), weight.detach())
            kept = short if is_exact else weight.detach()
            self._router_weights[weight] = (weight._version, kept)
        shortened: Tensor = self._router_weights[weight][1]
        return shortened

    def index_blocks(
        self, expert_index_TK: Tensor, num_experts: int, plan: BlockPlan
    ) -> BlockMapping:
        """Place every (token, choice) pair in a slot of a block."""
        return self._index(expert_index_TK, num_experts, plan)[0]

    def _index(
        self, expert_index_TK: Tensor, num_experts: int, plan: BlockPlan
    ) -> tuple[BlockMapping, Tensor]:
        """Return the mapping, and the slot of each pair."""
        from nki_kernels.index_blocks import BlockDims, check_index_blocks, index_blocks

        num_tokens, top_k = expert_index_TK.shape
        blocks = num_blocks(
            num_tokens,
            top_k,
            num_experts,
            plan.block_size,
            pad_to_even=plan.pad_num_blocks_to_even,
        )
        dims = BlockDims(num_experts, plan.block_size, blocks)
        check_index_blocks(num_tokens, top_k, dims, self.plan.num_cores)
        token, pair, expert, valid, counts, slot_of_pair_TK = self._launch(
            index_blocks, expert_index_TK.to(torch.int32), dims
        )
        mapping = BlockMapping(token, pair, expert, valid.view(()), counts.to(torch.int64))
        return mapping, slot_of_pair_TK

    def blockwise(
        self, hidden_TH: Tensor, routing: LocalRouting, weights: ExpertWeights, plan: BlockPlan
    ) -> Tensor:
        """Compute many tokens, rows sorted by expert; return [T, H] float32."""
        import nki.language as nl

        from nki_kernels.combine import CombineDims, check_combine, combine

        _check_call(hidden_TH)
        _check_weights(hidden_TH, weights)
        mapping, slot_of_pair_TK = self._index(routing.expert_index_TK, weights.num_experts, plan)
        affinities_TK = routing.expert_affinities_TK
        slots_PSH = self._experts(hidden_TH, routing, weights, plan, mapping)
        if routing.scales_input:
            affinities_TK = torch.ones_like(affinities_TK)
        num_parts, num_slots, hidden_size = slots_PSH.shape
        num_tokens, top_k = affinities_TK.shape
        check_combine(num_tokens, top_k, hidden_size, num_slots, num_parts)
        dims = CombineDims(nl.float32, True)
        output_TH: Tensor = self._launch(combine, slots_PSH, slot_of_pair_TK, affinities_TK, dims)
        return output_TH

    def _experts(
        self,
        hidden_TH: Tensor,
        routing: LocalRouting,
        weights: ExpertWeights,
        plan: BlockPlan,
        mapping: BlockMapping,
    ) -> Tensor:
        """Return what the experts make of each slot, [P, N * B, H] bfloat16 in P parts."""
        from nki_kernels.blockwise_moe import blockwise_moe
        from nki_kernels.blockwise_options import make_config

        spec = weights.activation
        config = make_config(
            H=hidden_TH.shape[1],
            I=weights.down_proj_EIH.shape[1],
            E=weights.num_experts,
            block_size=plan.block_size,
            num_slots=mapping.token_position_to_id.shape[0],
            num_tokens=hidden_TH.shape[0],
            num_cores=self.plan.num_cores,
            activation=_activation_name(spec),
            gate_limits=(spec.gate_lower, spec.gate_upper),
            up_limits=(spec.up_lower, spec.up_upper),
            up_offset=spec.bias,
            scaling="pre" if routing.scales_input else "none",
            has_gate_up_bias=weights.gate_up_bias_EI is not None,
            has_down_bias=weights.down_bias_EH is not None,
            loop_plan=self.plan.loop_plan,
            shard_plan=self.plan.shard_plan,
            in_halves=self.plan.in_halves,
        )
        gate_up_bias, down_bias = weights.gate_up_bias_EI, weights.down_bias_EH
        if gate_up_bias is not None:
            gate_up_bias = gate_up_bias.float()
        if down_bias is not None:
            down_bias = (down_bias * weights.down_bias_scale).to(torch.bfloat16)
        slots_PSH: Tensor = self._launch(
            blockwise_moe,
            hidden_TH,
            weights.gate_up_proj_EHI,
            weights.down_proj_EIH,
            mapping.token_position_to_id,
            *self._visits(mapping, config),
            config,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            slot_scale=_slot_scale(routing, mapping) if routing.scales_input else None,
        )
        return slots_PSH

    def _visits(self, mapping: BlockMapping, config: Any) -> tuple[Tensor, ...]:
        """Group the row tiles that hold a token into visits, on the host."""
        from nki_kernels.blockwise_options import plan_on_host

        device = mapping.block_to_expert.device
        visits = plan_on_host(
            config,
            mapping.token_position_to_id.cpu().numpy(),
            mapping.block_to_expert.cpu().numpy(),
        )
        return tuple(torch.from_numpy(array).to(device) for array in visits)

    def few_tokens(
        self, hidden_TH: Tensor, routing: LocalRouting, weights: ExpertWeights, mode: str
    ) -> Tensor:
        """Compute few tokens in the torch backend; return [T, H] float32."""
        return self._few_tokens.few_tokens(hidden_TH, routing, weights, mode)

    def _launch(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a kernel on the chip, or on the simulator where there is no vendor's package."""
        from nki_kernels import IS_SIMULATED

        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if IS_SIMULATED:
            device = tensors[0].device
            if device.type != "cpu":
                raise ValueError(
                    f"backend='nki' on device {device}: the package `nki` of the Neuron SDK is"
                    " not installed, and its simulator takes CPU tensors. Install the SDK, or move"
                    " the module to the CPU."
                )
            import nki_sim

            return nki_sim.run(kernel, *args, lnc=self.plan.num_cores, **kwargs).outputs
        return kernel[self.plan.num_cores](*args, **kwargs)


def _check_call(hidden_TH: Tensor) -> None:
    """Raise ValueError where kernels cannot stand in for torch operations."""
    if torch.compiler.is_compiling():
        raise ValueError(
            "backend='nki' inside torch.export or torch.compile: kernels are launched eagerly."
            " Capture the graph with backend='torch'."
        )
    if torch.is_grad_enabled() and hidden_TH.requires_grad:
        raise ValueError(
            "hidden_states.requires_grad=True: backend='nki' has no gradient. Use"
            " torch.no_grad(), or backend='torch' to train."
        )


def _check_weights(hidden_TH: Tensor, weights: ExpertWeights) -> None:
    if weights.packed_down is not None:
        raise ValueError(
            "packed weights: backend='nki' reads plain tensors. Do not call pack_weights(), or"
            " load the state dict again, which unpacks."
        )
    for name, tensor in (
        ("hidden_states", hidden_TH),
        ("gate_up_proj", weights.gate_up_proj_EHI),
        ("down_proj", weights.down_proj_EIH),
    ):
        if tensor.dtype != torch.bfloat16:
            raise ValueError(
                f"{name}: dtype {_dtype_name(tensor)} must be bfloat16 with backend='nki'. Convert"
                " the module with .to(torch.bfloat16), or use backend='torch'."
            )


def _activation_name(spec: ActivationSpec) -> str:
    """Return the kernels' name of an activation.

    Raises:
        ValueError: they do not have it.
    """
    known = {
        (GLUType.SWIGLU, "sigmoid", SWIGLU_OAI_SCALE): "swiglu_oai",
        (GLUType.SWIGLU, "sigmoid", 1.0): "silu",
        (GLUType.GLU, "silu", 1.0): "silu",
        (GLUType.GLU, "gelu", 1.0): "gelu",
        (GLUType.GLU, "gelu_pytorch_tanh", 1.0): "gelu_tanh",
        (GLUType.GLU, "relu", 1.0): "relu",
    }
    found = known.get((spec.glu_type, spec.hidden_act, spec.scale)) if spec.is_glu else None
    if found is None:
        raise ValueError(
            f"hidden_act={spec.hidden_act!r} (glu_mlp={spec.is_glu},"
            f" glu_type={spec.glu_type.value!r}, hidden_act_scaling_factor={spec.scale:g}): not in"
            " the kernels, which have silu, gelu, gelu_pytorch_tanh and relu as GLU, and SwiGLU"
            f" with scale 1 or {SWIGLU_OAI_SCALE}. Use backend='torch'."
        )
    return found


def _slot_scale(routing: LocalRouting, mapping: BlockMapping) -> Tensor:
    """Return [N * B] float32: the affinity of the pair in each slot, 0 for padding."""
    pair = mapping.pair_of_slot.to(torch.int64)
    scale = routing.expert_affinities_TK.reshape(-1)[pair.clamp(min=0)]
    return torch.where(pair >= 0, scale, 0.0)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

"""NxD's routed experts."""

from dataclasses import replace

import torch
from torch.distributed import ProcessGroup

from neuron_moe.backends import Backend, get_backend
from neuron_moe.errors import check_choice, check_instance, names_its_keys
from neuron_moe.experts import RoutedExperts
from neuron_moe.nxd_compat.configs import BlockwiseMatmulConfig, RoutedExpertsMLPOpsConfig
from neuron_moe.nxd_compat.tuning import expert_spec, refuse, tuning_of
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.config import STRATEGIES
from neuron_moe.parallel.placement import ExpertPlacement
from neuron_moe.spec import Tuning, as_dtype


@names_its_keys
class ExpertMLPsV2(RoutedExperts):
    """The routed experts of one layer, with NxD's constructor arguments.

    Args:
        routed_experts_mlp_config: sizes, activation, affinities, capacity.
        blockwise_matmul_config: tuning of the blockwise path.
        return_bias: not supported, as in NxD.
        dtype: dtype of the weights, or its name.
        sequence_parallel_enabled: the layer's input is this rank's part of the sequence; the layer
            decides, and refuses experts that say yes where it says no.
        device: where the weights live.
        tensor_model_parallel_group: ranks that split the intermediate axis; default: those of
            `parallel_state`, if it was initialised. The same holds for every group here.
        expert_model_parallel_group: ranks that split the experts.
        tkg_tensor_model_parallel_group: the same for decode, under hybrid sharding.
        tkg_expert_model_parallel_group: the same for decode, under hybrid sharding.
        cte_tensor_model_parallel_group: the same for prefill, under hybrid sharding.
        cte_expert_model_parallel_group: the same for prefill, under hybrid sharding.
        is_prefill: which phase NxD's module is for; this one computes both.
        enabled_hybrid_sharding: prefill and decode are sharded differently.
        backend: name of the backend, or a backend.
        compat: None for our dispatch rules, 'nxd' for NxD's.
        placement: which expert sits where, with replicas; default: NxD's `expert_distribution` of
            the configuration, or equal runs.
        strategy: 'replicate' or 'all_to_all'; default: what `parallel_state` says.
    """

    def __init__(
        self,
        routed_experts_mlp_config: RoutedExpertsMLPOpsConfig,
        blockwise_matmul_config: BlockwiseMatmulConfig | None = None,
        return_bias: bool = False,
        dtype: torch.dtype | str = torch.float32,
        sequence_parallel_enabled: bool = False,
        device: torch.device | str | None = None,
        tensor_model_parallel_group: ProcessGroup | None = None,
        expert_model_parallel_group: ProcessGroup | None = None,
        tkg_tensor_model_parallel_group: ProcessGroup | None = None,
        tkg_expert_model_parallel_group: ProcessGroup | None = None,
        cte_tensor_model_parallel_group: ProcessGroup | None = None,
        cte_expert_model_parallel_group: ProcessGroup | None = None,
        is_prefill: bool = True,
        enabled_hybrid_sharding: bool = False,
        *,
        backend: str | Backend = "torch",
        compat: str | None = None,
        placement: ExpertPlacement | None = None,
        strategy: str | None = None,
    ) -> None:
        if return_bias:
            raise NotImplementedError("return_bias=True: not supported, as in NxD. Leave it False.")
        config = check_instance(
            "routed_experts_mlp_config", routed_experts_mlp_config, RoutedExpertsMLPOpsConfig
        )
        tuning = blockwise_matmul_config or BlockwiseMatmulConfig.default()
        check_instance("blockwise_matmul_config", tuning, BlockwiseMatmulConfig)
        if strategy is not None:
            check_choice("strategy", strategy, STRATEGIES)
        if backend is None:
            raise ValueError("backend=None: must be the name of a backend or one. Use 'torch'.")
        found = get_backend(backend)
        main = (tensor_model_parallel_group, expert_model_parallel_group)
        hybrid = {
            "prefill": (cte_tensor_model_parallel_group, cte_expert_model_parallel_group),
            "decode": (tkg_tensor_model_parallel_group, tkg_expert_model_parallel_group),
        }
        _refuse_groups(hybrid, enabled_hybrid_sharding)
        if placement is None and config.expert_distribution is not None:
            placement = ExpertPlacement.from_distribution(config.expert_distribution)
        super().__init__(
            expert_spec(config),
            _with_remarks(tuning_of(tuning, found.name), config, found.name, is_prefill),
            backend=found,
            compat=compat,
            groups={
                phase: parallel_state.resolve_expert_groups(
                    *(given if enabled_hybrid_sharding else main), phase, strategy
                )
                for phase, given in hybrid.items()
            },
            placement=placement,
            shares_phases=parallel_state.phases_share_weights(),
            dtype=as_dtype("dtype", dtype),
            device=device,
            init_methods=(config.input_layer_init_method, config.output_layer_init_method),
        )
        self.config = config
        self.routed_experts_mlp_config = config
        self.blockwise_matmul_config = tuning
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.is_prefill = is_prefill
        self.enabled_hybrid_sharding = enabled_hybrid_sharding


def _refuse_groups(
    hybrid: dict[str, tuple[ProcessGroup | None, ProcessGroup | None]], is_enabled: bool
) -> None:
    """Raise ValueError for groups of hybrid sharding that nobody would read."""
    words = {"prefill": "cte", "decode": "tkg"}
    refuse(
        [
            (
                any(group is not None for group in groups) and not is_enabled,
                f"{words[phase]}_tensor_model_parallel_group,"
                f" {words[phase]}_expert_model_parallel_group: given with"
                " enabled_hybrid_sharding=False. Set it True, or leave them None.",
            )
            for phase, groups in hybrid.items()
        ]
    )


def _with_remarks(
    tuning: Tuning, config: RoutedExpertsMLPOpsConfig, backend: str, is_prefill: bool
) -> Tuning:
    """Return the tuning with sentences about keys that change nothing; refuse what contradicts."""
    remarks = list(tuning.remarks)
    if not config.use_index_calc_kernel:
        if backend == "nki":
            raise ValueError(
                "use_index_calc_kernel=False with backend='nki', whose blocks are indexed by a"
                " kernel. Leave it True, or use backend='torch'."
            )
        remarks.append("use_index_calc_kernel=False: blocks are indexed by torch operations")
    # The constructor's default is True, the configuration's None.
    told = {config.is_prefill, None if is_prefill else False}
    remarks += [
        f"is_prefill={value}: this module computes both phases"
        for value in (True, False)
        if value in told
    ]
    return replace(tuning, remarks=tuple(remarks))

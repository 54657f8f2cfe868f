"""NxD's routed experts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from neuron_moe.backends import Backend, get_backend
from neuron_moe.errors import WeightError, check_choice, names_its_keys, refuse
from neuron_moe.experts import RoutedExperts
from neuron_moe.nxd_compat import loading
from neuron_moe.nxd_compat.configs import (
    CHANGES,
    BlockwiseMatmulConfig,
    RoutedExpertsMLPOpsConfig,
)
from neuron_moe.nxd_compat.groups import expert_mesh
from neuron_moe.nxd_compat.quantized import check_plain
from neuron_moe.nxd_compat.sharder import SPMDRank, mark_experts
from neuron_moe.nxd_compat.tuning import expert_remarks, expert_spec, tuning_of
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.collectives import as_collectives, process_group_of
from neuron_moe.parallel.config import STRATEGIES
from neuron_moe.parallel.placement import ExpertPlacement
from neuron_moe.paths import DECODE_PHASES
from neuron_moe.plan import Forms, LayerParts
from neuron_moe.spec import ExpertSpec, Tuning, as_dtype
from neuron_moe.weights.checks import before_load
from neuron_moe.weights.experts import Experts

Pair = tuple[ProcessGroup | None, ProcessGroup | None]


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
            `parallel_state`, or NxD's, if they were initialised. The same holds for every group.
        expert_model_parallel_group: ranks that split the experts.
        tkg_tensor_model_parallel_group: the same for decode, under hybrid sharding.
        tkg_expert_model_parallel_group: the same for decode, under hybrid sharding.
        cte_tensor_model_parallel_group: in place of the main one; under hybrid sharding for prefill
            only.
        cte_expert_model_parallel_group: the same for the ranks that split the experts.
        is_prefill: which phase NxD's module is for; this one computes both.
        enabled_hybrid_sharding: prefill and decode are sharded differently.
        backend: name of the backend, or a backend.
        compat: None for our dispatch rules, 'nxd' for NxD's.
        placement: which expert sits where, with replicas; default: NxD's `expert_distribution` of
            the configuration, or equal runs.
        strategy: 'replicate' or 'all_to_all'; default: what `parallel_state` says.
        save_percent: what training keeps from forward to backward, see `neuron_moe.spec.Tuning`.

    Attributes:
        presharded: what a state dict that NxD's preshard hook has rewritten is: None refuses it,
            True undoes it, False loads the numbers as they are.
        spmd_rank: the place of this rank as parameters, with enable_spmd_rank.
        spmd_rank_tkg: the same for decode, under hybrid sharding.
    """

    presharded: bool | None = None

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
        save_percent: int | None = None,
    ) -> None:
        if return_bias:
            raise NotImplementedError("return_bias=True: not supported, as in NxD. Leave it False.")
        config = RoutedExpertsMLPOpsConfig.of(routed_experts_mlp_config)
        tuning = BlockwiseMatmulConfig.of(blockwise_matmul_config)
        # NxD refuses it here, and takes it where it is set later.
        one = "normalize_top_k_affinities=True with top_k=1: every affinity would become 1. Set"
        one += " normalize_top_k_affinities=False."
        refuse([(config.normalize_top_k_affinities and config.top_k == 1, one)])
        found = _check_choices(backend, strategy)
        given = _settle_groups(
            main=(tensor_model_parallel_group, expert_model_parallel_group),
            cte=(cte_tensor_model_parallel_group, cte_expert_model_parallel_group),
            tkg=(tkg_tensor_model_parallel_group, tkg_expert_model_parallel_group),
            is_hybrid=enabled_hybrid_sharding,
        )
        if placement is None and config.expert_distribution is not None:
            placement = ExpertPlacement.from_distribution(config.expert_distribution)
        super().__init__(
            expert_spec(config),
            replace(
                _with_remarks(tuning, config, found.name, is_prefill), save_percent=save_percent
            ),
            backend=found,
            compat=compat,
            groups={
                phase: parallel_state.resolve_expert_groups(*pair, phase, strategy)
                for phase, pair in given.items()
            },
            placement=placement,
            # NxD keeps two copies; ours share where our own groups were planned for it.
            shares_phases=given["decode"] == (None, None) and parallel_state.phases_share_weights(),
            dtype=as_dtype("dtype", dtype),
            device=device,
            init_methods=(config.input_layer_init_method, config.output_layer_init_method),
        )
        self.config = config
        if self.is_traced:
            self.check_even()  # else replicas would fill up, a placement that nobody requested
            _refuse_untraceable(self)
        self.routed_experts_mlp_config = config
        self.blockwise_matmul_config = tuning
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.is_prefill = is_prefill
        self.enabled_hybrid_sharding = enabled_hybrid_sharding
        self.return_bias = return_bias
        self._followed = config, config.__dict__[CHANGES], tuning, tuning.__dict__[CHANGES]
        self._prepare_for_nxd()

    @property
    def num_changes(self) -> int:
        """How often something was set that plans depend on, here or in a configuration.

        Raises:
            ValueError: of a configuration, a size was set that the weights do not have.
        """
        self._follow()
        found: int = self.__dict__["num_changes"]
        return found

    @num_changes.setter
    def num_changes(self, count: int) -> None:
        self.__dict__["num_changes"] = count

    def _follow(self) -> None:
        """Compute as the configurations say, if something of them was set since."""
        seen = self.__dict__.get("_followed")
        if seen is None:
            return
        config, given = self.routed_experts_mlp_config, self.blockwise_matmul_config
        now = config, config.__dict__[CHANGES], given, given.__dict__[CHANGES]
        is_other = seen[0] is not config or seen[1] != now[1]
        is_other_given = seen[2] is not given or seen[3] != now[3]
        if is_other:
            self.spec = _of_the_same_weights(expert_spec(config), self.spec)
        if is_other_given:
            tuning = _with_remarks(given, config, self.backend.name, self.is_prefill)
            self.tuning = replace(tuning, save_percent=self.tuning.save_percent)
        if is_other or is_other_given:  # a graph that is captured sees no write
            self.__dict__["_followed"] = now

    def parts(self, phase: str, forms: Forms | None = None) -> LayerParts:
        """Return what a backend plans with, as the configurations say now."""
        self._follow()
        return super().parts(phase, forms)

    @property
    def moe_tensor_model_parallel_group(self) -> ProcessGroup | None:
        """The ranks that split an expert in the phase NxD's module is for; None for one rank."""
        return process_group_of(self.groups[self._phase].tp)

    @property
    def moe_expert_model_parallel_group(self) -> ProcessGroup | None:
        """The ranks that split the experts in the phase NxD's module is for; None for one rank."""
        return process_group_of(self.groups[self._phase].ep)

    @property
    def _phase(self) -> str:
        return "prefill" if self.is_prefill else "decode"

    def get_mlp_op(self) -> Experts:
        """Return the weights of the phase NxD's module is for."""
        return self._experts_of(self._phase)

    def get_spmd_rank(self) -> SPMDRank:
        """Return the place of this rank in the phase NxD's module is for, with enable_spmd_rank."""
        has_own = self._phase == "decode" and self.shards.second is not None
        return self.spmd_rank_tkg if has_own else self.spmd_rank

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        """Prepare the whole model's state dict for NxD's sharder; no number changes.

        Args:
            model_state_dict: of the whole model; decode's copies and the ranks are added.
            prefix: of this module, and 'weight' behind it.

        Raises:
            WeightError: NxD's own hook has rewritten it before, see `presharded`; or codes that do
                not fit the layer.
            ValueError: see `check_even`.
        """
        self.check_even()
        self._mark()
        prefix = prefix.removesuffix("weight")
        problem = check_plain(self, model_state_dict, prefix)
        problem = problem or loading.prepare_experts(
            self, model_state_dict, prefix, self.presharded
        )
        if problem:
            raise WeightError(problem)
        if self.shards.second is not None:
            for name in [name for name in model_state_dict if f"{prefix}mlp_op." in name]:
                copy = name.replace(f"{prefix}mlp_op.", f"{prefix}mlp_op_tkg.")
                model_state_dict[copy] = model_state_dict[name]
        for name, phase in (("spmd_rank", "prefill"), ("spmd_rank_tkg", "decode")):
            if isinstance(getattr(self, name, None), SPMDRank):
                model_state_dict.update(self._places_of_all(phase, f"{prefix}{name}."))

    def first_expert(self, phase: str) -> int | Tensor:
        """Return the number of this rank's first expert; as data where one graph serves all
        ranks.
        """
        is_decode = phase in DECODE_PHASES
        if not self.groups["decode" if is_decode else "prefill"].ep.is_traced:
            return super().first_expert(phase)
        has_own = is_decode and self.shards.second is not None
        place = self.spmd_rank_tkg if has_own else self.spmd_rank
        return place.get_local_expert_indices()[0, 0]

    def check_even(self) -> None:
        """Refuse experts that NxD's ranks cannot hold: their parts are equal, in one graph of all.

        Raises:
            ValueError: the ranks of a phase do not divide the experts, or their intermediate axis.
        """
        spec = self.spec
        is_placed = self.config.expert_distribution is not None
        experts = self.num_physical if is_placed else spec.num_experts
        for name, group in self.groups.items():
            for what, size, ranks in (
                ("num_experts", experts, group.ep.size),
                ("intermediate_size", spec.intermediate_size, group.tp.size),
            ):
                if size % ranks:
                    raise ValueError(
                        f"{what}={size}: must divide by the {ranks} ranks that split it in {name},"
                        " since NxD's have equal parts. Use fewer ranks, or pad the checkpoint."
                    )

    def _prepare_for_nxd(self) -> None:
        """Add what NxD's sharder and its state dicts need."""
        is_split = any(groups.ep.is_traced for groups in self.groups.values())
        if self.config.enable_spmd_rank or is_split:
            self.spmd_rank = self._place("prefill")
            if self.shards.second is not None:
                self.spmd_rank_tkg = self._place("decode")
        self._mark()
        before_load(self, _before_load)

    def _place(self, phase: str) -> SPMDRank:
        is_split = self.shards.of(phase).ep_size > 1
        experts = [*self.local_experts(phase)] if is_split else None
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return SPMDRank(rank, _world_size(), experts, is_open=self.is_traced)

    def _places_of_all(self, phase: str, prefix: str) -> dict[str, Tensor]:
        """Return the parameters of SPMDRank of all ranks, a row each."""
        ranks = torch.arange(_world_size(), dtype=torch.int32)
        found = {f"{prefix}rank": ranks}
        shard = self.shards.of(phase)
        if shard.ep_size > 1:
            mesh = expert_mesh(process_group_of(self.groups[phase].ep))
            if mesh is None:
                places = ranks // shard.tp_size % shard.ep_size
            else:
                places = torch.tensor([_row_of(int(rank), mesh).index(rank) for rank in ranks])
            rows = [self._experts_at(place, shard.ep_size) for place in places.tolist()]
            found[f"{prefix}local_expert_indices"] = torch.tensor(rows, dtype=torch.int32)
        return found

    def _experts_at(self, ep_rank: int, ep_size: int) -> list[int]:
        count = self.num_physical // ep_size
        here = range(ep_rank * count, (ep_rank + 1) * count)
        return [*here] if self.placement is None else [self.placement.physical[e] for e in here]

    def _mark(self) -> None:
        mark_experts(self, self.config.expert_distribution)
        for name in loading.RANKS:
            place = getattr(self, name, None)
            if isinstance(place, SPMDRank):
                place.mark()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ExpertMLPsV2":
        """Move or cast; parameters that are new are marked for NxD's sharder again."""
        super()._apply(fn, recurse)
        self._mark()
        return self


def _check_choices(backend: str | Backend, strategy: str | None) -> Backend:
    """Return the backend, having checked it and the strategy."""
    if strategy is not None:
        check_choice("strategy", strategy, STRATEGIES)
    if backend is None:
        raise ValueError("backend=None: must be the name of a backend or one. Use 'torch'.")
    return get_backend(backend)


def _of_the_same_weights(new: ExpertSpec, old: ExpertSpec) -> ExpertSpec:
    """Return `new`; raise ValueError where its weights are of other shapes than those of `old`."""
    names = ("num_experts", "top_k", "hidden_size", "intermediate_size")
    pairs = [(name, getattr(new, name), getattr(old, name)) for name in names]
    pairs += [("glu_mlp", new.formula.has_gate, old.formula.has_gate)]
    pairs += [("bias", new.formula.has_down_bias, old.formula.has_down_bias)]
    refuse(
        (
            now != then,
            f"{name}={now}: the experts were built with {then}, which their weights have. Build"
            " them anew.",
        )
        for name, now, then in pairs
    )
    return new


def _refuse_untraceable(mlps: RoutedExperts) -> None:
    """Raise ValueError for what one graph for all ranks cannot do."""
    strategies = {groups.strategy for groups in mlps.groups.values()}
    refuse(
        [
            (
                mlps.placement is not None and any(g.ep.size > 1 for g in mlps.groups.values()),
                "placement (or expert_distribution) with experts split over ranks: in one graph for"
                " all ranks each has an equal run of the experts. Leave it None.",
            ),
            (
                "all_to_all" in strategies,
                "strategy='all_to_all': sends a number of rows that the data decides, which one"
                " graph for all ranks cannot hold. Use strategy='replicate'.",
            ),
        ]
    )


def _before_load(mlps: ExpertMLPsV2, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Put what NxD saved into the form that is loaded, or say why not."""
    problem = loading.prepare_experts(mlps, state_dict, prefix, mlps.presharded)
    problem = problem or loading.prepare_ranks(mlps, state_dict, prefix)
    if problem:
        raise WeightError(problem)


def _row_of(rank: int, mesh: list[list[int]]) -> list[int]:
    return next(row for row in mesh if rank in row)


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _settle_groups(*, main: Pair, cte: Pair, tkg: Pair, is_hybrid: bool) -> dict[str, Pair]:
    """Return the groups of both phases as NxD reads them: cte over main, one copy if not hybrid.

    Raises:
        ValueError: a group for decode that its only copy of the weights cannot follow.
    """
    if is_hybrid:
        return {"prefill": cte, "decode": tkg}
    used = cte[0] or main[0], cte[1] or main[1]
    for kind, group, other in zip(("tensor", "expert"), tkg, used, strict=True):
        sizes = [as_collectives(each, kind).size for each in (group, other)]
        refuse(
            [
                (
                    group is not None and sizes[0] != sizes[1],
                    f"tkg_{kind}_model_parallel_group: has {sizes[0]} ranks, prefill's has"
                    f" {sizes[1]}, with enabled_hybrid_sharding=False, which keeps one copy of the"
                    " weights. Set it True, or pass the same group.",
                )
            ]
        )
    return {"prefill": used, "decode": used}


def _with_remarks(
    given: BlockwiseMatmulConfig, config: RoutedExpertsMLPOpsConfig, backend: str, is_prefill: bool
) -> Tuning:
    """Return the tuning with sentences about keys that change nothing."""
    tuning = tuning_of(given, backend)
    remarks = [*tuning.remarks, *given.ignored, *expert_remarks(config)]
    if not config.use_index_calc_kernel:
        how = "a kernel in any case" if backend == "nki" else "torch operations"
        remarks.append(f"use_index_calc_kernel=False: blocks are indexed by {how}")
    # The constructor's default is True, the configuration's None.
    given_values = {config.is_prefill, None if is_prefill else False}
    remarks += [
        f"is_prefill={value}: this module computes both phases"
        for value in (True, False)
        if value in given_values
    ]
    return replace(tuning, remarks=tuple(remarks))

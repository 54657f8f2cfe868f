"""NxD's MoE layer."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from neuron_moe import moe
from neuron_moe.dispatch.shuffle import build_shuffle
from neuron_moe.errors import WeightError, check_instance, check_positive_int, names_its_keys
from neuron_moe.experts import RoutedExperts
from neuron_moe.latent import Latent
from neuron_moe.nxd_compat import loading
from neuron_moe.nxd_compat.configs import MoEFusedTKGConfig
from neuron_moe.nxd_compat.loading import before_load
from neuron_moe.nxd_compat.nxd import adopt_groups
from neuron_moe.nxd_compat.tuning import refuse, refuse_tkg_switches, tkg_remarks
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.collectives import Collectives, as_collectives
from neuron_moe.router import Router
from neuron_moe.shared_experts import SharedExperts
from neuron_moe.spec import LayerOptions


@names_its_keys
class MoE(moe.MoE):
    """One MoE layer, with NxD's constructor arguments.

    Args:
        router: chooses experts for each token.
        expert_mlps: the routed experts.
        shared_experts: experts every token takes, or None.
        rmsnorm: norm in front of router and experts, or None.
        sequence_parallel_enabled: the input is this rank's part of each sequence, parts of
            different length allowed; the router sees the own tokens only.
        sequence_dimension: axis that sequence parallelism splits (default 1 of [B, S, H]; 0 for
            [S, B, H]).
        return_router_logits: return the logits.
        return_expert_index: return the choices.
        token_shuffle_group_size: ranks that exchange tokens at random first, and back at the end;
            1 is none.
        token_shuffle_seed: seed of that exchange.
        tensor_model_parallel_group: ranks over which outputs are summed, all that hold experts;
            default: those of `parallel_state`.
        init_tkg_module: NxD's fused decode module, which takes a tkg_config; here fused decode is
            one plan of the layer.
        tkg_config: its switches.
        reduce_dtype: dtype of the sum over ranks; None is that of the hidden states.
        latent: projections around the routed experts, or None; not in NxD.

    Attributes:
        must_load: a state dict that lacks a weight is refused also with strict=False.
        tensor_parallel_group: ranks over which outputs are summed; None for one rank.
        ep_enabled: whether the model's experts are split by its main groups.
        moe_fused_tkg: None; fused decode is one plan of this layer.
        shuffle_permutation: None; the exchange of tokens keeps its own.

    Raises:
        ValueError: router and experts disagree on a size, or groups do not fit together.
    """

    must_load: bool = False
    moe_fused_tkg = None
    shuffle_permutation = None

    def __init__(
        self,
        router: Router,
        expert_mlps: RoutedExperts,
        shared_experts: SharedExperts | None = None,
        rmsnorm: nn.Module | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        return_router_logits: bool = False,
        return_expert_index: bool = False,
        token_shuffle_group_size: int = 1,
        token_shuffle_seed: int | None = None,
        tensor_model_parallel_group: ProcessGroup | None = None,
        init_tkg_module: bool = False,
        tkg_config: MoEFusedTKGConfig | None = None,
        *,
        reduce_dtype: torch.dtype | None = None,
        latent: Latent | None = None,
    ) -> None:
        check_instance("router", router, Router)
        check_instance("expert_mlps", expert_mlps, RoutedExperts)
        check_positive_int("token_shuffle_group_size", token_shuffle_group_size)
        adopt_groups()
        backend = expert_mlps.backend.name
        tkg_config = None if tkg_config is None else MoEFusedTKGConfig.of(tkg_config)
        options = LayerOptions(
            is_sequence_parallel=sequence_parallel_enabled,
            sequence_dimension=1 if sequence_dimension is None else sequence_dimension,
            returns_logits=return_router_logits,
            returns_index=return_expert_index,
            reduce_dtype=reduce_dtype,
            fuses_decode=None if tkg_config is None else tkg_config.moe_fused_kernel_enabled,
            needs_quantized=tkg_config is not None and tkg_config.quantized,
            remarks=_remarks(router, shared_experts, tkg_config, backend)
            + _TOLD_OF_TKG_MODULE[init_tkg_module]
            + _told_of_seed(token_shuffle_seed, token_shuffle_group_size),
        )
        _refuse_keys(options, router, expert_mlps)
        told = "init_tkg_module=True: needs a tkg_config. Pass one, or leave it False."
        refuse([(init_tkg_module and tkg_config is None, told)])
        group = tensor_model_parallel_group
        super().__init__(
            router,
            expert_mlps,
            shared_experts,
            rmsnorm,
            options=options,
            model_group=None if group is None else as_collectives(group, "model"),
            shuffle=build_shuffle(token_shuffle_group_size, token_shuffle_seed),
            latent=latent,
        )
        _refuse_group(router, self.groups["prefill"].model)
        if tkg_config is not None and backend == "nki":
            normalizes = router.spec.formula.renormalize or expert_mlps.spec.normalizes_affinities
            has_shared = shared_experts is not None
            refuse_tkg_switches(tkg_config, has_shared=has_shared, normalizes=normalizes)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        self.return_router_logits = return_router_logits
        self.return_expert_index = return_expert_index
        self.token_shuffle_group_size = token_shuffle_group_size
        self.token_shuffle_seed = token_shuffle_seed
        self.tensor_model_parallel_group = tensor_model_parallel_group
        self.init_tkg_module = init_tkg_module
        self.tkg_config = tkg_config
        self.ep_enabled = parallel_state.get_expert_model_parallel_size() > 1
        before_load(self, _before_load)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set; those arguments of the constructor that say what comes in and out may change."""
        super().__setattr__(name, value)
        if name in _OPTIONS:
            is_default = name == "sequence_dimension" and value is None
            change: dict[str, Any] = {_OPTIONS[name]: 1 if is_default else value}
            self.options = replace(self.options, **change)

    @property
    def tensor_parallel_group(self) -> ProcessGroup | None:
        """The ranks over which outputs are summed; None for one rank."""
        given = self.tensor_model_parallel_group
        return parallel_state.get_world_group() if given is None else given

    @property
    def presharded(self) -> bool | None:
        """What a state dict that NxD's preshard hooks have rewritten is, see `ExpertMLPsV2`."""
        found: bool | None = getattr(self.expert_mlps, "presharded", None)
        return found

    @presharded.setter
    def presharded(self, undo: bool | None) -> None:
        for part in (self.expert_mlps, self.shared_experts):
            if part is not None:
                part.presharded = undo


_OPTIONS = {
    "sequence_parallel_enabled": "is_sequence_parallel",
    "sequence_dimension": "sequence_dimension",
    "return_router_logits": "returns_logits",
    "return_expert_index": "returns_index",
}
_TOLD_OF_TKG_MODULE = {
    False: (),
    True: ("init_tkg_module=True: fused decode is one plan of this layer",),
}


def _told_of_seed(seed: int | None, ranks: int) -> tuple[str, ...]:
    if seed is None or ranks > 1:
        return ()
    return (f"token_shuffle_seed={seed}: nothing is shuffled with token_shuffle_group_size=1",)


def _remarks(
    router: Router,
    shared: SharedExperts | None,
    tkg_config: MoEFusedTKGConfig | None,
    backend: str,
) -> tuple[str, ...]:
    """Return a sentence for each key of the parts that was set and changes nothing."""
    told: list[str] = [
        remark for part in (router, shared) for remark in getattr(part, "remarks", ())
    ]
    return (*told, *(() if tkg_config is None else tkg_remarks(tkg_config, backend)))


def _before_load(layer: MoE, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Drop keys of NxD's fused decode; refuse a state dict that would leave a weight random."""
    loading.drop_fused_decode(state_dict, prefix)
    missing = loading.find_missing(layer, state_dict, prefix) if layer.must_load else []
    if missing:
        raise WeightError(
            f"{missing[0]}: is not in the state dict, nor are {len(missing) - 1} others of this"
            " layer, which would stay random. Check the names of the checkpoint's tensors."
        )


def _refuse_keys(options: LayerOptions, router: Router, experts: RoutedExperts) -> None:
    """Raise ValueError where router or experts were told otherwise than the layer, or of what one
    graph for all ranks cannot do.
    """
    is_parallel = options.is_sequence_parallel
    refuse(
        [
            (
                experts.is_traced and is_parallel and experts.spec.capacity_factor is not None,
                f"capacity_factor={experts.spec.capacity_factor} with sequence parallelism: one"
                " graph for all ranks cannot say which tokens of a sequence a rank has, which"
                " decides whom an expert takes. Leave it None.",
            ),
            (
                options.sequence_dimension == 0 and not is_parallel,
                "sequence_dimension=0: without sequence_parallel_enabled=True the input is"
                " [B, S, H]. Transpose it, or enable sequence parallelism.",
            ),
            *(
                (
                    getattr(part, "sequence_parallel_enabled", False) and not is_parallel,
                    f"sequence_parallel_enabled=True of the {name}, False of the layer, which"
                    " decides. Set both alike.",
                )
                for name, part in (("router", router), ("experts", experts))
            ),
            (
                getattr(router, "sequence_dimension", None)
                not in (None, options.sequence_dimension),
                f"sequence_dimension={getattr(router, 'sequence_dimension', None)} of the router,"
                f" {options.sequence_dimension} of the layer, which decides. Set both alike.",
            ),
        ]
    )


def _refuse_group(router: Router, model: Collectives) -> None:
    """Raise ValueError for a router's group of another size than the layer's."""
    group = getattr(router, "tensor_model_parallel_group", None)
    size = model.size if group is None else as_collectives(group, "router").size
    refuse(
        [
            (
                size != model.size,
                f"tensor_model_parallel_group of the router: has {size} ranks, the layer is spread"
                f" over {model.size}, which decide. Give both the same, or leave it None.",
            )
        ]
    )

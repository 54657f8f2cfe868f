"""Whether the parts and options of a layer fit together, and which of them change nothing."""

from neuron_moe.errors import refuse
from neuron_moe.experts import RoutedExperts
from neuron_moe.fused_decode import MoEFusedTKGConfig
from neuron_moe.latent import Latent
from neuron_moe.parallel.collectives import Collectives, as_collectives
from neuron_moe.router import Router
from neuron_moe.shared_experts import SharedExperts


def check_parts(
    router: Router,
    experts: RoutedExperts,
    shared: SharedExperts | None,
    latent: Latent | None = None,
) -> None:
    """Raise ValueError unless the parts of a layer fit together."""
    if shared is not None and router.spec.num_identity:
        raise ValueError(
            f"num_identity={router.spec.num_identity}: with shared experts, which no model has."
            " Leave one of them out."
        )
    if latent is not None:
        pairs = (
            ("hidden_size", latent.spec.hidden_size, "router", router.spec.hidden_size),
            ("latent_size", latent.spec.latent_size, "experts", experts.spec.hidden_size),
        )
        for name, ours, part, theirs in pairs:
            if ours != theirs:
                raise ValueError(
                    f"{name}={ours}: the {part} have a hidden size of {theirs}. Build both from the"
                    " same sizes."
                )
    for name in ("num_experts", "top_k", *(("hidden_size",) if latent is None else ())):
        ours, theirs = getattr(router.spec, name), getattr(experts.spec, name)
        if ours != theirs:
            raise ValueError(
                f"{name}: the router has {ours}, the experts have {theirs}."
                " Build both from the same sizes."
            )
    if shared is not None and shared.spec.hidden_size != router.spec.hidden_size:
        raise ValueError(
            f"hidden_size: the router has {router.spec.hidden_size}, the shared experts have"
            f" {shared.spec.hidden_size}. Build both from the same sizes."
        )


def check_sequence_dimension(value: object) -> None:
    """Raise ValueError for an axis that sequences do not have."""
    if value not in (None, 0, 1):
        raise ValueError(
            f"sequence_dimension={value!r}: must be 1 for [B, S, H] or 0 for [S, B, H]. Leave it"
            " out for [B, S, H]."
        )


def check_sequences(
    router: Router, experts: RoutedExperts, *, is_parallel: bool, axis: int
) -> None:
    """Raise ValueError where router or experts are set otherwise than the layer, or of what one
    graph for all ranks cannot do.

    Args:
        router: of the layer.
        experts: of the layer.
        is_parallel: the layer is sequence parallel.
        axis: that it splits.
    """
    of_router = getattr(router, "sequence_dimension", None)
    refuse(
        [
            (
                experts.is_traced and is_parallel and experts.spec.capacity_factor is not None,
                f"capacity_factor={experts.spec.capacity_factor} with sequence parallelism: one"
                " graph for all ranks cannot say which tokens of a sequence a rank has, which"
                " decides whom an expert takes. Leave it None.",
            ),
            (
                axis == 0 and not is_parallel,
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
                of_router not in (None, axis),
                f"sequence_dimension={of_router} of the router, {axis} of the layer, which"
                " decides. Set both alike.",
            ),
        ]
    )


def check_group(router: Router, model: Collectives) -> None:
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


def remarks_of(
    router: Router,
    shared: SharedExperts | None,
    tkg_config: MoEFusedTKGConfig | None,
    backend: str,
    *,
    init_tkg_module: bool,
    unused_seed: int | None,
) -> tuple[str, ...]:
    """Return a sentence for each option of a layer and its parts that changes nothing.

    Raises:
        ValueError: init_tkg_module=True without a tkg_config.
    """
    remarks = [remark for part in (router, shared) for remark in getattr(part, "remarks", ())]
    if tkg_config is not None:
        remarks += tkg_config.remarks(backend)
    elif init_tkg_module:
        raise ValueError("init_tkg_module=True: needs a tkg_config. Pass one, or leave it False.")
    if init_tkg_module:
        remarks.append("init_tkg_module=True: fused decode is one plan of this layer")
    if unused_seed is not None:
        remarks.append(
            f"token_shuffle_seed={unused_seed}: nothing is shuffled with token_shuffle_group_size=1"
        )
    return tuple(remarks)

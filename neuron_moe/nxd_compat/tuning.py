"""NxD's switches in our words: what they mean here, what is refused, what changes nothing."""

import dataclasses

from neuron_moe.activations import activation_of
from neuron_moe.errors import refuse
from neuron_moe.nxd_compat.configs import (
    BlockShardStrategy,
    BlockwiseMatmulConfig,
    GLUType,
    RoutedExpertsMLPOpsConfig,
)
from neuron_moe.spec import ExpertFormula, ExpertSpec, Tuning
from neuron_moe.tuned import TunedPlans
from nki_kernels.common.formula import limits


def expert_spec(config: RoutedExpertsMLPOpsConfig) -> ExpertSpec:
    """Return what a configuration says the experts are.

    Raises:
        ValueError: a key that cannot be honoured.
    """
    _refuse_keys(config)
    factor = config.capacity_factor
    formula = config.formula or ExpertFormula(
        activation=activation_of(str(config.hidden_act)),
        scale=config.hidden_act_scaling_factor,
        has_gate=config.glu_mlp,
        gates_itself=GLUType.validate(config.glu_type) is GLUType.SWIGLU,
        gate_limits=limits(config.gate_clamp_lower_limit, config.gate_clamp_upper_limit),
        up_limits=limits(config.up_clamp_lower_limit, config.up_clamp_upper_limit),
        up_offset=config.hidden_act_bias,
        has_gate_up_bias=config.bias,
        has_down_bias=config.bias,
    )
    return ExpertSpec(
        num_experts=config.num_experts,
        top_k=config.top_k,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        formula=formula,
        scales_input=config.early_expert_affinity_modulation,
        normalizes_affinities=config.normalize_top_k_affinities,
        capacity_factor=None if factor is None or factor <= 0 else factor,
    )


def expert_remarks(config: RoutedExpertsMLPOpsConfig) -> tuple[str, ...]:
    """Return a sentence for each key of the experts that was set and changes nothing."""
    factor = config.capacity_factor
    cases = (
        (factor is not None and factor <= 0, f"capacity_factor={factor}: every choice is computed"),
        *(
            (
                getattr(config, f"{name}_actual") not in (None, getattr(config, name)),
                f"{name}_actual={getattr(config, f'{name}_actual')}: padded weights are zeros and"
                " computed like the others",
            )
            for name in ("hidden_size", "intermediate_size")
        ),
    )
    return tuple(text for applies, text in cases if applies)


def _refuse_keys(config: RoutedExpertsMLPOpsConfig) -> None:
    """Raise ValueError for keys that would change numbers or the state dict and do not here."""
    for name in ("hidden_size", "intermediate_size"):
        actual, size = getattr(config, f"{name}_actual"), getattr(config, name)
        refuse(
            [
                (
                    actual is not None and actual > size,
                    f"{name}_actual={actual}: must not exceed {name}={size}, which is padded. Swap"
                    " them, or leave it None.",
                )
            ]
        )
    refuse(
        [
            (
                getattr(config, name),
                f"{name}=True: weights are read in the order of the checkpoint. Undo the shuffle,"
                " and leave it None.",
            )
            for name in ("is_hidden_dim_shuffled", "is_intermediate_dim_shuffled")
        ]
    )


def tuning_of(config: BlockwiseMatmulConfig, backend: str) -> Tuning:
    """Return what the switches of the blockwise path mean for a backend.

    Raises:
        ValueError: switches that contradict each other or the backend.
    """
    size = None if config.leaves_block_size else config.block_size
    common = {
        "block_size": size,
        "pad_num_blocks_to_even": config.pad_num_blocks_to_even,
        "num_cores": config.logical_nc_config,
        "decode_mode": config.decode_mode,
        "features": config.features,
        "tuned": TunedPlans.read(config.tuned or {}),
        "missing": "spare" if config.always_augment_inputs_for_blockwise_matmul else "skip",
    }
    if backend != "nki":
        return Tuning(**common, remarks=_remarks_without_kernels(config, backend))  # type: ignore[arg-type]
    _refuse_switches(config)
    in_halves = config.block_sharding_strategy == BlockShardStrategy.HI_LO
    shards: dict[str, object] = {}
    if config.use_shard_on_intermediate_dynamic_while:
        shards = {"shard_plan": "intermediate", "loop_plan": "dynamic"}
    elif config.use_shard_on_block_dynamic_while:
        shards = {"shard_plan": "block", "loop_plan": "dynamic", "in_halves": in_halves}
    elif config.use_block_parallel:
        shards = {"shard_plan": "block", "loop_plan": "static", "in_halves": in_halves}
    if shards:
        shards["skip_weights"] = config.skip_dma_weight
    return Tuning(**common, **shards, remarks=_remarks_on_nki(config, shards))  # type: ignore[arg-type]


def _remarks_without_kernels(config: BlockwiseMatmulConfig, backend: str) -> tuple[str, ...]:
    """Return a sentence for each switch that was set and has nothing to tune."""
    quiet = ("block_size", "blockwise_nki_autograd_cls")
    changed = [
        field.name
        for field in dataclasses.fields(config)
        if field.name not in quiet and getattr(config, field.name) != field.default
    ]
    if config.blockwise_nki_autograd_cls is not None:
        changed.append("blockwise_nki_autograd_cls")
    return tuple(
        f"{name}={getattr(config, name)!r}: tunes kernels, backend={backend!r} has none"
        for name in changed
    )


def _remarks_on_nki(config: BlockwiseMatmulConfig, shards: dict[str, object]) -> tuple[str, ...]:
    """Return a sentence for each switch that every plan honours as it is, or has no use for."""
    by_blocks = shards.get("shard_plan") == "block"
    reasons = {
        "skip_dma_token": "padding slots move no bytes, but for spare rows where they read those",
        "num_static_blocks": "no kernel here has a static part before a dynamic one",
        "parallelize_token_to_block_mapping": "both cores compute the mapping",
        "optimized_block_to_token_mapping": "the mapping is k-wide in any case",
    }
    if not shards:
        reasons["skip_dma_weight"] = "a work tile loads its expert's weights once for all its rows"
    if not by_blocks:
        reasons["block_sharding_strategy"] = "applies where blocks are sharded"
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return tuple(
        f"{name}={getattr(config, name)!r}: {why}"
        for name, why in reasons.items()
        if getattr(config, name) != defaults[name]
    )


def _refuse_switches(config: BlockwiseMatmulConfig) -> None:
    """Raise ValueError for what backend='nki' cannot honour."""
    shards_blocks = config.use_block_parallel or config.use_shard_on_block_dynamic_while
    by_intermediate = config.use_shard_on_intermediate_dynamic_while
    refuse(
        (
            (
                config.use_torch_block_wise,
                "use_torch_block_wise=True with backend='nki': they name different code. Use"
                " backend='torch', or leave it False.",
            ),
            (
                config.blockwise_nki_autograd_cls is not None,
                "blockwise_nki_autograd_cls: backend='nki' runs its own kernels and has no"
                " gradient. Leave it None; train with backend='torch'.",
            ),
            (
                config.use_block_parallel and by_intermediate,
                "use_block_parallel=True, use_shard_on_intermediate_dynamic_while=True: the two"
                " cores split either the blocks or the intermediate axis. Set one of them.",
            ),
            (
                config.always_augment_inputs_for_blockwise_matmul and config.skip_dma_weight,
                "always_augment_inputs_for_blockwise_matmul=True, skip_dma_weight=True: the one"
                " moves what is missing too, the other leaves loads out. Set one of them.",
            ),
            (
                config.logical_nc_config == 1 and (shards_blocks or by_intermediate),
                "logical_nc_config=1: one core has nothing to shard. Leave use_block_parallel and"
                " use_shard_on_*_dynamic_while False, or set logical_nc_config=2.",
            ),
        )
    )

"""How NxD's switches of the blockwise path become a plan of the prefill kernel."""

from dataclasses import dataclass

from neuron_moe.config import BlockShardStrategy, BlockwiseMatmulConfig


@dataclass(frozen=True)
class PrefillPlan:
    """How blockwise_moe spreads blocks over cores and goes through them.

    Attributes:
        num_cores: physical cores of a logical core.
        shard_plan: 'balanced' (visits of equal size side by side), 'block', 'intermediate',
            'hidden', or 'auto', the choice of the cost model.
        loop_plan: 'sorted' (run-time trips, weights stay for all row tiles of a visit), 'dynamic'
            (run-time trips, one row tile each) or 'static' (the worst case).
        in_halves: with 'block', core 0 takes the first half of the blocks; else every second one.
        skip_weights: an expert's weights stay for its next row tile.
    """

    num_cores: int
    shard_plan: str
    loop_plan: str
    in_halves: bool
    skip_weights: bool = False

    @classmethod
    def from_config(cls, config: BlockwiseMatmulConfig) -> "PrefillPlan":
        """Read the plan out of NxD's switches.

        Raises:
            ValueError: switches that contradict each other or this backend.
        """
        _check_config(config)
        cores, skips = config.logical_nc_config, config.skip_dma_weight
        if config.use_shard_on_intermediate_dynamic_while:
            return cls(cores, "intermediate", "dynamic", False, skips)
        in_halves = config.block_sharding_strategy is BlockShardStrategy.HI_LO
        if config.use_shard_on_block_dynamic_while:
            return cls(cores, "block", "dynamic", in_halves, skips)
        if config.use_block_parallel:
            return cls(cores, "block", "static", in_halves, skips)
        # Sorted visits load an expert's weights once for all their row tiles as it is.
        return cls(cores, "auto", "sorted", False)

    def __str__(self) -> str:
        halves = ", in halves" if self.in_halves else ""
        stay = ", weights stay for the next block" if self.skip_weights else ""
        shards = f"{self.shard_plan} shards over {self.num_cores} core(s)"
        return f"{self.loop_plan} loop, {shards}{halves}{stay}"


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

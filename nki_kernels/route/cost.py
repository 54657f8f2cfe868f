"""What a launch of `router_topk` moves and multiplies."""

from __future__ import annotations

from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.costs import KernelCost
from nki_kernels.common.token_tiles import split_tokens, used_partitions
from nki_kernels.route.config import RouterConfig, item_bytes, num_rows


def cost_router_topk(config: RouterConfig, num_tokens: int) -> KernelCost:
    """Predict the work of a launch; biases are taken as float32, the norm weight as hidden_dtype.

    Args:
        config: what the kernel is compiled for.
        num_tokens: T.
    """
    H, E, formula = config.hidden_size, config.num_experts, config.formula
    hidden_bytes = item_bytes(config.hidden_dtype)
    num_chunks = -(-H // PARTITIONS)
    per_row = formula.top_k * 8 + (E * 4 if config.returns_logits else 0)
    repeated = E * 4 * (int(formula.has_bias) + int(formula.has_selection_bias))
    if config.has_norm:
        per_row += H * hidden_bytes
        repeated += H * hidden_bytes
    read = columns = 0
    for core in range(config.num_cores):
        tokens = split_tokens(num_tokens, core, config.num_cores)
        if tokens.count == 0:
            continue
        rows = num_rows(config)
        read += tokens.rows * H * hidden_bytes + rows * H * item_bytes(config.weight_dtype)
        read += used_partitions(tokens) * repeated
        columns += num_chunks * (rows + tokens.rows + tokens.count * rows)
    return KernelCost(read, num_tokens * per_row, columns)

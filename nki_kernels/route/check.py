"""What the router kernel refuses."""

from __future__ import annotations

from nki_kernels.common.chip import MOST_SBUF_BYTES
from nki_kernels.common.router_choice import MAX_EXPERTS, check_router_formula
from nki_kernels.route.config import DTYPES, RouterConfig, num_rows
from nki_kernels.route.memory import router_table, sbuf_bytes

_MAX_TOKENS_PER_CORE = 16384


def check_router_topk(config: RouterConfig, num_tokens: int) -> None:
    """Raise ValueError unless the kernel takes this configuration.

    Args:
        config: what the kernel is compiled for.
        num_tokens: T.
    """
    H, E, num_cores = config.hidden_size, config.num_experts, config.num_cores
    most = _MAX_TOKENS_PER_CORE * num_cores
    if not 1 <= num_tokens <= most:
        raise ValueError(
            f"num_tokens={num_tokens}: must be 1 to {most} on {num_cores} core(s)."
            " Route longer inputs in parts."
        )
    if H < 64 or H % 64:
        raise ValueError(
            f"hidden_size={H}: must be a multiple of 64. Pad hidden and router_weight with zeros."
        )
    for name in ("hidden_dtype", "weight_dtype"):
        dtype = getattr(config, name)
        if dtype not in DTYPES:
            raise ValueError(f"{name}={dtype!r}: must be float32, bfloat16 or float16.")
    check_router_formula(config.formula, E)
    if config.has_gate and (num_rows(config) > MAX_EXPERTS or not config.marks_broken):
        raise ValueError(
            f"has_gate=True: needs marks_broken=True and num_experts={E} below {MAX_EXPERTS}. Gate"
            " outside the kernel."
        )
    needed = sbuf_bytes(router_table(config, -(-num_tokens // num_cores), 1))
    if needed > MOST_SBUF_BYTES:
        raise ValueError(
            f"hidden_size={H}, num_experts={E} with {config.hidden_dtype} hidden and"
            f" {config.weight_dtype} weights: need {needed} bytes of SBUF per partition, must be at"
            f" most {MOST_SBUF_BYTES}. Keep hidden and router_weight in bfloat16, or split the"
            " experts."
        )

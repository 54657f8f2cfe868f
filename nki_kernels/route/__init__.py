"""Route: logits, the K experts of every token, and their affinities.

config = RouterConfig(formula, num_experts, hidden_size)
check_router_topk(config, num_tokens)
affinities, index, ... = router_topk(hidden, weight, bias, selection_bias, norm_weight, config)
"""

import nki_kernels.provided  # noqa: F401  answers to `import nki`
from nki_kernels.common.router_reference import rms_norm, route
from nki_kernels.route.check import check_router_topk
from nki_kernels.route.config import RouterConfig
from nki_kernels.route.cost import cost_router_topk
from nki_kernels.route.kernel import router_topk

__all__ = [
    "RouterConfig",
    "check_router_topk",
    "cost_router_topk",
    "rms_norm",
    "route",
    "router_topk",
]

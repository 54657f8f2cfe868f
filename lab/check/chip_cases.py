"""What `chip check` runs: every kernel of ours on small shapes, then on those of models."""

from __future__ import annotations

from typing import Any, Final

from lab.check.kernel_cases.models import OAI
from lab.check.vendor_cases.case import Case

_PREFILL: Final = {
    "hidden": 512,
    "intermediate": 256,
    "experts": 4,
    "top_k": 2,
    "tokens": 300,
    "block_size": 128,
    "act_fn": "SiLU",
}
_DECODE: Final = {
    "hidden": 512,
    "intermediate": 256,
    "experts": 16,
    "top_k": 4,
    "tokens": 4,
    "act_fn": "SiLU",
}
_LAYER: Final = {
    "hidden": 512,
    "intermediate": 256,
    "num_global_experts": 16,
    "num_local_experts": 16,
    "top_k": 2,
    "batch": 4,
    "act_fn": "SiLU",
}
_ROUTER: Final = {"T": 130, "H": 512, "E": 64, "k": 4, "act_fn": "SOFTMAX"}
_INDEX: Final = {"tokens": 700, "experts": 64, "top_k": 4}


def _case(name: str, kernel: str, params: dict[str, Any], variant: str = "") -> Case:
    return Case(
        id=name,
        kernel=kernel,
        variant=variant,
        platform="trn2",
        params=params,
        rtol=0.02,
        atol=1e-5,
    )


SMALL: Final = (
    _case("small/index", "find_nonzero_indices", _INDEX),
    _case("small/router", "router_topk", _ROUTER),
    _case("small/combine", "topk_reduce", {"tokens": 256, "top_k": 4, "hidden": 1024}),
    _case("small/prefill", "moe_cte", _PREFILL),
    _case("small/prefill-split-on-I", "moe_cte", _PREFILL, "shard_on_i"),
    _case("small/prefill-gpt-oss", "moe_cte", {**_PREFILL, **OAI}),
    _case(
        "small/prefill-k1",
        "moe_cte",
        {**_PREFILL, "top_k": 1, "affinity_scaling_mode": "PRE_SCALE"},
    ),
    _case("small/decode", "moe_tkg", _DECODE, "selective"),
    _case("small/decode-all", "moe_tkg", {**_DECODE, "tokens": 32}, "all_expert"),
    _case("small/decode-gpt-oss", "moe_tkg", {**_DECODE, **OAI}, "selective"),
    _case(
        "small/decode-fp8",
        "moe_tkg",
        {**_DECODE, "hidden": 2048, "weight_dtype": "float8_e5m2"},
        "selective",
    ),
    _case("small/prefill-split-on-H", "moe_cte", {**_PREFILL, "shard_plan": "hidden"}),
    _case("small/decode-layer", "moe_block_tkg", _LAYER),
)

FULL: Final = (
    _case(
        "full/prefill-gpt-oss-120b",
        "moe_cte",
        {
            **_PREFILL,
            **OAI,
            "hidden": 2880,
            "intermediate": 360,
            "experts": 128,
            "top_k": 4,
            "tokens": 1024,
        },
    ),
    _case(
        "full/prefill-qwen3-30b",
        "moe_cte",
        {
            **_PREFILL,
            "hidden": 2048,
            "intermediate": 96,
            "experts": 128,
            "top_k": 8,
            "tokens": 1024,
        },
    ),
    _case(
        "full/decode-gpt-oss-120b",
        "moe_tkg",
        {**_DECODE, **OAI, "hidden": 2880, "intermediate": 360, "experts": 128, "tokens": 16},
        "selective",
    ),
    _case(
        "full/decode-fp8",
        "moe_tkg",
        {
            **_DECODE,
            "hidden": 4096,
            "intermediate": 1792,
            "experts": 8,
            "top_k": 2,
            "tokens": 4,
            "weight_dtype": "float8_e5m2",
        },
        "selective",
    ),
    _case(
        "full/prefill-split-on-H",
        "moe_cte",
        {
            **_PREFILL,
            "hidden": 2048,
            "intermediate": 512,
            "experts": 8,
            "tokens": 256,
            "shard_plan": "hidden",
        },
    ),
    _case(
        "full/decode-layer-qwen3-30b",
        "moe_block_tkg",
        {
            **_LAYER,
            "hidden": 2048,
            "intermediate": 96,
            "num_global_experts": 128,
            "num_local_experts": 128,
            "top_k": 8,
            "batch": 16,
            "norm_topk_prob": True,
        },
    ),
    _case(
        "full/router-deepseek-v3",
        "router_topk",
        {"T": 700, "H": 7168, "E": 256, "k": 8, "act_fn": "SIGMOID"},
    ),
)

CASES: Final = {case.id: case for case in (*SMALL, *FULL)}

"""Every key of every public configuration, a value other than its default, and who would notice."""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import neuron_moe
import nki_sim
from neuron_moe import (
    BlockwiseMatmulConfig,
    ExpertMLPsV2,
    MoE,
    MoEFusedTKGConfig,
    RoutedExpertsMLPOpsConfig,
    RouterConfig,
    SharedExperts,
)
from neuron_moe.latent import Latent
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.placement import ExpertPlacement
from neuron_moe.spec import ExpertFormula, LatentSpec

E, K, H, I = 8, 2, 64, 32  # noqa: E741  the axis letters
OWNERS = (
    "RouterTopK",
    "GroupLimitedRouter",
    "RouterConfig",
    "RoutedExpertsMLPOpsConfig",
    "BlockwiseMatmulConfig",
    "MoEFusedTKGConfig",
    "SharedExperts",
    "ExpertMLPsV2",
    "MoE",
)
_ROUTER = {"num_experts": E, "top_k": K, "hidden_size": H}
BASE: dict[str, dict[str, Any]] = {
    "RouterTopK": _ROUTER,
    "GroupLimitedRouter": {**_ROUTER, "n_group": 4, "topk_group": 2},
    "RouterConfig": {},
    "RoutedExpertsMLPOpsConfig": {
        **_ROUTER,
        "intermediate_size": I,
        "hidden_act": "silu",
        "glu_mlp": True,
    },
    "BlockwiseMatmulConfig": {},
    "MoEFusedTKGConfig": {"quantized": False},
    "SharedExperts": {
        "hidden_size": H,
        "intermediate_size": I,
        "num_shared_experts": 1,
        "hidden_act": "silu",
        "dtype": torch.bfloat16,
    },
    "ExpertMLPsV2": {"dtype": torch.bfloat16},
    "MoE": {},
}
Settings = Mapping[str, Mapping[str, Any]]


class World:
    """Stands for the process group of all ranks, which exists on ranks only."""

    def __repr__(self) -> str:
        return "world"


WORLD = World()


@dataclass(frozen=True)
class Probe:
    """A key with a value, in a situation where it must matter.

    Attributes:
        owner: one of OWNERS.
        key: a field or an argument.
        value: legal, and not the default.
        beside: other settings by owner.
        place: 'one' process; two 'ranks'; or two ranks with `parallel_state` set up for 'tp' = 2.
    """

    owner: str
    key: str
    value: Any
    beside: Settings = field(default_factory=dict)
    place: str = "one"

    def __str__(self) -> str:
        # An object's address differs between the processes that collect the tests.
        plain = type(self.value).__name__ if " at 0x" in repr(self.value) else str(self.value)
        value = getattr(self.value, "__name__", None) or plain
        beside = "".join(f"-{key}" for each in self.beside.values() for key in each)
        return f"{self.owner}.{self.key}={value[:30]}{beside and ' with' + beside}"


def settings_of(probe: Probe, changed: bool) -> dict[str, dict[str, Any]]:
    """Return all settings, with the probe's value or without."""
    needed = {"RouterTopK", "RoutedExpertsMLPOpsConfig", "BlockwiseMatmulConfig"}
    needed |= {"ExpertMLPsV2", "MoE", probe.owner, *probe.beside}
    if "GroupLimitedRouter" in needed:
        needed.discard("RouterTopK")
    found = {owner: {**BASE[owner], **probe.beside.get(owner, {})} for owner in needed}
    if changed:
        found[probe.owner][probe.key] = probe.value
    return found


def build(settings: Settings, backend: str) -> MoE:
    """Build the layer of some settings, its weights drawn by a fixed seed."""
    given = {
        owner: {key: dist.group.WORLD if value is WORLD else value for key, value in keys.items()}
        for owner, keys in settings.items()
    }
    torch.manual_seed(0)
    router: Any
    if "GroupLimitedRouter" in given:
        router = neuron_moe.GroupLimitedRouter(**given["GroupLimitedRouter"])
    else:
        read = {}
        if "RouterConfig" in given:
            config = RouterConfig(**given["RouterConfig"])
            read = {"act_fn": config.act_fn, "dtype": config.dtype}
        router = neuron_moe.RouterTopK(**{**read, **given["RouterTopK"]})
    experts = ExpertMLPsV2(
        RoutedExpertsMLPOpsConfig(**given["RoutedExpertsMLPOpsConfig"]),
        BlockwiseMatmulConfig(**given["BlockwiseMatmulConfig"]),
        **{"backend": backend, **given["ExpertMLPsV2"]},
    )
    beside: dict[str, Any] = {}
    if "SharedExperts" in given:
        beside["shared_experts"] = SharedExperts(**given["SharedExperts"])
    if "MoEFusedTKGConfig" in given:
        beside["tkg_config"] = MoEFusedTKGConfig(**given["MoEFusedTKGConfig"])
    return MoE(**{"router": router, "expert_mlps": experts, **beside, **given["MoE"]}).eval()


def observe(settings: Settings, backend: str) -> Iterator[tuple[str, Any]]:
    """Yield what anybody can see of a layer, cheap things first; last its error, if it has one."""
    try:
        layer = build(settings, backend)
        weights = layer.state_dict(keep_vars=True)
        yield "weights", [(n, tuple(w.shape), w.dtype, w.device) for n, w in weights.items()]
        _settle(layer)
        yield "numbers", [_hash(weight) for weight in weights.values()]
        for phase, tokens in (("prefill", 16), ("prefill", 200), ("decode", 4)):
            yield f"explain {phase} {tokens}", str(layer.explain(phase, tokens))
        dtype = torch.float32 if settings["ExpertMLPsV2"]["dtype"] == torch.float32 else None
        yield from _run(layer, dtype or torch.bfloat16)
        if backend == "torch":
            torch.manual_seed(1)
            layer.train()
            yield "training", _hash(layer(_hidden((6, 6), dtype or torch.bfloat16)).output)
    except Exception as error:  # noqa: BLE001  the message is what is looked at
        yield "error", f"{type(error).__name__}: {error}"


def _run(layer: MoE, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    seen: list[str] = []
    layer.router.register_forward_pre_hook(lambda _, inputs: seen.append(_hash(inputs[0])))
    layer.enable_load_counters()
    mask = torch.ones(6, 6)
    mask[0, 1:] = 0
    with torch.no_grad(), _launches() as launched:
        results = [*layer(_hidden((6, 6), dtype), mask), *layer(_hidden((4, 1), dtype))]
    yield "outputs", [None if value is None else _hash(value) for value in results]
    assert layer.expert_load is not None
    yield "load", layer.expert_load.tolist()
    yield "what is routed", seen
    yield "what is launched", launched


@contextlib.contextmanager
def _launches() -> Iterator[list[str]]:
    """Note the kernels that the simulator runs, the shapes of operands, and what is compiled."""
    found: list[str] = []
    run = nki_sim.run

    def watch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        given = [str(getattr(each, "shape", each)) for each in (*args, *kwargs.values())]
        found.append(re.sub("0x[0-9a-f]+", "", f"{getattr(kernel, '__name__', kernel)} {given}"))
        return run(kernel, *args, **kwargs)

    nki_sim.run = watch
    try:
        yield found
    finally:
        nki_sim.run = run


def verdict(probe: Probe, backends: tuple[str, ...] = ("torch", "nki")) -> str:
    """Return '' if a key is read, else what is wrong."""
    for backend in backends:
        pairs = zip(
            observe(settings_of(probe, False), backend),
            observe(settings_of(probe, True), backend),
            strict=False,
        )
        for (what, before), (now, after) in pairs:
            if what == "error":
                return f"the situation itself is refused: {before}"
            if now == "error":
                return "" if probe.key in after else f"refused without its name: {after}"
            if before != after:
                return ""
    return "nothing reads it"


def verdicts_of_rank(probes: list[Probe]) -> list[str]:
    """Return the verdicts of probes on one of two ranks; all ranks call it."""
    found = []
    for probe in probes:
        with _groups(probe.place):
            found.append(verdict(probe, ("torch",)))
    return found


@contextlib.contextmanager
def _groups(place: str) -> Iterator[None]:
    if place == "ranks":
        yield
        return
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, watch=False)
    parallel_state.initialize_token_shuffle_group(2)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def _settle(layer: MoE) -> None:
    """Give the selection bias, which starts at zero, numbers that matter."""
    bias_E = getattr(layer.router, "e_score_correction_bias", None)
    if bias_E is not None:
        with torch.no_grad():
            bias_E.copy_(torch.linspace(-2.0, -0.5, E))


def _hidden(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    stream = torch.Generator().manual_seed(2)
    return (4 * torch.randn(*shape, H, generator=stream)).to(dtype)


def _hash(value: Tensor) -> str:
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def _fill(value: float) -> Callable[[Tensor], Tensor]:
    def fill(weight: Tensor) -> Tensor:
        return nn.init.constant_(weight, value)

    return fill


def _router_probes(owner: str) -> list[Probe]:
    """Return the probes of arguments that both routers have."""
    return [
        Probe(owner, "num_experts", 16),
        Probe(owner, "top_k", 3),
        Probe(owner, "hidden_size", 128),
        Probe(owner, "sequence_parallel_enabled", True),
        Probe(owner, "sequence_dimension", 0),
        Probe(owner, "dtype", torch.bfloat16),
        Probe(owner, "device", "meta"),
        Probe(owner, "tensor_model_parallel_group", WORLD, place="ranks"),
        Probe(owner, "jitter_eps", 0.25),
        Probe(owner, "renormalize", True),
        Probe(owner, "renormalize_eps", 0.5, {owner: {"renormalize": True}}),
        Probe(owner, "routed_scaling_factor", 2.5),
    ]


_SWIGLU = {"RoutedExpertsMLPOpsConfig": {"hidden_act": "sigmoid", "glu_type": "swiglu"}}
_TUNED = {
    "prefill": [
        {
            "tokens": 1 << 20,
            "block_size": 64,
            "shard_plan": "balanced",
            "loop_plan": "sorted",
            "work_tile": 2,
            "loaded_parts": [1, 1],
            "weight_buffers": 2,
            "weights": "plain",
        }
    ]
}
_BY_BLOCKS = {"BlockwiseMatmulConfig": {"use_shard_on_block_dynamic_while": True}}
# 36 tokens with 3 of 8 experts need at most 11 blocks of 32.
_ODD_BLOCKS: dict[str, dict[str, Any]] = {
    "BlockwiseMatmulConfig": {"block_size": 32},
    "RouterTopK": {"top_k": 3},
    "RoutedExpertsMLPOpsConfig": {"top_k": 3},
}
_SHARED: dict[str, dict[str, Any]] = {"SharedExperts": {}}
_SPLIT: dict[str, dict[str, Any]] = {
    "ExpertMLPsV2": {"tensor_model_parallel_group": WORLD},
    "MoE": {"tensor_model_parallel_group": WORLD},
}
_SPLIT_EXPERTS = {"ExpertMLPsV2": {"tensor_model_parallel_group": WORLD}}
_HYBRID = {"ExpertMLPsV2": {"enabled_hybrid_sharding": True}}
_FLOAT32: dict[str, dict[str, Any]] = {"ExpertMLPsV2": {"dtype": torch.float32}}
# Which tokens an expert has no room for depends on the tokens of all ranks and on their order.
_DROPPING: dict[str, dict[str, Any]] = {"RoutedExpertsMLPOpsConfig": {"capacity_factor": 0.5}}
_PARTS: dict[str, dict[str, Any]] = {"MoE": {"sequence_parallel_enabled": True}}
_MIXED = {"MoE": {"sequence_parallel_enabled": True, "token_shuffle_group_size": 2}}

PROBES: list[Probe] = [
    *_router_probes("RouterTopK"),
    Probe("RouterTopK", "bias", True),
    Probe("RouterTopK", "act_fn", "sigmoid"),
    Probe("RouterTopK", "apply_act_fn_over_topk", True),
    Probe("RouterTopK", "store_transposed_weights", True),
    Probe("RouterTopK", "selection_bias", True),
    *_router_probes("GroupLimitedRouter"),
    Probe("GroupLimitedRouter", "n_group", 2),
    Probe("GroupLimitedRouter", "topk_group", 1),
    Probe("GroupLimitedRouter", "out_of_group_fill", 0.0),
    Probe("RouterConfig", "act_fn", "sigmoid"),
    Probe("RouterConfig", "dtype", torch.bfloat16),
    Probe("RoutedExpertsMLPOpsConfig", "num_experts", 16),
    Probe("RoutedExpertsMLPOpsConfig", "hidden_size", 128),
    Probe("RoutedExpertsMLPOpsConfig", "intermediate_size", 48),
    Probe("RoutedExpertsMLPOpsConfig", "top_k", 3),
    Probe("RoutedExpertsMLPOpsConfig", "hidden_act", "relu"),
    Probe("RoutedExpertsMLPOpsConfig", "glu_mlp", False),
    Probe("RoutedExpertsMLPOpsConfig", "formula", ExpertFormula("tanh")),
    Probe("RoutedExpertsMLPOpsConfig", "bias", True),
    Probe("RoutedExpertsMLPOpsConfig", "glu_type", "swiglu"),
    Probe("RoutedExpertsMLPOpsConfig", "hidden_act_scaling_factor", 1.702, _SWIGLU),
    Probe("RoutedExpertsMLPOpsConfig", "hidden_act_scaling_factor", 1.5),
    Probe("RoutedExpertsMLPOpsConfig", "hidden_act_bias", 1.0),
    Probe("RoutedExpertsMLPOpsConfig", "hidden_size_actual", 48),
    Probe("RoutedExpertsMLPOpsConfig", "intermediate_size_actual", 24),
    Probe("RoutedExpertsMLPOpsConfig", "is_hidden_dim_shuffled", True),
    Probe("RoutedExpertsMLPOpsConfig", "is_intermediate_dim_shuffled", True),
    Probe("RoutedExpertsMLPOpsConfig", "use_index_calc_kernel", False),
    Probe("RoutedExpertsMLPOpsConfig", "gate_clamp_upper_limit", 0.25),
    Probe("RoutedExpertsMLPOpsConfig", "gate_clamp_lower_limit", -0.25),
    Probe("RoutedExpertsMLPOpsConfig", "up_clamp_upper_limit", 0.25),
    Probe("RoutedExpertsMLPOpsConfig", "up_clamp_lower_limit", -0.25),
    Probe("RoutedExpertsMLPOpsConfig", "normalize_top_k_affinities", True),
    Probe("RoutedExpertsMLPOpsConfig", "early_expert_affinity_modulation", True),
    Probe("RoutedExpertsMLPOpsConfig", "input_layer_init_method", _fill(0.5)),
    Probe("RoutedExpertsMLPOpsConfig", "output_layer_init_method", _fill(0.5)),
    Probe("RoutedExpertsMLPOpsConfig", "capacity_factor", 0.5),
    Probe("RoutedExpertsMLPOpsConfig", "enable_spmd_rank", True),
    Probe("RoutedExpertsMLPOpsConfig", "is_prefill", True),
    Probe("RoutedExpertsMLPOpsConfig", "is_prefill", False),
    Probe("RoutedExpertsMLPOpsConfig", "expert_distribution", [[*range(E), 0]]),
    Probe("BlockwiseMatmulConfig", "block_size", 64),
    Probe("BlockwiseMatmulConfig", "use_block_parallel", True),
    Probe("BlockwiseMatmulConfig", "block_sharding_strategy", "PING_PONG"),
    Probe("BlockwiseMatmulConfig", "block_sharding_strategy", "PING_PONG", _BY_BLOCKS),
    Probe("BlockwiseMatmulConfig", "skip_dma_token", True),
    Probe("BlockwiseMatmulConfig", "skip_dma_weight", True, _BY_BLOCKS),
    Probe("BlockwiseMatmulConfig", "logical_nc_config", 1),
    Probe("BlockwiseMatmulConfig", "blockwise_nki_autograd_cls", object),
    Probe("BlockwiseMatmulConfig", "use_torch_block_wise", True),
    Probe("BlockwiseMatmulConfig", "parallelize_token_to_block_mapping", False),
    Probe("BlockwiseMatmulConfig", "optimized_block_to_token_mapping", False),
    Probe("BlockwiseMatmulConfig", "always_augment_inputs_for_blockwise_matmul", True),
    Probe("BlockwiseMatmulConfig", "use_shard_on_intermediate_dynamic_while", True),
    Probe("BlockwiseMatmulConfig", "use_shard_on_block_dynamic_while", True),
    Probe("BlockwiseMatmulConfig", "num_static_blocks", 4),
    Probe("BlockwiseMatmulConfig", "pad_num_blocks_to_even", True, _ODD_BLOCKS),
    Probe("BlockwiseMatmulConfig", "decode_mode", "all_experts"),
    Probe("BlockwiseMatmulConfig", "features", "open"),
    Probe("BlockwiseMatmulConfig", "tuned", _TUNED),
    Probe("MoEFusedTKGConfig", "quantized", True),
    Probe("MoEFusedTKGConfig", "moe_fused_kernel_enabled", False),
    Probe("MoEFusedTKGConfig", "router_topk_kernel_enabled", False),
    Probe("MoEFusedTKGConfig", "expert_mlp_kernel_enabled", False),
    Probe("MoEFusedTKGConfig", "shared_mlp_kernel_enabled", True),
    Probe("MoEFusedTKGConfig", "shared_mlp_kernel_enabled", False, _SHARED),
    Probe("MoEFusedTKGConfig", "norm_topk_prob", True),
    Probe("MoEFusedTKGConfig", "is_mxfp4_compute", True),
    Probe("MoEFusedTKGConfig", "router_mm_dtype", torch.bfloat16),
    Probe("SharedExperts", "hidden_size", 128),
    Probe("SharedExperts", "intermediate_size", 48),
    Probe("SharedExperts", "num_shared_experts", 2),
    Probe("SharedExperts", "hidden_act", "gelu"),
    Probe("SharedExperts", "formula", ExpertFormula("tanh")),
    Probe("SharedExperts", "dtype", torch.float16),
    Probe("SharedExperts", "tensor_model_parallel_group", WORLD, _SPLIT, "ranks"),
    Probe("SharedExperts", "reduce_dtype", torch.bfloat16, place="tp"),
    Probe("SharedExperts", "fused_gate_up_projection", True),
    Probe("SharedExperts", "sequence_parallel_enabled", True, place="tp"),
    Probe("SharedExperts", "transpose_weights", True),
    Probe("SharedExperts", "is_gated", True),
    Probe("SharedExperts", "device", "meta"),
    Probe("ExpertMLPsV2", "routed_experts_mlp_config", None),
    Probe("ExpertMLPsV2", "blockwise_matmul_config", object()),
    Probe("ExpertMLPsV2", "return_bias", True),
    Probe("ExpertMLPsV2", "dtype", torch.float16),
    Probe("ExpertMLPsV2", "sequence_parallel_enabled", True),
    Probe("ExpertMLPsV2", "device", "meta"),
    Probe("ExpertMLPsV2", "tensor_model_parallel_group", WORLD, place="ranks"),
    Probe("ExpertMLPsV2", "expert_model_parallel_group", WORLD, place="ranks"),
    *(
        Probe("ExpertMLPsV2", f"{phase}_{kind}_model_parallel_group", WORLD, beside, "ranks")
        for phase in ("tkg", "cte")
        for kind in ("tensor", "expert")
        for beside in (_HYBRID, {})
    ),
    Probe("ExpertMLPsV2", "is_prefill", False),
    Probe("ExpertMLPsV2", "enabled_hybrid_sharding", True, _SPLIT_EXPERTS, "ranks"),
    Probe("ExpertMLPsV2", "backend", "nki"),
    Probe("ExpertMLPsV2", "compat", "nxd"),
    Probe("ExpertMLPsV2", "placement", ExpertPlacement((*range(E), 0), 1, E)),
    Probe("ExpertMLPsV2", "strategy", "all_to_all", place="tp"),
    Probe("ExpertMLPsV2", "save_percent", 40),
    Probe("MoE", "latent", Latent(LatentSpec(hidden_size=H, latent_size=H))),
    Probe("MoE", "router", None),
    Probe("MoE", "expert_mlps", None),
    Probe("MoE", "shared_experts", SharedExperts(**BASE["SharedExperts"])),
    Probe("MoE", "rmsnorm", nn.RMSNorm(H, dtype=torch.bfloat16)),
    Probe("MoE", "sequence_parallel_enabled", True, _DROPPING, "tp"),
    Probe("MoE", "sequence_dimension", 0, {**_DROPPING, **_PARTS}, "tp"),
    Probe("MoE", "return_router_logits", True),
    Probe("MoE", "return_expert_index", True),
    Probe("MoE", "token_shuffle_group_size", 2, _PARTS, "tp"),
    Probe("MoE", "token_shuffle_seed", 5, _MIXED, "tp"),
    Probe("MoE", "tensor_model_parallel_group", WORLD, place="ranks"),
    Probe("MoE", "init_tkg_module", True),
    Probe("MoE", "tkg_config", MoEFusedTKGConfig(False, moe_fused_kernel_enabled=False)),
    Probe("MoE", "reduce_dtype", torch.bfloat16, _FLOAT32, "tp"),
]

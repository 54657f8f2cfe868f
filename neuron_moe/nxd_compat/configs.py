"""NxD's configuration objects.

Constructor arguments, their order and their defaults are NxD's
(`neuronx_distributed.modules.moe.moe_configs`), so a published configuration works unchanged, and a
program may set attributes later. Every value is checked when it is set. A key that `from_kwargs`
does not know is ignored, as by NxD, and named by `explain()`; a constructor refuses it.

NxD's own objects are taken where ours are: `of()` reads their attributes. Attributes are plain
numbers and strings, so that NxDI writes them to JSON and reads them back.
"""

import dataclasses
import difflib
import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from neuron_moe.activations import HIDDEN_ACTIVATIONS
from neuron_moe.errors import (
    attributes_of,
    check_bools,
    check_choice,
    check_finite,
    check_positive_int,
    did_you_mean,
    names_its_keys,
    reject_unknown,
)
from neuron_moe.spec import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_LNC_SIZE,
    ExpertFormula,
    as_dtype,
    check_top_k,
    open_features,
)
from neuron_moe.tuned import DECODE_MODES, TunedPlans, read_tuned


class GLUType(Enum):
    """How gate and up projections are combined.

    GLU:    act(scale * gate) * (up + bias)
    SWIGLU: gate * act(scale * gate) * (up + bias); with act = sigmoid and scale = 1 this is
        silu(gate) * up
    """

    GLU = "glu"
    SWIGLU = "swiglu"

    @classmethod
    def validate(cls, glu_type: "GLUType | str | None") -> "GLUType":
        """Return the member named by `glu_type`, GLU for None; raise ValueError for others."""
        return _as_enum(cls, "glu_type", cls.GLU if glu_type is None else glu_type)


class BlockShardStrategy(StrEnum):
    """Which blocks a physical core takes when blocks are spread over those of a logical core."""

    HI_LO = "HI_LO"
    PING_PONG = "PING_PONG"


_EnumT = TypeVar("_EnumT", bound=Enum)
_ConfigT = TypeVar("_ConfigT")
_LEAVES_BLOCK_SIZE = "_leaves_block_size"
CHANGES = "_changes"  # how often a field was set
_IGNORED = "_ignored"


class _Settable:
    """A configuration whose fields may be set after it was built, checked as by its constructor."""

    def __post_init__(self) -> None:
        vars(self)[CHANGES] = 0

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field."""
        record: Any = self
        known = [field.name for field in dataclasses.fields(record)]
        reject_unknown(type(self).__name__, [name], known)
        if CHANGES not in vars(self):  # it is being built
            super().__setattr__(name, value)
            return
        checked = dataclasses.replace(record, **{name: value})
        vars(self).update({field: getattr(checked, field) for field in known})
        vars(self)[CHANGES] += 1
        if name == "block_size":
            vars(self)[_LEAVES_BLOCK_SIZE] = False


class SkipMode(NamedTuple):
    """What NxD's kernels skip, as `BlockwiseMatmulConfig.skip_dma` has it."""

    skip_token: bool
    skip_weight: bool


def _as_enum(kind: type[_EnumT], name: str, value: object) -> _EnumT:
    """Return the member for a member, its name, a library's enum of that name, or its JSON form."""
    if isinstance(value, kind):
        return value
    if isinstance(value, Enum):
        value = value.value if isinstance(value.value, str) else value.name
    elif isinstance(value, Mapping):
        value = value.get("_name_", value)
    by_name = {str(member.value).lower(): member for member in kind}
    key = str(value).lower() if isinstance(value, str) else None
    if key not in by_name:
        options = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{name}={value!r}: must be {options} or a {kind.__name__}.")
    return by_name[key]


def _as_class(value: Any) -> Any:
    """Return a class, also for its JSON form {"__module__": .., "__name__": ..}."""
    if not isinstance(value, Mapping):
        return value
    if set(value) != {"__module__", "__name__"}:
        raise ValueError(
            f"blockwise_nki_autograd_cls={dict(value)!r}: must be a class, or its __module__ and"
            " __name__. Leave it None for the kernels here."
        )
    return getattr(importlib.import_module(value["__module__"]), value["__name__"])


def _notes_block_size(cls: type[_ConfigT]) -> type[_ConfigT]:
    """Make a class note whether somebody chose a block size; NxDI's JSON keeps the note."""
    built_init: Callable[..., None] = cls.__init__

    @functools.wraps(built_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, _LEAVES_BLOCK_SIZE, not args and "block_size" not in kwargs)
        built_init(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


@names_its_keys
@_notes_block_size
@dataclass
class BlockwiseMatmulConfig(_Settable):
    """Tuning of the blockwise prefill path; build it with `default()` or `from_kwargs(...)`.

    What is left out is 512 slots in a block, or, with backend='nki', what its cost model prefers.
    `explain()` names each switch that changes nothing for the plan it prints.

    Attributes:
        block_size: token slots of a block, which share one expert.
        use_block_parallel: the two cores share the blocks, every block of the static list.
        block_sharding_strategy: HI_LO gives each core a half of the blocks, PING_PONG every other.
        skip_dma_token: padding slots move no bytes; so in every plan of ours.
        skip_dma_weight: the next block of the same expert reuses its weights; where blocks are
            sharded, other plans load them once for several tiles anyway.
        logical_nc_config: physical cores of a rank, 1 or 2.
        blockwise_nki_autograd_cls: NxD's class with the backward pass; refused by backend='nki'.
        use_torch_block_wise: NxD's torch form; refused by backend='nki', which names other code.
        parallelize_token_to_block_mapping: changes nothing, both cores compute the mapping.
        optimized_block_to_token_mapping: changes nothing, the mapping is k-wide in any case.
        always_augment_inputs_for_blockwise_matmul: padding slots read a row and are not skipped.
        use_shard_on_intermediate_dynamic_while: the cores halve the intermediate axis, and the loop
            ends after the blocks in use.
        use_shard_on_block_dynamic_while: the cores share the blocks, and the loop ends after those
            in use.
        num_static_blocks: changes nothing, no kernel has a static part before a dynamic one.
        pad_num_blocks_to_even: one block more where their number is odd.
        decode_mode: beyond NxD's: 'selective' (a list of the chosen experts), 'all_experts', or
            'auto', the cost model's choice.
        features: beyond NxD's: 'safe', for kernels of nothing but what public ones show, 'open', or
            what a chip was seen to have; see `Tuning.features`.
        tuned: beyond NxD's: plans of `neuron-moe tune` as plain values; `from_tuned` reads a file.

    Raises:
        ValueError: a value outside its range, or two settings that exclude each other.
    """

    block_size: int = DEFAULT_BLOCK_SIZE
    use_block_parallel: bool = False
    block_sharding_strategy: BlockShardStrategy | str = BlockShardStrategy.HI_LO
    skip_dma_token: bool = False
    skip_dma_weight: bool = False
    logical_nc_config: int = DEFAULT_LNC_SIZE
    blockwise_nki_autograd_cls: Any = None
    use_torch_block_wise: bool = False
    parallelize_token_to_block_mapping: bool = True
    optimized_block_to_token_mapping: bool = True
    always_augment_inputs_for_blockwise_matmul: bool = False
    use_shard_on_intermediate_dynamic_while: bool = False
    use_shard_on_block_dynamic_while: bool = False
    num_static_blocks: int | None = None
    pad_num_blocks_to_even: bool = False
    decode_mode: str = dataclasses.field(default="auto", kw_only=True)
    features: str | frozenset[str] = dataclasses.field(default="safe", kw_only=True)
    tuned: Any = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_positive_int("block_size", self.block_size)
        check_choice("decode_mode", self.decode_mode, ("auto", *DECODE_MODES))
        open_features(self.features)
        if self.tuned is not None:
            TunedPlans.read(self.tuned)
        strategy = _as_enum(
            BlockShardStrategy, "block_sharding_strategy", self.block_sharding_strategy
        )
        self.block_sharding_strategy = strategy.value
        self.blockwise_nki_autograd_cls = _as_class(self.blockwise_nki_autograd_cls)
        if isinstance(self.logical_nc_config, bool) or self.logical_nc_config not in (1, 2):
            raise ValueError(
                f"logical_nc_config={self.logical_nc_config!r}: must be 1 or 2 (physical cores per"
                " logical core). Use 2 on Trn2 and Trn3."
            )
        if self.num_static_blocks is not None:
            check_positive_int("num_static_blocks", self.num_static_blocks)
        flags = [f.name for f in dataclasses.fields(self) if f.type is bool]
        check_bools(self, tuple(flags))
        if self.use_shard_on_intermediate_dynamic_while and self.use_shard_on_block_dynamic_while:
            raise ValueError(
                "use_shard_on_intermediate_dynamic_while=True,"
                " use_shard_on_block_dynamic_while=True:"
                " the two cores split either the intermediate axis or the blocks. Set one of them."
            )
        super().__post_init__()

    @property
    def ignored(self) -> tuple[str, ...]:
        """A sentence for each key that `from_kwargs` was given and nobody reads."""
        return tuple(vars(self).get(_IGNORED, ()))

    @property
    def leaves_block_size(self) -> bool:
        """Whether nobody chose a block size."""
        leaves: bool = getattr(self, _LEAVES_BLOCK_SIZE)
        return leaves

    @property
    def skip_dma(self) -> SkipMode:
        """The two skip switches under NxD's name."""
        return SkipMode(self.skip_dma_token, self.skip_dma_weight)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "BlockwiseMatmulConfig":
        """Build from keywords; those left out keep their default, unknown ones are `ignored`.

        `skip_dma`, which NxD derives and writes to JSON, is derived again.
        """
        for name in ("skip_dma", CHANGES):
            kwargs.pop(name, None)
        if kwargs.pop(_LEAVES_BLOCK_SIZE, False):
            kwargs.pop("block_size", None)
        ignored = tuple(kwargs.pop(_IGNORED, ()))
        known = [field.name for field in dataclasses.fields(cls)]
        for name in kwargs.keys() - set(known):
            hint = did_you_mean(name, known)
            remark = f"{name}={kwargs.pop(name)!r}: unknown, ignored as by NxD"
            ignored += (f"{remark}.{hint}" if hint else remark,)
        built = cls(**kwargs)
        vars(built)[_IGNORED] = sorted(ignored)
        return built

    @classmethod
    def of(cls, config: Any) -> "BlockwiseMatmulConfig":
        """Return ours for ours, for NxD's, or for None.

        NxD's default block size counts as left open: its objects always hold a number.
        """
        if config is None:
            return cls.default()
        if isinstance(config, cls):
            return config
        found = attributes_of("blockwise_matmul_config", cls, config)
        if found.get("block_size") == DEFAULT_BLOCK_SIZE:
            del found["block_size"]
        return cls(**found)

    @classmethod
    def default(cls) -> "BlockwiseMatmulConfig":
        """Build with every default."""
        return cls()

    @classmethod
    def from_tuned(cls, path: str | Path, **kwargs: Any) -> "BlockwiseMatmulConfig":
        """Build with the plans of a file that `neuron-moe tune` wrote.

        Args:
            path: of the file.
            kwargs: further fields.

        Raises:
            ValueError: the file is not as it must be, or was tuned for other cores.
        """
        found = read_tuned(path)
        found.check(str(path), lnc=kwargs.setdefault("logical_nc_config", found.lnc))
        return cls.from_kwargs(tuned=found.plans.to_dict(), **kwargs)


@names_its_keys
@dataclass
class RouterConfig:
    """Router activation and the dtype its weights are kept in (arithmetic is always float32).

    NxDI's models assign both after it was built.
    """

    act_fn: str = "softmax"
    dtype: torch.dtype | str = torch.float32

    def __setattr__(self, name: str, value: Any) -> None:
        """Set one of the two fields; act_fn is checked by the router that is built with it."""
        reject_unknown("RouterConfig", {name: value}, ("act_fn", "dtype"))
        super().__setattr__(name, as_dtype(name, value) if name == "dtype" else value)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "RouterConfig":
        """Build from `router_act_fn` and `router_dtype`.

        NxDI passes every key of its configuration; only a misspelt one of these two is refused.
        """
        known = ("router_act_fn", "router_dtype")
        near = [key for key in kwargs if difflib.get_close_matches(key, known, 1, cutoff=0.75)]
        reject_unknown("RouterConfig", {key: kwargs[key] for key in near}, known)
        return cls(
            act_fn=kwargs.get("router_act_fn", "softmax"),
            dtype=kwargs.get("router_dtype", torch.float32),
        )


@names_its_keys
@dataclass
class RoutedExpertsMLPOpsConfig(_Settable):
    """The routed experts of one layer: sizes, activation, affinities, capacity.

    Args:
        num_experts: experts of the whole model (E).
        hidden_size: H.
        intermediate_size: I of the whole expert, before any sharding.
        top_k: experts per token (K).
        hidden_act: one of HIDDEN_ACTIVATIONS, or 'swiglu' (glu_type 'swiglu' with a sigmoid).
        glu_mlp: gate and up projections (True) or a plain up projection (False).
        bias: experts have biases. They are kept as in the checkpoint.
        hidden_act_bias: added to up before the product, at run time (1.0 for GPT-OSS).
        normalize_top_k_affinities: divide the K affinities of a token by their sum.
        early_expert_affinity_modulation: scale the expert's input, not its output (Llama4).
        capacity_factor: None, and NxD's 0 and below ("blockwise"), compute every choice; > 0 drops
            what exceeds ceil(T * K * capacity_factor / E) tokens of an expert.
        formula: what an expert computes, whatever the keys of its activation, clamps and biases say
            (not in NxD).
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    hidden_act: str
    glu_mlp: bool
    bias: bool = False
    glu_type: GLUType | str | None = GLUType.GLU
    hidden_act_scaling_factor: float = 1.0
    hidden_act_bias: float = 0.0
    hidden_size_actual: int | None = None
    intermediate_size_actual: int | None = None
    is_hidden_dim_shuffled: bool | None = None
    is_intermediate_dim_shuffled: bool | None = None
    use_index_calc_kernel: bool = True
    gate_clamp_upper_limit: float | None = None
    gate_clamp_lower_limit: float | None = None
    up_clamp_upper_limit: float | None = None
    up_clamp_lower_limit: float | None = None
    normalize_top_k_affinities: bool = False
    early_expert_affinity_modulation: bool = False
    input_layer_init_method: Callable[..., Any] | None = None
    output_layer_init_method: Callable[..., Any] | None = None
    capacity_factor: float | None = None
    enable_spmd_rank: bool = False
    is_prefill: bool | None = None
    expert_distribution: list[list[int]] | None = None
    formula: ExpertFormula | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("num_experts", "hidden_size", "intermediate_size", "top_k"):
            check_positive_int(name, getattr(self, name))
        check_top_k(self.top_k, self.num_experts)
        flags = [f.name for f in dataclasses.fields(self) if f.type is bool]
        check_bools(self, flags)
        for name in ("hidden_size_actual", "intermediate_size_actual"):
            if getattr(self, name) is not None:
                check_positive_int(name, getattr(self, name))
        for name in ("is_hidden_dim_shuffled", "is_intermediate_dim_shuffled", "is_prefill"):
            if getattr(self, name) is not None:
                check_bools(self, (name,))
        self._settle_activation()
        for name in ("hidden_act_scaling_factor", "hidden_act_bias"):
            check_finite(name, getattr(self, name))
        for kind in ("gate", "up"):
            self._check_clamp(kind)
        if self.capacity_factor is not None:
            check_finite("capacity_factor", self.capacity_factor)
        super().__post_init__()

    def _settle_activation(self) -> None:
        glu_type = GLUType.validate(self.glu_type)
        hidden_act = check_choice("hidden_act", self.hidden_act, (*HIDDEN_ACTIVATIONS, "swiglu"))
        if hidden_act == "swiglu":
            glu_type, hidden_act = GLUType.SWIGLU, "sigmoid"
        if glu_type is GLUType.SWIGLU and not self.glu_mlp:
            raise ValueError(
                "glu_type='swiglu' with glu_mlp=False: SwiGLU needs gate and up projections."
                " Set glu_mlp=True, or hidden_act='silu' for a plain MLP."
            )
        self.glu_type, self.hidden_act = glu_type, hidden_act

    def _check_clamp(self, kind: str) -> None:
        lower = getattr(self, f"{kind}_clamp_lower_limit")
        upper = getattr(self, f"{kind}_clamp_upper_limit")
        for side, value in (("lower", lower), ("upper", upper)):
            if value is not None:
                check_finite(f"{kind}_clamp_{side}_limit", value)
        if lower is not None and upper is not None and lower > upper:
            raise ValueError(
                f"{kind}_clamp_lower_limit={lower!r}, {kind}_clamp_upper_limit={upper!r}:"
                " the lower limit must not exceed the upper one. Swap them."
            )

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "RoutedExpertsMLPOpsConfig":
        """Build from keywords; an unknown one is refused."""
        return cls(**kwargs)

    @classmethod
    def of(cls, config: Any) -> "RoutedExpertsMLPOpsConfig":
        """Return ours for ours or for NxD's."""
        if isinstance(config, cls):
            return config
        return cls(**attributes_of("routed_experts_mlp_config", cls, config))


def to_torch_dtype(dtype_str: str) -> torch.dtype:
    """Return a float dtype by its name, NxD's function."""
    return as_dtype("dtype_str", dtype_str)

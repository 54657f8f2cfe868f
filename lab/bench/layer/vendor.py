"""The vendor's chains of kernels for a layer, the fastest of which stands beside ours.

Decode, and prefill of up to 128 tokens: moe_block_tkg, which is norm, router and experts in one
launch; where it does not run, router_topk and moe_tkg. Prefill: router_topk, find_nonzero_indices,
indexed_flatten and a variant of `bench prefill`, which adds up a token's experts itself. Shared
experts are the library's dense MLP. What would be unfair to a chain is left out of it: the norm of
prefill, the gate of shared experts and the sum with them, what a graph computes between launches
(offsets of blocks, experts of blocks), groups and selection biases, which its routers have not; and
the router's hidden states are in whichever of its two layouts is faster, transposed for nothing.

All launches of a chain are one program: its start and end count once.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import nki_sim
from lab.bench.decode import vendor as decode
from lab.bench.decode.cases import ROUTERS, DecodeCase
from lab.bench.prefill.vendor import (
    DOES_NOT_RUN,
    KERNEL_NAMES,
    OPTIONS,
    SLOWEST,
    VARIANTS,
    Variant,
    bound_us,
    launch_vendor,
    seconds_of,
)
from lab.bench.prefill.vendor_index import BLOCK_SIZES, FULL, UNFIT, first_line, index_runs
from lab.check.vendor_cases.library import VendorLibrary
from lab.check.vendor_cases.moe_prefill import CORES
from neuron_moe.backends.nki.times import TIMES_ONLY
from neuron_moe.plan import LayerParts
from neuron_moe.tools.timing import layers
from neuron_moe.tools.timing.layers import Model
from neuron_moe.tools.timing.pool import Task
from neuron_moe.tools.timing.timelines import program, time_of
from nki_kernels.common.chip import PARTITIONS
from nki_sim.time.estimate import NOTHING, Estimate

ROUTER_TOKENS = 2048  # the most that router_topk is meant for; more are several launches
BF16 = ml_dtypes.bfloat16
AROUND = "router, lists and shared experts"  # the task of what chains have in common
ROUTER, EXPERTS, MLP = "router_topk", "moe", "mlp"  # launches; the last for shared experts
BLOCK = "moe_block_tkg"
_CHIP = nki_sim.hardware.find("trn2")
_ACTIVATIONS = {"silu": "SiLU", "gelu": "GELU", "gelu_tanh": "GELU_Tanh_Approx"}
_ROUTER_LAYOUTS = {"H_T": 0, "T_H": 1}
_TILINGS = ("use_tkg_gate_up_proj_column_tiling", "use_tkg_down_proj_column_tiling")
_ROUTES = replace(TIMES_ONLY, small_elements=1 << 22)  # a block chooses by real numbers
_FAMILIES = {"qwen3_235b_a22b": "qwen3-30b"}  # of models that differ in sizes alone
Parts = Mapping[str, Estimate | str]
"""Time of each launch, or why it does not run."""


class ChainError(ValueError):
    """A kernel of the chain does not run with these sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """What became of one chain; times in microseconds.

    Attributes:
        name: of its launch of experts.
        low_us, us, high_us: of all launches; None where it did not run.
        why: why it did not, "" if it did.
    """

    name: str
    low_us: float | None = None
    us: float | None = None
    high_us: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer on a rank, as the vendor's kernels are given it.

    Attributes:
        whole: router and experts of all ranks, as wide as on this one.
        model: the experts of this rank.
        phase: prefill or decode.
        index_TK: [T, K] choices; this rank's experts are the first.
        shared_width: of its part of the shared experts, 0 for none.
        shared_activation: theirs.
    """

    whole: Model
    model: Model
    phase: str
    index_TK: NDArray[np.int32]
    shared_width: int = 0
    shared_activation: str = ""

    @classmethod
    def of(cls, name: str, phase: str, parts: LayerParts, index_TK: NDArray[np.int32]) -> Layer:
        """Return the layer of a shipped configuration.

        Args:
            name: of the configuration.
            phase: prefill or decode.
            parts: of ours on this rank.
            index_TK: [T, K] choices among the experts of all ranks.
        """
        family = _FAMILIES.get(name, name.replace("_", "-"))
        like = next(each for each in layers.MODELS if family.startswith(each.name))
        experts, width, hidden = parts.weights.down_proj_EIH.shape
        model = replace(like, H=hidden, I=width, E=experts, K=parts.spec.top_k)
        whole = replace(model, E=parts.num_experts)
        local_TK = (index_TK - parts.first_expert) % parts.num_experts
        shared = parts.shared
        return cls(
            whole=whole,
            model=model,
            phase=phase,
            index_TK=local_TK.astype(np.int32),
            shared_width=0 if shared is None else shared.width,
            shared_activation="" if shared is None else shared.spec.formula.activation,
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.index_TK)


class VendorSide:
    """The chains of one layer, as tasks: what they have in common, then one after the other.

    Those with the smallest bound come first. Left out are those whose bound exceeds the fastest
    time so far; blocks larger than need be for the tokens of any expert; the dynamic kernel where
    it ran with a known number of blocks, since it runs the same blocks and a loop besides; and
    moe_tkg where moe_block_tkg ran.

    Args:
        library: the user's checkout.
        layer: what to compute.
        known: chains of an earlier run, which are not run again.
    """

    def __init__(self, library: VendorLibrary, layer: Layer, known: Sequence[Chain] = ()) -> None:
        self._library, self._layer = library, layer
        self._found = {chain.name: chain for chain in known}
        self._around: Parts | None = None
        is_decode = layer.num_tokens <= PARTITIONS
        blocks = [f"{BLOCK} {mode}" for mode in decode.MODES] if is_decode else []
        self._variants = {} if layer.phase == "decode" else {v.name: v for v in VARIANTS}
        if is_decode:
            self._variants |= {v.name: v for v in VARIANTS if not v.block_size}
        names = [*blocks, *self._variants]
        self._bounds = {name: self._bound_us(name) for name in names}
        self._seconds = {name: self._seconds_of(name) for name in names}
        by_bound = [sorted(each, key=self._bounds.__getitem__) for each in (blocks, self._variants)]
        self._waiting = [name for each in by_bound for name in each if name not in self._found]
        self._running = set[str]()

    @property
    def chains(self) -> list[Chain]:
        """Return what is known of the chains, the fastest first."""
        found = self._found.values()
        return sorted(found, key=lambda chain: (chain.us or float("inf"), chain.name))

    @property
    def is_done(self) -> bool:
        """Whether all that might be the fastest have run."""
        return not self._waiting and not self._running

    @property
    def size(self) -> float:
        """The seconds of what still waits, about."""
        return sum(self._seconds[name] for name in self._waiting)

    def next_task(self) -> Task | None:
        """Hand out what chains have in common, or the next chain that may be the fastest."""
        if AROUND in self._running or not self._waiting:
            return None
        if self._around is None:
            self._running.add(AROUND)
            seconds = 1.0 + self._layer.num_tokens / 4096
            return Task(AROUND, seconds, partial(around, self._library, self._layer))
        for name in list(self._waiting):
            if f"{name} known" in self._running:
                continue
            self._waiting.remove(name)
            why = self._why_not(name)
            if why:
                self._found[name] = Chain(name=name, why=why)
                continue
            self._running.add(name)
            return Task(name, self._seconds[name], partial(self._run, name))
        return None

    def take(self, task: Task, result: Any) -> None:
        """Keep the result of a task."""
        self._running.discard(task.name)
        if task.name == AROUND:
            self._around = result
        else:
            self._found[task.name] = result

    def _bound_us(self, name: str) -> float:
        """Return a time below which the launch of experts cannot be (computed)."""
        layer = self._layer
        if name not in self._variants:
            return decode.bound_us(layer.model, name.split()[-1], layer.num_tokens)
        return bound_us(layer.model, layer.index_TK, self._variants[name], _CHIP)

    def _seconds_of(self, name: str) -> float:
        model, index_TK = self._layer.model, self._layer.index_TK
        like = self._variants.get(name, Variant("moe_tkg", 0, name.split()[-1]))
        return 0.3 * seconds_of(model, index_TK, like)

    def _others(self, name: str) -> list[str]:
        """Return the launches of a chain beside that of the experts."""
        found = [MLP] if self._layer.shared_width else []
        if name in self._variants:
            found.append(ROUTER)
            if size := self._variants[name].block_size:
                found += ["find_nonzero_indices", f"indexed_flatten B={size}"]
        return found

    def _why_not(self, name: str) -> str:
        """Say why a chain need not or cannot run; "" if it may."""
        assert self._around is not None
        variant = self._variants.get(name)
        ran = {chain.name: chain.us for chain in self._found.values() if chain.us is not None}
        if name.startswith("moe_tkg") and any(each.startswith(BLOCK) for each in ran):
            return f"{BLOCK} ran, which needs no launch for the router"
        if self._layer.whole.E > self._layer.model.E and name.endswith("selective"):
            return f"{DOES_NOT_RUN}takes experts of all ranks"
        if variant is not None and (
            why := variant.why_not(self._layer.model, self._layer.num_tokens)
        ):
            return why
        if variant is not None and self._fits_smaller(variant):
            return "the tokens of any expert fit a smaller block"
        others = [self._around[each] for each in self._others(name)]
        for each in others:
            if isinstance(each, str):
                return each
        if f"{name} known" in ran:
            return f"runs the blocks of '{name} known', and a loop besides"
        bound = self._bounds[name] + sum(each.us for each in others if not isinstance(each, str))
        best = min(ran.values(), default=float("inf"))
        return f"needs {bound:.0f} us at least" if bound > best else ""

    def _fits_smaller(self, variant: Variant) -> bool:
        """Whether its kernel takes a smaller block, which holds the tokens of any expert.

        Then it is as many blocks; not so of the kernel sharded on H, which computes empty ones too.
        """
        if variant.kernel == "shard_on_h":
            return False
        sizes = [v.block_size for v in self._variants.values() if v.kernel == variant.kernel]
        smaller = [size for size in sizes if size < variant.block_size]
        held = self._layer.index_TK < self._layer.model.E
        counts = np.bincount(self._layer.index_TK[held], minlength=1)
        return max(smaller, default=0) >= int(counts.max())

    def _run(self, name: str) -> Chain:
        """Simulate a chain."""
        assert self._around is not None
        layer, variant = self._layer, self._variants.get(name)
        if variant is None:
            launch = partial(_launch_block, self._library, layer, name.split()[-1])
        else:
            launch = partial(
                launch_vendor, self._library, layer.model, layer.index_TK, variant, OPTIONS
            )
        try:
            experts = _time(EXPERTS, launch)
        except ChainError as error:
            return Chain(name=name, why=f"{DOES_NOT_RUN}{error}")
        others = (self._around[each] for each in self._others(name))
        total = program([experts, *(each for each in others if not isinstance(each, str))])
        low_us, us, high_us = (round(each, 2) for each in (total.low_us, total.us, total.high_us))
        return Chain(name=name, low_us=low_us, us=us, high_us=high_us)


def only_slowest_fits(chains: Sequence[Chain]) -> bool:
    """Whether none of the vendor's prefill kernels but the slowest runs with these sizes."""
    ran = {chain.name for chain in chains if chain.us is not None}
    refused = {chain.name.split()[0] for chain in chains if chain.why.startswith(DOES_NOT_RUN)}
    return bool(ran) and ran <= {*SLOWEST} and refused >= {*KERNEL_NAMES} - {"shard_on_block"}


def around(library: VendorLibrary, layer: Layer) -> dict[str, Estimate | str]:
    """Return the time of the launches that chains have in common, or why they do not run.

    Args:
        library: the user's checkout.
        layer: what to compute.
    """
    found: dict[str, Estimate | str] = {}
    wanted: dict[str, Callable[[], Estimate]] = {ROUTER: partial(_route, library, layer)}
    if layer.shared_width:
        wanted[MLP] = partial(_every_token, library, layer)
    for name, make in wanted.items():
        try:
            found[name] = make()
        except ChainError as error:
            found[name] = f"{DOES_NOT_RUN}{error}"
    if layer.phase == "prefill":
        found |= _lists(library, layer)
    return found


def _lists(library: VendorLibrary, layer: Layer) -> Iterator[tuple[str, Estimate | str]]:
    """Yield the launches that list the tokens of each expert and put them into blocks."""
    names = ["find_nonzero_indices", *(f"indexed_flatten B={size}" for size in BLOCK_SIZES)]
    found: dict[str, Estimate | str] = {}
    try:
        runs = index_runs(library, layer.model, layer.index_TK, layer.whole.E)
        for name, run in runs:
            found[name] = time_of(run.timeline)
    except UNFIT as error:
        why = f"{DOES_NOT_RUN}its lists: {type(error).__name__}: {first_line(error)}"
        found = {name: found.get(name, why) for name in names}
    yield from found.items()


def _launch_block(library: VendorLibrary, layer: Layer, mode: str) -> nki_sim.Run:
    """Simulate moe_block_tkg."""
    case = DecodeCase(
        kernel="decode_block",
        model=layer.whole,
        B=layer.num_tokens,
        routing="uniform",
        format="bf16",
    )
    return decode.launch_vendor(library, case, mode, _ROUTES, layer.model)


def _every_token(library: VendorLibrary, layer: Layer) -> Estimate:
    """Return the time of shared experts: a dense MLP of all tokens."""
    H, width = layer.model.H, layer.shared_width
    specs = {
        "hidden_tensor": (1, layer.num_tokens, H),
        "gate_proj_weights_tensor": (H, width),
        "up_proj_weights_tensor": (H, width),
        "down_proj_weights_tensor": (width, H),
    }
    operands = {name: nki_sim.TensorSpec(shape, "bfloat16") for name, shape in specs.items()}
    activation = library.enum("ActFnType", _ACTIVATIONS[layer.shared_activation])
    kernel = _mlp_kernel(library)
    return _time(
        MLP,
        lambda: nki_sim.run(
            kernel, lnc=CORES, options=OPTIONS, activation_fn=activation, **operands
        ),
    )


def _route(library: VendorLibrary, layer: Layer, most: int = ROUTER_TOKENS) -> Estimate:
    """Return the time of the router's launches, in the faster layout of hidden states."""
    rows = min(layer.num_tokens, most)
    try:
        ways = [_route_once(library, layer.whole, rows, each) for each in _ROUTER_LAYOUTS]
    except ChainError:  # wide tokens leave room for fewer
        if rows <= PARTITIONS:
            raise
        return _route(library, layer, rows // 2)
    fastest = min(ways, key=lambda way: way.us)
    return sum([fastest] * -(-layer.num_tokens // rows), NOTHING)


def _route_once(library: VendorLibrary, model: Model, rows: int, layout: str) -> Estimate:
    router, rng = ROUTERS[model.name], np.random.default_rng(0)
    H, E, K = -(-model.H // 128) * 128, model.E, model.K
    x_TH = rng.standard_normal((rows, H)).astype(BF16)
    weight_HE = (rng.standard_normal((H, E)) / H**0.5).astype(BF16)
    kernel = library.get("core.router_topk.router_topk", "router_topk")
    arguments = {
        "x": x_TH if layout == "T_H" else np.ascontiguousarray(x_TH.T),
        "w": weight_HE,
        "w_bias": np.zeros((1, E), BF16) if router.get("has_bias") else None,
        "router_logits": np.zeros((rows, E), BF16),
        "expert_affinities": np.zeros((rows, E), BF16),
        "expert_index": np.zeros((rows, K), np.uint32),
        "act_fn": library.enum("RouterActFnType", router["act_fn"].upper()),
        "k": K,
        "x_hbm_layout": _ROUTER_LAYOUTS[layout],
        "x_sb_layout": 0,
        "router_pre_norm": not router.get("act_over_topk", False),
        "norm_topk_prob": bool(router.get("renormalize")),
        "shard_on_tokens": rows > 1,
    }
    return _time(ROUTER, lambda: nki_sim.run(kernel, lnc=CORES, options=FULL, **arguments))


def _time(name: str, launch: Callable[[], nki_sim.Run]) -> Estimate:
    """Return the time of a launch in a graph.

    Raises:
        ChainError: it does not run with these sizes.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the library prints advice
            run = launch()
    except UNFIT as error:
        raise ChainError(f"{name}: {type(error).__name__}: {first_line(error)}") from error
    return time_of(run.timeline)


def _mlp_kernel(library: VendorLibrary) -> Any:
    """Return the library's entry point or, where that file does not compile, what it would do.

    The release of April 2026 has an indentation error in core/mlp/mlp.py; the two kernels behind it
    are intact.
    """
    try:
        return library.get("core.mlp.mlp", "mlp")
    except SyntaxError:
        pass
    nl = library.nl
    parameters = "core.mlp.mlp_parameters"
    make = library.get(parameters, "MLPParameters")
    validate = library.get(parameters, "validate_mlp_arguments")
    is_decode = library.get(parameters, "is_mlp_tkg")
    decode = library.get("core.mlp.mlp_tkg.mlp_tkg", "mlp_tkg")
    prefill = library.get("core.mlp.mlp_cte.mlp_cte", "mlp_cte")
    manager = library.get("core.utils.allocator", "SbufManager")
    logger = library.get("core.utils.logging", "Logger")

    def mlp(hidden_tensor: Any, store_fused_add_result: bool = False, **rest: Any) -> Any:
        tiling = dict.fromkeys(_TILINGS, True)
        params = make(
            hidden_tensor=hidden_tensor,
            store_fused_add_result=store_fused_add_result,
            **(tiling | rest),
        )
        validate(params)
        sbm = manager(0, 200 * 1024, logger("mlp"))
        sbm.set_name_prefix("mlp_")
        names = ["output_tensor_hbm", "output_stored_add_tensor_hbm"][: 1 + store_fused_add_result]
        shape, dtype = hidden_tensor.shape, hidden_tensor.dtype
        outs = [nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm, name=name) for name in names]
        added = outs[1] if store_fused_add_result else None
        if is_decode(params):
            return decode(params, outs[0], added, sbm=sbm)
        prefill(params, outs[0], added)
        return outs

    return mlp

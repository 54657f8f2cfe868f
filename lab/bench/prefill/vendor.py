"""The vendor's kernels on a prefill of the benchmark: variants, their bounds, their arguments."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import nki_sim
from lab.bench.comparison.attempts import Attempt
from lab.bench.comparison.deployed import BLOCK_SIZE
from lab.bench.decode import vendor as decode
from lab.bench.prefill.vendor_index import (
    UNFIT,
    first_line,
    index_times,
    lists_time,
)
from lab.check.vendor_cases.block_mapping import num_blocks
from lab.check.vendor_cases.library import VendorLibrary
from lab.check.vendor_cases.moe_prefill import CORES, KERNELS
from neuron_moe.backends.nki.times import TIMES_ONLY
from neuron_moe.tools.timing import runs
from neuron_moe.tools.timing.layers import BF16_BYTES, Model
from neuron_moe.tools.timing.pool import Task
from nki_sim import SimOptions, TensorSpec
from nki_sim.hardware import Hardware
from nki_sim.time.estimate import Estimate

H_MULTIPLE, I_MULTIPLE = 512, 16  # what the kernels require; callers pad
OPTIONS = replace(TIMES_ONLY, nki="0.6")  # the language of these kernels
DOES_NOT_RUN = "does not run: "  # begins why a variant cannot compute a case


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel with one block size.

    Attributes:
        kernel: of the vendor's prefill kernels.
        block_size: B.
        mode: "" for the plain kernel; "keep" keeps the weights of a repeated expert; "known" runs
            the dynamic kernel as if the number of live blocks were known when it is compiled, which
            flatters it; of the decode kernel, which has no blocks (B is 0), its own.
    """

    kernel: str
    block_size: int
    mode: str = ""

    @property
    def name(self) -> str:
        """Kernel, block size and mode."""
        size = f"B={self.block_size} " if self.block_size else ""
        return f"{self.kernel} {size}{self.mode}".rstrip()

    def why_not(self, model: Model, num_tokens: int) -> str:
        """Say why the kernel cannot compute a layer; "" if it may."""
        if self.kernel == "moe_tkg" and num_tokens > MOST_DECODED:
            return f"{DOES_NOT_RUN}takes up to {MOST_DECODED} tokens"
        if self.kernel == "shard_on_h" and model.vendor.get("bias"):
            return f"{DOES_NOT_RUN}has neither biases nor clamps"
        return ""


VARIANTS = (
    Variant("shard_on_block", 128),
    Variant("shard_on_block", 256),
    Variant("shard_on_block", 128, "keep"),
    Variant("shard_on_block", 256, "keep"),
    Variant("shard_on_block", 512, "keep"),
    *(Variant("shard_on_i_hybrid", B, "known") for B in (256, 512, 1024)),
    *(Variant("shard_on_i_hybrid", B) for B in (256, 512, 1024)),
    *(Variant("shard_on_h", B) for B in (128, 256, 512, 1024)),
    *(Variant("moe_tkg", 0, mode) for mode in decode.MODES),
)
DEPLOYED = Variant("shard_on_h", BLOCK_SIZE)  # NxD's default
SLOWEST = ("shard_on_block B=128", "shard_on_block B=128 keep")  # fit where no other one does
KERNEL_NAMES = tuple(dict.fromkeys(variant.kernel for variant in VARIANTS))
MOST_DECODED = 128  # tokens that the decode kernel takes
INDEX = "index"  # the task of the launches that list tokens


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a case.

    Attributes:
        attempts: at variants, by name.
        index: time of each launch that lists tokens, by name and block size.
    """

    attempts: Mapping[str, Attempt] = field(default_factory=dict)
    index: Mapping[str, Estimate] = field(default_factory=dict)


class VendorSide:
    """The vendor's variants of one case: which still matter, and what they took.

    The launches that list the tokens of each block run first, for all block sizes, then the
    variants in the order of their bounds. A variant is left out where its bound exceeds the fastest
    time so far, with its lists and without, and so is the dynamic kernel where it ran with a known
    number of blocks: it runs the same blocks, and a loop besides.

    Args:
        library: the user's checkout; None runs nothing.
        model: the layer.
        expert_index_TK: [T, K] the choices; numbers beyond the model's are another rank's.
        known: what an earlier run found; that is not run again.
        chip: what the bounds are computed for.
        kernels: only variants of these are run.
        all_experts: of all ranks; default: the model's.

    Attributes:
        index: time of each launch that lists tokens, by name and block size.
    """

    def __init__(
        self,
        library: VendorLibrary | None,
        model: Model,
        expert_index_TK: Any,
        known: Known,
        *,
        chip: Hardware,
        kernels: Collection[str] = KERNEL_NAMES,
        all_experts: int | None = None,
    ) -> None:
        self._library, self._model, self._index_TK = library, model, expert_index_TK
        self._kernels, self._all_experts = kernels, all_experts or model.E
        self._bounds = {v: bound_us(model, expert_index_TK, v, chip) for v in VARIANTS}
        self._seconds = {v: seconds_of(model, expert_index_TK, v) for v in VARIANTS}
        self._found, self.index = dict(known.attempts), dict(known.index)
        self._waiting = sorted(VARIANTS, key=self._bounds.__getitem__) if library else []
        self._running = set[str]()

    def attempts(self) -> list[Attempt]:
        """Return what is known of the variants, that with the smallest bound first."""
        order = sorted(VARIANTS, key=self._bounds.__getitem__)
        return [self._found[variant.name] for variant in order if variant.name in self._found]

    @property
    def is_done(self) -> bool:
        """Whether all that might be the fastest have run."""
        return not self._waiting and not self._running

    @property
    def size(self) -> float:
        """The seconds of what still waits, about."""
        return sum(self._seconds[variant] for variant in self._waiting)

    def next_task(self) -> Task | None:
        """Hand out the next variant that may be the fastest."""
        if self._library is not None and not self.index:
            if INDEX in self._running:
                return None
            self._running.add(INDEX)
            listed = functools.partial(
                index_times, self._library, self._model, self._index_TK, self._all_experts
            )
            return Task(INDEX, 1.0, listed)
        for variant in list(self._waiting):
            if f"{variant.name} known" in self._running:
                continue
            self._waiting.remove(variant)
            if self._is_wanted(variant):
                self._running.add(variant.name)
                given_us, chain_us = self._fastest_us()
                most_us = max(given_us, chain_us - self._lists_us(variant))
                attempt = functools.partial(self._attempt, variant, most_us)
                return Task(variant.name, self._seconds[variant], attempt)
        return None

    def take(self, task: Task, result: Any) -> None:
        """Keep the attempt at a variant, or the times of the lists."""
        self._running.discard(task.name)
        if task.name == INDEX:
            self.index = result
        else:
            self._found[result.name] = result

    def _fastest_us(self) -> tuple[float, float]:
        """Return the fastest time so far with lists given, and with those in front."""
        attempts = self.attempts()
        given_us, chain_us = (
            min((a.us for a in each if a.us is not None), default=float("inf"))
            for each in (attempts, with_lists(attempts, self.index))
        )
        return given_us, chain_us

    def _lists_us(self, variant: Variant) -> float:
        lists = lists_time(variant.name, self.index)
        return 0.0 if lists is None else lists.us

    def _is_wanted(self, variant: Variant) -> bool:
        """Whether to run a variant; if it cannot win, keep why."""
        found, bound = self._found, self._bounds[variant]
        if variant.name in found or variant.kernel not in self._kernels:
            return False
        why = variant.why_not(self._model, len(self._index_TK))
        given_us, chain_us = self._fastest_us()
        if not why and bound > given_us and bound + self._lists_us(variant) > chain_us:
            why = f"needs {bound:.0f} us at least, another takes {given_us:.0f} us"
        flattered = found.get(f"{variant.name} known")
        if flattered is not None and flattered.us is not None:
            why = f"runs the blocks of {flattered.name!r}, and a loop besides"
        if why:
            found[variant.name] = Attempt(name=variant.name, bound_us=bound, why=why)
        return not why

    def _attempt(self, variant: Variant, most_us: float) -> Attempt:
        """Simulate one variant; `most_us` is what it may take to be the fastest."""
        assert self._library is not None
        name, bound = variant.name, self._bounds[variant]
        found = Attempt(name=name, bound_us=bound)
        try:
            run = launch_vendor(self._library, self._model, self._index_TK, variant, OPTIONS)
        except UNFIT as error:
            return replace(found, why=f"{DOES_NOT_RUN}{type(error).__name__}: {first_line(error)}")
        took = run.timeline.total_us
        if took < bound and not isinstance(run, runs.MeasuredRun):
            raise RuntimeError(
                f"{name}: took {took:.0f} us, less than its bound of {bound:.0f} us. "
                "Correct bound_us: it must hold for every run."
            )
        return found.timed(run.timeline, most_us)


def with_lists(attempts: Sequence[Attempt], index: Mapping[str, Estimate]) -> list[Attempt]:
    """Return attempts with the launches in front that list the tokens of their blocks."""
    found = []
    for attempt in attempts:
        lists = lists_time(attempt.name, index)
        if attempt.us is None:
            found.append(attempt)
        elif lists is None:
            found.append(replace(attempt, us=None, why=f"its lists: {', '.join(index)}"))
        elif attempt.time is None:
            found.append(replace(attempt, us=attempt.us + lists.us))
        else:
            found.append(attempt.taking(attempt.time + lists))
    return found


def only_slowest_fits(attempts: Sequence[Attempt]) -> bool:
    """Whether none of the vendor's kernels but the slowest runs with these sizes."""
    ran = {attempt.name for attempt in attempts if attempt.us is not None}
    refused = {a.name.split()[0] for a in attempts if a.why.startswith(DOES_NOT_RUN)}
    return bool(ran) and ran <= {*SLOWEST} and refused >= {*KERNEL_NAMES} - {"shard_on_block"}


def seconds_of(model: Model, expert_index_TK: Any, variant: Variant) -> float:
    """Return what simulating a variant takes, about (measured on one machine)."""
    if not variant.block_size:
        experts = model.E if variant.mode == "all_experts" else expert_index_TK.size
        return 0.5 + 0.01 * experts
    blocks = _run_blocks(model, expert_index_TK, variant)
    rows = blocks * (1.0 + variant.block_size / 256)
    dynamic = 3.0 if variant.kernel == "shard_on_i_hybrid" else 1.0
    return 0.3 + 0.03 * rows * dynamic * (model.H / 3072)


def _run_blocks(model: Model, expert_index_TK: Any, variant: Variant) -> int:
    """Return the blocks that a variant computes: those with tokens, of shard_on_h all."""
    T, K = expert_index_TK.shape
    if variant.kernel == "shard_on_h":
        return num_blocks(T, min(K, model.E), model.E, variant.block_size)
    return int(np.ceil(_counts(model, expert_index_TK) / variant.block_size).sum())


def _counts(model: Model, expert_index_TK: Any) -> Any:
    """Return the choices of each expert; numbers beyond the model's are another rank's."""
    return np.bincount(expert_index_TK.reshape(-1), minlength=model.E)[: model.E]


def bound_us(model: Model, expert_index_TK: Any, variant: Variant, chip: Hardware) -> float:
    """Return a time below which the variant cannot be on this chip (computed).

    The larger of the weights it loads (those of each block that it computes; with kept weights
    those of each expert once) over the bandwidth of the stack, and the multiplications of these
    blocks, padding included, over two full arrays. That of the decode kernel: its weights.
    """
    if not variant.block_size:
        return decode.bound_us(model, variant.mode, len(expert_index_TK))
    counts = _counts(model, expert_index_TK)
    blocks = _run_blocks(model, expert_index_TK, variant)
    loads = int((counts > 0).sum()) if variant.mode == "keep" else blocks
    cells = 3 * model.H * model.I
    macs_per_ns = CORES * chip.array_rows * chip.array_columns * chip.tensor_clock_ghz
    memory_ns = loads * cells * BF16_BYTES / chip.hbm_bytes_per_ns
    return max(memory_ns, blocks * variant.block_size * cells / macs_per_ns) / 1e3


def launch_vendor(
    library: VendorLibrary,
    model: Model,
    expert_index_TK: Any,
    variant: Variant,
    options: SimOptions,
    bucket: int | None = None,
) -> nki_sim.Run:
    """Simulate one variant; return the run.

    Args:
        library: the user's checkout.
        model: the layer.
        expert_index_TK: [T, K] the choices.
        variant: what to run.
        options: of the simulator.
        bucket: tokens that the graph is compiled for, behind the T padding (default: T).

    Raises:
        NkiValidationError: the kernel breaks a rule of the simulated chip with these sizes.
        AssertionError: the kernel refuses these sizes.
    """
    if not variant.block_size:
        here_TK = np.minimum(expert_index_TK, model.E - 1)  # its time is that of any choices
        return decode.launch_moe(library, model, here_TK, variant.mode, options)
    module, name, _ = KERNELS[variant.kernel]
    with contextlib.redirect_stdout(io.StringIO()):  # the library prints advice
        return runs.run(
            library.get(module, name),
            lnc=CORES,
            options=options,
            **_arguments(library, model, expert_index_TK, variant, bucket or len(expert_index_TK)),
        )


def _arguments(
    library: VendorLibrary, model: Model, expert_index_TK: Any, variant: Variant, T: int
) -> dict[str, Any]:
    """Return the arguments: padded sizes, tokens skipped, floating point without values."""
    K = expert_index_TK.shape[1]
    E, B = model.E, variant.block_size
    H = -(-model.H // H_MULTIPLE) * H_MULTIPLE
    I = -(-model.I // I_MULTIPLE) * I_MULTIPLE  # noqa: E741  the axis letter
    on_block, on_h = variant.kernel == "shard_on_block", variant.kernel == "shard_on_h"
    blocks = num_blocks(T, min(K, E), E, B, CORES if on_block else 1)
    ids, block_to_expert, live = _blocks(expert_index_TK, E, B, blocks)
    vendor, bf16 = model.vendor, "bfloat16"
    skip_mode = library.get(KERNELS[variant.kernel][0], "SkipMode")
    found: dict[str, Any] = {
        "hidden_states": TensorSpec((T, H), bf16),
        "expert_affinities_masked": TensorSpec((T * E, 1), bf16),
        "gate_up_proj_weight": TensorSpec((E, H, 2, I), bf16),
        "down_proj_weight": TensorSpec((E, I, H), bf16),
        "block_size": B,
        "token_position_to_id": ids,
        "block_to_expert": block_to_expert[:, None] if on_h else block_to_expert,
        "skip_dma": skip_mode(True, variant.mode == "keep"),
        "compute_dtype": library.nl.bfloat16,
        "is_tensor_update_accumulating": K != 1,
        "expert_affinities_scaling_mode": library.enum(
            "ExpertAffinityScaleMode", vendor.get("scaling", "POST_SCALE")
        ),
    }
    if on_h:  # computes SiLU alone
        return found
    found["activation_function"] = library.enum("ActFnType", vendor.get("act_fn", "SiLU"))
    if not on_block:
        found["conditions"] = (np.arange(blocks + 1) < live).astype(np.int32)
        found["num_static_block"] = live if variant.mode == "known" else 0
    if vendor.get("bias"):
        found["gate_and_up_proj_bias"] = TensorSpec((E, 2, I), bf16)
        found["down_proj_bias"] = TensorSpec((E, H), bf16)
    for key in ("gate_upper", "up_upper", "up_lower"):
        if key in vendor:
            side, bound = key.split("_")
            found[f"{side}_clamp_{bound}_limit"] = vendor[key]
    return found


def _blocks(expert_index_TK: Any, E: int, B: int, blocks: int) -> tuple[Any, Any, int]:
    """Return token ids of the slots, experts of the blocks, and the number of live blocks."""
    T, K = expert_index_TK.shape
    ids = np.full(blocks * B, -1, np.int32)
    block_to_expert = np.full(blocks, E - 1, np.int32)
    token = np.repeat(np.arange(T, dtype=np.int32), K)
    flat = expert_index_TK.reshape(-1)
    first = 0
    for expert in range(E):
        members = token[flat == expert]
        used = -(-len(members) // B)
        ids[first * B : first * B + len(members)] = members
        block_to_expert[first : first + used] = expert
        first += used
    return ids, block_to_expert, first

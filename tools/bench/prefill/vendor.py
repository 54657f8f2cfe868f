"""The vendor's prefill kernels on a benchmark's case: variants, their bounds, their arguments."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import nki_sim
from neuron_moe.tools.bench.comparison import runs
from neuron_moe.tools.bench.comparison.attempts import Attempt
from neuron_moe.tools.bench.comparison.deployed import BLOCK_SIZE
from neuron_moe.tools.bench.comparison.layers import BF16_BYTES, Model
from neuron_moe.tools.bench.comparison.pool import Task
from neuron_moe.tools.bench.comparison.timelines import corner_timelines
from neuron_moe.tools.bench.prefill.ours import OPTIONS
from neuron_moe.tools.check.vendor_cases.block_mapping import num_blocks
from neuron_moe.tools.check.vendor_cases.library import VendorLibrary
from neuron_moe.tools.check.vendor_cases.moe_prefill import CORES, KERNELS
from nki_sim import SimOptions, TensorSpec
from nki_sim.hardware import Hardware

H_MULTIPLE, I_MULTIPLE = 512, 16  # what the kernels ask for; callers pad
# What a kernel raises that does not run with some sizes; some divide by the number of blocks.
UNFIT = (nki_sim.NkiValidationError, AssertionError, NotImplementedError, ZeroDivisionError)


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel with one block size.

    Attributes:
        kernel: of the vendor's prefill kernels.
        block_size: B.
        mode: "" for the plain kernel; "keep" keeps the weights of a repeated expert; "known" runs
            the dynamic kernel as if the number of live blocks were known when it is compiled, which
            flatters it.
    """

    kernel: str
    block_size: int
    mode: str = ""

    @property
    def name(self) -> str:
        """Kernel, block size and mode."""
        return f"{self.kernel} B={self.block_size} {self.mode}".rstrip()


VARIANTS = (
    Variant("shard_on_block", 128),
    Variant("shard_on_block", 256),
    Variant("shard_on_block", 128, "keep"),
    Variant("shard_on_block", 256, "keep"),
    Variant("shard_on_block", 512, "keep"),
    Variant("shard_on_i_hybrid", 256, "known"),
    Variant("shard_on_i_hybrid", 512, "known"),
    Variant("shard_on_i_hybrid", 256),
    Variant("shard_on_i_hybrid", 512),
)
DEPLOYED = Variant("shard_on_h", BLOCK_SIZE)  # NxD's default, every block of the graph
KERNEL_NAMES = tuple(dict.fromkeys(variant.kernel for variant in VARIANTS))


class VendorSide:
    """The vendor's variants of one case: which still matter in which corner, and what they took.

    They run in the order of their bounds. A variant whose bound exceeds the fastest time so far in
    every corner is left out, and so is the dynamic kernel where it ran with a known number of
    blocks: it runs the same blocks, and a loop besides.

    Args:
        library: the user's checkout; None runs nothing.
        model: the layer.
        expert_index_TK: [T, K] the choices; numbers beyond the model's are another rank's.
        known: attempts of an earlier run by corner and name; those are not run again.
        chip: what the bounds are computed for.
        kernels: only variants of these are run.
    """

    def __init__(
        self,
        library: VendorLibrary | None,
        model: Model,
        expert_index_TK: Any,
        known: Mapping[str, Mapping[str, Attempt]],
        *,
        chip: Hardware,
        kernels: Collection[str] = KERNEL_NAMES,
    ) -> None:
        self._library, self._model, self._index_TK = library, model, expert_index_TK
        self._kernels = kernels
        self._bounds = {v: bound_us(model, expert_index_TK, v, chip) for v in VARIANTS}
        self._seconds = {v: seconds_of(model, expert_index_TK, v) for v in VARIANTS}
        self._found = {corner: dict(attempts) for corner, attempts in known.items()}
        self._waiting = sorted(VARIANTS, key=self._bounds.__getitem__) if library else []
        self._running = set[str]()

    def attempts(self, corner: str) -> list[Attempt]:
        """Return what is known of the variants in a corner, that with the smallest bound first."""
        found = self._found[corner]
        order = sorted(VARIANTS, key=self._bounds.__getitem__)
        return [found[variant.name] for variant in order if variant.name in found]

    @property
    def size(self) -> float:
        """The seconds of what still waits, about."""
        return sum(self._seconds[variant] for variant in self._waiting)

    def next_task(self) -> Task | None:
        """Hand out the next variant that may be the fastest in some corner."""
        for variant in list(self._waiting):
            if f"{variant.name} known" in self._running:
                continue
            self._waiting.remove(variant)
            best = {c: self._best(c) for c in self._found if self._is_wanted(variant, c)}
            if best:
                self._running.add(variant.name)
                return Task(
                    variant.name,
                    self._seconds[variant],
                    functools.partial(self._attempt, variant, best),
                )
        return None

    def take(self, task: Task, result: Mapping[str, Attempt]) -> None:
        """Keep the attempts at a variant, by corner."""
        self._running.discard(task.name)
        for corner, attempt in result.items():
            self._found[corner][attempt.name] = attempt

    def _best(self, corner: str) -> float:
        times = [a.us for a in self._found[corner].values() if a.us is not None]
        return min(times, default=float("inf"))

    def _is_wanted(self, variant: Variant, corner: str) -> bool:
        """Whether to run a variant for a corner; if it cannot win there, keep why."""
        found, best, bound = self._found[corner], self._best(corner), self._bounds[variant]
        if variant.name in found or variant.kernel not in self._kernels:
            return False
        why = f"needs {bound:.0f} us at least, another takes {best:.0f} us" if bound > best else ""
        flattered = found.get(f"{variant.name} known")
        if flattered is not None and flattered.us is not None:
            why = f"runs the blocks of {flattered.name!r}, and a loop besides"
        if why:
            found[variant.name] = Attempt(name=variant.name, bound_us=bound, why=why)
        return not why

    def _attempt(self, variant: Variant, best: Mapping[str, float]) -> dict[str, Attempt]:
        """Simulate one variant; return the attempts by corner.

        Args:
            variant: what to run.
            best: the fastest time so far by corner; only these corners are timed.
        """
        assert self._library is not None
        name, bound = variant.name, self._bounds[variant]
        try:
            run = launch_vendor(self._library, self._model, self._index_TK, variant, OPTIONS)
        except UNFIT as error:
            line = (str(error).strip().splitlines() or [""])[0].rsplit("/", 1)[-1]
            why = f"{type(error).__name__}: {line}"
            return {corner: Attempt(name=name, bound_us=bound, why=why) for corner in best}
        found = {}
        for corner, timeline in corner_timelines(run, best):
            took = timeline.total_us
            if took < bound and not isinstance(run, runs.MeasuredRun):
                raise RuntimeError(
                    f"{name}: took {took:.0f} us, less than its bound of {bound:.0f} us. "
                    "Correct bound_us: it must hold for every run."
                )
            found[corner] = Attempt(name=name, bound_us=bound, us=took)
        return found


def seconds_of(model: Model, expert_index_TK: Any, variant: Variant) -> float:
    """Return what simulating a variant in both corners takes, about (measured on one machine)."""
    blocks = _live_blocks(model, expert_index_TK, variant.block_size)
    if variant == DEPLOYED:  # runs those without tokens, too
        T, K = expert_index_TK.shape
        blocks = num_blocks(T, min(K, model.E), model.E, variant.block_size)
    rows = blocks * (1.0 + variant.block_size / 256)
    dynamic = 3.0 if variant.kernel == "shard_on_i_hybrid" else 1.0
    return 0.3 + 0.03 * rows * dynamic * (model.H / 3072)


def _live_blocks(model: Model, expert_index_TK: Any, B: int) -> int:
    return int(np.ceil(_counts(model, expert_index_TK) / B).sum())


def _counts(model: Model, expert_index_TK: Any) -> Any:
    """Return the choices of each expert; numbers beyond the model's are another rank's."""
    return np.bincount(expert_index_TK.reshape(-1), minlength=model.E)[: model.E]


def bound_us(model: Model, expert_index_TK: Any, variant: Variant, chip: Hardware) -> float:
    """Return a time below which the variant cannot be on this chip (computed).

    The larger of the weights it loads (those of each block that holds tokens; with kept weights
    those of each expert once) over the bandwidth of the stack, and the multiplications of these
    blocks, padding included, over two full arrays.
    """
    counts = _counts(model, expert_index_TK)
    blocks = _live_blocks(model, expert_index_TK, variant.block_size)
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
    on_block = variant.kernel == "shard_on_block"
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
        "block_to_expert": block_to_expert if variant != DEPLOYED else block_to_expert[:, None],
        "skip_dma": skip_mode(True, variant.mode == "keep"),
        "compute_dtype": library.nl.bfloat16,
        "is_tensor_update_accumulating": K != 1,
        "expert_affinities_scaling_mode": library.enum(
            "ExpertAffinityScaleMode", vendor.get("scaling", "POST_SCALE")
        ),
    }
    if variant == DEPLOYED:  # computes SiLU alone
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

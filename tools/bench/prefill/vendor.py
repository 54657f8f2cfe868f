"""The vendor's prefill kernels on a benchmark's case: variants, their bounds, their arguments."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import nki_sim
from neuron_moe.tools.bench.comparison.attempts import Attempt
from neuron_moe.tools.bench.comparison.layers import BF16_BYTES, Model
from neuron_moe.tools.bench.comparison.timelines import varied_us
from neuron_moe.tools.check.vendor_cases.block_mapping import num_blocks
from neuron_moe.tools.check.vendor_cases.library import VendorLibrary
from neuron_moe.tools.check.vendor_cases.moe_prefill import CORES, KERNELS
from nki_sim import SimOptions, TensorSpec
from nki_sim.hardware import Hardware

H_MULTIPLE, I_MULTIPLE = 512, 16  # what the kernels ask for; callers pad
VARIED_WITHIN = 1.05  # variants up to this multiple of the fastest are varied


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
KERNEL_NAMES = tuple(dict.fromkeys(variant.kernel for variant in VARIANTS))


def attempt_all(
    library: VendorLibrary,
    model: Model,
    expert_index_TK: Any,
    options: SimOptions,
    *,
    chip: Hardware,
    with_varied: bool,
    known: Mapping[str, Attempt],
    kernels: Collection[str] = KERNEL_NAMES,
) -> list[Attempt]:
    """Simulate the variants, that with the smallest bound first.

    A variant whose bound exceeds the fastest time so far is left out, and so is the dynamic kernel
    where it ran with a known number of blocks: it runs the same blocks, and a loop besides. Only
    those up to `VARIED_WITHIN` times the fastest are timed with changed coefficients.

    Args:
        library: the user's checkout.
        model: the layer.
        expert_index_TK: [T, K] the choices.
        options: of the simulator.
        chip: what the bounds are computed for.
        with_varied: whether to also time them with changed coefficients.
        known: attempts of an earlier run, by name; those are not run again.
        kernels: only variants of these are run.
    """
    bounds = {variant: bound_us(model, expert_index_TK, variant, chip) for variant in VARIANTS}
    attempts: list[Attempt] = []
    best = min((a.us for a in known.values() if a.us is not None), default=float("inf"))
    for variant, bound in sorted(bounds.items(), key=lambda entry: entry[1]):
        earlier = known.get(variant.name)
        if earlier is not None and _is_enough(earlier, best, with_varied):
            attempts.append(earlier)
            continue
        if variant.kernel not in kernels:
            continue
        why = f"needs {bound:.0f} us at least, another takes {best:.0f} us" if bound > best else ""
        flattered = f"{variant.name} known"
        if any(a.name == flattered and a.us is not None for a in attempts):
            why = f"runs the blocks of {flattered!r}, and a loop besides"
        if why:
            attempts.append(Attempt(name=variant.name, bound_us=bound, why=why))
            continue
        attempts.append(
            _attempt(library, model, expert_index_TK, variant, options, bound, best, with_varied)
        )
        best = min(best, attempts[-1].us or best)
        gc.collect()
    return attempts


def _is_enough(earlier: Attempt, best: float, with_varied: bool) -> bool:
    is_near = earlier.us is not None and earlier.us <= VARIED_WITHIN * best
    return not (with_varied and is_near and not earlier.varied)


def _attempt(
    library: VendorLibrary,
    model: Model,
    expert_index_TK: Any,
    variant: Variant,
    options: SimOptions,
    bound: float,
    best: float,
    with_varied: bool,
) -> Attempt:
    try:
        timeline = launch_vendor(library, model, expert_index_TK, variant, options)
    except (nki_sim.NkiValidationError, AssertionError, NotImplementedError) as error:
        line = (str(error).strip().splitlines() or [""])[0].rsplit("/", 1)[-1]
        return Attempt(name=variant.name, bound_us=bound, why=f"{type(error).__name__}: {line}")
    took = timeline.total_us
    if took < bound:
        raise RuntimeError(
            f"{variant.name}: took {took:.0f} us, less than its bound of {bound:.0f} us. "
            "Correct bound_us: it must hold for every run."
        )
    varied = varied_us(timeline) if with_varied and took <= VARIED_WITHIN * best else {}
    return Attempt(name=variant.name, bound_us=bound, us=took, varied=varied)


def bound_us(model: Model, expert_index_TK: Any, variant: Variant, chip: Hardware) -> float:
    """Return a time below which the variant cannot be on this chip (computed).

    The larger of the weights it loads (those of each block that holds tokens; with kept weights
    those of each expert once) over the bandwidth of the stack, and the multiplications of these
    blocks, padding included, over two full arrays.
    """
    counts = np.bincount(expert_index_TK.reshape(-1), minlength=model.E)
    blocks = int(np.ceil(counts / variant.block_size).sum())
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
) -> Any:
    """Simulate one variant; return its timeline.

    Raises:
        NkiValidationError: the kernel breaks a rule of the simulated chip with these sizes.
        AssertionError: the kernel refuses these sizes.
    """
    module, name, _ = KERNELS[variant.kernel]
    run = nki_sim.run(
        library.get(module, name),
        lnc=CORES,
        options=options,
        **_arguments(library, model, expert_index_TK, variant),
    )
    return run.timeline


def _arguments(
    library: VendorLibrary, model: Model, expert_index_TK: Any, variant: Variant
) -> dict[str, Any]:
    """Return the arguments: padded sizes, tokens skipped, floating point without values."""
    T, K = expert_index_TK.shape
    E, B = model.E, variant.block_size
    H = -(-model.H // H_MULTIPLE) * H_MULTIPLE
    I = -(-model.I // I_MULTIPLE) * I_MULTIPLE  # noqa: E741  the axis letter
    on_block = variant.kernel == "shard_on_block"
    blocks = num_blocks(T, K, E, B, CORES if on_block else 1)
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
        "block_to_expert": block_to_expert,
        "skip_dma": skip_mode(True, variant.mode == "keep"),
        "compute_dtype": library.nl.bfloat16,
        "is_tensor_update_accumulating": K != 1,
        "expert_affinities_scaling_mode": library.enum(
            "ExpertAffinityScaleMode", vendor.get("scaling", "POST_SCALE")
        ),
        "activation_function": library.enum("ActFnType", vendor.get("act_fn", "SiLU")),
    }
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

"""The vendor's prefill kernels on a benchmark's case: layouts and arguments, nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import nki_sim
from neuron_moe.tools.prefill_cases import Model
from neuron_moe.tools.vendor_cases.block_plan import num_blocks
from neuron_moe.tools.vendor_cases.library import VendorLibrary
from neuron_moe.tools.vendor_cases.moe_prefill import CORES, KERNELS
from nki_sim import SimOptions, TensorSpec

H_MULTIPLE, I_MULTIPLE = 512, 16  # what the kernels ask for; callers pad


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel with one block size; `skips_weights` keeps the weights of a repeated expert."""

    kernel: str
    block_size: int
    skips_weights: bool

    @property
    def name(self) -> str:
        """Kernel and block size."""
        return f"{self.kernel} B={self.block_size}" + (" keep" if self.skips_weights else "")


VARIANTS = (
    Variant("shard_on_block", 128, False),
    Variant("shard_on_block", 256, False),
    Variant("shard_on_block", 256, True),
    Variant("shard_on_block", 512, True),
    Variant("shard_on_i_hybrid", 256, False),
    Variant("shard_on_i_hybrid", 512, False),
)


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
        "skip_dma": skip_mode(True, variant.skips_weights),
        "compute_dtype": library.nl.bfloat16,
        "is_tensor_update_accumulating": K != 1,
        "expert_affinities_scaling_mode": library.enum(
            "ExpertAffinityScaleMode", vendor.get("scaling", "POST_SCALE")
        ),
        "activation_function": library.enum("ActFnType", vendor.get("act_fn", "SiLU")),
    }
    if not on_block:
        found["conditions"] = (np.arange(blocks + 1) < live).astype(np.int32)
        found["num_static_block"] = 0
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

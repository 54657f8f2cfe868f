"""MoE prefill kernels: sharded on I (static, hybrid, dropping), on block, on H, and the mx
forms.
"""

from typing import Any

import numpy as np

from lab.check.vendor_cases import moe_prefill_mx
from lab.check.vendor_cases.block_mapping import (
    BlockMapping,
    map_blocks,
    map_dropping,
    num_blocks,
)
from lab.check.vendor_cases.case import (
    Case,
    Job,
    Limits,
    Skipped,
    scaled_note,
    seed_of,
)
from lab.check.vendor_cases.inputs import Draw, dtype_of
from lab.check.vendor_cases.library import VendorLibrary
from lab.check.vendor_cases.references import Experts, run_reference

# variant -> (module, kernel, the reference's name of the variant)
KERNELS = {
    "shard_on_i": (
        "core.moe.moe_cte.bwmm_shard_on_I",
        "blockwise_mm_baseline_shard_intermediate",
        "SHARD_ON_INTERMEDIATE",
    ),
    "shard_on_i_hybrid": (
        "core.moe.moe_cte.bwmm_shard_on_I",
        "blockwise_mm_baseline_shard_intermediate_hybrid",
        "SHARD_ON_INTERMEDIATE_HW",
    ),
    "shard_on_i_dropping": (
        "core.moe.moe_cte.bwmm_shard_on_I",
        "blockwise_mm_shard_intermediate_dropping",
        "SHARD_ON_INTERMEDIATE_DROPPING",
    ),
    "shard_on_block": (
        "core.moe.moe_cte.bwmm_shard_on_block",
        "bwmm_shard_on_block",
        "SHARD_ON_BLOCK",
    ),
    "shard_on_h": (
        "experimental.moe.forward.bwmm_shard_on_H",
        "blockwise_mm_baseline_shard_hidden",
        "SHARD_ON_HIDDEN",
    ),
}
CORES = 2


def build(case: Case, library: VendorLibrary, limits: Limits) -> Job:
    """Build a prefill case; mx variants go to their own module."""
    if "_mx" in case.variant:
        return moe_prefill_mx.build(case, library, limits)
    if case.variant not in KERNELS:
        raise Skipped(
            f"moe_cte variant {case.variant!r}: no adapter; "
            f"known are {', '.join(KERNELS)} and their _mx forms"
        )
    return _PrefillCase(case, library, limits).job()


class _PrefillCase:
    """Sizes, inputs and reference of one bf16, fp32 or fp8 prefill case."""

    def __init__(self, case: Case, library: VendorLibrary, limits: Limits) -> None:
        self.case, self.library = case, library
        self.H, self.I, self.E = (
            case.need("hidden"),
            case.need("intermediate"),
            case.need("experts"),
        )
        self.K, self.B = case.need("top_k"), case.need("block_size")
        self.dtype = dtype_of(case.get("dtype", "bfloat16"))
        self.dropping = case.variant == "shard_on_i_dropping"
        self.on_block = case.variant == "shard_on_block"
        self.skip_token = bool(case.get("skip_mode", 0) & 1)
        self.T = case.need("tokens")
        if not self.dropping:
            self.T = limits.tokens(self.T, self._macs, step=256, least=min(self.T, 512))
        self.draw = Draw(seed_of(case))
        self.mapping = self._mapping()

    def _blocks(self, tokens: int) -> int:
        return num_blocks(tokens, self.K, self.E, self.B, CORES if self.on_block else 1)

    def _macs(self, tokens: int) -> float:
        return float(self._blocks(tokens) * self.B * 3.0 * self.H * self.I)

    def _mapping(self) -> BlockMapping:
        if self.dropping:
            return map_dropping(self.draw, self.T, self.K, self.E, self.B)
        return map_blocks(
            self.draw, self.T, self.K, self.E, self.B, self._blocks(self.T), self.skip_token
        )

    def job(self) -> Job:
        """Return the run."""
        module, name, _ = KERNELS[self.case.variant]
        inputs = self._inputs()
        return Job(
            kernel=self.library.get(module, name),
            cores=CORES,
            inputs=inputs,
            reference=lambda: self._reference(inputs),
            select={} if self.skip_token else {"output": lambda rows: rows[: self.T]},
            note=scaled_note("T", self.case.need("tokens"), self.T),
        )

    def _inputs(self) -> dict[str, Any]:
        """Return the kernel's arguments."""
        case, library, mapping = self.case, self.library, self.mapping
        rows = self.T if self.skip_token else self.T + 1
        hidden_TH = self.draw.uniform((rows, self.H), 0.0, 1.0, self.dtype)
        affinities_TE = self.draw.uniform((rows, self.E), 0.0, 1.0, self.dtype)
        affinities_TE[: self.T] *= mapping.mask_TE.astype(self.dtype)
        if not self.skip_token:
            hidden_TH[self.T] = 0
            affinities_TE[self.T] = 0
        skip_mode = library.get(KERNELS[case.variant][0], "SkipMode")
        inputs: dict[str, Any] = {
            "hidden_states": hidden_TH,
            "expert_affinities_masked": affinities_TE.reshape(-1, 1),
            **self._weights(),
            "block_size": self.B,
            "token_position_to_id": mapping.token_position_to_id,
            "block_to_expert": mapping.block_to_expert.reshape(-1, 1)
            if case.variant == "shard_on_h"
            else mapping.block_to_expert,
            "skip_dma": skip_mode(self.skip_token, bool(case.get("skip_mode", 0) & 2)),
            "compute_dtype": getattr(library.nl, case.get("dtype", "bfloat16")),
            "is_tensor_update_accumulating": self.K != 1,
            "expert_affinities_scaling_mode": library.enum(
                "ExpertAffinityScaleMode", case.get("affinity_scaling_mode", "POST_SCALE")
            ),
        }
        if case.variant == "shard_on_i_hybrid":
            inputs["conditions"] = mapping.conditions(extra=1)
            if case.get("n_static_blocks") is not None:
                inputs["num_static_block"] = case.get("n_static_blocks")
        if case.variant != "shard_on_h":
            inputs["activation_function"] = library.enum("ActFnType", case.get("act_fn", "SiLU"))
            for side in ("gate", "up"):
                for bound in ("upper", "lower"):
                    limit = case.get(f"{side}_clamp_{bound}")
                    if limit is not None:
                        inputs[f"{side}_clamp_{bound}_limit"] = float(limit)
        if case.variant == "shard_on_i":
            inputs["checkpoint_activation"] = bool(case.get("training", False))
        if case.variant in ("shard_on_i", "shard_on_i_dropping"):
            inputs["expert_affinity_multiply_on_I"] = bool(
                case.get("affinity_multiply_on_I", False)
            )
        if case.variant == "shard_on_h" and case.get("checkpoint_activation"):
            inputs["gate_up_activations_T"] = np.zeros(
                (mapping.num_blocks, 2, self.I, self.B), dtype=self.dtype
            )
            inputs["down_activations"] = np.zeros(
                (mapping.num_blocks, self.B, self.H), dtype=self.dtype
            )
        return inputs

    def _weights(self) -> dict[str, np.ndarray]:
        """Return weights, scales and biases; the down weights are padded to a multiple of 16
        rows.
        """
        draw, i_padded = self.draw, -(-self.I // 16) * 16
        gate_up_shape, down_shape = (self.E, self.H, 2, self.I), (self.E, i_padded, self.H)
        quantize = self.case.get("quantize")
        if quantize:
            weights = {
                "gate_up_proj_weight": draw.integers(gate_up_shape, -240, 240, dtype_of(quantize)),
                "down_proj_weight": draw.integers(down_shape, -240, 240, dtype_of(quantize)),
                "gate_up_proj_scale": draw.uniform((self.E, 1, 2 * self.I), -0.1, 0.1, np.float32),
                "down_proj_scale": draw.uniform((self.E, 1, self.H), -0.1, 0.1, np.float32),
            }
        else:
            weights = {
                "gate_up_proj_weight": draw.uniform(gate_up_shape, -0.1, 0.1, self.dtype),
                "down_proj_weight": draw.uniform(down_shape, -0.1, 0.1, self.dtype),
            }
        if self.case.get("bias"):
            weights["gate_and_up_proj_bias"] = draw.uniform(
                (self.E, 2, self.I), -1.0, 1.0, self.dtype
            )
            weights["down_proj_bias"] = draw.uniform((self.E, self.H), -1.632, 1.4375, self.dtype)
        return weights

    def _reference(self, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
        """Run the vendor's torch reference; it reads the variant from an enumeration of the
        vendor's tests.
        """
        function = self.library.get("core.moe.moe_cte.moe_cte_torch", "moe_cte_torch_ref")
        variant = self.library.test(
            "integration.nkilib.core.moe.moe_cte.test_moe_cte_common", "BWMMFunc"
        )
        arguments = dict(inputs)
        arguments["bwmm_func"] = variant[KERNELS[self.case.variant][2]]
        arguments["gate_up_proj_weight"] = Experts(inputs["gate_up_proj_weight"])
        arguments["down_proj_weight"] = Experts(inputs["down_proj_weight"][:, : self.I])
        arguments["top_k"] = self.K
        for unused in ("gate_up_activations_T", "down_activations"):
            arguments.pop(unused, None)
        with self.library.test_tree():
            return run_reference(function, arguments)

"""MoE prefill kernels with packed mx weights (trn3): sharded on block, or on I, or on I with
dynamic blocks.
"""

from typing import Any

import numpy as np
import torch

from lab.check.vendor_cases import mx
from lab.check.vendor_cases.block_mapping import map_blocks, num_blocks
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

KERNELS = {
    "shard_on_block_mx": ("core.moe.moe_cte.bwmm_shard_on_block_mx", "bwmm_shard_on_block_mx"),
    "shard_on_i_mx": ("core.moe.moe_cte.bwmm_shard_on_I_mx", "blockwise_mm_shard_intermediate_mx"),
    "shard_on_i_mx_hybrid": (
        "core.moe.moe_cte.bwmm_shard_on_I_mx",
        "blockwise_mm_shard_intermediate_mx_hybrid",
    ),
}
CORES = 2
N_DYNAMIC_BLOCKS = 55


def build(case: Case, library: VendorLibrary, limits: Limits) -> Job:
    """Build an mx prefill case."""
    if case.variant not in KERNELS:
        raise Skipped(
            f"moe_cte variant {case.variant!r}: no adapter; known are {', '.join(KERNELS)}"
        )
    library.use_tables()
    return _MxCase(case, library, limits).job()


class _MxCase:
    """Sizes, inputs and reference of one mx prefill case; numbers are drawn when it is made."""

    def __init__(self, case: Case, library: VendorLibrary, limits: Limits) -> None:
        self.case, self.library = case, library
        self.E, self.K, self.B = (case.need(key) for key in ("experts", "top_k", "block_size"))
        self.H, self.I = case.need("hidden"), case.need("intermediate")
        self.on_block = case.variant == "shard_on_block_mx"
        self.skip_token = bool(case.get("skip_mode", 0) & 1)
        wanted = case.need("tokens")
        self.T = limits.tokens(wanted, self._macs, step=256, least=min(wanted, 512))
        self.dtype = dtype_of(case.get("dtype", "bfloat16"))
        self.format = case.need("weight_dtype")
        draw = Draw(seed_of(case))
        blocks = self._blocks(self.T)
        self.mapping = map_blocks(draw, self.T, self.K, self.E, self.B, blocks, self.skip_token)
        self.hidden_TH, self.affinities_TE = self._tokens(draw)
        self.weights = mx.draw_experts(draw, self.E, self.H, self.I, self.format)
        self.bias: np.ndarray | None
        self.down_bias: np.ndarray | None
        self.bias, self.down_bias = self._biases(draw)

    def _blocks(self, tokens: int) -> int:
        return num_blocks(tokens, self.K, self.E, self.B, CORES if self.on_block else 1)

    def _macs(self, tokens: int) -> float:
        return float(self._blocks(tokens) * self.B * 3.0 * self.H * self.I)

    def _tokens(self, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """Return hidden states and affinities, with a row of zeros unless tokens are skipped."""
        rows = self.T if self.skip_token else self.T + 1
        hidden_TH = mx.draw_stable_hidden(draw, rows, self.H).astype(self.dtype)
        affinities_TE = draw.uniform((rows, self.E), 0.0, 1.0, self.dtype)
        affinities_TE[: self.T] *= self.mapping.mask_TE.astype(self.dtype)
        if not self.skip_token:
            hidden_TH[self.T] = 0
            affinities_TE[self.T] = 0
        return hidden_TH, affinities_TE

    def _biases(self, draw: Draw) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
        if not self.case.get("bias"):
            return None, None
        shape = (self.E, mx.intermediate_partitions(self.I), 2, -(-self.I // 512), 4)
        bias = draw.uniform(shape, -2.0625, 0.52, self.dtype)
        return bias, draw.uniform((self.E, self.H), -1.632, 1.4375, self.dtype)

    def job(self) -> Job:
        """Return the run."""
        tokens_axis = 1 if self.on_block and self.K != 1 else 0
        return Job(
            kernel=self.library.get(*KERNELS[self.case.variant]),
            cores=CORES,
            mx_headroom=self.library.mx_headroom(),
            inputs=self._inputs() | self._clamps() | self._dynamic_blocks(),
            reference=self._reference,
            select={"output": lambda out: np.take(out, range(self.T), axis=tokens_axis)},
            note=scaled_note("T", self.case.need("tokens"), self.T),
        )

    def _inputs(self) -> dict[str, Any]:
        """Return the kernel's arguments that every case has."""
        case, library, weights = self.case, self.library, self.weights
        skip_mode = library.get("core.moe.moe_cte.moe_cte_utils", "SkipMode")
        return {
            "hidden_states": self.hidden_TH,
            "expert_affinities_masked": self.affinities_TE.reshape(-1, 1),
            "gate_up_proj_weight": self._packed(weights.gate_up),
            "down_proj_weight": self._packed(weights.down),
            "token_position_to_id": self.mapping.token_position_to_id,
            "block_to_expert": self.mapping.block_to_expert,
            "gate_and_up_proj_bias": self.bias,
            "down_proj_bias": self.down_bias,
            "gate_up_proj_scale": weights.gate_up_scale,
            "down_proj_scale": weights.down_scale,
            "block_size": self.B,
            "activation_function": library.enum("ActFnType", case.get("act_fn", "SiLU")),
            "skip_dma": skip_mode(self.skip_token, bool(case.get("skip_mode", 0) & 2)),
            "compute_dtype": getattr(library.nl, case.get("dtype", "bfloat16")),
            "weight_dtype": getattr(library.nl, self.format),
            "is_tensor_update_accumulating": self.K != 1,
            "expert_affinities_scaling_mode": library.enum("ExpertAffinityScaleMode", "POST_SCALE"),
        }

    def _packed(self, words: np.ndarray) -> np.ndarray:
        is_raw = bool(self.case.get("use_uint_weights")) and self.on_block
        return words if is_raw else mx.for_kernel(words, self.format)

    def _clamps(self) -> dict[str, float]:
        names = [f"{side}_clamp_{bound}" for side in ("gate", "up") for bound in ("upper", "lower")]
        given = {name: self.case.get(name) for name in names}
        return {f"{name}_limit": float(at) for name, at in given.items() if at is not None}

    def _dynamic_blocks(self) -> dict[str, Any]:
        """Return what tells blocks with tokens from padding, as each variant takes it."""
        case, found = self.case, dict[str, Any]()
        if case.get("is_dynamic"):
            found["conditions"] = self.mapping.conditions(extra=2 if self.on_block else 1)
            if self.on_block:
                found["n_dynamic_blocks"] = N_DYNAMIC_BLOCKS
        static = case.get("n_static_blocks")
        if static is not None and self.on_block:
            found["n_static_blocks"] = static
        elif static is not None and case.variant == "shard_on_i_mx_hybrid":
            found["num_static_block"] = static
        return found

    def _reference(self) -> dict[str, np.ndarray]:
        """Run the vendor's torch mx projections on each expert's tokens; sum the bf16-rounded
        results by affinity.
        """
        functions = _Functions(self.library, self.case.get("act_fn", "SiLU"))
        out_TH = np.zeros((self.T, self.H), dtype=np.float32)
        for expert in range(self.E):
            affinity_T = self.affinities_TE[: self.T, expert].astype(np.float32)
            members = np.flatnonzero(affinity_T)
            if members.size:
                scaled = self._expert(functions, expert, members) * affinity_T[members][:, None]
                out_TH[members] += torch.from_numpy(scaled).to(torch.bfloat16).float().numpy()
        if self.on_block and self.K != 1:
            out_TH = np.stack([out_TH, np.zeros_like(out_TH)])
        return {"output": out_TH}

    def _expert(self, functions: "_Functions", expert: int, members: np.ndarray) -> np.ndarray:
        """Return [n, H] float32, an expert's output for its tokens, not scaled."""
        sizes = (self.H, self.I, members.size)
        codes, scale = functions.quantized(self.hidden_TH[members])
        sides = [
            self._clamped(
                side,
                functions.project(
                    codes,
                    scale,
                    mx.for_reference(self.weights.gate_up[expert, :, number], self.format),
                    _tensor(self.weights.gate_up_scale[expert, :, number]),
                    None if self.bias is None else _floats(self.bias[expert, :, number]),
                    *sizes,
                    hidden_unpack_fn=functions.unpackers["float8_e4m3fn_x4"],
                    weight_unpack_fn=functions.unpackers[self.format],
                )["out"],
            )
            for number, side in enumerate(("gate", "up"))
        ]
        found: np.ndarray = functions.project_down(
            functions.activate(sides[0], functions.act_fn) * sides[1],
            mx.for_reference(self.weights.down[expert], self.format),
            torch.from_numpy(self.weights.down_scale[expert]),
            None if self.down_bias is None else _floats(self.down_bias[expert]),
            *sizes,
            weight_unpack_fn=functions.unpackers[self.format],
        )["out"].numpy()
        return found

    def _clamped(self, side: str, value: torch.Tensor) -> torch.Tensor:
        lower, upper = (self.case.get(f"{side}_clamp_{bound}") for bound in ("lower", "upper"))
        return value if lower is None and upper is None else torch.clamp(value, lower, upper)


class _Functions:
    """What the vendor's references of mx projections are made of."""

    def __init__(self, library: VendorLibrary, act_fn: str) -> None:
        common, projections = "core.utils.mx_torch_common", "core.mlp.mlp_tkg.mlp_proj_mxfp4_torch"
        self.quantize = library.get(common, "quantize_to_mx")
        self.hidden_format = library.nl.float8_e4m3fn_x4
        self.unpackers = {
            "float4_e2m1fn_x4": library.get(common, "unpack_float4_x4"),
            "float8_e4m3fn_x4": library.get(common, "unpack_float8_e4m3fn_x4"),
            "float8_e5m2_x4": library.get(common, "unpack_float8_e5m2_x4"),
        }
        self.project, self.project_down = (
            library.get(projections, f"{side}_proj_mxfp4_torch_ref") for side in ("gate_up", "down")
        )
        self.activate = library.get("core.moe.moe_cte.moe_cte_torch_utils", "torch_act_fn")
        self.act_fn = library.enum("ActFnType", act_fn)

    def quantized(self, rows_nH: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
        """Return codes and scales of some tokens, in the order of the projections."""
        n, H = rows_nH.shape
        tile = rows_nH.astype(np.float32).reshape(n, 4, H // 512, 128).transpose(3, 2, 0, 1)
        codes, scale = self.quantize(
            np.ascontiguousarray(tile).reshape(128, -1), self.hidden_format
        )
        return codes.reshape(128, H // 512, n), torch.from_numpy(scale.reshape(16, H // 512, n))


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def _floats(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))

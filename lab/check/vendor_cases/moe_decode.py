"""MoE decode kernels: selective and all experts, in bf16/fp16, fp8 row and mx, with tensors in
HBM or SBUF.
"""

import math
from typing import Any

import numpy as np

from lab.check.vendor_cases import mx
from lab.check.vendor_cases.case import Case, Job, Limits, scaled_note, seed_of
from lab.check.vendor_cases.inputs import Draw, dtype_of, only_experts
from lab.check.vendor_cases.library import VendorLibrary
from lab.check.vendor_cases.references import Experts, run_reference


def clamp_limits(on: bool) -> dict[str, float | None]:
    """Return the clamp arguments of a case that clamps, or none of them."""
    return {
        "gate_clamp_upper_limit": 7.0 if on else None,
        "gate_clamp_lower_limit": None,
        "up_clamp_upper_limit": 8.0 if on else None,
        "up_clamp_lower_limit": -6.0 if on else None,
    }


def build(case: Case, library: VendorLibrary, limits: Limits) -> Job:
    """Build a decode case."""
    return _DecodeCase(case, library, limits).job()


class _DecodeCase:
    """Sizes, inputs and reference of one decode case."""

    def __init__(self, case: Case, library: VendorLibrary, limits: Limits) -> None:
        self.case, self.library = case, library
        self.H, self.I, self.E = (
            case.need("hidden"),
            case.need("intermediate"),
            case.need("experts"),
        )
        self.all_experts = bool(case.get("all_expert", "all_expert" in case.variant))
        self.K = case.get("top_k") or self.E
        self.cores = case.cores()
        self.quant = case.get("quant_dtype")
        self.is_mx = self.quant in mx.FORMATS
        if self.is_mx:
            library.use_tables()
        self.in_dtype = dtype_of(case.get("in_dtype") or case.get("dtype", "bfloat16"))
        self.scaling = case.get("affinity_scaling_mode", "POST_SCALE")
        per_token = (self.E if self.all_experts else self.K) * 3.0 * self.H * self.I
        # The dynamic algorithm wants at least two blocks, and mx inputs 32 tokens at a time.
        step = math.lcm(2 * int(case.get("block_size") or 64), 32)
        wanted = case.need("tokens")
        self.T = limits.tokens(
            wanted,
            lambda tokens: tokens * per_token,
            # Selected tokens touch experts one by one; few tokens may fit where many do not.
            step=step if self.all_experts else 4,
            least=min(wanted, step if self.all_experts else 4),
            input_bytes=lambda tokens: self._expert_bytes(tokens),
        )
        self.draw = Draw(seed_of(case))

    def _expert_bytes(self, tokens: int) -> float:
        """Return the bytes of all experts that so many tokens can touch."""
        touched = self.E if self.all_experts else min(self.E, tokens * self.K)
        return float(touched * 6.0 * self.H * self.I)

    def job(self) -> Job:
        """Return the run."""
        inputs = self._inputs()
        kernel = self.library.get("core.moe.moe_tkg.moe_tkg", "moe_tkg")
        if self.is_mx:
            kernel = with_packed_weights(self.library, kernel, self.quant)
        if "sbuf_io" in self.case.variant:
            kernel = _through_sbuf(self.library, kernel)
        return Job(
            kernel=kernel,
            cores=self.cores,
            inputs={name: value for name, value in inputs.items() if value is not None},
            reference=lambda: self._reference(inputs),
            mx_headroom=self.library.mx_headroom() if self.is_mx else 1,
            outputs=("out",),
            note=scaled_note("T", self.case.need("tokens"), self.T),
            refusal=self._refusal(),
        )

    def _refusal(self) -> str:
        """Return the documented limit that the case breaks on purpose, or ""."""
        if not (self.all_experts or self.T == 1):
            return ""
        if self.H // self.cores % 128 or (self.H // 128) % self.cores:
            return f"hidden={self.H}: H per core must be a multiple of 128"
        return ""

    def _inputs(self) -> dict[str, Any]:
        """Return the kernel's arguments."""
        case, draw, library = self.case, self.draw, self.library
        expert_index = (
            draw.choices(self.T, self.E, self.K)
            if self.all_experts
            else draw.rng.integers(0, self.E, (self.T, self.K)).astype(np.int32)
        )
        bias = bool(case.get("bias"))
        inputs: dict[str, Any] = {
            "hidden_input": self._hidden(),
            **self._weights(np.unique(expert_index)),
            "expert_affinities": self._affinities(expert_index),
            "expert_index": expert_index,
            "is_all_expert": self.all_experts,
            "rank_id": np.zeros((1, 1), np.uint32)
            if self.all_experts and self.scaling != "NO_SCALE"
            else None,
            "expert_gate_up_bias": draw.normal(self._bias_shape(), self.in_dtype) if bias else None,
            "expert_down_bias": draw.normal((self.E, self.H), self.in_dtype) if bias else None,
            "expert_affinities_scaling_mode": library.enum("ExpertAffinityScaleMode", self.scaling),
            "activation_fn": library.enum("ActFnType", case.get("act_fn", "SiLU")),
            "output_dtype": getattr(
                library.nl, case.get("out_dtype") or case.get("dtype", "bfloat16")
            ),
            **clamp_limits(bool(case.get("clamp"))),
        }
        if case.get("block_size") is not None:
            inputs["is_all_expert_dynamic"] = True
            inputs["block_size"] = case.get("block_size")
        return inputs

    def _hidden(self) -> np.ndarray:
        if self.is_mx:
            return mx.draw_stable_hidden(self.draw, self.T, self.H).astype(self.in_dtype)
        return self.draw.normal((self.T, self.H), self.in_dtype)

    def _affinities(self, expert_index: np.ndarray) -> np.ndarray:
        """Return [T, E]: normalised random weights at the chosen experts, zero rows for unrouted
        tokens.
        """
        weights_TK = self.draw.rng.random((self.T, self.K))
        weights_TK /= weights_TK.sum(axis=1, keepdims=True)
        affinities_TE = np.zeros((self.T, self.E))
        np.put_along_axis(affinities_TE, expert_index, weights_TK, axis=1)
        routed = int(self.T * self.case.get("routed_token_ratio", 1.0))
        affinities_TE[self.draw.rng.permutation(self.T)[routed:]] = 0
        return affinities_TE.astype(dtype_of("bfloat16" if self.all_experts else "float32"))

    def _bias_shape(self) -> tuple[int, ...]:
        if self.is_mx:
            return (self.E, mx.intermediate_partitions(self.I), 2, math.ceil(self.I / 512), 4)
        return (self.E, 2, self.I)

    def _weights(self, touched: np.ndarray) -> dict[str, Any]:
        """Return weights and scales; only the touched experts are drawn."""
        if self.is_mx:
            self.packed = mx.draw_experts(self.draw, self.E, self.H, self.I, self.quant, touched)
            return {
                "expert_gate_up_weights": self.packed.gate_up,
                "expert_down_weights": self.packed.down,
                "expert_gate_up_weights_scale": self.packed.gate_up_scale,
                "expert_down_weights_scale": self.packed.down_scale,
            }
        draw, dtype = self.draw, dtype_of(self.quant) if self.quant else self.in_dtype
        # Without clamps, weights of unit variance overflow float16.
        std = 1.0 if self.case.get("clamp") or self.quant else self.H**-0.5
        weights: dict[str, Any] = {
            "expert_gate_up_weights": only_experts(
                (self.E, self.H, 2, self.I),
                dtype,
                touched,
                lambda shape: draw.normal(shape, dtype, std),
            ),
            "expert_down_weights": only_experts(
                (self.E, self.I, self.H),
                dtype,
                touched,
                lambda shape: draw.normal(shape, dtype, std),
            ),
        }
        if self.quant:
            weights["expert_gate_up_weights_scale"] = draw.normal((self.E, 2, self.I), np.float32)
            weights["expert_down_weights_scale"] = draw.normal((self.E, self.H), np.float32)
        return weights

    def _reference(self, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
        function = self.library.get("core.moe.moe_tkg.moe_tkg_torch", "moe_tkg_torch_ref")
        arguments = dict(inputs)
        if self.is_mx:
            arguments["expert_gate_up_weights"] = mx.for_reference(self.packed.gate_up, self.quant)
            arguments["expert_down_weights"] = mx.for_reference(self.packed.down, self.quant)
        else:
            for name in ("expert_gate_up_weights", "expert_down_weights"):
                arguments[name] = Experts(inputs[name])
        return run_reference(function, arguments)


def with_packed_weights(library: VendorLibrary, kernel: Any, name: str) -> Any:
    """Return a kernel that reads plain words as packed elements before it calls another.

    Frameworks without the packed types pass words; the mx decode kernels expect views of them.
    """
    view = library.get("core.utils.tensor_view", "TensorView")
    packed = getattr(library.nl, name)

    def call_with_packed_weights(
        expert_gate_up_weights: Any, expert_down_weights: Any, **rest: Any
    ) -> Any:
        return kernel(
            expert_gate_up_weights=view(expert_gate_up_weights).reinterpret_cast(packed),
            expert_down_weights=view(expert_down_weights).reinterpret_cast(packed),
            **rest,
        )

    return call_with_packed_weights


def _through_sbuf(library: VendorLibrary, kernel: Any) -> Any:
    """Return a kernel that hands hidden states over in SBUF and takes the result from there.

    The kernel's SBUF layout is [128, T, H/128 of the shard], where partition p of a shard holds
    H/128 neighbouring columns; all-experts shards H over the cores, selective shards T.
    """
    nisa, nl = library.nki.isa, library.nl

    def moe_tkg_through_sbuf(
        hidden_input: Any, expert_affinities: Any, is_all_expert: bool, **rest: Any
    ) -> Any:
        tokens, hidden = hidden_input.shape
        cores, core = nl.num_programs(0), nl.program_id(0)
        columns = hidden // 128 // (cores if is_all_expert else 1)
        start = core * 128 * columns if is_all_expert else 0
        hidden_sb = nl.ndarray((128, tokens, columns), dtype=hidden_input.dtype, buffer=nl.sbuf)
        layout = [[columns, 128], [hidden, tokens], [1, columns]]
        nisa.dma_copy(dst=hidden_sb, src=hidden_input.ap(pattern=layout, offset=start))
        affinities = expert_affinities
        if not is_all_expert:
            affinities = nl.ndarray(
                expert_affinities.shape, dtype=expert_affinities.dtype, buffer=nl.sbuf
            )
            nisa.dma_copy(dst=affinities, src=expert_affinities)
        result_sb = kernel(
            hidden_input=hidden_sb,
            expert_affinities=affinities,
            is_all_expert=is_all_expert,
            output_in_sbuf=True,
            **rest,
        )
        out = nl.ndarray((tokens, hidden), dtype=hidden_input.dtype, buffer=nl.shared_hbm)
        mine = tokens if is_all_expert else tokens // cores
        first = 0 if is_all_expert else core * mine
        target = out.ap(
            pattern=[[columns, 128], [hidden, mine], [1, columns]], offset=start + first * hidden
        )
        nisa.dma_copy(dst=target, src=result_sb[:, first : first + mine, :])
        return out

    return moe_tkg_through_sbuf

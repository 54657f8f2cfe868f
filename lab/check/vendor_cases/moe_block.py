"""The fused decode layer: RMSNorm, router, experts."""

import contextlib
import importlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lab.check.vendor_cases import mx
from lab.check.vendor_cases.case import Case, Job, Limits, scaled_note, seed_of
from lab.check.vendor_cases.inputs import (
    Draw,
    chosen_experts,
    dtype_of,
    only_experts,
    separate_logits,
)
from lab.check.vendor_cases.library import PACKAGE, VendorLibrary
from lab.check.vendor_cases.moe_decode import clamp_limits, with_packed_weights
from lab.check.vendor_cases.references import Experts, run_reference

EPS = 1e-6
REFERENCE = "core.moe_block.moe_block_tkg_torch"


def build(case: Case, library: VendorLibrary, limits: Limits) -> Job:
    """Build a fused decode layer case."""
    return _BlockCase(case, library, limits).job()


class _BlockCase:
    """Sizes, inputs and reference of one fused block case."""

    def __init__(self, case: Case, library: VendorLibrary, limits: Limits) -> None:
        self.case, self.library = case, library
        self.H, self.I = case.need("hidden"), case.need("intermediate")
        self.E, self.E_local = case.need("num_global_experts"), case.need("num_local_experts")
        self.K = case.need("top_k")
        self.all_experts = bool(case.get("is_all_expert", "all_expert" in case.variant))
        self.cores = case.cores()
        self.weight_dtype = case.get("weight_dtype", "bfloat16")
        self.is_mx = self.weight_dtype in mx.FORMATS
        if self.is_mx:
            library.use_tables()
        self.dtype = dtype_of(case.get("dtype", "bfloat16"))
        self.S = case.get("seqlen", 1)
        experts = self.E_local if self.all_experts else self.K
        per_sequence = self.S * experts * 3.0 * self.H * self.I
        self.batch = limits.tokens(
            case.need("batch"),
            lambda batch: batch * per_sequence,
            step=8,
            least=min(4, case.need("batch")),
            input_bytes=lambda batch: self._expert_bytes(batch * self.S),
        )
        self.T = self.batch * self.S
        self.draw = Draw(seed_of(case))

    def _expert_bytes(self, tokens: int) -> float:
        """Return the bytes of all experts that so many tokens can touch."""
        touched = self.E_local if self.all_experts else min(self.E_local, tokens * self.K)
        return float(touched * 6.0 * self.H * self.I)

    def job(self) -> Job:
        """Return the run."""
        inputs = self._inputs()
        kernel = self.library.get("core.moe_block.moe_block_tkg", "moe_block_tkg")
        return Job(
            kernel=with_packed_weights(self.library, kernel, self.weight_dtype)
            if self.is_mx
            else kernel,
            cores=self.cores,
            inputs={name: value for name, value in inputs.items() if value is not None},
            reference=lambda: self._reference(inputs),
            mx_headroom=self.library.mx_headroom() if self.is_mx else 1,
            outputs=("out",) if self.case.get("skip_router_logits") else ("out", "router_logits"),
            note="; ".join(filter(None, self._notes())),
        )

    def _inputs(self) -> dict[str, Any]:
        """Return the kernel's arguments; tokens whose choice of experts is a near tie are drawn
        again.
        """
        case, draw, library = self.case, self.draw, self.library
        router_dtype = dtype_of(case.get("router_mm_dtype", "bfloat16"))
        # Powers of two: a kernel may multiply by gamma before or after it normalises; with exact
        # products both round alike.
        gamma = draw.rng.choice([-0.0625, -0.03125, 0.03125, 0.0625], (1, self.H)).astype(
            self.dtype
        )
        router_HE = draw.uniform((self.H, self.E), -0.1, 0.1, router_dtype)
        bias = bool(case.get("bias"))
        router_bias = draw.uniform((1, self.E), -0.1, 0.1, router_dtype) if bias else None
        expert_biases = self._expert_biases(bias)

        def logits(tokens_TH: np.ndarray) -> np.ndarray:
            x = tokens_TH.astype(np.float32)
            size = case.get("hidden_actual") or self.H
            normed = (
                x
                / np.sqrt((x * x).sum(axis=1, keepdims=True) / size + EPS)
                * gamma.astype(np.float32)
            )
            out: np.ndarray = normed @ router_HE.astype(np.float32)
            return out if router_bias is None else out + router_bias.astype(np.float32)

        tokens_TH = separate_logits(
            lambda count: draw.uniform((count, self.H), -0.1, 0.1, self.dtype),
            logits,
            self.T,
            self.K,
            margin=8e-3,
        )
        chosen_TK = chosen_experts(logits(tokens_TH), self.K)
        touched = range(self.E_local) if self.all_experts else np.unique(chosen_TK)
        # The rank with the most tokens: a random one often has none, and then any kernel agrees.
        ranks = np.bincount(chosen_TK.reshape(-1) // self.E_local, minlength=self.E // self.E_local)
        rank = int(ranks.argmax()) if self.all_experts else None
        inputs: dict[str, Any] = {
            "inp": tokens_TH.reshape(self.batch, self.S, self.H),
            "gamma": gamma,
            "router_weights": router_HE,
            **self._weights(touched),
            "router_bias": router_bias,
            **expert_biases,
            "eps": EPS,
            "top_k": self.K,
            "router_act_fn": library.enum("RouterActFnType", case.get("router_fn", "SOFTMAX")),
            "router_pre_norm": bool(case.get("router_act_first")),
            "norm_topk_prob": bool(case.get("norm_topk_prob")),
            "expert_affinities_scaling_mode": library.enum(
                "ExpertAffinityScaleMode", case.get("affinity_scaling_mode", "POST_SCALE")
            ),
            "hidden_act_fn": library.enum("ActFnType", case.get("act_fn", "SiLU")),
            **clamp_limits(bool(case.get("clamp"))),
            "router_mm_dtype": getattr(library.nl, case.get("router_mm_dtype", "bfloat16")),
            "hidden_actual": case.get("hidden_actual"),
            "skip_router_logits": bool(case.get("skip_router_logits")),
            "is_all_expert": self.all_experts,
            "rank_id": None if rank is None else np.full((1, 1), rank, dtype=np.uint32),
        }
        return inputs

    def _notes(self) -> tuple[str, str]:
        scaled = scaled_note("batch", self.case.need("batch"), self.batch)
        return scaled, "the kernel cannot do without biases: zeros" if self._zero_biases() else ""

    def _zero_biases(self) -> bool:
        """Return whether the case has no bias but the kernel, selective mx, fails without."""
        return self.is_mx and not self.all_experts and not self.case.get("bias")

    def _expert_biases(self, bias: bool) -> dict[str, Any]:
        shapes = {
            "expert_gate_up_bias": self._bias_shape(),
            "expert_down_bias": (self.E_local, self.H),
        }
        if self._zero_biases():
            return {"expert_gate_up_bias": np.zeros(self._bias_shape(), dtype=self.dtype)}
        if not bias:
            return {}
        return {name: self.draw.normal(shape, self.dtype) for name, shape in shapes.items()}

    def _bias_shape(self) -> tuple[int, ...]:
        if self.is_mx:
            return (self.E_local, mx.intermediate_partitions(self.I), 2, math.ceil(self.I / 512), 4)
        return (self.E_local, 2, self.I)

    def _weights(self, touched: Any) -> dict[str, Any]:
        """Return expert weights; packed ones are plain words, as a framework without the packed
        types passes them.
        """
        if self.is_mx:
            self.packed = mx.draw_experts(
                self.draw, self.E_local, self.H, self.I, self.weight_dtype, touched
            )
            return {
                "expert_gate_up_weights": self.packed.gate_up,
                "expert_down_weights": self.packed.down,
                "expert_gate_up_weights_scale": self.packed.gate_up_scale,
                "expert_down_weights_scale": self.packed.down_scale,
            }
        draw, dtype = self.draw, dtype_of(self.weight_dtype)
        return {
            "expert_gate_up_weights": only_experts(
                (self.E_local, self.H, 2, self.I),
                dtype,
                touched,
                lambda shape: draw.normal(shape, dtype),
            ),
            "expert_down_weights": only_experts(
                (self.E_local, self.I, self.H),
                dtype,
                touched,
                lambda shape: draw.normal(shape, dtype),
            ),
        }

    def _reference(self, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
        function = self.library.get(REFERENCE, "moe_block_tkg_torch_ref")
        arguments = dict(inputs)
        if self.is_mx:
            arguments["expert_gate_up_weights"] = mx.for_reference(
                self.packed.gate_up, self.weight_dtype
            )
            arguments["expert_down_weights"] = mx.for_reference(self.packed.down, self.weight_dtype)
        else:
            for name in ("expert_gate_up_weights", "expert_down_weights"):
                arguments[name] = Experts(inputs[name])
        with self._norm_in_input_dtype():
            return run_reference(function, arguments)

    @contextlib.contextmanager
    def _norm_in_input_dtype(self) -> Iterator[None]:
        """Round the reference's norm to the type of the input, as the reference itself means to.

        It casts the norm to the input's type, which does nothing once the input has been widened to
        float32 for the CPU; the norm's rounding alone then uses up the whole tolerance of mx cases.
        """
        module = importlib.import_module(f"{PACKAGE}.{REFERENCE}")
        norm = module.rms_norm_torch_ref
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.dtype.name)

        def rounded(*args: Any, **kwargs: Any) -> Any:
            result = norm(*args, **kwargs)
            return result if dtype is None else result.to(dtype).float()

        module.rms_norm_torch_ref = rounded  # type: ignore[attr-defined]
        try:
            yield
        finally:
            module.rms_norm_torch_ref = norm  # type: ignore[attr-defined]

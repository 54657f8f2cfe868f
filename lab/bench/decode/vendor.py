"""The vendor's decode kernels on a benchmark's case: layouts, arguments, and which mode is faster.

Selective reads an expert once for each token that chose it, all experts reads every one: both times
follow from sizes alone, whatever the routing. A mode whose bytes at the HBM rate already take
longer than the other mode took is left out; the attempt keeps that bound.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nki_sim
from lab.bench.comparison.attempts import Attempt
from lab.bench.decode.cases import ROUTERS, DecodeCase
from lab.bench.decode.router_inputs import BF16, RouterInputs
from lab.check.vendor_cases.library import VendorLibrary
from neuron_moe.tools.timing import runs
from neuron_moe.tools.timing.layers import HBM_BYTES_PER_US, Model
from neuron_moe.tools.timing.pool import Task
from nki_sim import SimOptions, TensorSpec

H_MULTIPLE = 256  # 128 partitions on each of two cores; callers pad
CORES = 2
MODES = ("all_experts", "selective")


def padded_hidden(model: Model) -> int:
    """Return H as the vendor's users must pad it."""
    return -(-model.H // H_MULTIPLE) * H_MULTIPLE


def bound_us(model: Model, mode: str, tokens: int, format: str = "bf16") -> float:
    """Return the least time that reading the mode's weights takes (computed).

    The larger of their bytes at the HBM rate, and their runs on all DMA engines: gate and up are
    read apart, so that a run of either is one row of I.
    """
    chip = nki_sim.hardware.find("trn2")
    experts = model.E if mode == "all_experts" else tokens * model.K
    H, item = padded_hidden(model), 2 if format == "bf16" else 1
    run_ns = chip.dma_run_ns + model.I * item / chip.dma_engine_bytes_per_ns
    runs_us = 2 * H * run_ns / (CORES * chip.dma_engines) / 1e3
    return experts * max(3 * H * model.I * item / HBM_BYTES_PER_US, runs_us)


class VendorSide:
    """The vendor's modes of one case, whatever the routing: which still matter, what they took.

    The mode with the smaller bound runs first; the other one is left out where its bound exceeds
    what the first took.

    Args:
        library: the user's checkout.
        case: what to compute.
        known: attempts of an earlier run by name; those are not run again.
        options: of the simulator.
    """

    def __init__(
        self,
        library: VendorLibrary,
        case: DecodeCase,
        known: Mapping[str, Attempt],
        options: SimOptions,
    ) -> None:
        self.case = case
        self.name = f"{case.kernel} {case.model.name} TP{case.model.tp} B={case.B} {case.format}"
        self._library, self._options = library, options
        self._found = dict(known)
        self._waiting = sorted(MODES, key=self._bound_us)

    def _bound_us(self, mode: str) -> float:
        return bound_us(self.case.model, mode, self.case.B, self.case.format)

    @property
    def size(self) -> float:
        """The seconds of what still waits, about."""
        return sum(seconds_of(self.case, mode) for mode in self._waiting)

    def attempts(self) -> list[Attempt]:
        """Return what is known, that with the smaller bound first."""
        return sorted(self._found.values(), key=lambda attempt: attempt.bound_us)

    def next_task(self) -> Task | None:
        """Hand out the next mode that may be the faster one."""
        while self._waiting:
            mode = self._waiting.pop(0)
            if self._is_wanted(mode):
                compute = functools.partial(self._attempt, mode, self._fastest_us())
                return Task(mode, seconds_of(self.case, mode), compute)
        return None

    def take(self, task: Task, result: Attempt) -> None:
        """Keep the attempt at a mode."""
        self._found[task.name] = result

    def _fastest_us(self) -> float:
        times = (a.us for a in self._found.values() if a.us is not None)
        return min(times, default=float("inf"))

    def _is_wanted(self, mode: str) -> bool:
        """Whether to run a mode; if it cannot win, keep why."""
        found, bound = self._found, self._bound_us(mode)
        if mode in found:
            return False
        best = self._fastest_us()
        if bound > best:
            why = f"needs {bound:.0f} us at least, the other takes {best:.0f} us"
            found[mode] = Attempt(name=mode, bound_us=bound, why=why)
        return bound <= best

    def _attempt(self, mode: str, most_us: float) -> Attempt:
        """Simulate a mode; `most_us` is what it may take to be the fastest."""
        found = Attempt(name=mode, bound_us=self._bound_us(mode))
        try:
            run = launch_vendor(self._library, self.case, mode, self._options)
        except (nki_sim.NkiValidationError, AssertionError, NotImplementedError) as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            return dataclasses.replace(found, why=why)
        return found.timed(run.timeline, most_us)


def seconds_of(case: DecodeCase, mode: str) -> float:
    """Return what simulating a mode takes, about (measured on one machine)."""
    model = case.model
    experts = model.E if mode == "all_experts" else case.B * model.K
    return 1.0 + experts * (model.H / 2048) * (1.0 + model.I / 512) * 0.02


def launch_vendor(
    library: VendorLibrary,
    case: DecodeCase,
    mode: str,
    options: SimOptions,
    held: Model | None = None,
) -> nki_sim.Run:
    """Simulate a mode of the vendor's kernel.

    Args:
        library: the user's checkout.
        case: what to compute.
        mode: one of MODES.
        options: of the simulator.
        held: by a block, the experts of its rank, the first ones; default: all.

    Raises:
        NkiValidationError: the kernel breaks a rule of the simulated chip with these sizes.
        AssertionError: the kernel refuses these sizes.
    """
    if case.kernel == "decode_moe":
        index_TK = case.expert_index()
        return launch_moe(library, case.model, index_TK, mode, options, case.format)
    with contextlib.redirect_stdout(io.StringIO()):  # the library reports its use of memory
        return _launch_block(library, case, mode, options, held or case.model)


def launch_moe(
    library: VendorLibrary,
    model: Model,
    index_TK: NDArray[np.int32],
    mode: str,
    options: SimOptions,
    format: str = "bf16",
) -> nki_sim.Run:
    """Simulate a mode of moe_tkg.

    Args:
        library: the user's checkout.
        model: the layer.
        index_TK: [T, K] choices.
        mode: one of MODES.
        options: of the simulator.
        format: of the weights, bf16 or fp8.
    """
    arguments = {
        **_experts(library, model, format),
        "hidden_input": TensorSpec((len(index_TK), padded_hidden(model)), "bfloat16"),
        "expert_affinities": TensorSpec((len(index_TK), model.E), "float32"),
        "expert_index": index_TK,
        "is_all_expert": mode == "all_experts",
    }
    if mode == "all_experts":  # affinities are those of the choices, as from the router
        arguments["rank_id"] = np.zeros((1, 1), np.uint32)
    kernel = library.get("core.moe.moe_tkg.moe_tkg", "moe_tkg")
    with contextlib.redirect_stdout(io.StringIO()):  # the library reports its use of memory
        return runs.run(
            kernel, lnc=CORES, options=dataclasses.replace(options, nki="0.6"), **arguments
        )


def _launch_block(
    library: VendorLibrary, case: DecodeCase, mode: str, options: SimOptions, held: Model
) -> nki_sim.Run:
    """Simulate moe_block_tkg."""
    model, H = case.model, padded_hidden(case.model)
    front = RouterInputs.of(case, H)
    router, experts = ROUTERS[model.name], _experts(library, held, case.format)
    arguments = {
        "hidden_act_fn": experts.pop("activation_fn"),
        **experts,
        "inp": front.hidden_TH.reshape(case.B, 1, H),
        "gamma": front.norm_1H,
        "router_weights": np.ascontiguousarray(front.weight_EH.T),
        "router_bias": None if front.bias_1E is None else front.bias_1E.astype(BF16),
        "eps": 1e-6,
        "top_k": model.K,
        "router_act_fn": library.enum("RouterActFnType", router["act_fn"].upper()),
        "router_pre_norm": not router.get("act_over_topk", False),
        "norm_topk_prob": bool(router.get("renormalize")),
        "router_mm_dtype": library.nl.bfloat16,
        "hidden_actual": model.H,
        "skip_router_logits": False,
        "is_all_expert": mode == "all_experts",
        "rank_id": np.zeros((1, 1), np.uint32),
    }
    kernel = library.get("core.moe_block.moe_block_tkg", "moe_block_tkg")
    return runs.run(kernel, lnc=CORES, options=dataclasses.replace(options, nki="0.6"), **arguments)


def _experts(library: VendorLibrary, model: Model, format: str) -> dict[str, Any]:
    """Return weights and formula of the experts, floating point without values.

    The kernels scale outputs only; a model that scales inputs gets that. In fp8 they take e4m3 with
    scales of rows, whatever the 8-bit format of ours.
    """
    vendor = model.vendor
    E, H, I = model.E, padded_hidden(model), model.I  # noqa: E741  the axis letters
    weights = "bfloat16" if format == "bf16" else "float8_e4m3"
    found: dict[str, Any] = {
        "expert_gate_up_weights": TensorSpec((E, H, 2, I), weights),
        "expert_down_weights": TensorSpec((E, I, H), weights),
        "expert_affinities_scaling_mode": library.enum("ExpertAffinityScaleMode", "POST_SCALE"),
        "activation_fn": library.enum("ActFnType", vendor.get("act_fn", "SiLU")),
    }
    if format == "fp8":
        found["expert_gate_up_weights_scale"] = TensorSpec((E, 2, I), "float32")
        found["expert_down_weights_scale"] = TensorSpec((E, H), "float32")
    if vendor.get("bias"):
        found["expert_gate_up_bias"] = TensorSpec((E, 2, I), "bfloat16")
        found["expert_down_bias"] = TensorSpec((E, H), "bfloat16")
    for key in ("gate_upper", "up_upper", "up_lower"):
        if key in vendor:
            side, bound = key.split("_")
            found[f"{side}_clamp_{bound}_limit"] = vendor[key]
    return found

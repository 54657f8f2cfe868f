"""The vendor's chain of kernels for a layer's prefill: router, index, experts with their sum.

router_topk, find_nonzero_indices, indexed_flatten, then the fastest of the moe_cte variants of
`bench prefill`, which add up a token's experts themselves; on ranks that split experts, of those
that are the fastest there; of shared experts, the library's dense MLP. What would be unfair to the
chain is left out of it: the norm, the gate of shared experts and the sum with them, what a graph
computes between the launches (offsets of blocks, experts of blocks), groups and selection biases,
which its router has not; and the router's hidden states lie in whichever of its two layouts is
faster, turned for nothing.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import nki_sim
from neuron_moe.shared_experts import SharedExperts
from neuron_moe.tools.bench.comparison import layers
from neuron_moe.tools.bench.comparison.attempts import fastest
from neuron_moe.tools.bench.comparison.timelines import corner_timelines
from neuron_moe.tools.bench.decode.cases import ROUTERS
from neuron_moe.tools.bench.prefill.ours import OPTIONS
from neuron_moe.tools.bench.prefill.vendor import KERNEL_NAMES, UNFIT, VARIANTS, VendorSide
from neuron_moe.tools.check.vendor_cases.block_mapping import num_blocks
from neuron_moe.tools.check.vendor_cases.library import VendorLibrary
from neuron_moe.tools.check.vendor_cases.mlp import mlp_kernel
from neuron_moe.tools.check.vendor_cases.moe_prefill import CORES
from neuron_moe.tools.check.vendor_cases.router import HBM_LAYOUTS
from nki_kernels.common.chip import PARTITIONS

ROUTER_TOKENS = 2048  # the most that router_topk is meant for; more are several launches
INDEX_TOKENS = 4096  # of a piece of find_nonzero_indices, by which its tiles fit SBUF
HYBRID_MODEL = "mixtral-8x7b"  # the only one whose fastest variant on TP ranks is the hybrid one
_FLATTEN_PIECES = 16  # indexed_flatten wants a multiple of so many pieces of a row
_FULL = replace(OPTIONS, mode="full")  # these kernels go by what they compute
BF16 = ml_dtypes.bfloat16
MLP = "mlp"  # the launch for shared experts
_ACTIVATIONS = {"silu": "SiLU", "gelu": "GELU", "gelu_tanh": "GELU_Tanh_Approx"}
Times = dict[str, dict[str, float]]  # microseconds of each launch, by corner


class ChainError(ValueError):
    """A kernel of the chain does not run with these sizes."""


class VendorChain:
    """The chain for one layer on a rank.

    Args:
        library: the user's checkout.
        name: of the model, a shipped configuration.
        tp: ranks that split an expert.
        ep: ranks that split the experts.
        shared: this rank's share of the shared experts, or None.
    """

    def __init__(
        self,
        library: VendorLibrary,
        name: str,
        tp: int,
        ep: int,
        shared: SharedExperts | None = None,
    ) -> None:
        whole = next(m for m in layers.MODELS if name.startswith(m.name.replace("-", "_")))
        self._library, self._whole, self._shared = library, whole, shared
        self._model = replace(whole, tp=tp, I=whole.I * whole.tp // tp, E=whole.E // ep)
        is_hybrid_slower = ep == 1 and whole.name != HYBRID_MODEL
        self._kernels = ("shard_on_block",) if is_hybrid_slower else KERNEL_NAMES

    def times(
        self,
        expert_index_TK: NDArray[np.int32],
        corners: Sequence[str],
        known: Mapping[str, dict[str, float] | None] = MappingProxyType({}),
    ) -> Times:
        """Return the microseconds of each launch, by corner.

        Args:
            expert_index_TK: [T, K] experts of the model, those of this rank first.
            corners: of the clock.
            known: launches of an earlier run, by corner, which are not run again.

        Raises:
            ChainError: a kernel of the chain does not run with these sizes.
        """
        found = {corner: dict(known.get(corner) or {}) for corner in corners}
        unknown = [corner for corner in corners if not found[corner]]
        if unknown:
            found |= self._routed(expert_index_TK, unknown)
        alone = [corner for corner in corners if MLP not in found[corner]]
        if self._shared is not None and alone:
            for corner, us in self._every_token(self._shared, len(expert_index_TK), alone).items():
                found[corner][MLP] = us
        return found

    def _routed(self, expert_index_TK: NDArray[np.int32], corners: Sequence[str]) -> Times:
        """Return the time of each launch for routed experts."""
        local_TK = np.minimum(expert_index_TK, self._model.E)  # the first beyond: another rank's
        router = self._route(len(local_TK), corners)
        listed = self._list_tokens(expert_index_TK, corners)
        found: Times = {}
        for corner, (us, block_size) in self._experts(local_TK, corners).items():
            flattened = self._flatten(local_TK, block_size, [corner])
            found[corner] = {
                "router_topk": router[corner],
                "find_nonzero_indices": listed[corner],
                "indexed_flatten": flattened[corner],
                "moe_cte": us,
            }
        return found

    def _experts(
        self, local_TK: NDArray[np.int32], corners: Sequence[str]
    ) -> dict[str, tuple[float, int]]:
        """Return for each corner the time and the block size of the fastest variant."""
        chip = nki_sim.hardware.find("trn2")
        known: dict[str, dict[str, Any]] = {corner: {} for corner in corners}
        side = VendorSide(
            self._library, self._model, local_TK, known, chip=chip, kernels=self._kernels
        )
        while (task := side.next_task()) is not None:
            side.take(task, task.compute())
        sizes = {variant.name: variant.block_size for variant in VARIANTS}
        found = {}
        for corner in corners:
            attempts = side.attempts(corner)
            best = fastest(attempts)
            if best is None or best.us is None:
                raise ChainError("; ".join(f"{each.name}: {each.why}" for each in attempts))
            found[corner] = best.us, sizes[best.name]
        return found

    def _every_token(
        self, shared: SharedExperts, num_tokens: int, corners: Sequence[str]
    ) -> dict[str, float]:
        """Return the time of shared experts: a dense MLP of all tokens."""
        H, width, library = shared.spec.hidden_size, shared.width, self._library
        specs = {
            "hidden_tensor": (1, num_tokens, H),
            "gate_proj_weights_tensor": (H, width),
            "up_proj_weights_tensor": (H, width),
            "down_proj_weights_tensor": (width, H),
        }
        operands = {name: nki_sim.TensorSpec(shape, "bfloat16") for name, shape in specs.items()}
        activation = library.enum("ActFnType", _ACTIVATIONS[shared.spec.activation])
        return self._time(
            corners, MLP, mlp_kernel(library), OPTIONS, activation_fn=activation, **operands
        )

    def _route(
        self, num_tokens: int, corners: Sequence[str], most: int = ROUTER_TOKENS
    ) -> dict[str, float]:
        """Return the time of the router's launches, in the faster layout of hidden states."""
        rows = min(num_tokens, most)
        try:
            ways = [self._route_once(rows, layout, corners) for layout in HBM_LAYOUTS]
        except ChainError:  # wide tokens leave room for fewer
            if rows <= PARTITIONS:
                raise
            return self._route(num_tokens, corners, rows // 2)
        launches = -(-num_tokens // rows)
        return {corner: launches * min(way[corner] for way in ways) for corner in corners}

    def _route_once(self, rows: int, layout: str, corners: Sequence[str]) -> dict[str, float]:
        whole, library = self._whole, self._library
        router, rng = ROUTERS[whole.name], np.random.default_rng(0)
        H, E, K = -(-whole.H // 128) * 128, whole.E, whole.K
        x_TH = rng.standard_normal((rows, H)).astype(BF16)
        weight_HE = (rng.standard_normal((H, E)) / H**0.5).astype(BF16)
        return self._time(
            corners, "router_topk", library.get("core.router_topk.router_topk", "router_topk"),
            x=x_TH if layout == "T_H" else np.ascontiguousarray(x_TH.T),
            w=weight_HE,
            w_bias=np.zeros((1, E), BF16) if router.get("has_bias") else None,
            router_logits=np.zeros((rows, E), BF16),
            expert_affinities=np.zeros((rows, E), BF16),
            expert_index=np.zeros((rows, K), np.uint32),
            act_fn=library.enum("RouterActFnType", router["act_fn"].upper()),
            k=K,
            x_hbm_layout=HBM_LAYOUTS[layout],
            x_sb_layout=0,
            router_pre_norm=not router.get("act_over_topk", False),
            norm_topk_prob=bool(router.get("renormalize")),
            shard_on_tokens=True,
        )  # fmt: skip

    def _list_tokens(
        self, expert_index_TK: NDArray[np.int32], corners: Sequence[str]
    ) -> dict[str, float]:
        """Return the time of listing the tokens of each local expert."""
        T = len(expert_index_TK)
        mask_TE = np.zeros((T, self._whole.E), np.float32)
        np.put_along_axis(mask_TE, expert_index_TK, 1.0, axis=1)
        name = "find_nonzero_indices"
        return self._time(
            corners, name, self._library.get(f"core.subkernels.{name}", name),
            input_tensor=mask_TE,
            col_start_id=np.zeros(1, np.int32),
            n_cols=max(CORES, self._model.E),
            chunk_size=min(T, INDEX_TOKENS),
        )  # fmt: skip

    def _flatten(
        self, local_TK: NDArray[np.int32], block_size: int, corners: Sequence[str]
    ) -> dict[str, float]:
        """Return the time of putting these lists into blocks."""
        T, K = local_TK.shape
        E = self._model.E
        used = -(-np.bincount(local_TK.reshape(-1), minlength=E)[:E] // block_size)
        first = np.cumsum(used) - used
        length = max(1, min(block_size, T // _FLATTEN_PIECES))
        blocks = num_blocks(T, min(K, E), E, block_size, CORES)
        multiple = max(128, length)
        slots = -(-(blocks * block_size + T) // multiple) * multiple
        name = "indexed_flatten"
        return self._time(
            corners, name, self._library.get(f"core.subkernels.{name}", name),
            input_tensor=np.full((E, T), -1, np.int32),
            f_len=length,
            output_len=slots,
            row_offsets=(first * (block_size // length)).astype(np.int32),
        )  # fmt: skip

    def _time(
        self,
        corners: Sequence[str],
        name: str,
        kernel: Any,
        options: nki_sim.SimOptions = _FULL,
        **arguments: Any,
    ) -> dict[str, float]:
        """Return the time of a launch, by corner."""
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # the library prints advice
                run = nki_sim.run(kernel, lnc=CORES, options=options, **arguments)
        except UNFIT as error:
            line = (str(error).strip().splitlines() or [""])[0].rsplit("/", 1)[-1]
            raise ChainError(f"{name}: {type(error).__name__}: {line}") from error
        return {corner: line.total_us for corner, line in corner_timelines(run, corners)}

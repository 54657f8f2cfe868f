"""What NxD runs by default at a shape, and the least time that takes.

NxD decides by sizes (`ExpertMLPsV2.forward`; our `compat="nxd"` has its table), with blocks of 512
slots. Of its default paths only one is a kernel of the vendor's library, blockwise prefill of plain
SiLU experts sharded on H, as NxD 0.16 ships it and as later releases can have it patched in; the
others are torch graphs for the compiler, of which a bound is computed: the weights they read at the
HBM rate, or their multiplications at the peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.check.vendor_cases.block_mapping import num_blocks
from neuron_moe.paths import choose_path
from neuron_moe.tools.timing.layers import HBM_BYTES_PER_US, PE_CYCLES_PER_US, Model

BLOCK_SIZE = 512
AT_LEAST = ", at least"  # ends a plan whose time is a bound
CELLS = 2 * 128 * 128  # of two cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """NxD's default at a shape.

    Attributes:
        plan: in words.
        experts: whose weights are read, as often as they are.
        rows: that are multiplied with the weights of one expert each.
        is_kernel: whether it is the library's kernel sharded on H.
    """

    plan: str
    experts: int
    rows: int
    is_kernel: bool = False

    def bound_us(self, model: Model, weight_bytes: int) -> float:
        """Return the least time of it (computed)."""
        cells = 3 * model.H * model.I
        reads_us = self.experts * cells * weight_bytes / HBM_BYTES_PER_US
        return max(reads_us, self.rows * cells / CELLS / PE_CYCLES_PER_US)


def nxd_default(model: Model, phase: str, tokens: int) -> Deployed:
    """Return what NxD runs for some tokens.

    Args:
        model: the layer.
        phase: prefill or decode.
        tokens: T.
    """
    T, K, E = tokens, model.K, model.E
    path = choose_path(phase, T, K, E, block_size=BLOCK_SIZE, compat="nxd").path
    if path == "selective":
        return Deployed(plan=f"selective in torch{AT_LEAST}", experts=T * K, rows=T * K)
    if path == "all_experts":
        return Deployed(plan=f"all experts in torch{AT_LEAST}", experts=E, rows=T * E)
    blocks = num_blocks(T, K, E, BLOCK_SIZE)
    is_kernel = not model.vendor.get("bias")  # it has neither biases nor clamps
    plan = "shard_on_h B=512" if is_kernel else f"blocks of 512 in torch{AT_LEAST}"
    return Deployed(plan=plan, experts=blocks, rows=blocks * BLOCK_SIZE, is_kernel=is_kernel)

"""What a run really moved and multiplied, to hold against the `cost_` functions."""

from nki_kernels.common.costs import KernelCost
from nki_sim.trace import DmaFacts, MatmulFacts, Trace


def measured_cost(trace: Trace) -> KernelCost:
    """Return the bytes and matmul columns of a trace."""
    read = written = columns = 0
    for instruction in trace:
        facts = instruction.facts
        if isinstance(facts, DmaFacts):
            read += facts.hbm_read_bytes
            written += facts.hbm_write_bytes
        elif isinstance(facts, MatmulFacts):
            columns += facts.n
    return KernelCost(read, written, columns)

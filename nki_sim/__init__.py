"""nki_sim: NKI kernels on a CPU, with the meaning, the rules and the time of the hardware.

Rooms from low to high; nothing imports upward: `errors`, `dialects`, `options`, `dtypes`,
`constants`, `hardware`, `targets` and `trace`; `machine`; `isa`; `language`; then `collectives`,
`launch`, `provide`, `testing`, `own_kernel` and `pytest_plugin`; `__main__` on top. `time` reads
`trace` and `hardware` alone, and `lint` reads `dialects`.
"""

from nki_sim.errors import (
    AccumulateError,
    CapacityError,
    DeadlockError,
    DivergenceError,
    IllegalOperand,
    LanguageError,
    NkiValidationError,
    OldDialectError,
    OutOfBounds,
    OverlapError,
    RaceError,
    UninitializedRead,
    UnknownValue,
)
from nki_sim.launch import Kernel, Run, TensorSpec, jit, run, run_ranks, simulate
from nki_sim.options import SimOptions
from nki_sim.provide import provide, stands_in

__version__ = "0.7.0"  # the NKI that it speaks

__all__ = [
    "AccumulateError",
    "CapacityError",
    "DeadlockError",
    "DivergenceError",
    "IllegalOperand",
    "Kernel",
    "LanguageError",
    "NkiValidationError",
    "OldDialectError",
    "OutOfBounds",
    "OverlapError",
    "RaceError",
    "Run",
    "SimOptions",
    "TensorSpec",
    "UninitializedRead",
    "UnknownValue",
    "jit",
    "provide",
    "run",
    "run_ranks",
    "simulate",
    "stands_in",
]

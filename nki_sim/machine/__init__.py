"""The simulated machine: memory, tensors, registers, and the cores that programs run on.

Files from low to high; each knows only those before it:

- `memory`, `geometry`: bytes, which of them are defined, where a view is.
- `ambient`, `numbers`, `registers`, `views`, `tensor`: what kernels hold in their hands.
- `shared_log`, `system`: what the cores of a launch share.
- `iterations`: whether the iterations of a dynamic loop are alike.
- `program`, `allocator`, `undefined`, `core`: one core; its place in the kernel, its memories, and
  how an instruction takes effect.
- `scheduler`, `races`, `liveness`: several cores, and the checks of a whole run.
- `host_memory`, `host_threads`: settings of the process that simulates.

For nki_sim.isa, nki_sim.language and the files above them. It knows nothing of instructions, of the
language or of time.
"""

from nki_sim.machine.core import Core, Machine, NkiInstruction, current, running
from nki_sim.machine.memory import MemoryRegion
from nki_sim.machine.registers import DynamicSlice, NkiScalar, SequencerValue, VirtualRegister
from nki_sim.machine.system import Finding
from nki_sim.machine.tensor import NkiTensor

__all__ = [
    "Core",
    "DynamicSlice",
    "Finding",
    "Machine",
    "MemoryRegion",
    "NkiInstruction",
    "NkiScalar",
    "NkiTensor",
    "SequencerValue",
    "VirtualRegister",
    "current",
    "running",
]

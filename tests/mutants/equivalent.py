"""Mutants that no test can notice, and why: they are not sampled.

Each stands for one line as it is, without its indentation, and as it would be. `test_mutants.py`
sees that such a mutant still exists, so that an entry goes when its line does.
"""

from typing import NamedTuple


class Equivalent(NamedTuple):
    """A change of one line of a file that changes nothing.

    Attributes:
        path: of the file.
        old, new: the line before and after.
        why: what is the same.
    """

    path: str
    old: str
    new: str
    why: str


EQUIVALENT = (
    Equivalent(
        "nki_sim/isa/tensor_engine.py",
        "if rows < 128 and stationary.geometry.start_partition != row:",
        "if rows <= 128 and stationary.geometry.start_partition != row:",
        "128 rows begin at row 0 of the array, and on partition 0",
    ),
    Equivalent(
        "nki_sim/isa/_arithmetic.py",
        "if least > _FIRST_GENERATION and least > core.target.version.value:",
        "if least >= _FIRST_GENERATION and least > core.target.version.value:",
        "no target is older than the first generation",
    ),
    Equivalent(
        "nki_sim/machine/races.py",
        "longer = first if len(first) > len(core.flow) else core.flow",
        "longer = first if len(first) >= len(core.flow) else core.flow",
        "the lengths differ there",
    ),
    Equivalent(
        "nki_sim/isa/_dma_operand.py",
        "return self.tensor._derive((1, 1), (1, 1), 0, static=True)",
        "return self.tensor._derive((1, 1), (2, 1), 0, static=True)",
        "an axis of one element has no step",
    ),
    Equivalent(
        "nki_sim/isa/gpsimd.py",
        "wrapped.setflags(write=False)",
        "pass",
        "nothing writes it: the flag is there for those who change the file",
    ),
    Equivalent(
        "neuron_moe/quantize/recode.py",
        "highest = torch.where(has_value, exponents, -256).amax(axes)",
        "highest = torch.where(has_value, exponents, -257).amax(axes)",
        "both lie below every exponent",
    ),
    Equivalent(
        "neuron_moe/quantize/recode.py",
        "lowest = torch.where(has_value, exponents, 256).amin(axes)",
        "lowest = torch.where(has_value, exponents, 257).amin(axes)",
        "both lie above every exponent",
    ),
    Equivalent(
        "neuron_moe/quantize/recode.py",
        "relative = relative.clamp(0, E8M0_NAN - 1).to(torch.uint8)",
        "relative = relative.clamp(1, E8M0_NAN - 1).to(torch.uint8)",
        "only groups of zeros lie outside the window, whatever the exponent they are given",
    ),
    Equivalent(
        "neuron_moe/quantize/recode.py",
        "relative = relative.clamp(0, E8M0_NAN - 1).to(torch.uint8)",
        "relative = relative.clamp(0, E8M0_NAN - 2).to(torch.uint8)",
        "only groups of zeros lie outside the window, whatever the exponent they are given",
    ),
    Equivalent(
        "neuron_moe/quantize/recode.py",
        "highest.append(torch.where(is_zero, -256, field).amax(0, keepdim=True))",
        "highest.append(torch.where(is_zero, -257, field).amax(0, keepdim=True))",
        "both lie below every exponent",
    ),
    Equivalent(
        "neuron_moe/quantize/recode.py",
        "lowest.append(torch.where(is_zero, 256, field).amin(0, keepdim=True))",
        "lowest.append(torch.where(is_zero, 257, field).amin(0, keepdim=True))",
        "both lie above every exponent",
    ),
    Equivalent(
        "neuron_moe/quantize/mxfp4.py",
        "codes += ((scaled.clamp(4, 6) - 4) / 2).round_()",
        "codes += ((scaled.clamp(5, 6) - 4) / 2).round_()",
        "up to 5, half a step rounds to the even code, which is that of 4",
    ),
)

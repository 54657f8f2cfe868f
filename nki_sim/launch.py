"""Running a kernel: `jit`, `simulate`, `run`, and what comes back.

Kernels called with NumPy or torch tensors outside a running kernel are simulated; inside one they
are plain functions. Inputs are shared with the caller while the kernel runs; what a kernel writes
to an input comes back only if it returns that tensor, and the caller's array stays as it was.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

import numpy as np

from nki_sim import dtypes, hardware
from nki_sim.dialects import OLD_PARAMETERS, refusal
from nki_sim.dtypes import DType, as_dtype, bfloat16
from nki_sim.errors import (
    IllegalOperand,
    NkiValidationError,
    OldDialectError,
    UninitializedRead,
)
from nki_sim.language import api as language
from nki_sim.language.objects import NKIObject
from nki_sim.machine import Core, Finding, Machine, MemoryRegion, NkiTensor, running
from nki_sim.machine.ambient import on_core
from nki_sim.machine.host_memory import keep_freed_memory
from nki_sim.machine.host_threads import one_blas_thread
from nki_sim.machine.liveness import check_capacity
from nki_sim.machine.races import check_flow, check_races
from nki_sim.machine.scheduler import Scheduler
from nki_sim.machine.system import PACKAGE_DIR
from nki_sim.options import SimOptions
from nki_sim.trace import CORE, RANK, Trace

_UNEXPECTED: Final = re.compile(r"(\w+)\(\) got an unexpected keyword argument '(\w+)'")
_MOST_PROGRAMS: Final = 64  # of a grid of several axes
_IGNORED_JIT_OPTIONS = frozenset(
    ("mode", "debug_kernel", "show_compiler_tb", "experimental_flags", "debug", "grid")
)

# Types of 64 bits that the hardware lacks; frameworks pass them as these.
_NARROWED = {
    dtypes.int64: dtypes.int32,
    dtypes.uint64: dtypes.uint32,
    dtypes.float64: dtypes.float32,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without values: an input of `indices` mode, or an output nothing is known of.

    Attributes:
        shape: sizes of the axes.
        dtype: element type, anything `as_dtype` takes.
    """

    shape: tuple[int, ...]
    dtype: Any

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass
class Run:
    """What a simulation gives.

    Attributes:
        outputs: what the kernel returned, tensors as arrays (NumPy, or torch where torch came in).
            With several ranks, a list with one entry per rank.
        trace: the instructions.
        options: how it was simulated.
        machine: memories and cores after the run.
    """

    outputs: Any
    trace: Trace
    options: SimOptions
    machine: Machine = field(repr=False)

    @property
    def findings(self) -> list[Finding]:
        """What was tolerated but is worth knowing, one entry per kind and source line."""
        return list(self.machine.findings.values())

    @property
    def sbuf_peak_bytes(self) -> int:
        """The largest number of bytes per partition alive in SBUF at once, on any core."""
        return max(core.sbuf_peak for core in self.machine.cores)

    @functools.cached_property
    def timeline(self) -> Any:
        """The engine times of the trace; computed on first use."""
        from nki_sim.time import schedule  # here, as a run that requests no times starts faster

        return schedule(self.trace, hardware.find(self.machine.target.name))


class Kernel:
    """A kernel, and the grid it is launched with.

    Args:
        function: the Python function.
        grid: physical cores, by axis; empty means launched without brackets.
        schedule: (consumer, producers) pairs of instruction names.
        target: the generation that `platform_target` of nki.jit names, or None.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        grid: tuple[int, ...] = (),
        schedule: Sequence[tuple[Any, Any]] = (),
        target: str | None = None,
    ) -> None:
        self.function = function
        self.grid = grid
        self.schedule = tuple(schedule)
        self.target = target
        functools.update_wrapper(self, function)

    @property
    def func(self) -> Callable[..., Any]:
        """The Python function."""
        return self.function

    def __getitem__(self, grid: Any) -> Kernel:
        """Return the kernel with a launch bracket: ``kernel[2]`` runs on two cores."""
        return Kernel(self.function, _grid(grid), self.schedule, self.target)

    def with_schedule(self, schedule: Sequence[tuple[Any, Any]]) -> Kernel:
        """Return the kernel with explicit dependencies between named instructions."""
        return Kernel(self.function, self.grid, schedule, self.target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Simulate it; inside a running kernel, call the function."""
        if running() is not None:
            return self.function(*args, **kwargs)
        return _launch(self, [(args, kwargs)], None, SimOptions(), single=True).outputs


def _grid(grid: Any) -> tuple[int, ...]:
    """Return the cores that a launch bracket requests, by axis.

    The language has one axis of 1 or 2 cores; more axes are those of the first NKI.
    """
    axes = tuple(int(size) for size in grid) if isinstance(grid, (tuple, list)) else (int(grid),)
    if len(axes) == 1 and axes[0] not in (1, 2):
        raise ValueError(f"grid={grid!r}: must be 1 or 2 cores.")
    if not axes or min(axes) < 1 or math.prod(axes) > _MOST_PROGRAMS:
        raise ValueError(f"grid={grid!r}: must be axes of 1 to {_MOST_PROGRAMS} programs in all.")
    return axes


class AddressRotation(Enum):
    """Which tensors the compiler may move from iteration to iteration."""

    AUTO = "auto"
    ENABLE = "enable"
    DISABLE = "disable"


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """What `nki.jit` tells the compiler; nothing of it is simulated.

    Attributes:
        address_rotation: which tensors it may move from iteration to iteration.
        prefetch_auto: whether it looks for loads to prefetch.
        nki_alloc_fallback: whether another allocator is tried when that of NKI fails.
        non_ssa_legalization, dead_code_elim, barrier_check: passes of its back end.
    """

    address_rotation: AddressRotation = AddressRotation.AUTO
    non_ssa_legalization: bool | None = None
    dead_code_elim: bool | None = None
    barrier_check: bool | None = None
    prefetch_auto: bool = False
    nki_alloc_fallback: bool = True


@dataclass(frozen=True, kw_only=True)
class SpecializationConfig:
    """What `nki.jit` tells the tracer; nested kernels are always inlined here.

    Attributes:
        allow_nested_config_override: whether a nested kernel of another configuration only warns.
    """

    allow_nested_config_override: bool = False


def jit(
    fn: Any = None,
    *,
    compile_config: CompileConfig | None = None,
    specialization_config: SpecializationConfig | None = None,
    **kwargs: Any,
) -> Any:
    """Mark a function as a kernel.

    Args:
        fn: the function; without it a decorator is returned.
        compile_config, specialization_config: accepted; not simulated.
        **kwargs: of older versions. `platform_target` is the chip to simulate where the options of
            the run name none, and leaves a finding; the others change nothing.

    Raises:
        TypeError: an unknown keyword.
    """
    target = kwargs.pop("platform_target", None)
    for key in kwargs:
        if key not in _IGNORED_JIT_OPTIONS:
            raise TypeError(f"{key}: must be an option of nki.jit.")
    if fn is None:
        return functools.partial(jit, platform_target=target)
    return fn if isinstance(fn, Kernel) else Kernel(fn, target=target)


def simulate(kernel: Any, options: SimOptions | None = None) -> Simulation:
    """Return a callable that runs a kernel on the simulator and returns its outputs.

    Args:
        kernel: a function, a `nki.jit` kernel, or ``kernel[2]``.
        options: how to simulate; the default is strict.
    """
    return Simulation(jit(kernel), options or SimOptions())


class Simulation:
    """A kernel bound to simulation options.

    Args:
        kernel: what to run.
        options: how.
    """

    def __init__(self, kernel: Kernel, options: SimOptions) -> None:
        self.kernel = kernel
        self.options = options
        self.last_run: Run | None = None

    def __getitem__(self, grid: Any) -> Simulation:
        """Return the simulation with a launch bracket."""
        return Simulation(self.kernel[grid], self.options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it and return the outputs."""
        self.last_run = _launch(self.kernel, [(args, kwargs)], None, self.options, single=True)
        return self.last_run.outputs


def run(
    kernel: Any,
    /,
    *args: Any,
    lnc: int | None = None,
    options: SimOptions | None = None,
    **kwargs: Any,
) -> Run:
    """Run a kernel on the simulator.

    Args:
        kernel: a function or a `nki.jit` kernel.
        *args: its arguments; arrays become tensors in HBM, everything else is compile-time.
        lnc: physical cores, overriding ``kernel[n]``.
        options: how to simulate.
        **kwargs: its keyword arguments.

    A kernel's own parameter called `lnc` gets that keyword (use ``kernel[n]`` for the cores), and
    one called `options` gets what is no `SimOptions`.

    Returns:
        Outputs, trace and findings.

    Raises:
        NkiValidationError: the kernel broke a rule; see `errors.py`.
    """
    found = jit(kernel)
    names = inspect.signature(found.function).parameters
    if lnc is not None and "lnc" in names:
        kwargs["lnc"], lnc = lnc, None
    if options is not None and "options" in names and not isinstance(options, SimOptions):
        kwargs["options"], options = options, None
    return _launch(found, [(args, kwargs)], lnc, options or SimOptions(), single=True)


def run_ranks(
    kernel: Any,
    arguments: Sequence[Sequence[Any] | Mapping[str, Any]],
    lnc: int | None = None,
    options: SimOptions | None = None,
) -> Run:
    """Run a kernel on several ranks that may use nki.collectives.

    Args:
        kernel: a function or a `nki.jit` kernel.
        arguments: for each rank its positional arguments, or its keyword arguments as a mapping.
        lnc: physical cores per rank.
        options: how to simulate.

    Returns:
        A run whose `outputs` is a list with one entry per rank.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), dict(entry)) if isinstance(entry, Mapping) else (tuple(entry), {})
        for entry in arguments
    ]
    return _launch(jit(kernel), calls, lnc, options or SimOptions(), single=False)


def _launch(
    kernel: Kernel,
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]],
    lnc: int | None,
    options: SimOptions,
    single: bool,
) -> Run:
    """Run the kernel once per rank and core, then check the trace as a whole."""
    keep_freed_memory()
    grid = kernel.grid if lnc is None else _grid(lnc)
    if kernel.target is not None and options.target is None:
        options = replace(options, target=kernel.target)
    machine = Machine(options, math.prod(grid), len(calls))
    if kernel.target is not None:
        text = "platform_target of nki.jit is gone since NKI 0.3; use SimOptions(target=...)"
        machine.find("deprecated", "", text)
    if len(grid) > 1:
        text = f"grid={grid}: the first NKI has several axes; today's has one of 1 or 2 cores"
        machine.find("deprecated", "", f"{text} (NEURON_LOGICAL_NC_CONFIG). Use loops")
    if machine.watcher is not None:
        machine.watcher.begun(getattr(kernel, "__name__", "kernel"))
    uses_torch = any(_is_torch(a) for args, kwargs in calls for a in (*args, *kwargs.values()))

    def program(core: Core) -> Any:
        core.grid = grid
        args, kwargs = calls[core.rank]
        try:
            with on_core(core):
                bound = _bind(core, kernel.function, args, kwargs)
                result = kernel.function(*bound.args, **bound.kwargs)
                core.check_all_ended()
                return result
        except NkiValidationError as error:
            _locate(error)
            raise
        except TypeError as error:
            if (old := _old_call(error)) is not None:
                _locate(old)
                raise old from None
            raise

    try:
        with one_blas_thread(), machine.float_flags.watch(is_on=machine.watches_numbers):
            if len(machine.cores) == 1:
                results = [program(machine.cores[0])]
            else:
                machine.scheduler = scheduler = Scheduler(machine)
                results = scheduler.run(program)
        _apply_schedule(machine.trace, kernel.schedule)
        check_flow(machine)
        check_races(machine)
        check_capacity(machine)
        if machine.watcher is not None:
            machine.watcher.ended(machine.trace)
        per_rank = [results[rank * machine.lnc] for rank in range(machine.num_ranks)]
        outputs = [_collect(machine, value, uses_torch) for value in per_rank]
    finally:
        machine.restore_inputs()
    return Run(outputs[0] if single else outputs, machine.trace, options, machine)


def _old_call(error: TypeError) -> OldDialectError | None:
    """Return what to raise for a helper of nki.language that got a parameter of older dialects."""
    found = _UNEXPECTED.search(str(error))
    if found is None or found[2] not in OLD_PARAMETERS:
        return None
    if found[1] != "_apply" and not hasattr(language, found[1]):
        return None  # a function of the user
    name = "operator of nl" if found[1] == "_apply" else f"nl.{found[1]}"
    old = refusal(f"{name}({found[2]}=)", OLD_PARAMETERS[found[2]])
    return old.with_traceback(error.__traceback__)


def _locate(error: NkiValidationError) -> None:
    """Add the kernel's line to an error that no instruction raised: views, loops, registers."""
    step = error.__traceback__
    place, inside = "", ""
    while step is not None:
        code = step.tb_frame.f_code
        if not code.co_filename.startswith(PACKAGE_DIR):
            place, inside = f"{code.co_filename}:{step.tb_lineno}", ""
        elif not inside:
            inside = code.co_name
        step = step.tb_next
    error.location = error.location or place
    if not inside.startswith("_"):
        error.instruction = error.instruction or inside


def _bind(core: Core, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Turn the caller's arguments into what the kernel sees."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    for key, value in bound.arguments.items():
        bound.arguments[key] = _to_device(core, key, value)
    return bound


def _to_device(core: Core, name: str, value: Any) -> Any:
    """Wrap arrays as HBM tensors, also inside tuples, mappings and NKIObjects."""
    if isinstance(value, TensorSpec):
        return core.bind_input(value, as_dtype(value.dtype), name)
    if isinstance(value, np.ndarray) or _is_torch(value):
        array, dtype = _as_array(value)
        if dtype in _NARROWED:
            target = _NARROWED[dtype]
            text = f"{name}: {dtype} is taken as {target}, and not written back"
            core.machine.find("input", "", text)
            array, dtype = array.astype(target.numpy), target
        return core.bind_input(array, dtype, name)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_to_device(core, f"{name}[{k}]", item) for k, item in enumerate(value))
    if isinstance(value, list):
        return [_to_device(core, f"{name}[{k}]", item) for k, item in enumerate(value)]
    if type(value) is dict:
        return {k: _to_device(core, f"{name}[{k!r}]", item) for k, item in value.items()}
    if isinstance(value, NKIObject) and hasattr(value, "__dict__"):
        copy = object.__new__(type(value))
        for key, item in value.__dict__.items():
            object.__setattr__(copy, key, _to_device(core, f"{name}.{key}", item))
        return copy
    return value


def _is_torch(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "torch" and hasattr(value, "detach")


def _as_array(value: Any) -> tuple[np.ndarray[Any, Any], DType]:
    """Return a contiguous writable array that shares memory with the input where it can."""
    if _is_torch(value):
        import torch

        dtype = as_dtype(str(value.dtype))
        tensor = value.detach().contiguous()
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = tensor.view(integers[tensor.element_size()]) if tensor.ndim else tensor.reshape(1)
        return bits.numpy().view(dtype.numpy).reshape(tuple(value.shape)), dtype
    dtype = as_dtype(value.dtype)
    array = np.ascontiguousarray(value)
    if array.dtype.names is not None:  # a packed type, named by its one field
        array = array.view(dtype.numpy)
    return (array if array.flags.writeable else array.copy()), dtype


def _collect(machine: Machine, value: Any, uses_torch: bool) -> Any:
    """Turn what a kernel returned into arrays."""
    if isinstance(value, NkiTensor):
        return _output(machine, value, uses_torch)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_collect(machine, item, uses_torch) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_collect(machine, item, uses_torch) for item in value)
    if isinstance(value, dict):
        return {key: _collect(machine, item, uses_torch) for key, item in value.items()}
    return value


def _output(machine: Machine, tensor: NkiTensor, uses_torch: bool) -> Any:
    """Check one returned tensor and give its values."""
    options = machine.options
    alloc = tensor._alloc
    if tensor.buffer is not MemoryRegion.shared_hbm:
        raise IllegalOperand(
            tensor.label(),
            "returned tensors in nl.shared_hbm",
            tensor.buffer.name,
            instruction="return",
            location=machine.location(alloc.line),
        )
    geometry = tensor.geometry
    if alloc.poisoned is not None and options.uninitialized == "output":
        bad = alloc.poisoned.elements_of(geometry.walk)
        if bad.any():
            first = tuple(int(k) for k in np.argwhere(bad)[0])
            origin = alloc.poison[0]
            raise UninitializedRead(
                origin.operands or tensor.label(),
                "elements that were written before they are read",
                f"unwritten ones; {int(bad.sum())} of {tensor.size} elements of the returned "
                f"{tensor.label()} depend on them, the first at {list(first)}",
                instruction=origin.op or "return",
                location=origin.location,
            )
    if not alloc.known:
        return TensorSpec(tensor.shape, tensor.dtype)
    array = tensor.array() if alloc.original is None else tensor.array().copy()
    if not alloc.defined.covers(geometry.box, geometry.walk):
        holes = ~alloc.defined.elements_of(geometry.walk)
        machine.find(
            "output",
            machine.location(alloc.line),
            f"{tensor.label()}: {int(holes.sum())} of {tensor.size} returned elements unwritten",
        )
        array[holes] = np.full(array.dtype.itemsize, options.fill, np.uint8).view(array.dtype)[0]
    if uses_torch:
        return _to_torch(array, tensor.dtype)
    if tensor.dtype.kind == "x":  # packed words keep their type, for a kernel that takes them
        return array.view(np.dtype(array.dtype, metadata={"nki": str(tensor.dtype)}))
    return array


def _to_torch(array: np.ndarray[Any, Any], dtype: DType) -> Any:
    import torch

    name = {"bool": "bool", "float8_e4m3": "float8_e4m3fn"}.get(str(dtype), str(dtype))
    if dtype is bfloat16 or dtype.itemsize == 1 or dtype.kind == "x":
        bits = np.ascontiguousarray(array).view(
            {1: np.uint8, 2: np.int16, 4: np.int32}[dtype.itemsize]
        )
        target = getattr(torch, name, None)
        tensor = torch.from_numpy(bits)
        return tensor if target is None else tensor.view(target)
    return torch.from_numpy(np.ascontiguousarray(array))


def _apply_schedule(trace: Trace, schedule: Sequence[tuple[Any, Any]]) -> None:
    """Turn (consumer, producers) pairs of names into dependencies."""
    if not schedule:
        return
    columns = trace.columns()
    by_core: dict[tuple[int, int], dict[str, int]] = {}
    for index, name in trace.names.items():
        where = int(columns[index, RANK]), int(columns[index, CORE])
        by_core.setdefault(where, {})[name] = index
    for consumer, producers in schedule:
        names = [producers] if isinstance(producers, str) else list(producers)
        for name in (consumer, *names):
            if not any(name in found for found in by_core.values()):
                raise ValueError(f"schedule: no instruction is named {name!r}.")
        for found in by_core.values():
            if consumer in found:
                before = trace.after.get(found[consumer], ())
                after = (found[name] for name in names if name in found)
                trace.after[found[consumer]] = (*before, *after)

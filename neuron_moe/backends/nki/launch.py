"""A launch as a value: a kernel, what it is compiled for, and its operands.

A plan makes its launches once. Who runs, times, checks or captures a step takes the same values:
the chip through `nki.jit`, the simulator where there is no SDK, a graph as an operator: that of the
compiler for Neuron where it is installed, one of ours elsewhere.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from typing import Any, NamedTuple

import ml_dtypes
import torch
from torch import Tensor

import nki_sim
from neuron_moe.backends.nki import operators
from neuron_moe.device import is_captured, is_captured_by_dynamo, is_traced
from neuron_moe.versions import check_version
from nki_kernels import IS_SIMULATED
from nki_kernels.outputs import Output, outputs_of

if not IS_SIMULATED:
    for _package in ("nki", "torch"):
        check_version(_package)


class Input(NamedTuple):
    """An operand that each step gives anew.

    Attributes:
        name: under which `run` is given it: hidden, index, affinities, is_real, or an output of an
            earlier launch of the step.
        shape: its axes.
        dtype: element type as kernels spell it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch of a kernel on all cores of a logical core.

    Attributes:
        kernel: of `nki_kernels`.
        num_cores: physical cores of the logical core (LNC).
        records: what it is compiled for, by the names of its parameters.
        operands: weights, and what a step gives, likewise; those it does not have are None or left
            out.
        outputs: names of what it returns, under which later launches of the step read it.
    """

    kernel: Any
    num_cores: int
    records: Mapping[str, Any]
    operands: Mapping[str, Tensor | Input | None] = field(repr=False)
    outputs: tuple[str, ...] = ("output",)

    @cached_property
    def name(self) -> str:
        """Name of the kernel."""
        return operators.name_of(self.kernel)

    @cached_property
    def arguments(self) -> tuple[tuple[str, Any], ...]:
        """What the kernel is called with, in the order of its parameters; None where one is left
        out.

        Raises:
            ValueError: an operand or record that the kernel does not have.
        """
        given = {**self.records, **self.operands}
        parameters = operators.parameters_of(self.kernel)
        unknown = sorted(set(given) - set(parameters))
        if unknown:
            raise ValueError(f"{self.name}: has no {', '.join(unknown)}.")
        return tuple((name, given.get(name, default)) for name, default in parameters.items())

    @cached_property
    def inputs(self) -> tuple[tuple[str, str], ...]:
        """Parameters that a step fills, each with the name of its input."""
        found = self.arguments
        return tuple((name, value.name) for name, value in found if isinstance(value, Input))

    @cached_property
    def eager(self) -> dict[str, Any]:
        """The arguments as they are launched outside of a graph."""
        return _as_operands(dict(self.arguments))

    @cached_property
    def specs(self) -> tuple[Output, ...]:
        """Shapes and element types of the outputs."""
        shapes = {
            name: tuple(value.shape) for name, value in self.operands.items() if value is not None
        }
        found = outputs_of(self.name, shapes, self.records)
        return (found,) if isinstance(found, Output) else found

    @cached_property
    def captured(self) -> dict[str, Any]:
        """The arguments as they stand in a graph: records as text, weights without gradient."""
        return {name: _in_graph(value) for name, value in self.arguments}

    def prepare(self) -> None:
        """Make what a graph reads, before it is captured."""
        _ = self.name, self.inputs, self.captured


def _in_graph(value: Any) -> Any:
    if is_dataclass(value):
        return operators.record_text(value)
    return value.detach() if isinstance(value, Tensor) else value


def run(launch: Launch, **step: Tensor | None) -> tuple[Tensor, ...]:
    """Run a launch, or put it into the graph that is being captured; return its outputs.

    Args:
        launch: of a plan.
        step: its inputs by name; others are passed over.

    Raises:
        ValueError: tensors on a device although only the simulator is there.
    """
    in_graph = is_captured()
    is_fake = IS_SIMULATED and any(_is_traced(x) for x in step.values())
    if not (in_graph or is_fake):
        return _call(launch.kernel, launch.num_cores, _filled(launch, launch.eager, step))
    arguments = _filled(launch, launch.captured, step)
    if in_graph and launch.name in _LOWERED:
        found = _LOWERED[launch.name](launch.num_cores, *arguments.values())
        return tuple(found) if isinstance(found, tuple | list) else (found,)
    return tuple(_OPERATORS[launch.name](launch.num_cores, *arguments.values()))


def _is_traced(x: Tensor | None) -> bool:
    """Ask further only of what is no plain tensor of the CPU: every call of a layer comes by."""
    return x is not None and (type(x) is not Tensor or not x.is_cpu) and is_traced(x)


def _filled(
    launch: Launch, arguments: dict[str, Any], step: Mapping[str, Tensor | None]
) -> dict[str, Any]:
    found = arguments.copy()
    for parameter, name in launch.inputs:
        found[parameter] = step[name]
    return found


def _call(kernel: Any, num_cores: int, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    if IS_SIMULATED:
        device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
        if device.type != "cpu":
            raise ValueError(
                f"backend='nki' on device {device}: the package `nki` of the Neuron SDK is not"
                " installed, and its simulator takes CPU tensors. Install the SDK, or move the"
                " module to the CPU."
            )
        found = nki_sim.run(kernel, lnc=num_cores, **arguments).outputs
    else:
        found = kernel[num_cores](**arguments)
    return found if isinstance(found, tuple) else (found,)


def _call_node(kernel: Any, num_cores: int, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """Run what a node of a graph says."""
    return _call(kernel, num_cores, _as_operands(arguments))


def _as_operands(arguments: dict[str, Any]) -> dict[str, Any]:
    if not IS_SIMULATED:
        return arguments
    return {name: _as_operand(value) for name, value in arguments.items()}


_OPERATORS = operators.register(_call_node)
_WRAPPERS = ("torch_neuronx", "libtorch_neuronx_lite.nki.nki_hop")


def find_wrapper() -> tuple[Any, Any]:
    """Return `wrap_nki` and, if there is one, `nki_op` of TorchNeuron or of vllm-neuron's runtime;
    None where there is neither.
    """
    for name in _WRAPPERS:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            continue
        module = importlib.import_module(name)
        if hasattr(module, "wrap_nki"):
            return module.wrap_nki, getattr(module, "nki_op", None)
    return None, None


_WRAP_NKI, _NKI_OP = (None, None) if IS_SIMULATED else find_wrapper()
_LOWERED = {} if _WRAP_NKI is None else operators.lowered(_WRAP_NKI, _NKI_OP)


def _as_operand(value: Any) -> Any:
    """Return an operand as the simulator takes it: e4m3 codes under Trainium 2's name for them.

    torch has no name for that type. On the chip codes arrive under torch's name, float8_e4m3fn. Not
    tried is whether its compiler takes that on Trainium 2; codes up to 240 mean the same in both.
    """
    if isinstance(value, Tensor) and value.dtype == torch.float8_e4m3fn and value.is_cpu:
        bits = value.detach().contiguous().view(torch.uint8).numpy()
        return bits.view(ml_dtypes.float8_e4m3)
    return value


def check_capture() -> None:
    """Raise ValueError where a plan would be made while Python itself is captured."""
    if is_captured_by_dynamo():
        raise ValueError(
            "backend='nki' inside torch.compile: a plan is made before the graph is captured, by"
            " the layer. Call the layer or its experts, not a plan of yours."
        )


def check_call(hidden_TH: Tensor) -> None:
    """Raise ValueError where kernels cannot stand in for torch operations."""
    if torch.is_grad_enabled() and hidden_TH.requires_grad:
        raise ValueError(
            "hidden_states.requires_grad=True: backend='nki' has no gradient. Use"
            " torch.no_grad(), or backend='torch' to train."
        )


def numbers_near(numbers: Tensor, weight: Tensor) -> Tensor:
    """Return small integers where a weight is; on the CPU where that has no numbers.

    They decide how a kernel runs, so that times of a layer on the meta device need them, too.
    """
    return numbers if weight.is_meta else numbers.to(weight.device)


def dtype_name(of: Tensor | torch.dtype) -> str:
    """Return a dtype, or that of a tensor, as kernels spell it."""
    dtype = of.dtype if isinstance(of, Tensor) else of
    return str(dtype).removeprefix("torch.")

"""Kernels as operators of torch graphs: `neuron_moe::decode_moe` and its like.

`torch.export` keeps a launch as one node with static shapes. What a kernel is compiled for stands
in the node as text, so that a saved graph runs in another process, once this package is imported.
Running the node launches the kernel: on the chip, or on the simulator.
"""

import functools
import inspect
import json
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import nki.language as nl
import torch
from torch import Tensor

from nki_kernels.combine import CombineDims, combine
from nki_kernels.common.work_tiles import WorkTileDims
from nki_kernels.decode import DecodeConfig, LayerConfig, decode_layer, decode_moe
from nki_kernels.index import BlockDims, index_blocks
from nki_kernels.layer import PrefillLayerConfig, prefill_layer
from nki_kernels.outputs import Output, outputs_of
from nki_kernels.prefill import PrefillConfig, blockwise_moe
from nki_kernels.route import RouterConfig, router_topk

NAMESPACE = "neuron_moe"
Call = Callable[[Any, int, dict[str, Any]], Sequence[Tensor]]

_KERNELS = (
    router_topk,
    index_blocks,
    blockwise_moe,
    combine,
    decode_moe,
    decode_layer,
    prefill_layer,
)
_ROOTS = (
    RouterConfig,
    BlockDims,
    WorkTileDims,
    PrefillConfig,
    CombineDims,
    DecodeConfig,
    LayerConfig,
    PrefillLayerConfig,
)
_ELEMENT_TYPES = ("float32", "bfloat16", "float16")  # that records hold


def record_text(record: Any) -> str:
    """Return a record of `nki_kernels` as text, which `record_of` reads."""
    return json.dumps(_plain(record), separators=(",", ":"))


@functools.lru_cache(maxsize=1024)
def record_of(text: str) -> Any:
    """Return the record that `record_text` wrote; the same object for the same text.

    Raises:
        ValueError: the text is of a record that this version does not have.
    """
    return _record(json.loads(text))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {
            "record": type(value).__name__,
            **{field.name: _plain(getattr(value, field.name)) for field in fields(value)},
        }
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    for name in _ELEMENT_TYPES:
        if value is getattr(nl, name):
            return {"element": name}
    return value


def _record(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_record(each) for each in value)
    if not isinstance(value, dict):
        return value
    if "element" in value:
        return getattr(nl, value["element"])
    name = value.pop("record")
    found = _record_types().get(name)
    if found is None or {field.name for field in fields(found)} != set(value):
        raise ValueError(
            f"{name}: not a record of this version of nki_kernels with the fields"
            f" {', '.join(value)}. Export the graph again."
        )
    return found(**{key: _record(each) for key, each in value.items()})


@functools.cache
def _record_types() -> dict[str, Any]:
    """Return every record that a kernel is compiled for, and those inside, by name."""
    found: dict[str, Any] = {}
    waiting: list[Any] = list(_ROOTS)
    while waiting:
        kind = waiting.pop()
        found[kind.__name__] = kind
        waiting += [
            inner
            for hint in typing.get_type_hints(kind).values()
            for inner in typing.get_args(hint) or (hint,)  # those of what may be None
            if isinstance(inner, type) and is_dataclass(inner) and inner.__name__ not in found
        ]
    return found


def parameters_of(kernel: Any) -> dict[str, Any]:
    """Return a kernel's parameters in order, each with its default; None where it has none."""
    found = inspect.signature(getattr(kernel, "func", kernel)).parameters
    return {
        name: None if parameter.default is parameter.empty else parameter.default
        for name, parameter in found.items()
    }


def name_of(kernel: Any) -> str:
    """Return a kernel's name."""
    name: str = getattr(kernel, "func", kernel).__name__
    return name


NAMES = tuple(name_of(kernel) for kernel in _KERNELS)


def _is_record(parameter: inspect.Parameter) -> bool:
    return parameter.annotation in {root.__name__ for root in _ROOTS}


def register(call: Call) -> dict[str, Callable[..., list[Tensor]]]:
    """Make an operator of every kernel; return them by the kernel's name.

    An operator takes the launch's cores, then the kernel's parameters in order, records as text.

    Args:
        call: launches a kernel: takes it, the number of cores and its arguments by name.
    """
    return {name_of(kernel): _make(kernel, call) for kernel in _KERNELS}


def lowered(
    wrap_nki: Callable[[Any], Any], nki_op: Callable[..., Any] | None = None
) -> dict[str, Callable[..., Any]]:
    """Return every kernel as a compiler of graphs for Neuron takes it, by its name.

    Its operator for kernels lowers what an operator of ours would hide. It passes tensors and plain
    constants, so records stay text until the kernel is traced, which needs NKI 0.7. Each takes the
    launch's cores, then the kernel's parameters in order.

    Args:
        wrap_nki: of torch_neuronx, or of the runtime of vllm-neuron.
        nki_op: of torch_neuronx, which gives a kernel a name and a schema and takes itself apart
            into that operator; None: there is none.
    """
    return {name_of(kernel): _lowered(kernel, wrap_nki, nki_op) for kernel in _KERNELS}


def _lowered(kernel: Any, wrap_nki: Any, nki_op: Any) -> Callable[..., Any]:
    caller, names = wrap_nki(_of_text(kernel)), tuple(parameters_of(kernel))

    def launch(num_cores: int, *values: Any) -> Any:
        return caller[(num_cores,)](**dict(zip(names, values, strict=True)))

    if nki_op is None:
        return launch

    def listed(num_cores: int, *values: Any) -> list[Tensor]:
        found = launch(num_cores, *values)
        return list(found) if isinstance(found, tuple) else [found]

    hints = {"str": str, "Tensor?": Tensor | None, "Tensor": Tensor}
    kind, given = inspect.Parameter, _terms(kernel).items()
    listed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            kind("num_cores", kind.POSITIONAL_OR_KEYWORD, annotation=int),
            *(kind(key, kind.POSITIONAL_OR_KEYWORD, annotation=hints[term]) for key, term in given),
        ],
        return_annotation=list[Tensor],
    )
    found: Callable[..., Any] = nki_op(
        f"{NAMESPACE}_nki::{name_of(kernel)}", listed, mutates_args={}
    )
    return found


def _terms(kernel: Any) -> dict[str, str]:
    """Return the type of each parameter as a schema has it."""
    parameters = inspect.signature(getattr(kernel, "func", kernel)).parameters
    return {
        key: "str"
        if _is_record(parameter)
        else "Tensor?"
        if parameter.annotation == "Any"
        else "Tensor"
        for key, parameter in parameters.items()
    }


def _of_text(kernel: Any) -> Callable[..., Any]:
    """Return a kernel that takes its records as text."""
    function = getattr(kernel, "func", kernel)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def of_text(*args: Any, **kwargs: Any) -> Any:
        values = signature.bind(*args, **kwargs).arguments
        records = {
            key: record_of(values[key])
            for key, parameter in signature.parameters.items()
            if _is_record(parameter)
        }
        return function(**{**values, **records})

    return of_text


def _make(kernel: Any, call: Call) -> Callable[..., list[Tensor]]:
    name = name_of(kernel)
    parameters = inspect.signature(getattr(kernel, "func", kernel)).parameters
    records = {key for key, parameter in parameters.items() if _is_record(parameter)}

    def read(values: Sequence[Any]) -> dict[str, Any]:
        pairs = zip(parameters, values, strict=True)
        return {key: record_of(value) if key in records else value for key, value in pairs}

    def launch(num_cores: int, *values: Any) -> list[Tensor]:
        return list(call(kernel, num_cores, read(values)))

    def fake(num_cores: int, *values: Any) -> list[Tensor]:
        arguments = read(values)
        shapes = {key: tuple(v.shape) for key, v in arguments.items() if isinstance(v, Tensor)}
        found = outputs_of(name, shapes, {key: arguments[key] for key in records})
        some = next(value for value in values if isinstance(value, Tensor))
        return [
            some.new_empty(each.shape, dtype=getattr(torch, each.dtype))
            for each in ((found,) if isinstance(found, Output) else found)
        ]

    terms = [f"{term} {key}" for key, term in _terms(kernel).items()]
    operator = torch.library.custom_op(
        f"{NAMESPACE}::{name}",
        launch,
        mutates_args=(),
        schema=f"({', '.join(['int num_cores', *terms])}) -> Tensor[]",
    )
    operator.register_fake(fake)
    return operator

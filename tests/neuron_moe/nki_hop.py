"""Stands for `wrap_nki` and `nki_op` of TorchNeuron and of vllm-neuron's runtime.

It has the form of theirs (torch_neuronx/nki_hop.py of the native back end, read in October 2026): a
higher-order operator of this name and of these arguments, which takes the kernel's arguments in the
order of its parameters, tensors and plain constants. Theirs asks the compiler for shapes; this one
asks our operator of the same kernel, whose simulator runs it, too.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch._dynamo import allow_in_graph
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree

KERNELS: list[Callable[..., Any]] = []
CONSTANTS = (int, float, str, bool, type(None))


class _Wrapper(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("nki_kernel_wrapper", cacheable=True)

    def __call__(self, **keys: Any) -> Any:
        wrong = [x for x in keys["args"] if not isinstance(x, (torch.Tensor, *CONSTANTS))]
        assert not wrong, wrong
        return super().__call__(**keys)


nki_kernel_wrapper = allow_in_graph(_Wrapper())


def _run(keys: dict[str, Any]) -> Any:
    name = KERNELS[keys["kernel_idx"]].__name__
    found = getattr(torch.ops.neuron_moe, name)(keys["grid"][0], *keys["args"])
    return found[0] if len(found) == 1 else tuple(found)


@nki_kernel_wrapper.py_impl(DispatchKey.CompositeExplicitAutograd)
def _eager(**keys: Any) -> Any:
    return _run(keys)


@nki_kernel_wrapper.py_impl(FakeTensorMode)
def _fake(mode: FakeTensorMode, **keys: Any) -> Any:
    with mode:
        return _run(keys)


@nki_kernel_wrapper.py_impl(ProxyTorchDispatchMode)
def _proxy(mode: ProxyTorchDispatchMode, **keys: Any) -> Any:
    with disable_proxy_modes_tracing():
        found = nki_kernel_wrapper(**keys)
    operands = pytree.tree_map(mode.tracer.unwrap_proxy, keys)
    proxy = mode.tracer.create_proxy("call_function", nki_kernel_wrapper, (), operands)
    return track_tensor_tree(found, proxy, constant=None, tracer=mode.tracer)


@nki_kernel_wrapper.py_functionalize_impl
def _functional(ctx: Any, **keys: Any) -> Any:
    keys["args"] = pytree.tree_map_only(torch.Tensor, ctx.unwrap_tensors, keys["args"])
    with ctx.redispatch_to_next():
        found = nki_kernel_wrapper(**keys)
    return ctx.wrap_tensors(found)


for _key in (
    DispatchKey.PythonDispatcher,
    DispatchKey.PythonTLSSnapshot,
    DispatchKey.ADInplaceOrView,
    DispatchKey.BackendSelect,
    DispatchKey.AutocastCPU,
    DispatchKey.AutogradCPU,
):
    nki_kernel_wrapper.fallthrough(_key)


class _Caller:
    def __init__(self, index: int, names: list[str], defaults: dict[str, Any], grid: Any) -> None:
        self.index, self.names, self.defaults, self.grid = index, names, defaults, grid

    def __getitem__(self, grid: tuple[int, ...]) -> "_Caller":
        return _Caller(self.index, self.names, self.defaults, tuple(map(int, grid)))

    def __call__(self, **given: Any) -> Any:
        values = {**self.defaults, **given}
        return nki_kernel_wrapper(
            kernel_idx=self.index,
            grid=self.grid,
            backend_config="",
            operand_output_aliases={},
            args=tuple(values[name] for name in self.names),
            arg_names=self.names,
            constant_args_key=-1,
        )


def wrap_nki(kernel: Any) -> _Caller:
    """Return a kernel that a graph takes."""
    parameters = inspect.signature(kernel).parameters
    KERNELS.append(getattr(kernel, "func", kernel))
    defaults = {
        name: each.default for name, each in parameters.items() if each.default is not each.empty
    }
    return _Caller(len(KERNELS) - 1, list(parameters), defaults, ())


def nki_op(name: str, fn: Callable[..., Any], mutates_args: Any) -> Any:
    """Return an operator whose schema is that of `fn`, which stands for it in graphs."""
    operator = torch.library.custom_op(name, fn, mutates_args=mutates_args)
    operator.register_fake(fn)

    def taken_apart(mode: Any, _op: Any, _types: Any, args: Any, kwargs: Any) -> Any:
        with mode:
            return fn(*args, **(kwargs or {}))

    operator.register_torch_dispatch(FunctionalTensorMode, taken_apart)
    return operator

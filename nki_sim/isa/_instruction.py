"""The decorator of instructions.

An instruction is a function of the running core and the parameters of the language, written in
three paragraphs: constraints, cost, meaning. The decorator takes the core away from the public
signature, resolves dynamic scalar offsets, and adds the place and the instruction to any error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from nki_sim.dialects import NO_DST, OLD_PARAMETERS, refuse_old
from nki_sim.errors import NkiValidationError
from nki_sim.machine import Core, NkiTensor, running

_P = ParamSpec("_P")
_R = TypeVar("_R")


@overload
def instruction(function: Callable[Concatenate[Core, _P], _R]) -> Callable[_P, _R]: ...


@overload
def instruction(
    *, resolve: bool
) -> Callable[[Callable[Concatenate[Core, _P], _R]], Callable[_P, _R]]: ...


def instruction(function: Any = None, *, resolve: bool = True) -> Any:
    """Turn ``f(core, dst, ...)`` into the public instruction ``f(dst, ...)``.

    Args:
        function: the instruction; its first parameter is the running `Core`.
        resolve: replace tensors with a scalar offset by the static view it means now. DMA
            instructions resolve for themselves.
    """
    if function is None:
        return functools.partial(instruction, resolve=resolve)
    body = function
    name = body.__name__
    signature = inspect.signature(body)
    parameters = list(signature.parameters.values())[1:]
    names = tuple([parameter.name for parameter in parameters])
    public = signature.replace(parameters=parameters)
    defaults = {parameter.name: parameter.default for parameter in parameters}

    @functools.wraps(body)
    def issue(*args: Any, **kwargs: Any) -> Any:
        core = running()
        if core is None:
            raise RuntimeError(
                f"nki.isa.{name}: no kernel is running. Use nki_sim.simulate(kernel)."
            )
        try:
            core.call = (names, args, kwargs)
            core.dynamic_operands = 0
            watcher = core.machine.watcher
            if watcher is not None:
                given = {**dict(zip(names, args, strict=False)), **kwargs}
            if core.open_loops:
                core.same_as_first_iteration(name, names, args, kwargs)
            if resolve:
                for arg in args:
                    if type(arg) is NkiTensor and arg._dynamic is not None:
                        core.dynamic_operands = 1
                        args = tuple([_static(a) for a in args])
                        core.call = (names, args, kwargs)
                        break
                for key, arg in kwargs.items():
                    if type(arg) is NkiTensor and arg._dynamic is not None:
                        core.dynamic_operands = 1
                        kwargs[key] = arg.resolve()
            written = args[0] if args else kwargs.get("dst")
            if type(written) is NkiTensor and 0 in written.shape:
                core.note("empty", f"{name}: no element; nothing is done")
                return None
            try:
                result = body(core, *args, **kwargs)
            except TypeError:
                _refuse_call(name, public, args, kwargs)
                raise
            if watcher is not None:
                watcher.issued(core, name, defaults, given, result)
            return result
        except NkiValidationError as error:
            if error.operand not in names:
                error.operand = core.operand_of_error(error)
            core.locate(error, name)
            raise

    issue.__signature__ = public  # type: ignore[attr-defined]
    return issue


def _refuse_call(name: str, signature: inspect.Signature, args: Any, kwargs: Any) -> None:
    """Refuse a call that older dialects allowed, with parameters of theirs or without `dst`, and
    one with wrong arguments.

    Raises:
        OldDialectError: it is one of theirs.
        TypeError: some argument is missing, or there is no such parameter.
    """
    for key in kwargs:
        if key in OLD_PARAMETERS and key not in signature.parameters:
            refuse_old(f"nisa.{name}({key}=)", OLD_PARAMETERS[key])
    if not args and "dst" in signature.parameters and "dst" not in kwargs:
        old = NO_DST._replace(instead=NO_DST.instead.format(name=name))
        refuse_old(f"nisa.{name} without dst", old)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        text = f"nisa.{name}: {error}. It takes {', '.join(signature.parameters)}"
        raise TypeError(text) from None


def _static(value: Any) -> Any:
    return value.resolve() if type(value) is NkiTensor else value

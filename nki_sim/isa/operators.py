"""The operators of the language as values: ``op=nl.add``.

There is one `Operator` object per name, compared by identity. Instructions take its arithmetic
from `alu` or `activation`; called inside a kernel, ``nl.add(x, y)`` runs `compute`, the helper of
the language that allocates its result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from nki_sim.isa.functions import ACTIVATIONS, ALU_OPS, Activation, AluOp

# Functions of the language that no engine has as an operation, with their number of arguments.
_HELPERS_ONLY: Final = {
    "divide": 2,
    "fmod": 2,
    "mod": 2,
    "logical_not": 1,
    "cos": 1,
    "tan": 1,
    "ceil": 1,
    "floor": 1,
    "trunc": 1,
    "negative": 1,
}
# Codes that are no functions of the language.
_CODES_ONLY: Final = ("average", "prelu", "bypass")


class Operator:
    """An operator of nki.language.

    Attributes:
        name: its name there.
        arity: number of tensor arguments.
        alu: its arithmetic on the Vector, Scalar and GpSimd engines, or None.
        activation: the function of the Scalar engine, or None.
        compute: what a call does in a kernel; `language/math.py` puts its helpers there.
    """

    __slots__ = ("__name__", "activation", "alu", "arity", "compute", "name")

    def __init__(
        self, name: str, arity: int, alu: AluOp | None, activation: Activation | None
    ) -> None:
        self.name = self.__name__ = name
        self.arity = arity
        self.alu = alu
        self.activation = activation
        self.compute: Callable[..., Any] = self._refuse

    @property
    def __signature__(self) -> inspect.Signature:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in ("x", "y")[: self.arity]]
        parameters.append(inspect.Parameter("dtype", kind, default=None))
        return inspect.Signature(parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute element by element on tiles in SBUF."""
        return self.compute(*args, **kwargs)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{self!r}: only a code until nki_sim.language is imported.")

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return operator, (self.name,)


def _collect() -> dict[str, Operator]:
    names = dict.fromkeys((*ALU_OPS, *ACTIVATIONS, *_HELPERS_ONLY, *_CODES_ONLY))
    found = {}
    for name in names:
        alu = ALU_OPS.get(name)
        arity = alu.arity if alu is not None else _HELPERS_ONLY.get(name, 1)
        found[name] = Operator(name, arity, alu, ACTIVATIONS.get(name))
    return found


OPERATORS: Final[dict[str, Operator]] = _collect()


def operator(name: str) -> Operator:
    """Return the operator called `name`."""
    return OPERATORS[name]

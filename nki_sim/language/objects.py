"""`NKIObject`, the base class of user classes in kernels, and the making of tensors.

The compiler builds objects by its own constructor, even under `@dataclass`: fields that are
not given become None. Declaring a class therefore puts a constructor with that rule in its
namespace, which `dataclass` then leaves alone.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from nki_sim.dialects import check_first_axis
from nki_sim.dtypes import DType, as_dtype
from nki_sim.errors import NkiValidationError
from nki_sim.machine import MemoryRegion, NkiTensor, current


class NKIObject:
    """Base class of records in kernels; its constructor takes the annotated fields in order."""

    def __init__(self, **kwargs: Any) -> None:
        for key, value in kwargs.items():
            object.__setattr__(self, key, value)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherits = cls.__init__ not in (NKIObject.__init__, _construct)
        if "__init__" not in cls.__dict__ and _fields(cls) and not inherits:
            setattr(cls, "__init__", _construct)  # noqa: B010  mypy refuses the assignment form


def _fields(cls: type) -> dict[str, Any]:
    """Return the fields of a class and its bases with their defaults: annotated names, then plain
    assignments in the class body, which the compiler takes for fields too.
    """
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base is NKIObject or not issubclass(base, NKIObject):
            continue
        declared = getattr(base, "__dataclass_fields__", {})
        for name in inspect.get_annotations(base):
            if name in declared:
                found[name] = declared[name]
            else:
                found[name] = base.__dict__.get(name)
        for name, value in base.__dict__.items():
            if not name.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
                found.setdefault(name, value)
    return found


def _known_fields(cls: type) -> dict[str, Any]:
    """Return the fields of a class that is complete, decorators included; looked up once."""
    found: dict[str, Any] | None = cls.__dict__.get("__nki_fields__")
    if found is None:
        found = _fields(cls)
        setattr(cls, "__nki_fields__", found)  # noqa: B010  mypy refuses the assignment form
    return found


def _construct(self: Any, *args: Any, **kwargs: Any) -> None:
    """Fill the fields in order; a field without value or default becomes None."""
    fields = _known_fields(type(self))
    if len(args) > len(fields):
        raise TypeError(
            f"{type(self).__name__}: takes {len(fields)} fields, {len(args)} were given."
        )
    given = dict(zip(fields, args, strict=False))
    for name, value in kwargs.items():
        if name not in fields or name in given:
            raise TypeError(f"{type(self).__name__}: {name}: must be a field, given once.")
        given[name] = value
    for name, default in fields.items():
        if name in given:
            value = given[name]
        elif isinstance(default, dataclasses.Field):
            if default.default is not dataclasses.MISSING:
                value = default.default
            elif default.default_factory is not dataclasses.MISSING:
                value = default.default_factory()
            else:
                value = None
        else:
            value = default
        object.__setattr__(self, name, value)
    post_init = getattr(self, "__post_init__", None)
    if post_init is not None:
        post_init()


def find_region(buffer: Any) -> MemoryRegion:
    """Return the memory region that a kernel names."""
    return buffer if type(buffer) is MemoryRegion else MemoryRegion(str(buffer))


def create(
    shape: Sequence[int],
    dtype: Any,
    buffer: Any = MemoryRegion.sbuf,
    name: str = "",
    address: tuple[int, int] | None = None,
) -> NkiTensor:
    """Make a tensor without values; the arguments are those of `nl.ndarray`."""
    core = current()
    kind = dtype if type(dtype) is DType else as_dtype(dtype)
    try:
        check_first_axis(shape)
        return core.allocate(shape, kind, find_region(buffer), name, address)
    except NkiValidationError as error:
        core.locate(error, "ndarray")
        raise

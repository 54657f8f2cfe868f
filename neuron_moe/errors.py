"""Errors about what a caller passed in, and the words they share."""

import dataclasses
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class UnknownKeyError(ValueError, TypeError):
    """A configuration key nobody reads; also a TypeError, which Python raises for a bad keyword."""


class WrongTypeError(ValueError, TypeError):
    """A value of a class that cannot be used."""


class WeightError(ValueError, RuntimeError):
    """A weight of the wrong shape or dtype; also a RuntimeError, which torch raises for a shape."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a sentence that names the nearest of the known words, empty if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def closest(name: str, known: Iterable[str]) -> str:
    """Return ' Did you mean ...?' for the known name nearest to `name`, or the whole list."""
    options = sorted(known)
    return did_you_mean(name, options).strip() or f"Known: {', '.join(options)}."


def reject_unknown(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UnknownKeyError for the first given key that `owner` does not know."""
    options = set(known)
    for name in given:
        if name not in options:
            raise UnknownKeyError(f"{owner}: unknown key {name!r}. {closest(name, options)}")


def names_its_keys(cls: type[T]) -> type[T]:
    """Make a class refuse unknown keywords by name, with the nearest known one."""
    built_init: Callable[..., None] = cls.__init__
    known = [name for name in inspect.signature(built_init).parameters if name != "self"]

    @functools.wraps(built_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        reject_unknown(cls.__name__, kwargs, known)
        built_init(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def refuse(refused: Iterable[tuple[object, str]]) -> None:
    """Raise ValueError with the first message whose condition holds."""
    for is_refused, message in refused:
        if is_refused:
            raise ValueError(message)


def check_instance(name: str, value: object, kind: type[T]) -> T:
    """Return `value` if it is a `kind`; raise WrongTypeError otherwise."""
    if not isinstance(value, kind):
        raise WrongTypeError(
            f"{name}: must be a {kind.__name__}, not {type(value).__name__}. Build one and pass it."
        )
    return value


def attributes_of(name: str, kind: type[Any], given: object) -> dict[str, Any]:
    """Return the attributes of an object that `kind` has as fields; WrongTypeError if none."""
    names = [field.name for field in dataclasses.fields(kind)]
    found = {each: getattr(given, each) for each in names if hasattr(given, each)}
    if not found:
        raise WrongTypeError(
            f"{name}: must be a {kind.__name__}, not {type(given).__name__}. Build one and pass it."
        )
    return found


def check_finite(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a finite number (bool is none)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: must be a finite number.")


def check_bools(owner: object, names: Iterable[str]) -> None:
    """Raise ValueError unless each named attribute of `owner` is True or False."""
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r}: must be True or False.")


def check_positive_int(name: str, value: object) -> int:
    """Return `value` if it is an int >= 1 (bool is none); raise ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: must be a positive int. Pass a whole number >= 1.")
    return value


def check_choice(name: str, value: object, options: Iterable[str]) -> str:
    """Return `value` if it is one of the option strings; raise ValueError otherwise."""
    known = tuple(options)
    if value not in known:
        hint = did_you_mean(str(value).lower(), known)
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(known)}.{hint}")
    return str(value)

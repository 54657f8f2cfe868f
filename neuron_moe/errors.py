"""Errors about what a caller passed in, and the words they share."""

import difflib
from collections.abc import Iterable


class UnknownKeyError(ValueError, TypeError):
    """A configuration key nobody reads; also a TypeError, which Python raises for a bad keyword."""


def closest(name: str, known: Iterable[str]) -> str:
    """Return ' Did you mean ...?' for the known name nearest to `name`, or the whole list."""
    options = sorted(known)
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(options)}."


def reject_unknown(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UnknownKeyError for the first given key that `owner` does not know."""
    options = set(known)
    for name in given:
        if name not in options:
            raise UnknownKeyError(f"{owner}: unknown key {name!r}. {closest(name, options)}")


def check_positive_int(name: str, value: object) -> int:
    """Return `value` if it is an int >= 1 (bool is none); raise ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: must be a positive int. Pass a whole number >= 1.")
    return value


def check_choice(name: str, value: object, options: Iterable[str]) -> str:
    """Return `value` if it is one of the option strings; raise ValueError otherwise."""
    known = tuple(options)
    if value not in known:
        raise ValueError(
            f"{name}={value!r}: must be one of {', '.join(known)}. {closest(str(value), known)}"
        )
    return str(value)

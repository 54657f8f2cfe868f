"""What random cases of all kernels share."""

from typing import Any, Protocol


class Case(Protocol):
    """A problem of a kernel."""

    def config(self) -> Any:
        """Return what the kernel is compiled for, or raise ValueError."""


def is_taken(case: Case) -> bool:
    """Say whether the kernel takes a case that was drawn."""
    try:
        case.config()
    except ValueError:
        return False
    return True

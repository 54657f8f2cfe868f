"""Put our layer into NxDI's models, and take it out again.

NxDI's modeling files import `initialize_moe_module` by name, so the name is rebound in each of them
that is loaded, and in the two files that define it, for those that are loaded later.
"""

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from neuron_moe.backends import Backend, get_backend
from neuron_moe.nxd_compat.nxdi import initialize_moe_module, initialize_moe_module_v1
from neuron_moe.versions import check_version

_LOG = logging.getLogger("neuron_moe")
_NAME = "initialize_moe_module"
_PACKAGE = "neuronx_distributed_inference"
_FIRST_FORM = f"{_PACKAGE}.modules.moe"
_FORMS: dict[str, Callable[..., Any]] = {
    f"{_PACKAGE}.modules.moe_v2": initialize_moe_module,
    _FIRST_FORM: initialize_moe_module_v1,
}


@dataclass(frozen=True)
class Rebinding:
    """A name of a module that now means another function.

    Attributes:
        module: whose name it is.
        function: what it means now.
    """

    module: str
    function: str

    def __str__(self) -> str:
        return f"{self.module}.{_NAME} is now {self.function}"


@dataclass(frozen=True)
class _Pair:
    """NxDI's function and ours in its place."""

    theirs: Callable[..., Any]
    ours: Callable[..., Any]


_installed: dict[str, _Pair] = {}


def install(
    *, backend: str | Backend = "torch", presharded: bool | None = None
) -> tuple[Rebinding, ...]:
    """Let NxDI's models build our layer; call it before its application objects are built.

    Models that exist keep their layers. A second call changes backend and flag.

    Args:
        backend: name of the backend of these layers, or a backend.
        presharded: what a checkpoint is that NxD's preshard hook has rewritten: None refuses it,
            True undoes it, False loads the numbers as they are.

    Returns:
        What was rebound, a sentence each; also logged.

    Raises:
        ImportError: NxDI cannot be imported, or is of a version that is not supported.
        ValueError: the backend is unknown.
    """
    get_backend(backend)
    for package in ("neuronx-distributed", "neuronx-distributed-inference"):
        check_version(package)
    uninstall()
    for name, ours in _FORMS.items():
        module = _import(name)
        if module is None:
            continue
        theirs = getattr(module, _NAME)
        bound = functools.partial(ours, backend=backend, presharded=presharded)
        _installed[name] = _Pair(theirs, functools.update_wrapper(bound, ours))
    return _report(
        rebinding for pair in _installed.values() for rebinding in _rebind(pair.theirs, pair.ours)
    )


def uninstall() -> tuple[Rebinding, ...]:
    """Give NxDI's models their own function back; returns and logs what was rebound."""
    found = [
        rebinding for pair in _installed.values() for rebinding in _rebind(pair.ours, pair.theirs)
    ]
    _installed.clear()
    return _report(found)


def is_installed() -> bool:
    """Say whether NxDI's models build our layer."""
    return bool(_installed)


def _import(name: str) -> ModuleType | None:
    """Return a file of NxDI's; None for a first form that is gone."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if name == _FIRST_FORM and error.name == name:
            return None
        raise ImportError(
            f"{name}: cannot be imported ({error}). Install NxDI and what it needs, or build the"
            " layer with neuron_moe.nxd_compat.initialize_moe_module()."
        ) from error


def _rebind(old: Callable[..., Any], new: Callable[..., Any]) -> list[Rebinding]:
    """Rebind the name wherever a loaded module has it for a function."""
    found = []
    for name, module in sorted(sys.modules.items()):
        if getattr(module, "__dict__", {}).get(_NAME) is old:
            setattr(module, _NAME, new)
            found.append(Rebinding(name, f"{new.__module__}.{new.__name__}"))
    return found


def _report(rebindings: Any) -> tuple[Rebinding, ...]:
    found = tuple(rebindings)
    for each in found:
        _LOG.info("%s", each)
    return found

"""Answering to the vendor's module names where the vendor's package is missing."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from typing import Any, Final

from nki_sim import collectives, constants, dtypes, isa
from nki_sim.dialects import old_names
from nki_sim.language import api as language
from nki_sim.launch import AddressRotation, CompileConfig, SpecializationConfig, jit, simulate
from nki_sim.machine import NkiTensor

_MARK: Final = "__nki_sim__"


def provide(force: bool = False) -> bool:
    """Make `import nki` and its submodules find the simulator.

    The vendor's package wins if it is installed; the empty package of that name on the public
    registry does not count. Calling it again changes nothing.

    Args:
        force: answer even if the vendor's package is there.

    Returns:
        Whether the simulator answers.
    """
    if _answers():
        return True
    if not force and _vendor_present():
        return False
    sys.modules.update(_modules())
    return True


def stands_in() -> bool:
    """Say whether `provide` makes the simulator answer, without doing so."""
    return _answers() or not _vendor_present()


def _answers() -> bool:
    return getattr(sys.modules.get("nki"), _MARK, False)


def _vendor_present() -> bool:
    """Whether an `nki` with an instruction set is importable."""
    if "nki" in sys.modules and hasattr(sys.modules["nki"], "jit"):
        return True
    try:
        return importlib.util.find_spec("nki.isa") is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _module(name: str, content: dict[str, Any], doc: str | None) -> types.ModuleType:
    """Make a module as an import leaves it; every one may have submodules."""
    module = types.ModuleType(name, doc)
    module.__spec__ = spec = ModuleSpec(name, None, origin="nki_sim", is_package=True)
    module.__path__ = spec.submodule_search_locations or []
    module.__package__ = name
    module.__dict__.update(content)
    module.__dict__[_MARK] = True
    return module


def _same(
    name: str, module: types.ModuleType, more: Mapping[str, Any] | None = None
) -> types.ModuleType:
    """Make a module that shows the names of one of the simulator, and more."""
    content = {key: getattr(module, key) for key in module.__all__} | dict(more or {})
    return _module(name, content, module.__doc__)


class _AnyType:
    """Stands for the annotation types of older versions: `tensor[128, 512]`, `mutable_tensor`."""

    def __getitem__(self, item: Any) -> _AnyType:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else self

    def __or__(self, other: Any) -> _AnyType:
        return self

    __ror__ = __or__


def _modules() -> dict[str, types.ModuleType]:
    """Build the modules, the present names and those of older versions."""
    any_type = _AnyType()
    # `nki.dtype` is a module with the types, and an annotation.
    dtype_names = {str(d): d for d in dtypes.ALL} | {"DType": dtypes.DType, "bool_": dtypes.bool_}
    annotations = {"tensor": any_type, "mutable_tensor": any_type}
    compiler: tuple[type, ...] = (AddressRotation, CompileConfig, SpecializationConfig)
    configs = {each.__name__: each for each in compiler} | old_names("compiler")
    built = [
        _module("nki", {"jit": jit, "simulate": simulate} | old_names("nki"), "NKI, simulated."),
        _same("nki.language", language),
        _module("nki.language.constants", old_names("constants"), "Gone since NKI 0.2."),
        _same("nki.isa", isa, old_names("nisa")),
        _same("nki.isa.constants", constants),
        _same("nki.collectives", collectives),
        _module("nki.typing", annotations, "Annotation types."),
        _module("nki.compiler", configs, "What nki.jit takes for the compiler, not simulated."),
        _module("nki.dtype", dtype_names, "Element types."),
        _module("nki.tensor", {"NkiTensor": NkiTensor}, "Tensors."),
        _module("neuronxcc", {}, "Name of the package before NKI 0.1."),
    ]
    modules = {module.__name__: module for module in built}
    modules["nki.language"].__dict__["__getattr__"] = language.__getattr__
    modules |= {f"neuronxcc.{name}": m for name, m in modules.items() if name != "neuronxcc"}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules

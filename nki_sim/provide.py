"""Answering to the vendor's module names where the vendor's package is missing."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any, Final

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
    present = sys.modules.get("nki")
    if present is not None and getattr(present, _MARK, False):
        return True
    if not force and _vendor_present():
        return False
    sys.modules.update(_modules())
    return True


def _vendor_present() -> bool:
    """Whether an `nki` with an instruction set is importable."""
    if "nki" in sys.modules and hasattr(sys.modules["nki"], "jit"):
        return True
    try:
        return importlib.util.find_spec("nki.isa") is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _module(name: str, content: dict[str, Any], doc: str) -> types.ModuleType:
    module = types.ModuleType(name, doc)
    module.__dict__.update(content)
    module.__dict__[_MARK] = True
    return module


def _public(module: types.ModuleType) -> dict[str, Any]:
    """Return the names of a simulator module that the language shows."""
    return {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("__") and not isinstance(value, types.ModuleType)
    }


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
    from nki_sim import collectives, constants, dtypes, isa, launch
    from nki_sim.language import api as language
    from nki_sim.machine import core as machine
    from nki_sim.machine import tensor

    any_type = _AnyType()
    top = _module("nki", {"jit": launch.jit, "simulate": launch.simulate}, "NKI, simulated.")
    top.__path__ = []
    nl = _module("nki.language", _public(language), language.__doc__ or "")
    nl.__dict__["__getattr__"] = language.__getattr__
    nisa = _module("nki.isa", _public(isa), isa.__doc__ or "")
    nisa.__path__ = []
    nisa_constants = _module("nki.isa.constants", _public(constants), constants.__doc__ or "")
    typing_ = _module(
        "nki.typing", {"tensor": any_type, "mutable_tensor": any_type}, "Annotation types."
    )
    compiler = _module("nki.compiler", {}, "Nothing of the compiler is simulated.")
    # `nki.dtype` is a module with the types, and an annotation.
    dtype_names = {str(d): d for d in dtypes.ALL} | {"DType": dtypes.DType, "bool_": dtypes.bool_}
    dtype = _module("nki.dtype", dtype_names, "Element types.")
    tensor_module = _module("nki.tensor", {"NkiTensor": tensor.NkiTensor}, "Tensors.")
    modules = {
        "nki": top,
        "nki.language": nl,
        "nki.isa": nisa,
        "nki.isa.constants": nisa_constants,
        "nki.typing": typing_,
        "nki.compiler": compiler,
        "nki.dtype": dtype,
        "nki.tensor": tensor_module,
    }
    modules["nki.collectives"] = _module(
        "nki.collectives", _public(collectives), collectives.__doc__ or ""
    )
    for name, module in list(modules.items()):
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    nisa.__dict__["constants"] = nisa_constants
    nisa.__dict__["NkiInstruction"] = machine.NkiInstruction
    old = _module("neuronxcc", {"nki": top}, "Name of the package before NKI 0.1.")
    old.__path__ = []
    modules |= {name.replace("nki", "neuronxcc.nki", 1): m for name, m in modules.items()}
    modules["neuronxcc"] = old
    return modules

"""The vendor's kernel library from a user's checkout: found, imported beside the simulator, never
copied.
"""

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nki_sim.neuron_dtypes import provide_neuron_dtypes

PACKAGE = "nkilib_src.nkilib"
LIBRARY_VARIABLE = "NKI_LIBRARY_PATH"  # the environment's name of the checkout


class VendorLibrary:
    """Imports kernels, references and enumerations of one checkout.

    Args:
        path: the checkout's root: the folder that holds `src/nkilib_src`.

    Raises:
        ValueError: the folder is not such a checkout, or another one is already imported in this
            process.
    """

    def __init__(self, path: Path) -> None:
        source = path / "src"
        if not (source / "nkilib_src" / "nkilib").is_dir():
            raise ValueError(
                f"--library {path}: no folder src/nkilib_src/nkilib in it. "
                "Give the root of a checkout of the library."
            )
        loaded = sys.modules.get("nkilib_src")
        if (
            loaded is not None
            and Path(str(loaded.__file__)).resolve().parents[1] != source.resolve()
        ):
            raise ValueError(
                f"--library {path}: another checkout is imported already. Start a new process."
            )
        self.path = path.resolve()
        self._has_tables = False
        self._test_modules: dict[str, types.ModuleType] = {}
        import nki_sim

        nki_sim.provide()
        if str(source.resolve()) not in sys.path:
            sys.path.insert(0, str(source.resolve()))
        import nki
        import nki.language

        self.nki = nki
        self.nl = nki.language
        provide_neuron_dtypes()

    def get(self, module: str, name: str) -> Any:
        """Return one name of a library module, e.g. get("core.cumsum.cumsum", "cumsum")."""
        with self.test_tree():
            return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)

    def test(self, module: str, name: str) -> Any:
        """Return one name of the checkout's test tree (some references live only there)."""
        with self.test_tree():
            return getattr(importlib.import_module(f"test.{module}"), name)

    def enum(self, name: str, member: str) -> Any:
        """Return a member of an enumeration of the library's common types."""
        return self.get("core.utils.common_types", name)[member]

    def mx_headroom(self) -> int:
        """Return the headroom of quantisation that the library's mx reference assumes.

        The rule changed with NKI 0.5; a library for either is run with its own.
        """
        ones = np.ones((8, 4), dtype=np.float32)
        quantize = self.get("core.utils.mx_torch_common", "quantize_to_mx")
        scale = int(quantize(ones, self.nl.float8_e4m3fn_x4)[1].reshape(-1)[0])
        return scale - (127 - 8)

    def use_tables(self) -> None:
        """Let the mx references widen packed fp8 by a table instead of by arithmetic on every
        element.

        The table is the reference's own result for the 256 codes, so its meaning is unchanged; it
        is about 50 times quicker, which is the difference between seconds and minutes for a layer
        of 8 experts.
        """
        if self._has_tables:
            return
        self._has_tables = True
        modules = [
            importlib.import_module(f"{PACKAGE}.{name}")
            for name in (
                "core.utils.mx_torch_common",
                "core.mlp.mlp_tkg.mlp_proj_mxfp4_torch",
                "core.moe.moe_tkg.moe_tkg_torch",
            )
        ]
        for name in ("float8_e4m3fn_x4", "float8_e5m2_x4"):
            quick = _table_lookup(getattr(modules[0], f"unpack_{name}"))
            for module in modules:
                if hasattr(module, f"unpack_{name}"):
                    setattr(module, f"unpack_{name}", quick)

    @contextlib.contextmanager
    def test_tree(self) -> Iterator[None]:
        """Let `import test.…` mean the checkout's test tree, and supply `scipy.special` if SciPy
        is missing.

        Some of the vendor's references import both, at import or at call time. The standard
        library's own `test` package is put back on the way out.
        """
        kept = {
            name: module
            for name, module in sys.modules.items()
            if name == "test" or name.startswith("test.")
        }
        if not self._test_modules:
            root = types.ModuleType("test")
            root.__path__ = [str(self.path / "test")]
            self._test_modules = {"test": root}
        for name in kept:
            del sys.modules[name]
        sys.modules.update(self._test_modules)
        stand_in = _scipy_special_stand_in()
        sys.modules.update(stand_in)
        try:
            yield
        finally:
            self._test_modules = {
                name: module
                for name, module in sys.modules.items()
                if name == "test" or name.startswith("test.")
            }
            for name in (*self._test_modules, *stand_in):
                del sys.modules[name]
            sys.modules.update(kept)


def _table_lookup(unpack: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray], Any]:
    """Return a function that widens packed fp8 words through a table of another such function's
    results.
    """
    import torch

    codes = np.arange(256, dtype=np.uint8)
    table = unpack(codes.view(np.uint32)).numpy().astype(np.float32)

    def look_up(packed: np.ndarray) -> Any:
        words = np.ascontiguousarray(packed).view(np.uint32)
        return torch.from_numpy(
            table[words.view(np.uint8)].reshape(*words.shape[:-1], words.shape[-1] * 4)
        )

    return look_up


def _scipy_special_stand_in() -> dict[str, types.ModuleType]:
    """Return modules for the two SciPy functions the references use, or nothing where SciPy is
    installed.
    """
    if importlib.util.find_spec("scipy") is not None:
        return {}
    import torch

    def through_torch(function: Any) -> Any:
        return lambda x: (
            function(torch.from_numpy(np.asarray(x, dtype=np.float64)))
            .numpy()
            .astype(np.asarray(x).dtype)
        )

    package = types.ModuleType("scipy")
    package.__path__ = []
    special = types.ModuleType("scipy.special")
    special.erf = through_torch(torch.erf)  # type: ignore[attr-defined]
    special.expit = through_torch(torch.sigmoid)  # type: ignore[attr-defined]
    return {"scipy": package, "scipy.special": special}

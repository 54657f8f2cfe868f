"""Stands for the compiler of kernels: notes what it is given; SDK_STUB_FAILS names its step."""

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
from nki import note


def compile_to_bir(
    kernel_func: Any,
    *,
    frontend: Any,
    inputs: dict[str, Any],
    compile_opts: Any,
    output_names: list[str] | None = None,
    enable_cache: bool = True,
) -> Any:
    """Return what NKI 0.6 returns."""
    inspect.signature(kernel_func).bind(**inputs)
    arrays = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
    note("bir", kernel=kernel_func.__name__, frontend=type(frontend).__name__, lnc=compile_opts.lnc)
    specs = [SimpleNamespace(name=name, shape=value.shape) for name, value in arrays.items()]
    outputs = [SimpleNamespace(name=name) for name in output_names or ()]
    return SimpleNamespace(
        descriptor=SimpleNamespace(input_specs=specs, output_specs=outputs),
        kernel=kernel_func.__name__,
    )

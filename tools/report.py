"""What is kept of an error that is a bug of ours."""

import platform
import sys
import tempfile
import traceback
from pathlib import Path

from neuron_moe import __version__


def write_report(args: list[str], error: Exception) -> Path:
    """Write command line, versions and traceback to a file of its own; return its path."""
    lines = [
        f"neuron-moe {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"arguments: {args!a}",
        "",
        *traceback.format_exception(error),
    ]
    for name in ("torch", "numpy", "safetensors", "tokenizers"):
        version = getattr(sys.modules.get(name), "__version__", "not loaded")
        lines.insert(1, f"{name} {version}")
    with tempfile.NamedTemporaryFile(
        "w", prefix="neuron-moe-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.write("\n".join(lines).encode("utf-8", "backslashreplace").decode())
    return Path(file.name)

"""Where the NKI compiler leaves what it makes; it reads this when `nki` is imported."""

from __future__ import annotations

import os
import tempfile
from typing import Final

ARTIFACTS: Final = "NKI_ARTIFACTS_DIR"


def keep_artifacts() -> None:
    """Name a folder of this process for the compiler's artifacts, unless the user named one.

    Must be called before `nki` is imported.
    """
    if ARTIFACTS not in os.environ:
        os.environ[ARTIFACTS] = os.path.join(tempfile.gettempdir(), f"neuron-moe-nki-{os.getpid()}")

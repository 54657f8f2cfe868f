"""Fixed seeds for every test; nothing here changes what a test asserts."""

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

os.environ.setdefault(
    "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
)  # to ask must not start CUDA: ranks fork
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # it counts when triton is imported, which torch may do


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  libraries under test may use the legacy generator
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what commands measure out of the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield

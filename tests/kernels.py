"""Which tests a machine can run.

Any Triton runs our kernels on a GPU; without one, Triton from where NumPy does not break it.
"""

import pytest
import torch

from neuron_moe.weights.packed import is_packing_available

OLDEST_TRITON = None if torch.cuda.is_available() else "3.9"
NO_TRITON = f"pip install 'triton>={OLDEST_TRITON or 3}'"
PACKS_BFLOAT16 = pytest.mark.skipif(
    not is_packing_available(torch.bfloat16), reason="this processor packs no bfloat16"
)

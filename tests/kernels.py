"""Which Triton runs our kernels: any on a GPU; without one, from where NumPy does not break it."""

import torch

OLDEST_TRITON = None if torch.cuda.is_available() else "3.9"
NO_TRITON = f"pip install 'triton>={OLDEST_TRITON or 3}'"

"""What our kernels use of NKI that public documents leave open, and what they do without it."""

import nki_kernels  # noqa: F401  its import lets the simulator answer to `nki` where the SDK is missing

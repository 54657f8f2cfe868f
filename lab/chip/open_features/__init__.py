"""What our kernels use of NKI that public documents leave open, and what they do without it."""

import nki_kernels.provided  # noqa: F401  answers to `import nki`

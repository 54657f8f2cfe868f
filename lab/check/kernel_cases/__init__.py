"""Cases for our kernels: inputs, launches and the formula in float64, by family of kernels."""

import nki_kernels.provided  # noqa: F401  answers to `import nki`

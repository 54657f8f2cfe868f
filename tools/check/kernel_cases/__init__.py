"""Cases for our kernels: inputs, launches and the formula in float64, by family of kernels."""

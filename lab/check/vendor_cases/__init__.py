"""Cases for the vendor's kernels: inputs, layouts and references, by family of kernels."""

"""nki_kernels."""

"""nki_kernels/index."""

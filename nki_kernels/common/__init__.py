"""nki_kernels/common."""

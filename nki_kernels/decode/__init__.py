"""nki_kernels/decode."""

"""nki_kernels/route."""

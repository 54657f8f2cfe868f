"""nki_kernels/combine."""

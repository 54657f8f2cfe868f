"""nki_kernels/prefill."""

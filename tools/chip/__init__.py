"""Compiling a plan's kernels with AWS's wheels, and what the compiler made of them."""

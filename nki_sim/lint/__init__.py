"""A linter for the Python that the front ends of the vendor's compiler take.

For the command line (`python -m nki_sim.lint.linter FILES`) and for tests of kernels. It reads
source text, and of nki_sim the table of older names.
"""

"""A linter for the part of Python that the vendor's compiler reads.

For the command line (`python -m nki_sim.lint.linter FILES`) and for tests of kernels. It reads
source text and imports nothing else of nki_sim.
"""

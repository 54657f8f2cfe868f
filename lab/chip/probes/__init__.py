"""Micro-kernels whose times depend on few coefficients each, and the list of them.

Every kernel is real NKI. It repeats one pattern and stores a little at the end, since a kernel has
to return something.
"""

import nki_kernels.provided  # noqa: F401  answers to `import nki`

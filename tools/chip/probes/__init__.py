"""Micro-kernels whose times depend on few coefficients each, and the list of them.

Every kernel is real NKI. It repeats one pattern and stores a little at the end, since a kernel has
to return something.
"""

import nki_kernels  # noqa: F401  its import lets the simulator answer to `nki` where the SDK is missing

"""Large matrices in huge pages of the system, which a CPU streams faster.

Where pages are of 4 KiB, a step at few tokens, which reads each chosen matrix once, waits for the
translation of addresses as well. Linux gives pages of 2 MiB on request; elsewhere, or where there
are none left, everything stays as it is.
"""

import ctypes
import mmap

from torch import Tensor

_PAGE_BYTES = 2 << 20


def request_huge_pages(untouched: Tensor) -> Tensor:
    """Request huge pages for a tensor on the CPU that nobody has written to, and return it."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or untouched.nbytes < 2 * _PAGE_BYTES:
        return untouched
    address = untouched.data_ptr()
    first = -(-address // _PAGE_BYTES) * _PAGE_BYTES
    end = (address + untouched.nbytes) // _PAGE_BYTES * _PAGE_BYTES
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(first, end - first, advice)  # a refusal changes nothing
    return untouched

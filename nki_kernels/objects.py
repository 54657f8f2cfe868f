"""`NKIObject`, the base of records in kernels, without making the simulator answer to `nki`."""

import nki_sim

if nki_sim.stands_in():
    from nki_sim.language.objects import NKIObject
else:
    from nki.language import NKIObject

__all__ = ["NKIObject"]

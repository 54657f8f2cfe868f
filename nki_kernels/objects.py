"""`NKIObject`, the base of records in kernels, without making the simulator answer to `nki`."""

from typing import TYPE_CHECKING

import nki_sim

if TYPE_CHECKING or nki_sim.stands_in():
    from nki_sim.language.objects import NKIObject
else:
    from nki.language import NKIObject

__all__ = ["NKIObject"]

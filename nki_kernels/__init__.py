"""NKI kernels for Mixture-of-Experts inference, and their references.

Kernels say ``import nki`` as on the chip. Where the vendor's package is missing, the simulator
answers to that name; this is the only switch.
"""

import nki_sim

IS_SIMULATED: bool = nki_sim.provide()

"""NKI kernels for Mixture-of-Experts inference, and their references.

Kernels say ``import nki`` as on the chip. Where the vendor's package is missing, the simulator
answers to that name from the first import of a room of kernels on: `nki_kernels.provided` is the
only switch. `nki_kernels.common.formula` needs neither.
"""

import nki_sim

IS_SIMULATED: bool = nki_sim.stands_in()

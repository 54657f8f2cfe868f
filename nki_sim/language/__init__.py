"""The NKI language: `api` is what kernels import as `nki.language`, and the other files its parts.

`math` holds the helpers that compute, `loops` the dynamic loops, `objects` the base class of
records. For nki_sim.launch, nki_sim.provide and nki_sim.collectives. It knows the instructions and
the machine.
"""

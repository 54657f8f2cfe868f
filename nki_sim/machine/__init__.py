"""nki_sim/machine."""

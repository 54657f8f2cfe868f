"""nki_sim/time."""

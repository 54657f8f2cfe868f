"""nki_sim/lint."""

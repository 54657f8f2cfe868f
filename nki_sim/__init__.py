"""nki_sim."""

"""Published times of the chip beside what the simulator says."""

"""Rehearsals and fits of a chip: what only the owners of the clock run; see `tools/chip`."""

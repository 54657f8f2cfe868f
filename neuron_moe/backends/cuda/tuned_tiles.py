"""Measured on one H200, T = 16384: (product, H, I) to the first fields of a HopperTile."""

HOPPER_TILES: dict[tuple[str, int, int], tuple[int, int, int, bool]] = {}

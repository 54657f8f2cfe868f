"""nxd_compat."""

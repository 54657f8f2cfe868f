"""NxD's package name, so that import lines carry over."""

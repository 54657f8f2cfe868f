"""Simulated times of plans, many at once: for `tune`, `profile` and benchmarks."""

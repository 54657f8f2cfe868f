"""The NKI language: `nki.language` and what its names stand on."""

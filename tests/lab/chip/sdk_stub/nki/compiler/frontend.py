"""What reads kernels."""


class TracerFrontend:
    """Python itself."""

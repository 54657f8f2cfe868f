"""neuron-moe: Mixture-of-Experts inference modules that run, verify and tune anywhere."""

__version__ = "0.1.0"

"""Checks behind `neuron-moe check`: our kernels and the vendor's, case by case."""

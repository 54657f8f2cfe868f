"""Benchmarks behind `neuron-moe bench`: cpu, host, sim, wire, prefill, decode."""

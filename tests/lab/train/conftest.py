"""Ranks for the trainers' tests."""

from tests.neuron_moe.parallel.conftest import run_ranks

__all__ = ["run_ranks"]

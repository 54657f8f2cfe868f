"""What maintainers run from a checkout: benchmarks, checks, training, a day with a chip.

None of it is in the wheel. `neuron-moe bench`, `check` and the like find it beside `neuron_moe`.
"""

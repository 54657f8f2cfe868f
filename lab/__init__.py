"""What maintainers run from a checkout: benchmarks, training, rehearsals of a chip.

None of it is in the wheel. `neuron-moe bench`, `train` and the like find it beside `neuron_moe`.
"""

"""One module for each subcommand of `neuron-moe`."""

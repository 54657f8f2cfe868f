"""What the benchmarks beside the vendor's kernels share: options, layers, files, comparison."""

"""What several kernel rooms share: formulas, axes, visits, buffers as data, stages on tiles."""

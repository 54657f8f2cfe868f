"""What several kernel rooms share: formulas, axes, work tiles, buffers as data, stages on tiles."""

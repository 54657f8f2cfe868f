"""Packed items: how many elements of a chunk of an expert each partition has."""

from __future__ import annotations

from nki_kernels.common.mx import MxForm, Shape, in_shape, make_mx_form, out_shape
from nki_kernels.decode.config import DecodeConfig, is_mx, packed_rows, packed_run, rows_out


def mx_form(config: DecodeConfig) -> MxForm:
    """Return the layout of experts of an MX format."""
    has_bias = config.formula.has_gate_up_bias
    return make_mx_form(config.weights.format, config.H, config.I, config.chunks, has_bias)


def packed_shapes(config: DecodeConfig) -> tuple[Shape, Shape]:
    """Return partitions and elements of each, of gate and up, and of down weights of an item."""
    if is_mx(config):
        return in_shape(mx_form(config)), out_shape(mx_form(config))
    gate_up = (packed_rows(config), packed_run(config))
    return gate_up, (rows_out(config), config.h_axis.count * config.h_axis.rows)

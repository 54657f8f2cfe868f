"""Checkpoints: safetensors files in, module parameters out, and back.

A model states once, in a `WeightMap`, how the tensors of a published checkpoint become its
parameters. From that come strict loading (`load_weights`), with every tensor accounted for before
the first one is read, and export (`save_checkpoint`).
"""

from neuron_moe.checkpoint.lazy import LazyTensor, Selection
from neuron_moe.checkpoint.load import (
    Match,
    Progress,
    Shard,
    load_weights,
    match_parameters,
    read_matched,
    read_parameters,
    stream_parameters,
    unique_parameters,
)
from neuron_moe.checkpoint.reader import Checkpoint, TensorInfo, open_checkpoint
from neuron_moe.checkpoint.transforms import (
    Transform,
    chain,
    concat_gate_up,
    concat_mixed,
    deinterleave_gate_up,
    first_of,
    identity,
    mxfp4,
    only_row,
    scale_along,
    split_rows,
    transpose,
    whole_numbers,
)
from neuron_moe.checkpoint.weight_map import Assignment, Rule, WeightMap
from neuron_moe.checkpoint.writer import save_checkpoint

__all__ = [
    "Assignment",
    "Checkpoint",
    "LazyTensor",
    "Match",
    "Progress",
    "Rule",
    "Selection",
    "Shard",
    "TensorInfo",
    "Transform",
    "WeightMap",
    "chain",
    "concat_gate_up",
    "concat_mixed",
    "deinterleave_gate_up",
    "first_of",
    "identity",
    "load_weights",
    "match_parameters",
    "mxfp4",
    "only_row",
    "open_checkpoint",
    "read_matched",
    "read_parameters",
    "save_checkpoint",
    "scale_along",
    "split_rows",
    "stream_parameters",
    "transpose",
    "unique_parameters",
    "whole_numbers",
]

"""Expert weights as MXFP4 words, which a trn3 multiplies as they are stored in checkpoints.

A module holds decoded weights; every one that an MXFP4 checkpoint can hold has its codes, so that
encoding gives the checkpoint's words again; weights with any other value have none. The axis that
is summed over must keep its groups of 32: a slice of the intermediate axis for tensor parallelism
does where it begins at a multiple of 32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_moe.quantize import MXFP4_GROUP_SIZE, encode_mxfp4_exactly
from neuron_moe.weights.expert_weights import ExpertWeights, Packed
from neuron_moe.weights.laid_out import LaidOut, to_numpy
from neuron_moe.weights.narrow import NarrowMatrices
from nki_kernels.decode import WeightForm, mx_form, pack_mx_down, pack_mx_gate_up
from nki_sim.targets import find_target

CHIP = "trn3"  # which multiplies words
FORM = WeightForm("float4_e2m1fn_x4", "packed")
Words = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def chip_name() -> str:
    """Return the chip that kernels are made for: NEURON_PLATFORM_TARGET_OVERRIDE, else trn2.

    What is neither a trn2 nor a trn3 counts as a trn2, for which the kernels are fitted.
    """
    return CHIP if find_target(None).name == CHIP else "trn2"


def is_words(copy: LaidOut) -> bool:
    """Whether a laid out copy is of words."""
    return copy.gate_up.dtype == torch.uint8


def words_copy(weights: ExpertWeights, make_config: Callable[[WeightForm], Any]) -> LaidOut | None:
    """Return the experts as words in the decode kernel's layout; None if that would lose a bit.

    Args:
        weights: of this rank.
        make_config: makes what decode_moe is compiled for; raises ValueError for what it is not.
    """
    try:
        config = make_config(FORM)
    except ValueError:
        return None
    gate_up = _words(weights.packed_gate_up, weights.gate_up_proj_EHI)
    down = None if gate_up is None else _words(weights.packed_down, weights.down_proj_EIH)
    if gate_up is None or down is None:
        return None
    bias = weights.gate_up_bias_EI
    gate_up_bias = None if bias is None else to_numpy(bias.detach().float())
    device = weights.gate_up_proj_EHI.device if weights.packed_down is None else torch.device("cpu")
    form = mx_form(config)
    first = torch.from_numpy(pack_mx_gate_up(form, *gate_up, gate_up_bias)).to(device)
    return LaidOut(first, torch.from_numpy(pack_mx_down(form, *down)).to(device))


def _words(packed: Packed | None, plain_Ekn: Tensor) -> Words | None:
    """Return words [E, n, k/4] uint16 and scales [E, n, k/32] of matrices [E, k, n], or None."""
    words, scales = [], []
    for values_kn in _values(packed, plain_Ekn):
        missing = -values_kn.shape[0] % MXFP4_GROUP_SIZE
        values_nk = torch.nn.functional.pad(values_kn.T, (0, missing)).contiguous()
        found = encode_mxfp4_exactly(values_nk)
        if found is None:
            return None
        blocks, powers = found
        words.append(blocks.flatten(1).numpy().view("<u2"))
        scales.append(powers.numpy())
    return np.stack(words), np.stack(scales)


def _values(packed: Packed | None, plain_Ekn: Tensor) -> Iterator[Tensor]:
    """Yield the matrix of each expert, float32 on the host."""
    if isinstance(packed, NarrowMatrices):
        for codes_kn, scale_n in zip(packed.codes_Ekn, packed.scale, strict=True):
            yield codes_kn.float().cpu() * scale_n.cpu()
    else:
        for matrix_kn in plain_Ekn.detach():
            yield matrix_kn.float().cpu()

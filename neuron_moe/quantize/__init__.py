"""Number formats of weights: bf16, MXFP4 and fp8, encoded and decoded on torch tensors.

Every function is vectorised, works in pieces so that its temporaries stay small beside its result,
and refuses tensors of another dtype or shape with a `TypeError` or `ValueError` that says what it
wanted.
"""

from neuron_moe.quantize.bf16 import round_to_bf16
from neuron_moe.quantize.fp8 import (
    E4M3_NEURON,
    E4M3_OCP,
    E5M2,
    Fp8Format,
    QuantizedWeight,
    dequantize_fp8,
    quantize_fp8,
    rescale_ocp_to_neuron,
)
from neuron_moe.quantize.mxfp4 import (
    MXFP4_GROUP_SIZE,
    decode_mxfp4,
    encode_mxfp4,
    encode_mxfp4_exactly,
)
from neuron_moe.quantize.recode import (
    ExponentSpread,
    mxfp4_exponent_spread,
    recode_bf16_to_fp8,
    recode_mxfp4_to_fp8,
)

__all__ = [
    "E4M3_NEURON",
    "E4M3_OCP",
    "E5M2",
    "MXFP4_GROUP_SIZE",
    "ExponentSpread",
    "Fp8Format",
    "QuantizedWeight",
    "decode_mxfp4",
    "dequantize_fp8",
    "encode_mxfp4",
    "encode_mxfp4_exactly",
    "mxfp4_exponent_spread",
    "quantize_fp8",
    "recode_bf16_to_fp8",
    "recode_mxfp4_to_fp8",
    "rescale_ocp_to_neuron",
    "round_to_bf16",
]

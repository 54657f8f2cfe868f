"""Number formats: exact values, rounding, scales, and what is refused."""

import doctest

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import neuron_moe.quantize.mxfp4
import neuron_moe.quantize.recode
from neuron_moe.quantize import (
    E4M3_NEURON,
    E4M3_OCP,
    E5M2,
    QuantizedWeight,
    decode_mxfp4,
    dequantize_fp8,
    encode_mxfp4,
    mxfp4_exponent_spread,
    quantize_fp8,
    recode_bf16_to_fp8,
    recode_mxfp4_to_fp8,
    rescale_ocp_to_neuron,
    round_to_bf16,
)
from neuron_moe.quantize.recode import _is_exact, spread_limit

FORMATS = [
    pytest.param(fmt, id=name)
    for name, fmt in [("e4m3-448", E4M3_OCP), ("e4m3-240", E4M3_NEURON), ("e5m2", E5M2)]
]
SCHEMES = {
    "per_tensor_symmetric": (1,),
    "per_channel_symmetric": (1, 1, 200),
    "expert_wise_per_channel_symmetric": (3, 1, 200),
    "blockwise_symmetric": (3, 3, 2),
}


def random_mxfp4(
    *shape: int, lowest: int = 90, highest: int = 160, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random codes [*shape, 16] and scales [*shape]."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(lowest, highest + 1, shape, dtype=torch.uint8, generator=generator)
    return blocks, scales


@pytest.mark.parametrize("module", [neuron_moe.quantize.mxfp4, neuron_moe.quantize.recode])
def test_examples_in_docstrings_are_true(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


# MXFP4


def test_mxfp4_decodes_every_code_and_scale_as_the_standard_says():
    table = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    codes = torch.arange(16, dtype=torch.uint8)
    low_and_high = torch.stack([codes, codes.flip(0) << 4], dim=0)
    blocks = (low_and_high[0] | low_and_high[1]).expand(255, 1, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).unsqueeze(1)
    decoded = decode_mxfp4(blocks, scales, torch.float32).double().numpy()
    powers = 2.0 ** (np.arange(255)[:, None] - 127)
    with np.errstate(over="ignore"):
        expected = np.stack([table, table[::-1]], axis=1).reshape(1, 32) * powers
        expected = expected.astype(np.float32)
    np.testing.assert_array_equal(decoded, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_mxfp4_decodes_bit_for_bit_as_transformers(dtype):
    blocks, scales = random_mxfp4(3, 40, 5, lowest=0, highest=254)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2).contiguous()
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(decode_mxfp4(blocks, scales, dtype).view(bits), expected.view(bits))


def test_mxfp4_scale_255_is_nan():
    blocks = torch.zeros(2, 1, 16, dtype=torch.uint8)
    decoded = decode_mxfp4(blocks, torch.tensor([[255], [254]], dtype=torch.uint8))
    assert torch.isnan(decoded[0]).all()
    assert torch.equal(decoded[1], torch.zeros(32, dtype=torch.bfloat16))


def test_mxfp4_decodes_the_same_across_chunks_and_strides():
    blocks, scales = random_mxfp4(9000, 2)
    whole = decode_mxfp4(blocks, scales)
    parts = torch.cat([decode_mxfp4(blocks[i : i + 1], scales[i : i + 1]) for i in (0, 4095, 8999)])
    assert torch.equal(whole[[0, 4095, 8999]], parts)
    strided = decode_mxfp4(blocks.transpose(0, 1), scales.transpose(0, 1))
    assert torch.equal(strided.view(2, 9000, 32).transpose(0, 1).reshape(9000, 64), whole)


@given(seed=st.integers(0, 2**31), lowest=st.integers(0, 200), spread=st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_encoding_a_decoded_weight_gives_it_back(seed, lowest, spread):
    blocks, scales = random_mxfp4(4, 3, lowest=lowest, highest=lowest + spread, seed=seed)
    decoded = decode_mxfp4(blocks, scales)
    again = decode_mxfp4(*encode_mxfp4(decoded))
    assert torch.equal(again.view(torch.int16), decoded.view(torch.int16))  # -0.0 stays -0.0


@given(seed=st.integers(0, 2**31), exponent=st.integers(-140, 120))
@settings(max_examples=40, deadline=None)
def test_encoding_twice_gives_the_same_codes(seed, exponent):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.ldexp(torch.randn(4, 96, generator=generator), torch.tensor(exponent))
    blocks, scales = encode_mxfp4(weight)
    blocks_again, scales_again = encode_mxfp4(decode_mxfp4(blocks, scales, torch.float32))
    assert torch.equal(blocks, blocks_again)
    assert torch.equal(scales, scales_again)


@pytest.mark.parametrize(
    ("maximum", "scale"),
    [(4.0, 127), (6.0, 127), (7.99, 127), (8.0, 128), (3.99, 126), (2.0**-127, 0), (0.0, 0)],
)
def test_mxfp4_scale_is_the_power_of_two_below_the_maximum_over_four(maximum, scale):
    weight = torch.zeros(32)
    weight[5] = -maximum
    assert encode_mxfp4(weight)[1].item() == scale


def test_mxfp4_rounds_to_nearest_with_ties_to_even_as_ml_dtypes():
    magnitudes = torch.linspace(0, 7.99, 3069)
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = torch.cat([midpoints.nextafter(torch.tensor(b)) for b in (0.0, 8.0)])
    values = torch.cat([magnitudes, midpoints, near, -midpoints, -near])
    groups = torch.nn.functional.pad(values, (0, -len(values) % 31)).view(-1, 31)
    groups = torch.cat([groups, torch.full((len(groups), 1), 4.0)], dim=1)  # the scale stays 1
    blocks, scales = encode_mxfp4(groups)
    assert (scales == 127).all()
    expected = groups.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(decode_mxfp4(blocks, scales, torch.float32).numpy(), expected)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_mxfp4_error_stays_below_twice_the_scale(seed):
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    blocks, scales = encode_mxfp4(weight)
    error = (decode_mxfp4(blocks, scales, torch.float32) - weight).abs().view(8, 2, 32)
    scale = torch.ldexp(torch.ones(8, 2), scales.int() - 127).unsqueeze(-1)
    assert (error < 2 * scale).all()  # a saturated 7.99 is 1.99 from 6
    is_saturated = weight.abs().view(8, 2, 32) > 6 * scale
    assert (error[~is_saturated] <= scale.expand_as(error)[~is_saturated]).all()


MXFP4_REFUSALS = {
    "blocks-not-uint8": (
        lambda: decode_mxfp4(torch.zeros(2, 16), torch.zeros(2, dtype=torch.uint8)),
        TypeError,
        r"blocks\.dtype=torch\.float32: must be uint8 .*encode_mxfp4",
    ),
    "scales-not-uint8": (
        lambda: decode_mxfp4(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2)),
        TypeError,
        r"scales\.dtype=torch\.float32: must be uint8",
    ),
    "no-tensor": (lambda: decode_mxfp4([1], [2]), TypeError, r"blocks is a list: must be a torch"),
    "last-axis": (
        lambda: decode_mxfp4(*(torch.zeros(n, dtype=torch.uint8) for n in [(2, 8), (2,)])),
        ValueError,
        r"blocks \[2, 8\]: the last axis must be the 16 bytes .*Reshape",
    ),
    "shapes-differ": (
        lambda: decode_mxfp4(*(torch.zeros(n, dtype=torch.uint8) for n in [(2, 3, 16), (3, 2)])),
        ValueError,
        r"scales \[3, 2\]: must be \[2, 3\].*Check that both",
    ),
    "dtype": (
        lambda: decode_mxfp4(*random_mxfp4(1), dtype=torch.float16),
        TypeError,
        r"dtype=torch\.float16: must be bfloat16 or float32.*Decode to float32",
    ),
    "odd-length": (
        lambda: encode_mxfp4(torch.zeros(2, 33)),
        ValueError,
        r"weight \[2, 33\]: the last axis must be a multiple of 32.*Pad it",
    ),
    "nan": (
        lambda: encode_mxfp4(torch.full((32,), float("nan"))),
        ValueError,
        r"NaN or infinity: MXFP4 has neither.*Repair",
    ),
    "infinity": (
        lambda: encode_mxfp4(torch.full((32,), float("inf"))),
        ValueError,
        r"NaN or infinity",
    ),
}


@pytest.mark.parametrize("case", MXFP4_REFUSALS)
def test_mxfp4_refuses(case):
    call, error, message = MXFP4_REFUSALS[case]
    with pytest.raises(error, match=message):
        call()


# bf16


def test_bf16_rounds_to_nearest_even():
    weight = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20])
    assert round_to_bf16(weight).tolist() == [1.0, 1 + 2**-6, 1 + 2**-7]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
def test_bf16_refuses_what_it_cannot_hold(value):
    with pytest.raises(ValueError, match=r"weight \[1\] holds 1 values .* must be finite\. Repair"):
        round_to_bf16(torch.tensor([value]))


# fp8


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fp8_scales_have_the_shape_of_their_scheme_and_codes_use_the_range(fmt, scheme):
    weight = torch.randn(3, 300, 200) * torch.logspace(-3, 3, 200)
    quantized = quantize_fp8(weight, fmt, scheme)
    assert tuple(quantized.scale.shape) == SCHEMES[scheme]
    assert quantized.codes.dtype == fmt.dtype
    assert quantized.codes.float().abs().max().item() == fmt.max_value
    error = (dequantize_fp8(quantized, torch.float32) - weight).abs()
    # Half a unit in the last place of each value, or of the smallest normal code of its scope.
    scale = quantized.scale
    if scheme == "blockwise_symmetric":
        scale = scale.repeat_interleave(128, 1)[:, :300].repeat_interleave(128, 2)[:, :, :200]
    half_step = 2.0 ** -(fmt.mantissa_bits + 1)
    bound = half_step * torch.maximum(weight.abs(), scale * 2.0**fmt.min_exponent) * 1.0001
    assert (error <= bound).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_fp8_codes_are_rounded_as_ml_dtypes_rounds(fmt):
    weight = torch.randn(64, 32) * fmt.max_value / 4
    weight[0] = fmt.max_value  # the scale of each channel becomes 1
    weight.clamp_(-fmt.max_value, fmt.max_value)
    codes = quantize_fp8(weight, fmt, "expert_wise_per_channel_symmetric").codes
    ours = ml_dtypes.float8_e5m2 if fmt is E5M2 else ml_dtypes.float8_e4m3fn
    assert np.array_equal(codes.view(torch.uint8), weight.numpy().astype(ours).view(np.uint8))


def test_neuron_codes_mean_the_same_in_the_ieee_like_e4m3_of_the_chip():
    codes = quantize_fp8(torch.randn(2, 128, 64), E4M3_NEURON).codes
    on_chip = codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3).astype(np.float32)
    np.testing.assert_array_equal(on_chip, codes.float().numpy())


def test_one_scale_for_all_experts_loses_the_small_expert_and_one_each_keeps_it():
    weight = torch.randn(2, 64, 32)
    weight[1] *= 1e-5

    def relative_error(scheme):
        decoded = dequantize_fp8(quantize_fp8(weight, E4M3_NEURON, scheme), torch.float32)
        return ((decoded - weight)[1].norm() / weight[1].norm()).item()

    assert relative_error("per_channel_symmetric") > 0.5
    assert relative_error("expert_wise_per_channel_symmetric") < 0.04


def test_power_of_two_scales_never_push_codes_out_of_range():
    weight = torch.randn(3, 64, 40).exp()
    weight[0, :, 0] = E4M3_NEURON.max_value / 8  # whose scale is a power of two already
    quantized = quantize_fp8(weight, E4M3_NEURON, power_of_two=True)
    assert quantized.scale[0, 0, 0] == 1 / 8
    mantissa, _ = torch.frexp(quantized.scale)
    assert (mantissa == 0.5).all()
    largest = quantized.codes.float().abs().amax(1)
    assert ((largest >= 128) & (largest <= 240)).all()


@pytest.mark.parametrize("fmt", [E4M3_NEURON, E5M2])
def test_what_has_power_of_two_scales_is_quantised_again_alike(fmt):
    weight = torch.linspace(0.4, 2.1, 4096)[None]  # a channel each; rounds up, down, and over 2
    first = quantize_fp8(weight, fmt, power_of_two=True)
    again = quantize_fp8(dequantize_fp8(first, torch.float32), fmt, power_of_two=True)
    assert torch.equal(first.scale, again.scale)
    assert torch.equal(first.codes.float(), again.codes.float())
    limit = torch.tensor([fmt.rounding_limit])
    codes = quantize_fp8(limit.nextafter(torch.zeros(1))[None], fmt, power_of_two=True).codes
    assert codes.float().item() == fmt.max_value


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fp8_zeros_and_tiny_weights_have_usable_scales(scheme):
    weight = torch.zeros(2, 130, 3)
    weight[1] = 1e-44
    quantized = quantize_fp8(weight, E5M2, scheme)
    assert (quantized.scale > 0).all()
    assert torch.isfinite(dequantize_fp8(quantized, torch.float32)).all()


def test_fp8_takes_a_plain_matrix_and_a_transposed_one():
    weight = torch.randn(200, 300, dtype=torch.bfloat16)
    for matrix in (weight, weight.t()):
        quantized = quantize_fp8(matrix, E4M3_OCP, "blockwise_symmetric")
        assert quantized.scale.shape == tuple(-(-size // 128) for size in matrix.shape)
        assert quantize_fp8(matrix.contiguous(), E4M3_OCP, "blockwise_symmetric").codes.equal(
            quantized.codes
        )


@pytest.mark.parametrize("factor", [448 / 240, 2.0])
def test_rescaling_brings_ocp_codes_into_the_range_of_the_chip(factor):
    quantized = quantize_fp8(torch.randn(2, 256, 128), E4M3_OCP, "blockwise_symmetric")
    rescaled = rescale_ocp_to_neuron(quantized, factor)
    assert rescaled.codes.float().abs().max() <= 240
    before, after = (dequantize_fp8(q, torch.float32) for q in (quantized, rescaled))
    torch.testing.assert_close(after, before, rtol=2**-4, atol=2**-10 * rescaled.scale.max().item())
    exact = quantized.codes.float().abs() >= 2**-5
    if factor == 2.0:
        assert torch.equal(after[exact], before[exact])


def quantized_of(codes_shape, scale_shape, block_shape=None):
    return QuantizedWeight(
        torch.zeros(codes_shape, dtype=torch.float8_e4m3fn), torch.ones(scale_shape), block_shape
    )


FP8_REFUSALS = {
    "scheme": (
        lambda: quantize_fp8(torch.zeros(2, 2), scheme="blockwise"),
        ValueError,
        r"scheme='blockwise': must be one of per_tensor_symmetric.*Did you mean",
    ),
    "vector": (
        lambda: quantize_fp8(torch.zeros(2)),
        ValueError,
        r"weight \[2\]: must have at least two axes",
    ),
    "block": (
        lambda: quantize_fp8(torch.zeros(2, 2), E5M2, "blockwise_symmetric", block_shape=(0, 1)),
        ValueError,
        r"block_shape=\(0, 1\): must be two positive integers.*Use \(128, 128\)",
    ),
    "nan": (
        lambda: quantize_fp8(torch.full((2, 2), float("nan"))),
        ValueError,
        r"weight \[2, 2\] holds NaN or infinity: .*Repair",
    ),
    "codes-dtype": (
        lambda: QuantizedWeight(torch.zeros(2, 2), torch.ones(1)),
        TypeError,
        r"codes\.dtype=torch\.float32: must be float8_e4m3fn or float8_e5m2.*quantize_fp8\(\)",
    ),
    "scale-dtype": (
        lambda: QuantizedWeight(
            torch.zeros(2, 2, dtype=torch.float8_e5m2), torch.ones(1, dtype=torch.bfloat16)
        ),
        TypeError,
        r"scale\.dtype=torch\.bfloat16: must be float32.*\.float\(\)",
    ),
    "scale-shape": (
        lambda: quantized_of((4, 6), (3, 1)),
        ValueError,
        r"scale \[3, 1\]: must broadcast against codes \[4, 6\].*block_shape",
    ),
    "scale-axes": (
        lambda: quantized_of((4, 6), (1, 4, 6)),
        ValueError,
        r"scale \[1, 4, 6\]: must broadcast against codes \[4, 6\]",
    ),
    "one-axis": (
        lambda: quantized_of((6,), (1,)),
        ValueError,
        r"codes \[6\]: must have at least two axes",
    ),
    "infinite-factor": (
        lambda: rescale_ocp_to_neuron(quantized_of((2, 2), (1,)), float("inf")),
        ValueError,
        r"factor=inf: must be at least 448/240",
    ),
    "nan-codes": (
        lambda: rescale_ocp_to_neuron(
            QuantizedWeight(torch.tensor([[1.0, float("nan")]]).to(E4M3_OCP.dtype), torch.ones(1))
        ),
        ValueError,
        r"codes \[1, 2\] hold NaN: .*Repair",
    ),
    "grid-shape": (
        lambda: quantized_of((256, 130), (2, 1), (128, 128)),
        ValueError,
        r"scale \[2, 1\]: must be \[2, 2\], one for each block.*order of the axes",
    ),
    "factor": (
        lambda: rescale_ocp_to_neuron(quantized_of((2, 2), (1,)), 1.5),
        ValueError,
        r"factor=1\.5: must be at least 448/240.*Use the default",
    ),
    "rescale-e5m2": (
        lambda: rescale_ocp_to_neuron(quantize_fp8(torch.ones(2, 2), E5M2)),
        TypeError,
        r"codes\.dtype=torch\.float8_e5m2: must be float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("case", FP8_REFUSALS)
def test_fp8_refuses(case):
    call, error, message = FP8_REFUSALS[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("convert", [quantize_fp8, encode_mxfp4, round_to_bf16])
def test_weights_that_are_no_floats_are_refused(convert):
    for weight in (torch.ones(2, 32, dtype=torch.int8), torch.ones(2, 32, dtype=torch.float64)):
        with pytest.raises(TypeError, match=f"weight.dtype={weight.dtype}: .*Convert"):
            convert(weight)


@pytest.mark.parametrize("rows", [2, 3, 600])
def test_scales_of_single_values_and_of_rows_stay_with_them(rows):
    codes = torch.randn(rows, 4).to(torch.float8_e5m2)
    for scale in (torch.rand(rows, 4), torch.rand(rows, 1)):
        decoded = dequantize_fp8(QuantizedWeight(codes, scale), torch.float32)
        assert torch.equal(decoded, codes.float() * scale)


def test_blocks_may_have_more_rows_than_columns():
    usual = quantize_fp8(torch.ones(257, 257), scheme="blockwise_symmetric")
    assert (usual.block_shape, tuple(usual.scale.shape)) == ((128, 128), (3, 3))
    weight = torch.arange(1.0, 1 + 130 * 70).view(130, 70)
    quantized = quantize_fp8(weight, scheme="blockwise_symmetric", block_shape=(128, 64))
    assert quantized.scale.shape == (2, 2)
    torch.testing.assert_close(dequantize_fp8(quantized, torch.float32), weight, rtol=0.1, atol=0)


# MXFP4 to fp8


@pytest.mark.parametrize("allow_subnormal", [False, True], ids=["normal", "subnormal"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_spread_limit_is_exactly_where_recoding_stops_being_exact(fmt, allow_subnormal):
    def holds(exponent):  # all magnitudes of a group, as the format rounds them
        values = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6]) * 2.0**exponent
        smallest = 2.0**fmt.min_exponent
        fits = bool((values <= fmt.max_value).all())
        fits &= allow_subnormal or bool((values >= smallest).all())
        return fits and torch.equal(values.to(fmt.dtype).float(), values)

    exact = [exponent for exponent in range(-30, 30) if holds(exponent)]
    assert exact == list(range(exact[0], exact[-1] + 1))
    assert spread_limit(fmt, allow_subnormal=allow_subnormal) == exact[-1] - exact[0]


@given(
    seed=st.integers(0, 2**31),
    lowest=st.integers(0, 225),
    spread=st.integers(0, 26),
    scope=st.sampled_from(["channel", "expert"]),
)
@settings(max_examples=60, deadline=None)
def test_recoding_mxfp4_to_e5m2_keeps_every_bit(seed, lowest, spread, scope):
    blocks, scales = random_mxfp4(2, 5, 3, lowest=lowest, highest=lowest + spread, seed=seed)
    blocks[0, 0, 0] = 0x80  # a group of zeros, of both signs, whose exponent does not count
    scales[0, 0, 0] = 3
    recoded = recode_mxfp4_to_fp8(blocks, scales, E5M2, scope)
    assert recoded.scale.shape == ((2, 5, 1) if scope == "channel" else (2, 1, 1))
    assert (torch.frexp(recoded.scale).mantissa == 0.5).all()
    assert (recoded.scale >= torch.finfo(torch.float32).tiny).all()  # no subnormal scale
    decoded = decode_mxfp4(blocks, scales, torch.float32)
    assert torch.equal(dequantize_fp8(recoded, torch.float32), decoded)
    magnitudes = recoded.codes.float().abs()
    assert (magnitudes[magnitudes > 0] >= 2.0**E5M2.min_exponent).all()


@pytest.mark.parametrize(
    ("exponent", "scale_of_zeros"),
    [(131, 0), (131, 3), (131, 4), (131, 130), (131, 254), (20, 254)],
)
def test_the_scale_of_a_group_of_zeros_does_not_matter(exponent, scale_of_zeros):
    blocks, scales = random_mxfp4(1, 2, 3, lowest=exponent, highest=exponent)
    blocks[0, :, 1] = 0
    scales[0, :, 1] = scale_of_zeros
    recoded = recode_mxfp4_to_fp8(blocks, scales)
    expected = decode_mxfp4(blocks, scales, torch.float32)
    assert torch.equal(dequantize_fp8(recoded, torch.float32), expected)
    if exponent == 131:
        assert (recoded.scale == 16).all()


def test_channels_beyond_one_slab_keep_their_own_scales():
    blocks, scales = random_mxfp4(2, 1100, 1)
    recoded = recode_mxfp4_to_fp8(blocks, scales)
    expected = decode_mxfp4(blocks, scales, torch.float32)
    assert torch.equal(dequantize_fp8(recoded, torch.float32), expected)


def test_recoding_reports_and_refuses_a_spread_that_is_too_wide():
    blocks, scales = random_mxfp4(2, 3, 2, lowest=120, highest=120)
    scales[1, 2] = torch.tensor([100, 127], dtype=torch.uint8)
    spread = mxfp4_exponent_spread(blocks, scales)
    assert (spread.widest, spread.limit, spread.num_too_wide) == (27, 26, 1)
    assert spread.first_too_wide == (1, 2)
    assert not spread.is_lossless
    assert mxfp4_exponent_spread(blocks[0], scales[0]).widest == 0
    nothing = mxfp4_exponent_spread(blocks[:0], scales[:0])
    assert (nothing.widest, nothing.num_scopes, nothing.first_too_wide) == (0, 0, None)
    message = r"channel \(1, 2\) spread over more than 26 \(widest 27; 1 of 6 .*decode_mxfp4\(\)"
    with pytest.raises(ValueError, match=message):
        recode_mxfp4_to_fp8(blocks, scales)
    recoded = recode_mxfp4_to_fp8(blocks, scales, allow_subnormal=True)
    expected = decode_mxfp4(blocks, scales, torch.float32)
    assert torch.equal(dequantize_fp8(recoded, torch.float32), expected)


def test_a_spread_within_each_channel_may_be_too_wide_for_the_expert():
    blocks, scales = random_mxfp4(1, 2, 4, lowest=120, highest=120)
    scales[0, 0] = 60
    assert mxfp4_exponent_spread(blocks, scales, scope="channel").is_lossless
    assert not mxfp4_exponent_spread(blocks, scales, scope="expert").is_lossless


@pytest.mark.parametrize(
    ("fmt", "highest"), [(E4M3_NEURON, 130), (E4M3_OCP, 131)], ids=["e4m3-240", "e4m3-448"]
)
def test_recoding_to_e4m3_is_exact_up_to_its_limit(fmt, highest):
    blocks, scales = random_mxfp4(1, 64, 8, lowest=120, highest=highest)
    recoded = recode_mxfp4_to_fp8(blocks, scales, fmt)
    expected = decode_mxfp4(blocks, scales, torch.float32)
    assert torch.equal(dequantize_fp8(recoded, torch.float32), expected)
    assert recoded.codes.float().abs().max() <= fmt.max_value


@pytest.mark.parametrize(
    ("scope", "scale", "message"),
    [
        ("row", 120, r"scope='row': must be one of channel, expert"),
        ("channel", 255, r"scales \[1, 2, 2\] hold 255, which is NaN: .*Repair"),
    ],
    ids=["scope", "nan"],
)
def test_recoding_refuses(scope, scale, message):
    blocks, scales = random_mxfp4(1, 2, 2, lowest=scale, highest=scale)
    with pytest.raises(ValueError, match=message):
        recode_mxfp4_to_fp8(blocks, scales, scope=scope)


def test_a_plain_matrix_is_recoded_and_a_vector_refused() -> None:
    blocks, scales = random_mxfp4(64, 8, lowest=110, highest=115)
    expected = decode_mxfp4(blocks, scales, torch.float32)
    assert torch.equal(dequantize_fp8(recode_mxfp4_to_fp8(blocks, scales), torch.float32), expected)
    with pytest.raises(ValueError, match=r"scales \[8\]: must be \[..., rows, groups\]"):
        recode_mxfp4_to_fp8(blocks[0], scales[0])


def test_every_pair_of_mxfp4_code_and_scale_survives_decoding_and_recoding() -> None:
    # All 16 codes under every finite scale whose decoded values are normal bfloat16 numbers; two
    # neighbouring scales meet in a column, as do the two that are as far apart as e5m2 spans.
    codes = torch.arange(16, dtype=torch.uint8)
    group = torch.cat((codes[0::2] | (codes[1::2] << 4),) * 2)
    lowest = torch.arange(2, 252 - 26, dtype=torch.uint8)
    for distance in (0, 1, 26):
        scales = torch.stack((lowest, lowest + distance), dim=1).unsqueeze(0)
        blocks = group.expand(*scales.shape, 16).contiguous()
        decoded = decode_mxfp4(blocks, scales).transpose(-1, -2)
        by_column = recode_bf16_to_fp8(decoded)
        assert torch.equal(dequantize_fp8(by_column), decoded)
        assert torch.equal(
            by_column.codes.transpose(-1, -2).float(),
            recode_mxfp4_to_fp8(blocks, scales).codes.float(),
        )
        by_matrix = recode_bf16_to_fp8(decoded[0].t().unsqueeze(-1).contiguous())
        assert by_matrix.scale.shape == (len(lowest), 1, 1)
        assert torch.equal(dequantize_fp8(by_matrix)[..., 0].t(), decoded[0])
        normal = by_column.codes.float().abs()
        assert (normal[normal > 0] >= 2.0**E5M2.min_exponent).all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 1.125], r"1.125 at \[0, 1, 0\] has no exact e5m2 form \(1 of 2"),
        ([1.0, float("nan")], r"nan at \[0, 1, 0\] has no exact e5m2 form"),
        ([2.0**-15, 2.0**15], r"expert 0, column 0 spread over 31 powers of two .*Keep bfloat16"),
    ],
    ids=["mantissa", "nan", "spread"],
)
def test_bf16_weights_that_fp8_cannot_hold_are_refused(values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recode_bf16_to_fp8(torch.tensor(values).bfloat16().view(1, -1, 1))
    with pytest.raises(TypeError, match=r"float32: must be bfloat16"):
        recode_bf16_to_fp8(torch.tensor(values).view(1, -1, 1))


def test_columns_of_zeros_and_one_wide_matrix_fit_with_scales_of_columns() -> None:
    weight = torch.zeros(2, 3, 4).bfloat16()
    weight[0, :, 1], weight[0, :, 2] = 2.0**-40, -(2.0**40)
    weight[1, 1, 3] = 7.0
    recoded = recode_bf16_to_fp8(weight)
    assert recoded.scale.shape == (2, 1, 4)
    assert (recoded.scale[weight.abs().amax(1, keepdim=True) == 0] == 1).all()
    assert torch.equal(dequantize_fp8(recoded), weight)


@pytest.fixture
def _nan_in_new_memory():
    torch.use_deterministic_algorithms(True)  # torch.empty fills with NaN, then
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_nan_in_new_memory")
@pytest.mark.parametrize(("largest", "scale"), [(0.0, 1.0), (1.0, 2.0**-2), (2.0**-130, 2.0**-126)])
def test_each_matrix_has_a_scale_for_its_own_largest_magnitude(largest, scale):
    weight = torch.zeros(2, 3, 2).bfloat16()
    weight[0, 0, 0] = 12.0
    weight[1, 2, 1] = -largest
    recoded = recode_bf16_to_fp8(weight)
    assert recoded.scale.flatten().tolist() == [2.0, scale]
    assert torch.equal(dequantize_fp8(recoded), weight)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_matrix_is_exact_in_normal_codes_alone(fmt):
    every = torch.arange(256).to(torch.uint8).view(fmt.dtype)
    for code in every[torch.isfinite(every.float())]:
        codes, magnitude = code.view(1, 1), abs(float(code))
        is_normal = magnitude == 0 or magnitude >= 2.0**fmt.min_exponent
        matrix = codes.bfloat16() * 4
        assert _is_exact(codes, matrix, 4.0, fmt) == is_normal
        other = -matrix if magnitude else matrix + 1
        assert not _is_exact(codes, other, 4.0, fmt)


def test_a_mantissa_that_the_largest_exponent_lacks_is_refused():
    # 1.875 * 2^8 is no number of OCP's e4m3, 448 = 1.75 * 2^8 is.
    weight = torch.tensor([480.0, 2.0**-6]).bfloat16().view(1, 2, 1)
    with pytest.raises(ValueError, match=r"480\.0 at \[0, 0, 0\] has no exact e4m3 .*\(1 of 2 in"):
        recode_bf16_to_fp8(weight, E4M3_OCP)
    weight[0, 0] = 448.0
    recoded = recode_bf16_to_fp8(weight, E4M3_OCP)
    assert recoded.scale.item() == 1
    assert torch.equal(dequantize_fp8(recoded), weight)


@pytest.mark.parametrize("byte", [1, 2, 7, 9, 0x10, 0x20, 0x70, 0x90])
def test_one_value_is_enough_for_a_group_to_count(byte):
    blocks = torch.full((1, 1, 3, 16), 0x88, dtype=torch.uint8)  # zeros with a sign
    blocks[0, 0, 0, 3], blocks[0, 0, 1, 5] = byte, 0x71
    scales = torch.tensor([[[100, 103, 150]]], dtype=torch.uint8)
    assert mxfp4_exponent_spread(blocks, scales).widest == 3
    recoded = recode_mxfp4_to_fp8(blocks, scales)
    expected = decode_mxfp4(blocks, scales, torch.float32)
    assert torch.equal(dequantize_fp8(recoded, torch.float32), expected)

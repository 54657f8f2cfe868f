"""Expert weights kept as fp8 codes: what the modules hold, load, save and compute with."""

import copy
import logging
import math
import pickle
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from neuron_moe import BlockwiseMatmulConfig, ExpertMLPsV2, RoutedExpertsMLPOpsConfig
from neuron_moe.backends.nki import NkiBackend
from neuron_moe.backends.nki.operands import _log_once, check_weights, format_note
from neuron_moe.backends.torch_backend import TorchBackend
from neuron_moe.errors import WeightError
from neuron_moe.parallel import ParallelConfig, parallel_state
from neuron_moe.plan import Step
from neuron_moe.quantize import decode_mxfp4, quantize_fp8, recode_bf16_to_fp8
from neuron_moe.weights.expert_weights import ExpertWeights
from neuron_moe.weights.linear import ExpertLinear
from neuron_moe.weights.narrow import NarrowMatrices
from nki_kernels.common.formula import ExpertFormula
from tests.kernels import PACKS_BFLOAT16
from tests.neuron_moe.nki_cases import GPT_OSS
from tests.tolerances import rms_error

E, K, H, I, T = 4, 2, 128, 64, 40  # noqa: E741
NAMES = ("gate_up_proj", "down_proj")


def build(backend: str = "nki", dtype: torch.dtype = torch.bfloat16) -> ExpertMLPsV2:
    config = RoutedExpertsMLPOpsConfig(
        num_experts=E, hidden_size=H, intermediate_size=I, top_k=K, glu_mlp=True, **GPT_OSS
    )
    tuning = BlockwiseMatmulConfig.from_kwargs(block_size=32)
    return ExpertMLPsV2(config, tuning, dtype=dtype, backend=backend).requires_grad_(False)


def mxfp4_state(lowest: int = 116, highest: int = 124) -> dict[str, Tensor]:
    """Return a state dict in bfloat16 whose weights were MXFP4, with biases."""
    state = {}
    for name, size, width in (("gate_up_proj", H, 2 * I), ("down_proj", I, H)):
        blocks = torch.randint(0, 256, (E, width, size // 32, 16), dtype=torch.uint8)
        scales = torch.randint(lowest, highest, (E, width, size // 32), dtype=torch.uint8)
        decoded = decode_mxfp4(blocks, scales).transpose(1, 2).contiguous()
        state[f"mlp_op.{name}.weight"] = decoded
        state[f"mlp_op.{name}.bias"] = torch.randn(E, width).bfloat16()
    return state


def e4m3_state(scheme: str = "expert_wise_per_channel_symmetric") -> dict[str, Tensor]:
    """Return a state dict of e4m3 codes with scales, NxD's quantised form."""
    state = {}
    for name, size, width in (("gate_up_proj", H, 2 * I), ("down_proj", I, H)):
        quantized = quantize_fp8(torch.randn(E, size, width) * size**-0.5, scheme=scheme)
        state[f"mlp_op.{name}.weight"] = quantized.codes
        state[f"mlp_op.{name}.scale"] = quantized.scale
        state[f"mlp_op.{name}.bias"] = torch.randn(E, width).bfloat16()
    return state


def compute(experts: ExpertMLPsV2, seq_len: int = T) -> Tensor:
    """Return what the experts make of tokens that depend on nothing else."""
    stream = torch.Generator().manual_seed(4)
    hidden_TH = torch.randn(T, H, generator=stream).to(experts.dtype)
    index_TK = torch.rand(T, E, generator=stream).argsort(1)[:, :K]
    affinities_TK = torch.rand(T, K, generator=stream)
    output: Tensor = experts(hidden_TH, affinities_TK, index_TK, seq_len)
    return output.float()


def notes(experts: ExpertMLPsV2, phase: str = "prefill") -> tuple[str, ...]:
    return experts.plan(Step(phase, T)).notes()


def is_narrow(experts: ExpertMLPsV2) -> list[bool]:
    return [isinstance(getattr(experts.mlp_op, n).packed, NarrowMatrices) for n in NAMES]


def test_mxfp4_weights_stay_narrow_and_give_the_same_output() -> None:
    state = mxfp4_state()
    wide, narrow = build(), build()
    wide.load_state_dict(state)
    narrow.load_state_dict(state)
    narrow.pack_weights()
    assert (is_narrow(wide), is_narrow(narrow)) == ([False] * 2, [True] * 2)
    assert narrow.mlp_op.down_proj.packed.format == "float8_e5m2"
    assert torch.equal(compute(wide), compute(narrow))
    narrow.backend = TorchBackend()
    wide.backend = TorchBackend()
    assert torch.equal(compute(wide), compute(narrow))


@pytest.mark.parametrize("layout", ["plain", "for-decode"])
@pytest.mark.parametrize("form", ["bfloat16", "scale-per-expert", "scale-per-channel", "e4m3"])
def test_decode_in_every_format_and_layout_is_as_right_as_torch(form: str, layout: str) -> None:
    state = e4m3_state() if form == "e4m3" else mxfp4_state()
    if form == "scale-per-channel":
        state["mlp_op.down_proj.weight"][0, :, 5] *= 2.0**-40
    if form == "bfloat16":
        state["mlp_op.down_proj.weight"] *= 1.01
    nki, bf16, exact = build(), build("torch"), build("torch", torch.float32)
    for experts in (nki, bf16, exact):
        experts.load_state_dict(state)
    nki.pack_weights(for_decode=layout == "for-decode")
    assert is_narrow(nki) == [form != "bfloat16"] * 2
    wanted = compute(exact, 1)
    assert rms_error(compute(nki, 1), wanted) <= 1.05 * rms_error(compute(bf16, 1), wanted)
    (shown,) = [note for note in notes(nki, "decode") if note.startswith("plan:")]
    assert shown.endswith("laid out for decode" if layout == "for-decode" else "plain layout")
    # Prefill reads the plain form beside it.
    assert rms_error(compute(nki), wanted) <= 1.05 * rms_error(compute(bf16), wanted)


def test_a_copy_for_decode_is_dropped_with_the_weights_it_was_made_from() -> None:
    experts = build()
    experts.load_state_dict(mxfp4_state())
    experts.pack_weights(for_decode=True)
    assert experts.weights().decode_copy is not None
    experts.mlp_op.gate_up_proj.bias.add_(1)
    assert experts.weights().decode_copy is None
    experts.pack_weights(for_decode=True)
    assert experts.weights().decode_copy is not None
    experts.to("cpu")
    assert experts.weights().decode_copy is not None
    copied = pickle.loads(pickle.dumps(experts))
    assert copied.weights().decode_copy is copy.deepcopy(experts).weights().decode_copy is None
    assert torch.equal(compute(copied, 1), compute(experts, 1))
    experts.load_state_dict(mxfp4_state())
    assert experts.weights().decode_copy is None
    with pytest.raises(ValueError, match="for_decode=True: backend='torch' has one layout"):
        build("torch").float().pack_weights(for_decode=True)


def test_narrow_weights_take_half_the_memory() -> None:
    experts = build()
    experts.load_state_dict(mxfp4_state())
    experts.pack_weights()
    held = {id(p): p.untyped_storage().nbytes() for p in experts.parameters() if not p.is_meta}
    held |= {id(m.packed): m.packed.codes_Ekn.nbytes for m in experts.mlp_op.children() if m.packed}
    biases = E * (2 * I + H) * 2
    stand_ins = 2 * 2  # bytes of one number each
    assert sum(held.values()) == E * 3 * I * H + biases + stand_ins


def test_the_state_dict_of_repacked_weights_is_unchanged_and_loads_into_both_forms() -> None:
    state = mxfp4_state()
    narrow, plain = build(), build("torch")
    narrow.load_state_dict(state)
    narrow.pack_weights()
    saved = narrow.state_dict()
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], value) for name, value in state.items())
    plain.load_state_dict(saved)
    narrow.load_state_dict(saved)
    assert is_narrow(narrow) == [False] * 2


@pytest.mark.parametrize(
    "scheme",
    ["per_tensor_symmetric", "per_channel_symmetric", "expert_wise_per_channel_symmetric"],
)
def test_e4m3_weights_are_kept_as_loaded(scheme: str) -> None:
    state = e4m3_state(scheme)
    nki, torch_bf16, exact = build(), build("torch"), build("torch", torch.float32)
    for experts in (nki, torch_bf16, exact):
        experts.load_state_dict(
            {n: v.float() if n.endswith("bias") else v for n, v in state.items()}
            if experts is exact
            else state
        )
        assert is_narrow(experts) == [True] * 2
    with torch.no_grad():
        wanted = compute(exact)
        assert rms_error(compute(nki), wanted) <= 1.05 * rms_error(compute(torch_bf16), wanted)
    nki.pack_weights()  # changes nothing
    saved = nki.state_dict()
    assert saved.keys() == state.keys()
    for name in NAMES:
        codes = saved[f"mlp_op.{name}.weight"]
        assert torch.equal(
            codes.view(torch.uint8), state[f"mlp_op.{name}.weight"].view(torch.uint8)
        )
    again = build()
    again.load_state_dict(saved)
    assert torch.equal(compute(again), compute(nki))


def test_the_largest_e4m3_code_of_trainium_is_read_as_240() -> None:
    state = e4m3_state()
    for name in NAMES:
        codes = state[f"mlp_op.{name}.weight"].view(torch.uint8)
        codes[:, 0] = 0x77
    experts = build()
    experts.load_state_dict(state)
    assert experts.mlp_op.down_proj.packed.codes_Ekn.float().max() == 240
    nki = compute(experts)
    experts.backend = TorchBackend()
    wanted = compute(experts)
    torch.testing.assert_close(nki, wanted, rtol=0.03, atol=0.03 * wanted.abs().max().item())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("scale", None, r"down_proj.weight: dtype torch.float8_e4m3fn must be a float dtype of 16"),
        (
            "weight",
            lambda codes: codes.transpose(1, 2).contiguous(),
            r"down_proj.weight: shape \[4, 128, 64\] must be \[4, 64, 128\]",
        ),
    ],
    ids=["no-scale", "transposed"],
)
def test_codes_that_cannot_be_multiplied_are_refused(
    name: str, change: Callable[[Tensor], Tensor] | None, message: str
) -> None:
    state = e4m3_state()
    given = state.pop(f"mlp_op.down_proj.{name}")
    if change is not None:
        state[f"mlp_op.down_proj.{name}"] = change(given)
    with pytest.raises(WeightError, match=message):
        build().load_state_dict(state)


def test_a_bias_is_loaded_beside_codes_and_what_is_missing_is_named() -> None:
    codes = torch.ones(2, 3, 5).to(torch.float8_e4m3fn)
    state = {"weight": codes, "scale": torch.full((1,), 0.5), "bias": torch.arange(10.0).view(2, 5)}
    linear = ExpertLinear(2, 3, 5, bias=True, dtype=torch.bfloat16, device=None)
    linear.load_state_dict(state)
    assert linear.bias is not None
    assert torch.equal(linear.bias.float(), state["bias"])
    assert isinstance(linear.packed, NarrowMatrices)
    del state["bias"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "bias"'):
        linear.load_state_dict(state)


SMALL = (2, 3, 5)  # experts, in, out


def narrow_of(
    scale: Tensor, largest: int = 0, dtype: torch.dtype = torch.float8_e4m3fn
) -> NarrowMatrices:
    codes = torch.zeros(SMALL, dtype=torch.uint8)
    codes[1, 2, 4] = largest
    return NarrowMatrices.from_codes("w", codes.view(dtype), scale, SMALL, torch.bfloat16)


def test_the_note_of_a_format_tells_where_codes_and_scales_come_from() -> None:
    weight, one = torch.ones(2, 3, 5, dtype=torch.bfloat16), torch.ones(1)
    recoded = NarrowMatrices.from_exact(recode_bf16_to_fp8(weight), torch.bfloat16)
    notes = {
        "float8_e4m3, as loaded, a scale per expert": narrow_of(one),
        "float8_e4m3, as loaded, scales per channel": narrow_of(torch.ones(1, 1, 5)),
        "float8_e5m2, re-coded without loss, a scale per expert": recoded,
    }
    for note, down in notes.items():
        assert format_note(SimpleNamespace(packed_down=down)) == f"weights: {note}"


@pytest.mark.parametrize("shape", [(1,), (1, 1, 5), (2, 1, 1), (2, 1, 5)])
def test_every_shape_of_scales_multiplies_each_channel(shape: tuple[int, ...]) -> None:
    scale = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    narrow = narrow_of(scale)
    wanted = (torch.ones(SMALL) * scale)[:, 0]
    assert torch.equal(narrow.scale_per_channel_En, wanted)
    assert torch.equal(narrow[1], narrow.unpack()[1])
    assert narrow.is_quantized
    assert len(narrow) == 2
    assert torch.equal(narrow.run(slice(1, 2)).scale_per_channel_En, wanted[1:])


@pytest.mark.parametrize(
    "shape", [(2,), (5,), (1, 2, 1), (3, 1, 1), (2, 3, 1), (1, 3, 5), (1, 1, 3)]
)
def test_other_shapes_of_scales_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(WeightError, match=r"w: scale .* torch.float32 must be float32 \[1\]"):
        narrow_of(torch.ones(shape))


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(torch.float8_e4m3fn, 0x77), (torch.float8_e5m2, 0x7B)],
    ids=["e4m3", "e5m2"],
)
@pytest.mark.parametrize("sign", [0, 0x80])
def test_codes_are_taken_up_to_the_largest(dtype: torch.dtype, largest: int, sign: int) -> None:
    assert abs(float(narrow_of(torch.ones(1), largest | sign, dtype)[1][2, 4])) in (240, 57344)
    with pytest.raises(WeightError, match=r"above 240 .* infinite or NaN. Use rescale_ocp"):
        narrow_of(torch.ones(1), (largest + 1) | sign, dtype)


def test_formats_that_differ_are_refused() -> None:
    experts, state = build(), e4m3_state()
    state["mlp_op.down_proj.weight"] = state["mlp_op.down_proj.weight"].to(torch.float8_e5m2)
    experts.load_state_dict(state)
    with pytest.raises(ValueError, match="gate_up_proj in float8_e4m3, down_proj in float8_e5m2"):
        compute(experts)


def test_weights_without_an_exact_form_stay_and_say_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _log_once.cache_clear()
    state = mxfp4_state()
    state["mlp_op.down_proj.weight"][1, 2, 3] = 1.01
    with caplog.at_level(logging.WARNING, "neuron_moe"):
        for experts in (build(), build()):
            experts.load_state_dict(state)
            experts.pack_weights()
            assert is_narrow(experts) == [False] * 2
            reason = experts.weights().why_plain
            assert re.search(r"1\.0078125 at \[1, 2, 3\] has no exact e5m2 form", reason)
            assert any("not 8 bits: weight" in note for note in notes(experts))
    assert len(caplog.records) == 1
    experts.load_state_dict(mxfp4_state())
    assert experts.weights().why_plain == ""


def test_a_spread_too_wide_for_a_matrix_takes_a_scale_per_channel() -> None:
    state = mxfp4_state()
    weight = state["mlp_op.down_proj.weight"]
    weight[0, :, 5] *= 2.0**-40
    experts, wide = build(), build()
    for module in (experts, wide):
        module.load_state_dict(state)
    experts.pack_weights()
    assert experts.mlp_op.down_proj.packed.scale.shape == (E, H)
    assert experts.mlp_op.gate_up_proj.packed.scale.shape == (E, 1)
    assert "scales per channel" in " ".join(notes(experts))
    torch.testing.assert_close(compute(experts), compute(wide), rtol=0.02, atol=0.02)


def test_codes_move_and_cast_with_their_module() -> None:
    state = mxfp4_state()
    experts, wide = build("torch"), build("torch", torch.float32)
    experts.backend = NkiBackend()
    experts.load_state_dict(state)
    experts.pack_weights()
    experts.backend = TorchBackend()
    experts.float()
    experts.dtype = torch.float32
    wide.load_state_dict({name: value.float() for name, value in state.items()})
    assert is_narrow(experts) == [True] * 2
    assert torch.equal(compute(experts), compute(wide))
    for linear in experts.mlp_op.children():
        assert not linear.weight.requires_grad
        assert linear.bias is None or linear.bias.dtype == torch.float32


@pytest.mark.parametrize("backend", ["nki", pytest.param("torch", marks=PACKS_BFLOAT16)])
def test_the_load_of_packed_experts_is_counted(backend: str) -> None:
    experts = build(backend)
    experts.load_state_dict(mxfp4_state())
    experts.pack_weights()
    experts.enable_load_counters()
    compute(experts)
    assert int(experts.expert_load_E.sum()) == T * K


@pytest.mark.parametrize("backend", ["nki", pytest.param("torch", marks=PACKS_BFLOAT16)])
def test_a_phase_that_computes_with_a_part_of_packed_weights(backend: str) -> None:
    state = mxfp4_state()
    config = ParallelConfig(tp=1, ep=2, decode_moe_tp=1, decode_moe_ep=1)
    with parallel_state.as_rank(config, 1):
        plain, packed = build(backend), build(backend)
    assert (packed.num_local_experts, len(packed.local_experts("decode"))) == (E // 2, E)
    for experts in (plain, packed):
        experts.load_state_dict(state)
    packed.pack_weights(for_decode=backend == "nki")
    for seq_len in (1, T):
        torch.testing.assert_close(
            compute(packed, seq_len), compute(plain, seq_len), rtol=0.02, atol=0.02
        )


@pytest.mark.parametrize("backend", ["nki", pytest.param("torch", marks=PACKS_BFLOAT16)])
def test_packed_experts_run_without_routing(backend: str) -> None:
    plain, packed = build(backend), build(backend)
    for experts in (plain, packed):
        experts.load_state_dict(mxfp4_state())
    packed.load_state_dict(plain.state_dict())
    packed.pack_weights()
    rows = torch.randn(1, 3, H).bfloat16()
    assert torch.equal(packed.mlp_op(rows), plain.mlp_op(rows))
    some = torch.tensor([2, 0])
    assert torch.equal(packed.mlp_op(rows, some), plain.mlp_op(rows, some))


@pytest.mark.long
@pytest.mark.parametrize("has_scales", [pytest.param(False, marks=pytest.mark.slow), True])
def test_experts_too_large_for_the_chip_are_laid_out_for_prefill(has_scales: bool) -> None:
    size, width, tokens = 4096, 1792, 200  # Mixtral 8x7B on 8 ranks
    config = RoutedExpertsMLPOpsConfig(3, size, width, 1, "silu", True)
    experts = ExpertMLPsV2(config, dtype=torch.bfloat16, backend="nki").requires_grad_(False)
    if has_scales:
        for linear in experts.mlp_op.children():
            linear.weight.copy_(linear.weight.to(torch.float8_e5m2).bfloat16())
    hidden_TH, index_T1 = torch.randn(tokens, size).bfloat16(), torch.arange(tokens)[:, None] % 3
    plain = experts(hidden_TH, torch.ones(tokens, 1), index_T1, tokens)
    experts.pack_weights(for_prefill=True)
    shown = experts.plan(Step("prefill", tokens)).notes()
    assert "by parts weights loaded in" in " ".join(shown)
    laid_out = experts(hidden_TH, torch.ones(tokens, 1), index_T1, tokens)
    torch.testing.assert_close(laid_out, plain, rtol=0.02, atol=0.02 * plain.abs().max().item())


def test_experts_that_fit_on_chip_are_not_laid_out_for_prefill() -> None:
    experts = build()
    experts.pack_weights(for_prefill=True)
    assert experts.weights().prefill_copy is None
    tuned = ExpertMLPsV2(
        experts.config,
        BlockwiseMatmulConfig(use_shard_on_block_dynamic_while=True),
        dtype=torch.bfloat16,
        backend="nki",
    )
    with pytest.raises(ValueError, match="for_prefill=True: the plan requested"):
        tuned.pack_weights(for_prefill=True)


def matrices(format_: str | None) -> tuple[NarrowMatrices | None, Tensor]:
    """Return packed codes, or none, and plain weights in bfloat16."""
    plain = torch.randn(E, H, I).bfloat16()
    if format_ is None:
        return None, plain
    codes = plain.to(getattr(torch, format_))
    return NarrowMatrices(codes, torch.ones(E, I), torch.bfloat16), plain


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (None, None, None),
        ("float8_e5m2", "float8_e5m2", None),
        ("float8_e5m2", None, "packed weights: .* alike"),
        (None, "float8_e5m2", "packed weights: .* alike"),
        ("float8_e5m2", "float8_e4m3fn", "one format for both"),
    ],
)
def test_kernels_read_both_matrices_in_one_form(
    first: str | None, second: str | None, message: str | None
) -> None:
    (gate_up, gate_up_EHI), (down, down_EIH) = matrices(first), matrices(second)
    weights = ExpertWeights(
        gate_up_EHI, down_EIH, None, None, ExpertFormula(), packed_gate_up=gate_up, packed_down=down
    )
    if message is None:
        assert check_weights(weights) == (gate_up, down)
        return
    with pytest.raises(ValueError, match=message):
        check_weights(weights)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_kernels_read_plain_matrices_in_bfloat16_only(name: str) -> None:
    both = {"gate_up_proj": torch.zeros(E, H, 2 * I), "down_proj": torch.zeros(E, I, H)}
    half = {key: value if key == name else value.bfloat16() for key, value in both.items()}
    weights = ExpertWeights(half["gate_up_proj"], half["down_proj"], None, None, ExpertFormula())
    with pytest.raises(ValueError, match=f"{name}: dtype float32 must be bfloat16"):
        check_weights(weights)


def test_four_bits_a_value_are_found_again() -> None:
    state = mxfp4_state()
    weight = state["mlp_op.gate_up_proj.weight"]
    narrow = NarrowMatrices.from_mxfp4_values(weight)
    assert narrow is not None
    assert (narrow.format, narrow.shape) == ("mxfp4", weight.shape)
    assert narrow.codes_Ekn.shape == (E, H // 2, 2 * I)
    assert narrow.scale.shape == (E, H // 32, 2 * I)
    for expert in range(E):
        assert torch.equal(narrow[expert], weight[expert])
    # Line j holds inputs j (low bits) and j + in / 2.
    low, high = narrow.codes_Ekn & 15, narrow.codes_Ekn >> 4
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    powers = 2.0 ** (narrow.scale.float() - 127).repeat_interleave(32, dim=1)
    decoded = torch.cat([values[low.int()], values[high.int()]], dim=1) * powers
    assert torch.equal(decoded.bfloat16(), weight)


def test_what_four_bits_do_not_hold_stays_as_it_is() -> None:
    weight = mxfp4_state()["mlp_op.gate_up_proj.weight"]
    assert NarrowMatrices.from_mxfp4_values(weight[:, :96].contiguous()) is None  # 96 is 3 groups
    assert NarrowMatrices.from_mxfp4_values(weight * 1.03) is None
    for exponent, fits in ((128, True), (129, False)):
        blocks = torch.full((1, 4, 2, 16), 0x77, dtype=torch.uint8)
        scales = torch.full((1, 4, 2), exponent, dtype=torch.uint8)
        large = decode_mxfp4(blocks, scales).transpose(1, 2).contiguous()
        assert (NarrowMatrices.from_mxfp4_values(large) is not None) == fits

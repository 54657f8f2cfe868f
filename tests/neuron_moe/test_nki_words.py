"""MXFP4 experts on a trn3: kept as the checkpoint's words, multiplied so, shown by explain()."""

import numpy as np
import pytest
import torch
from torch import Tensor

from neuron_moe import MoE
from neuron_moe.quantize import decode_mxfp4, encode_mxfp4
from neuron_moe.weights.laid_out import LaidOut, from_numpy, to_numpy
from nki_kernels.decode import decode_moe_ref
from tests.neuron_moe.nki_cases import assert_as_right
from tests.neuron_moe.test_narrow_weights import E, H, build, compute, mxfp4_state, notes
from tests.neuron_moe.test_nki_fused import layers
from tests.tolerances import rms_error

TARGET = "NEURON_PLATFORM_TARGET_OVERRIDE"
WORDS = "MXFP4 words as in the checkpoint (trn3), activations quantised to 8 bits on chip"
LOSS = 0.08  # of the output's root mean square, from activations of 8 bits


@pytest.fixture(autouse=True)
def _on_a_trn3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TARGET, "trn3")


def plan_note(shown: tuple[str, ...]) -> str:
    (note,) = [line for line in shown if line.startswith("plan:")]
    return note


def copy_of(experts: object) -> LaidOut:
    copy = experts.weights().decode_copy  # type: ignore[attr-defined]
    assert copy is not None
    return copy


@pytest.mark.parametrize("is_narrow", [False, True])
def test_words_of_a_checkpoint_are_multiplied_as_they_are(is_narrow: bool) -> None:
    state = mxfp4_state()
    nki, exact = build(), build("torch", torch.float32)
    for experts in (nki, exact):
        experts.load_state_dict(state)
    if is_narrow:
        nki.pack_weights(for_decode=True)
    else:  # the words are the same whatever the modules keep
        nki.mlp_op.lay_out("decode", lambda weights: nki._lay_out("decode", weights))
    assert copy_of(nki).gate_up.dtype == torch.uint8
    assert plan_note(notes(nki, "decode")).endswith(WORDS)
    wanted = compute(exact, 1)
    size = rms_error(wanted, torch.zeros_like(wanted))
    assert rms_error(compute(nki, 1), wanted) <= LOSS * size
    # Prefill multiplies bfloat16 tokens with the same weights.
    assert rms_error(compute(nki), compute(exact)) <= 0.01 * size


def test_the_output_is_that_of_the_formula_with_quantised_activations() -> None:
    state = mxfp4_state()
    nki = build()
    nki.load_state_dict(state)
    nki.pack_weights(for_decode=True)
    stream = torch.Generator().manual_seed(4)
    hidden_TH = torch.randn(5, H, generator=stream).bfloat16()
    index_TK = torch.rand(5, E, generator=stream).argsort(1)[:, :2]
    affinities_TK = torch.rand(5, 2, generator=stream)
    actual = nki(hidden_TH, affinities_TK, index_TK, 1).float().numpy()

    def wide(values: Tensor) -> np.ndarray:
        return values.double().numpy()

    wanted = decode_moe_ref(
        wide(hidden_TH),
        wide(state["mlp_op.gate_up_proj.weight"]),
        wide(state["mlp_op.down_proj.weight"]),
        index_TK.numpy(),
        wide(affinities_TK),
        nki.weights().formula,
        gate_up_bias_E2I=wide(state["mlp_op.gate_up_proj.bias"]),
        down_bias_EH=wide(state["mlp_op.down_proj.bias"]),
        in_words=True,
    )
    assert np.abs(actual - wanted).max() <= 0.02 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("target", "factor", "layout"),
    [("trn3", 1.01, "laid out for decode"), ("trn2", 1.0, "plain layout")],
    ids=["other weights", "a trn2 beside the copy"],
)
def test_what_is_not_multiplied_as_words_is_as_right_as_torch(
    target: str, factor: float, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = mxfp4_state()
    state["mlp_op.down_proj.weight"] *= factor
    nki, bf16, exact = build(), build("torch"), build("torch", torch.float32)
    for experts in (nki, bf16, exact):
        experts.load_state_dict(state)
    nki.pack_weights(for_decode=True)
    if target == "trn2":
        monkeypatch.delenv(TARGET)
    assert plan_note(notes(nki, "decode")).endswith(layout)
    assert_as_right(*(compute(experts, 1) for experts in (nki, bf16, exact)))


def as_mxfp4(weight_Ekn: Tensor) -> Tensor:
    codes = encode_mxfp4(weight_Ekn.float().transpose(1, 2).contiguous())
    return decode_mxfp4(*codes).transpose(1, 2)


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-next"])
def test_the_fused_layer_multiplies_words_too(name: str) -> None:
    made: list[MoE] = layers(name)
    for layer in made:
        experts = layer.expert_mlps.mlp_op
        for projection in (experts.gate_up_proj, experts.down_proj):
            projection.weight.data.copy_(as_mxfp4(projection.weight.data))
        layer.weights_changed()
    nki, _, exact = made
    nki.expert_mlps.pack_weights(for_decode=True)
    shown = nki.explain("decode", 3)
    assert shown.decision.kernel == "nki.decode_layer"
    assert WORDS in str(shown)
    hidden = torch.randn(3, 1, H).bfloat16()
    with torch.no_grad():
        wanted, ours = exact(hidden.float()).output, nki(hidden).output
    assert rms_error(ours, wanted) <= LOSS * rms_error(wanted, torch.zeros_like(wanted))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float32])
def test_numpy_sees_the_bytes_of_a_tensor_and_gives_them_back(dtype: torch.dtype) -> None:
    values = torch.randint(0, 9, (3, 5)).to(dtype)
    array = to_numpy(values)
    assert array.shape == (3, 5)
    assert array.astype(np.float32).tolist() == values.float().tolist()
    assert torch.equal(from_numpy(array, dtype).float(), values.float())
    laid_out = LaidOut(values, values[:2])
    assert laid_out.num_bytes == 25 * values.element_size()

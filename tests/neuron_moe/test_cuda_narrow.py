"""Experts kept as fp8 or MXFP4 codes on the cuda backend, against what torch makes of them.

Without a GPU the kernels run in Triton's interpreter, as in test_cuda_backend.py.
"""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from neuron_moe import ExpertMLPsV2, RoutedExpertsMLPOpsConfig
from neuron_moe.backends.cuda import hopper_launch, launch
from neuron_moe.backends.nki.operands import check_weights
from neuron_moe.plan import Step
from neuron_moe.quantize import E4M3_NEURON, E5M2, decode_mxfp4, quantize_fp8
from neuron_moe.weights.linear import ExpertLinear
from neuron_moe.weights.narrow import NarrowMatrices
from tests.neuron_moe.test_cuda_backend import CASES, DEVICE, apart
from tests.rows import thinned

FORMATS = {"float8_e4m3": E4M3_NEURON, "float8_e5m2": E5M2, "mxfp4": None}
E, K, H, I = 3, 2, 64, 64  # noqa: E741  the axis letters of the project
NEEDS_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def values_of(form: str, inputs: int, outputs: int) -> dict[str, Tensor]:
    """Return a weight's part of a state dict: codes with scales, or MXFP4 values in bfloat16."""
    fmt = FORMATS[form]
    if fmt is not None:
        quantized = quantize_fp8(torch.randn(E, inputs, outputs) * inputs**-0.5, fmt)
        return {"weight": quantized.codes, "scale": quantized.scale}
    blocks = torch.randint(0, 256, (E, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(120, 125, (E, outputs, inputs // 32), dtype=torch.uint8)
    return {"weight": decode_mxfp4(blocks, scales).transpose(1, 2).contiguous()}


def build(
    backend: str,
    form: str,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int] = (H, I),
    **config: object,
) -> ExpertMLPsV2:
    """Return experts of one seed, of MXFP4 values packed where the backend does."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"hidden_act": "silu", "glu_mlp": True, **config}
    whole = RoutedExpertsMLPOpsConfig(
        num_experts=E, top_k=K, hidden_size=sizes[0], intermediate_size=sizes[1], **settings
    )
    experts = ExpertMLPsV2(whole, dtype=dtype, backend=backend).requires_grad_(False)
    state = {}
    for name, linear in experts.mlp_op.named_children():
        assert isinstance(linear, ExpertLinear)
        _, inputs, outputs = linear.shape
        found = values_of(form, inputs, outputs)
        if linear.bias is not None:
            found["bias"] = torch.randn(E, outputs)
        state |= {f"mlp_op.{name}.{key}": value for key, value in found.items()}
    experts.load_state_dict(state)
    if backend == "cuda":
        experts.pack_weights()
        assert {linear.packed.format for linear in experts.mlp_op.children()} == {form}
    return experts.to(DEVICE)


def compute(experts: ExpertMLPsV2, tokens: int = 3) -> Tensor:
    stream = torch.Generator().manual_seed(1)
    hidden_TH = torch.randn(tokens, experts.spec.hidden_size, generator=stream)
    index_TK = torch.rand(tokens, E, generator=stream).argsort(1)[:, :K]
    index_TK[-1, 0] = -1
    affinities_TK = torch.rand(tokens, K, generator=stream)
    inputs = hidden_TH.to(experts.dtype), affinities_TK, index_TK
    with torch.no_grad():
        output: Tensor = experts(*(each.to(DEVICE) for each in inputs), tokens)
    return output


@pytest.mark.parametrize(
    ("form", "most_unsorted"),
    [
        ("float8_e4m3", 512),
        ("mxfp4", 512),
        ("mxfp4", 0),
        pytest.param("float8_e4m3", 0, marks=pytest.mark.long),
        pytest.param("float8_e5m2", 512, marks=pytest.mark.long),
        pytest.param("float8_e5m2", 0, marks=pytest.mark.long),
    ],
)
def test_codes_are_multiplied_as_torch_decodes_them(
    form: str, most_unsorted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MOST_PAIRS_UNSORTED", most_unsorted)
    found, expected = (compute(build(name, form)) for name in ("cuda", "torch"))
    assert apart(found, expected) < 2e-6


@pytest.mark.long
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", thinned(CASES, 4, pytest.mark.slow))
@pytest.mark.parametrize(
    ("tokens", "most_unsorted"), [(1, 512), (40, 512), (40, 0)], ids=["one", "unsorted", "sorted"]
)
def test_codes_in_every_formula(
    form: str, case: str, tokens: int, most_unsorted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MOST_PAIRS_UNSORTED", most_unsorted)
    found, expected = (
        compute(build(name, form, sizes=(192, 128), **CASES[case]), tokens)
        for name in ("cuda", "torch")
    )
    assert apart(found, expected) < 1e-5


def check_in_bfloat16(form: str, tokens: int, **rest: Any) -> None:
    """Check that cuda gives the same bits twice, as near to float32 as torch in bfloat16."""
    exact = compute(build("torch", form, **rest), tokens)
    theirs = compute(build("torch", form, torch.bfloat16, **rest), tokens)
    experts = build("cuda", form, torch.bfloat16, **rest)
    mine = compute(experts, tokens)
    assert torch.equal(mine, compute(experts, tokens))
    assert apart(mine, exact) < 1.15 * apart(theirs, exact) + 1e-3


@NEEDS_GPU
@pytest.mark.parametrize(
    ("case", "tokens"),
    [("silu", 1), ("silu", 70), *((case, tokens) for case in CASES for tokens in (9, 400))],
)
@pytest.mark.parametrize("form", FORMATS)
def test_codes_in_bfloat16_are_as_near_to_float32_as_torch_is(
    form: str, case: str, tokens: int
) -> None:
    check_in_bfloat16(form, tokens, sizes=(320, 192), **CASES[case])


@NEEDS_GPU
@pytest.mark.parametrize("tokens", [9, 70, 400])
@pytest.mark.parametrize("form", FORMATS)
def test_sorted_rows_are_multiplied_in_registers_in_bfloat16(
    form: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MOST_PAIRS_UNSORTED", 0)
    monkeypatch.setattr(hopper_launch, "fits", lambda *_: False)
    check_in_bfloat16(form, tokens, sizes=(320, 192))


@NEEDS_GPU
@pytest.mark.parametrize("tokens", [3, 400])
def test_fp8_of_sizes_that_fill_no_tile(tokens: int) -> None:
    check_in_bfloat16("float8_e4m3", tokens, sizes=(100, 36))


@pytest.mark.parametrize(
    "form",
    ["mxfp4", *(pytest.param(f"float8_{e}", marks=pytest.mark.long) for e in ("e4m3", "e5m2"))],
)
def test_matrices_are_decoded_whole(form: str) -> None:
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    experts = build("cuda", form, dtype)
    for linear in experts.mlp_op.children():
        narrow = linear.packed
        scale = narrow.scale if form == "mxfp4" else narrow.scale_per_channel_En
        found = launch.decode_matrices(narrow.codes_Ekn, scale, dtype)
        assert torch.equal(found, narrow.unpack())


def test_fp8_is_decoded_whole_for_many_rows_an_expert_alone() -> None:
    index_TK = torch.arange(E, dtype=torch.int32, device=DEVICE).view(E, 1)
    few, many = (launch.sort_rows(index_TK.repeat(rows, 1), E) for rows in (255, 256))
    fp8 = torch.zeros(E, 4, 4, dtype=torch.float8_e5m2, device=DEVICE)
    assert [launch.decodes_whole(rows, fp8) for rows in (few, many)] == [False, True]
    packed = build("cuda", "mxfp4").mlp_op.down_proj.packed
    assert launch.decodes_whole(few, packed.codes_Ekn)


def test_mxfp4_codes_are_half_bytes_and_the_same_numbers() -> None:
    plain, packed = build("torch", "mxfp4"), build("cuda", "mxfp4").cpu()
    for name, linear in packed.mlp_op.named_children():
        narrow, weight = linear.packed, getattr(plain.mlp_op, name).weight.cpu()
        assert isinstance(narrow, NarrowMatrices)
        assert narrow.shape == weight.shape
        assert narrow.codes_Ekn.nbytes + narrow.scale.nbytes == weight.numel() * 17 / 32
        assert torch.equal(narrow.unpack(), weight)
        assert torch.equal(narrow.run(slice(1, 3))[0], weight[1])
        assert torch.equal(pickle.loads(pickle.dumps(narrow)).unpack(), weight)
    saved = packed.state_dict()
    assert all(torch.equal(saved[name], value) for name, value in plain.cpu().state_dict().items())


def test_the_format_is_told_and_the_nki_backend_refuses_mxfp4() -> None:
    experts = build("cuda", "mxfp4")
    shown = " ".join(experts.plan(Step("decode", 4)).notes())
    assert "mxfp4, decoded in registers and multiplied in torch.float32" in shown
    with pytest.raises(ValueError, match="MXFP4 as backend='cuda' packs it"):
        check_weights(experts.weights())


def test_weights_that_mxfp4_lacks_stay_plain_and_say_so() -> None:
    experts = build("torch", "mxfp4")
    experts.mlp_op.down_proj.weight[1, 2, 3] = 0.3
    plain = build("cuda", "mxfp4")
    plain.load_state_dict(experts.state_dict())
    plain.pack_weights()
    assert [linear.packed for linear in plain.mlp_op.children()] == [None, None]
    assert "no MXFP4 values" in " ".join(plain.plan(Step("decode", 4)).notes())


def test_codes_have_no_gradient() -> None:
    experts = build("cuda", "mxfp4")
    hidden_TH = torch.ones(1, H, device=DEVICE, requires_grad=True)
    index_TK = torch.zeros(1, K, dtype=torch.int64, device=DEVICE)
    index_TK[0, 1] = 1
    output = experts(hidden_TH, torch.ones(1, K, device=DEVICE), index_TK, 1)
    with pytest.raises((RuntimeError, NotImplementedError), match="autograd"):
        output.sum().backward()


@NEEDS_GPU
@pytest.mark.parametrize("form", FORMATS)
def test_codes_are_captured_in_a_graph(form: str) -> None:
    experts = build("cuda", form, torch.bfloat16, (320, 192))
    hidden_TH = torch.randn(4, 320, device=DEVICE, dtype=torch.bfloat16)
    index_TK = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2]], device=DEVICE, dtype=torch.int32)
    affinities_TK = torch.rand(4, K, device=DEVICE)
    plan = experts.plan(Step("decode", 4))
    with torch.no_grad():
        expected = experts.compute(plan, hidden_TH, index_TK, affinities_TK)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = experts.compute(plan, hidden_TH, index_TK, affinities_TK)
    graph.replay()
    assert torch.equal(found, expected)

"""The cuda backend's kernels in Triton's interpreter, or on a GPU, against the torch backend.

Without a GPU, tests/conftest.py chooses the interpreter; a GPU runs the compiled kernels.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable
from itertools import starmap
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels import NO_TRITON, OLDEST_TRITON

pytest.importorskip("triton", minversion=OLDEST_TRITON, reason=NO_TRITON)

from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK
from neuron_moe.backends.cuda import decode, hopper_launch
from neuron_moe.backends.cuda.launch import copy_rows, sort_rows
from neuron_moe.backends.cuda.records import Matrices
from neuron_moe.backends.cuda.tuned_tiles import HOPPER_TILES
from neuron_moe.blocks import sort_pairs
from neuron_moe.spec import formula_of, text_of
from nki_kernels.common.formula import ExpertFormula, limits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NARROW = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter's
SIGNALLING_NAN = 0x7FA00000  # bits of a float32
E, K, H, I, T = 5, 2, 48, 40, 37  # noqa: E741  the axis letters of the project; none fills a tile


def build(backend: str, save_percent: int | None = None, **config: object) -> MoE:
    torch.manual_seed(0)
    sizes = {"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": I}
    settings: dict[str, Any] = {"hidden_act": "silu", "glu_mlp": True, **sizes, **config}
    experts = ExpertMLPsV2(
        RoutedExpertsMLPOpsConfig(**settings),
        backend=backend,
        save_percent=save_percent,
    )
    hidden = settings["hidden_size"]
    layer = MoE(RouterTopK(E, K, hidden, act_fn="sigmoid", renormalize=True), experts).train()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return layer.to(DEVICE)


def run(
    layer: MoE, dtype: torch.dtype = torch.float32, tokens: int = T, width: int = H
) -> list[Tensor]:
    layer = layer.to(dtype)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, tokens, width, generator=generator).to(DEVICE, dtype).requires_grad_()
    mask = torch.ones(1, tokens, device=DEVICE)
    mask[0, tokens // 2] = 0
    output = layer(hidden, mask)[0]
    weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    return [output, *torch.autograd.grad(output.float().square().sum(), [hidden, *weights])]


def apart(mine: Tensor, theirs: Tensor) -> float:
    mine, theirs = mine.detach().float(), theirs.detach().float()
    return float((mine - theirs).norm() / theirs.norm())


OAI = {
    "hidden_act": "swiglu",
    "bias": True,
    "gate_clamp_upper_limit": 0.5,
    "up_clamp_upper_limit": 0.5,
}
SITU = ExpertFormula("sigmoid", gates_itself=True, gate_softcap=0.5, up_softcap=0.7)
CASES: dict[str, dict[str, Any]] = {
    "silu": {},
    "swiglu-oai with biases and clamps": {**OAI, "up_clamp_lower_limit": -0.5},
    "gelu": {"hidden_act": "gelu"},
    "gelu by tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "no gate": {"formula": ExpertFormula("relu2", has_gate=False), "glu_mlp": False},
    "soft caps": {"formula": SITU},
    "affinities scale the input": {"early_expert_affinity_modulation": True},
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_those_of_torch(case: str) -> None:
    expected, found = (run(build(name, **CASES[case])) for name in ("torch", "cuda"))
    errors = list(starmap(apart, zip(found, expected, strict=True)))
    assert max(errors) < 2e-5, errors


@pytest.mark.slow
@pytest.mark.parametrize("save_percent", [0, 60])
def test_gradients_do_not_depend_on_what_is_kept(save_percent: int) -> None:
    expected = run(build("cuda", **OAI))
    found = run(build("cuda", save_percent, **OAI))
    errors = list(starmap(apart, zip(found, expected, strict=True)))
    assert max(errors) < 1e-6, errors


@pytest.mark.long
def test_sixteen_bits_are_as_near_to_float32_as_torch_is() -> None:
    exact = run(build("torch"))
    theirs, mine = (run(build(name), NARROW) for name in ("torch", "cuda"))
    for value, other, reference in zip(mine, theirs, exact, strict=True):
        assert apart(value, reference) < 1.15 * apart(other, reference) + 1e-3


@pytest.mark.skipif(
    DEVICE == "cpu" or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("save_percent", [0, 60, 100])
@pytest.mark.parametrize("case", CASES)
def test_warpgroups_multiply_as_near_to_float32_as_torch_does(
    case: str, save_percent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if save_percent == 60:  # groups of a row tile, one warp that loads, rows copied for sums
        for product in {product for product, *_ in HOPPER_TILES}:
            monkeypatch.setitem(HOPPER_TILES, (product, 320, 192), (1, 1, False))
    sizes = {"hidden_size": 320, "intermediate_size": 192, **CASES[case]}
    exact = run(build("torch", **sizes), tokens=400, width=320)
    theirs = run(build("torch", **sizes), torch.bfloat16, 400, 320)
    mine = run(build("cuda", save_percent, **sizes), torch.bfloat16, 400, 320)
    again = run(build("cuda", save_percent, **sizes), torch.bfloat16, 400, 320)
    assert all(map(torch.equal, mine, again))
    for value, other, reference in zip(mine, theirs, exact, strict=True):
        assert apart(value, reference) < 1.15 * apart(other, reference) + 1e-3


def test_rows_are_sorted_as_torch_sorts_them() -> None:
    generator = torch.Generator().manual_seed(2)
    index_TK = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(200)])
    index_TK[7], index_TK[11, 1] = -1, -1
    index_TK[index_TK == 3] = -1  # an expert without rows
    rows = sort_rows(index_TK.to(DEVICE, torch.int32), E)
    pairs = sort_pairs(index_TK, E)
    is_row = rows.pair_R >= 0
    assert rows.pair_R[is_row].tolist() == pairs.order_P[: int(is_row.sum())].tolist()
    assert rows.total_E.tolist() == pairs.tokens_per_expert_E.tolist()
    slots = rows.slot_P.tolist()
    assert [pair for pair, slot in enumerate(slots) if slot < 0] == (
        (index_TK.reshape(-1) < 0).nonzero().flatten().tolist()
    )
    assert all(int(rows.pair_R[slot]) == pair for pair, slot in enumerate(slots) if slot >= 0)
    of_tile = rows.pair_R.view(-1, rows.rows).max(1).values[: int(rows.num_tiles)]
    flat = index_TK.reshape(-1)
    assert rows.tile_expert[: int(rows.num_tiles)].tolist() == flat[of_tile.cpu()].tolist()


def test_rows_are_copied_in_their_order() -> None:
    generator = torch.Generator().manual_seed(3)
    index_TK = torch.rand(9, E, generator=generator).topk(K).indices.to(DEVICE, torch.int32)
    index_TK[4] = -1
    hidden_TH = torch.randn(9, H, generator=generator).to(DEVICE)
    rows = sort_rows(index_TK, E)
    copied_RH = copy_rows(rows, hidden_TH)
    used = int(rows.num_tiles) * rows.rows
    pair_R = rows.pair_R[:used].long()
    expected_RH = hidden_TH[pair_R.clamp(min=0) // K] * (pair_R >= 0).unsqueeze(1)
    assert torch.equal(copied_RH[:used], expected_RH)


@pytest.mark.long
def test_reruns_are_the_same_bits() -> None:
    assert all(map(torch.equal, run(build("cuda")), run(build("cuda"))))


@pytest.mark.parametrize(
    ("case", "tokens"),
    [
        ("silu", 1),
        ("silu", 3),
        *(pytest.param(case, 1, marks=pytest.mark.long) for case in CASES if case != "silu"),
        # An expert has more pairs than a tile.
        *(pytest.param(case, 40, marks=pytest.mark.long) for case in CASES),
    ],
)
def test_few_tokens_decode(case: str, tokens: int) -> None:
    found, expected = (
        build(name, **CASES[case]).eval()(torch.ones(tokens, 1, H, device=DEVICE).cumsum(0) / 40)[0]
        for name in ("cuda", "torch")
    )
    assert apart(found, expected) < 1e-5


@pytest.fixture
def _unset_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what is allocated without a value with NaN that no sum may meet, even to be left out."""

    def fill(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def filled(*args: Any, **settings: Any) -> Tensor:
            out = allocate(*args, **settings)
            if out.dtype == torch.float32:
                out.view(torch.int32).fill_(SIGNALLING_NAN)
            return out

        return filled

    monkeypatch.setattr(torch, "empty", fill(torch.empty))
    monkeypatch.setattr(torch, "empty_like", fill(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", fill(Tensor.new_empty))


@pytest.mark.usefixtures("_unset_signals")
@pytest.mark.parametrize("tokens", [1, 2])
def test_choices_of_no_expert_are_left_out_of_decode(tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (E, H, 2 * I), (E, 2 * I), (E, I, H), (E, H), (tokens, H), (tokens, 3)
    values = (torch.randn(*size, generator=generator) for size in sizes)
    first, first_bias, down, down_bias, hidden, affinities = (each.to(DEVICE) for each in values)
    index = torch.tensor([[4, -1, 2], [-1, 0, -1]], dtype=torch.int32, device=DEVICE)[:tokens]
    matrices = Matrices(first, behind_nan(first_bias), down, behind_nan(down_bias))
    found = decode.forward(hidden, affinities, index, matrices, ExpertFormula())
    gate, up = (hidden @ first + first_bias[:, None]).chunk(2, dim=-1)
    each_ETH = functional.silu(gate) * up @ down + down_bias[:, None]
    expected = torch.zeros_like(hidden)
    for token, choice in (index >= 0).nonzero().tolist():
        expert = index[token, choice]
        expected[token] += affinities[token, choice] * each_ETH[expert, token]
    assert apart(found, expected) < 1e-5


def behind_nan(values: Tensor) -> Tensor:
    """Return the values behind a row that no sum may meet."""
    whole = torch.cat([values[:1], values])
    whole[:1].view(torch.int32).fill_(SIGNALLING_NAN)
    return whole[1:]


@pytest.mark.long
def test_the_operator_keeps_the_rules_of_torch() -> None:
    importlib.import_module("neuron_moe.backends.cuda.operators")  # registers it
    layer = build("cuda")
    experts = layer.expert_mlps
    weights = experts.weights()
    hidden = torch.randn(9, H, device=DEVICE, requires_grad=True)
    affinities = torch.rand(9, K, device=DEVICE, requires_grad=True)
    index = torch.tensor([[0, 1]] * 9, dtype=torch.int32, device=DEVICE)
    matrices = (weights.gate_up_proj_EHI, None, weights.down_proj_EIH, None)
    torch.library.opcheck(
        torch.ops.neuron_moe.cuda_experts.default,
        (hidden, affinities, index, *matrices, text_of(weights.formula), 50),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize("case", CASES)
def test_a_formula_travels_as_text(case: str) -> None:

    formula = build("cuda", **CASES[case]).expert_mlps.weights().formula
    formula = dataclasses.replace(formula, up_limits=limits(-0.1, math.inf), scale=1.7)
    assert formula_of(text_of(formula)) == formula


@pytest.mark.long
def test_a_compiled_layer_is_one_graph_and_computes_the_same() -> None:
    layer, hidden = build("cuda"), torch.randn(1, T, H, device=DEVICE)
    compiled = torch.compile(layer.expert_mlps, backend="aot_eager", fullgraph=True)
    affinities = torch.rand(T, K, device=DEVICE)
    index = torch.rand(T, E, device=DEVICE).topk(K).indices.int()
    found, expected = (
        experts(hidden[0], affinities, index, T) for experts in (compiled, layer.expert_mlps)
    )
    assert torch.equal(found, expected)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("save_percent", [0, 100])
def test_replays_of_a_captured_step_are_its_eager_bits(save_percent: int) -> None:
    layer = build("cuda", save_percent, hidden_size=320, intermediate_size=192).bfloat16()
    hidden = torch.zeros(1, 400, 320, device=DEVICE, dtype=torch.bfloat16).requires_grad_()

    def step() -> list[Tensor]:
        output = layer(hidden)[0]
        gradients = torch.autograd.grad(output.float().square().sum(), [hidden])
        return [output.detach(), *gradients]

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        hidden.normal_()
    graph.replay()
    assert all(map(torch.equal, captured, step()))


def test_explain_tells_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cuda" in str(build("cuda").explain("decode", 4))
    monkeypatch.setattr(hopper_launch, "has_hopper_kernels", lambda device: True)
    wide = build("cuda", hidden_size=128, intermediate_size=64)
    slower = "without the products for Hopper GPUs"
    assert "H=128, I=64: " + slower in str(wide.explain("prefill", 4))
    assert slower not in str(wide.to(torch.bfloat16).explain("prefill", 4))

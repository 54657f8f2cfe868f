"""The kernels of one token against those of few, in Triton's interpreter or on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import NO_TRITON, OLDEST_TRITON

pytest.importorskip("triton", minversion=OLDEST_TRITON, reason=NO_TRITON)

from neuron_moe.backends.cuda import decode, launch, one_token
from neuron_moe.backends.cuda.one_token import TokenTile
from neuron_moe.backends.cuda.records import Matrices
from neuron_moe.backends.cuda.tiles import DecodeTile
from neuron_moe.plan import Step
from tests.neuron_moe.test_cuda_backend import CASES, DEVICE, apart
from tests.neuron_moe.test_cuda_narrow import FORMATS, build

IS_HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
TILES = {
    "apart": TokenTile(),
    "early": TokenTile(early=True),
    "wide": TokenTile(depth=64, width=256),
    "together": TokenTile(programs=2),
    "together, not ahead": TokenTile(programs=1, ahead=0, stages=2),
}
REST = ("swiglu-oai with biases and clamps", "gelu", "no gate")
Operands = tuple[Tensor, Tensor, Tensor, Matrices, Any]


def operands(
    case: str,
    form: str,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> Operands:
    """Return what a layer's experts hand over for one token, one of whose choices is none."""
    torch.manual_seed(3)
    kept: list[Operands] = []
    name = "float8_e4m3" if form == "plain" else form
    experts = build("cuda", name, dtype, sizes, **CASES[case])

    def keep(*given: Any) -> Tensor:
        kept.append(given)
        return torch.empty_like(given[0])

    monkeypatch.setattr(decode, "forward", keep)
    index_TK = torch.tensor([[2, -1, 0]], dtype=torch.int32, device=DEVICE)
    hidden_TH = torch.randn(1, sizes[0], device=DEVICE, dtype=dtype)
    affinities_TK = torch.rand(1, 3, device=DEVICE)
    with torch.no_grad():
        experts.compute(experts.plan(Step("decode", 1)), hidden_TH, index_TK, affinities_TK)
    monkeypatch.undo()
    *inputs, weights, formula = kept[0]
    if form == "plain":
        first, down = (
            launch.decode_matrices(codes, scale, dtype)
            for codes, scale in (
                (weights.first_EHI, weights.first_scale),
                (weights.down_EIH, weights.down_scale),
            )
        )
        weights = weights._replace(
            first_EHI=first, first_scale=None, down_EIH=down, down_scale=None
        )
    return (*inputs, weights, formula)


LONG = [("silu", "plain"), *((case, form) for case in REST for form in ("plain", *FORMATS))]


@pytest.mark.parametrize(
    ("case", "form"),
    [("silu", "mxfp4"), *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)],
)
def test_one_token_is_computed_as_few_are(
    case: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = operands(case, form, (64, 64), torch.float32, monkeypatch)
    tile = DecodeTile(16, 64, 64, 64)
    expected = decode.forward(*given, (tile, tile))
    assert apart(decode.forward(*given), expected) < 2e-6


@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("form", ["plain", *FORMATS])
def test_every_tile_in_bfloat16(form: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(
        "swiglu-oai with biases and clamps", form, (2048, 768), torch.bfloat16, monkeypatch
    )
    tile = DecodeTile(16, 128, 64, 256)
    expected = decode.forward(*given, (tile, tile))
    found = one_token.forward(*given, TILES[name])
    assert apart(found, expected) < 4e-3
    assert all(torch.equal(found, one_token.forward(*given, TILES[name])) for _ in range(20))


@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
def test_launches_together_and_apart_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands("silu", "plain", (2048, 768), torch.bfloat16, monkeypatch)
    expected = one_token.forward(*given, TILES["apart"])
    for name in ("early", "together", "together, not ahead"):
        assert torch.equal(one_token.forward(*given, TILES[name]), expected), name

"""Ten random layers: torch, cuda and nki compute the same from one state dict.

Without a GPU the cuda kernels run in Triton's interpreter, in float32: its products of bfloat16
are wrong.
"""

from dataclasses import replace

import pytest
import torch

from tests.kernels import NO_TRITON, OLDEST_TRITON

pytest.importorskip("triton", minversion=OLDEST_TRITON, reason=NO_TRITON)

from neuron_moe import MoE
from tests.golden.layer_cases import Case, Step, draw_case, make_layer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16_TOLERANCE = 2e-2  # of the norm: three roundings of 2^-8 and their products
# The first ten drawn layers of plain weights that all three compute: norms, biases, clamps, shared
# experts, activations without a gate, affinities before the experts, groups of experts.
NAMES = [f"nki-{number:03d}" for number in range(10)]


def build(case: Case, backend: str, dtype: torch.dtype) -> MoE:
    return make_layer(replace(case, backend=backend, sizes={**case.sizes, "dtype": dtype}))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_three_backends_agree(name: str) -> None:
    drawn = draw_case(name)
    case = replace(
        drawn, weights="plain", pack={}, counts=False, layer={}, steps=(Step("prefill", (1, 12)),)
    )
    nki = build(case, "nki", torch.bfloat16)
    state = nki.state_dict()
    hidden = torch.randn(
        1, 12, case.sizes["H"], generator=torch.Generator().manual_seed(7)
    ).bfloat16()
    outputs = {"nki": nki(hidden)[0]}
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    for backend, kind, device in (("torch", torch.float32, "cpu"), ("cuda", dtype, DEVICE)):
        layer = build(case, backend, kind)
        layer.load_state_dict(
            {key: value.to(layer.state_dict()[key].dtype) for key, value in state.items()}
        )
        outputs[backend] = layer.to(device)(hidden.to(device, kind))[0].cpu()
    exact = outputs["torch"].double()
    for backend in ("nki", "cuda"):
        error = (outputs[backend].double() - exact).norm() / exact.norm()
        assert error < BF16_TOLERANCE, (backend, float(error))

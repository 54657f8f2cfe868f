"""A layer whose operations are recorded as they are called: no number is read, one graph results.

Fake tensors stand for those of torch_xla: operations on them are recorded, and reading a number of
one raises. tests/nxd/traced.py does the same inside NxD's own tracer.
"""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from neuron_moe.backends.nki.layer import _pack_router
from neuron_moe.device import can_look, has_numbers, is_traced
from neuron_moe.experts import RoutedExperts
from neuron_moe.moe import MoE
from neuron_moe.router import Router
from neuron_moe.shared_experts import SharedExperts
from neuron_moe.spec import (
    ExpertFormula,
    ExpertSpec,
    RouterFormula,
    RouterSpec,
    SharedSpec,
)
from nki_kernels.common.axes import AxisTiles, tile_axis
from nki_kernels.decode import pack_router_weight
from tests.recorded import Kernels

E, K, H, I = 8, 2, 256, 128  # noqa: E741  the axis letters


def make_layer(backend: str, *, is_shared: bool = False, has_norm: bool = False) -> MoE:
    torch.manual_seed(0)
    spec = ExpertSpec(
        num_experts=E, top_k=K, hidden_size=H, intermediate_size=I, formula=ExpertFormula("silu")
    )
    layer = MoE(
        Router(RouterSpec(num_experts=E, hidden_size=H, formula=RouterFormula(top_k=K))),
        RoutedExperts(spec, backend=backend),
        SharedExperts(SharedSpec(hidden_size=H, intermediate_size=I)) if is_shared else None,
        torch.nn.RMSNorm(H) if has_norm else None,
    )
    return layer.eval().to(torch.bfloat16)


def traced(layer: MoE, tokens: int, mask: torch.Tensor | None = None) -> list[str]:
    """Call a layer with fake tensors; return the kernels."""
    fake = FakeTensorMode(allow_non_fake_inputs=False)
    state = {name: fake.from_tensor(x.detach()) for name, x in layer.state_dict().items()}
    given = (torch.zeros(1, tokens, H, dtype=torch.bfloat16), mask)
    inputs = tuple(None if x is None else fake.from_tensor(x) for x in given)
    kernels = Kernels()
    with fake, kernels, torch.no_grad():
        output = torch.func.functional_call(layer, state, inputs)[0]
    assert output.shape == (1, tokens, H)
    return kernels.names


@pytest.mark.parametrize("tokens", [1, 200])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("backend", ["torch", "nki"])
def test_no_number_is_read(backend: str, is_padded: bool, tokens: int) -> None:
    mask = torch.ones(1, tokens) if is_padded else None
    fused = ["decode_layer" if tokens == 1 else "prefill_layer"]
    assert traced(make_layer(backend), tokens, mask) == ([] if backend == "torch" else fused)


@pytest.mark.parametrize(("tokens", "kernel"), [(1, "decode_moe"), (200, "prefill_layer")])
def test_shared_experts_are_not_laid_out_in_every_step(tokens: int, kernel: str) -> None:
    layer = make_layer("nki", is_shared=True, has_norm=True)
    assert traced(layer, tokens) == ["router_topk", kernel]


def test_plans_of_traced_weights_are_not_kept() -> None:
    layer = make_layer("nki")
    before = dict(layer._plans._plans)
    traced(layer, 1)
    assert layer._plans._plans == before


def test_worlds_are_told_by_tensor() -> None:
    real, fake = torch.zeros(2), FakeTensorMode().from_tensor(torch.zeros(2))
    meta = torch.zeros(2, device="meta")
    assert [is_traced(x) for x in (real, fake, meta)] == [False, True, False]
    assert [has_numbers(x) for x in (real, fake, meta)] == [True, False, False]
    assert [can_look(x) for x in (real, fake, meta)] == [True, False, False]


@pytest.mark.parametrize(
    ("axis", "parts"),
    [(tile_axis(256), 1), (tile_axis(2880), 2), (AxisTiles(320, 128, 4, 32, False, 2), 2)],
)
def test_a_routers_weight_lies_as_the_kernel_reads_it(axis: AxisTiles, parts: int) -> None:
    weight_NH = torch.randn(8, axis.size)
    wanted = pack_router_weight(weight_NH.numpy(), axis, parts)
    np.testing.assert_array_equal(_pack_router(weight_NH, axis, parts).numpy(), wanted)

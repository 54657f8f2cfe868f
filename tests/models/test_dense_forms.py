"""Dense projections in a form of their own on a CPU: the same model, and what it saves."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from neuron_moe.backends import compiled_products, form_choice
from neuron_moe.models import dense_forms
from neuron_moe.models.dense_forms import CompiledLinear, PackedLinear, settle_linears
from neuron_moe.models.generation import GenerationOptions, generate
from neuron_moe.models.loader import load_model
from neuron_moe.router import Router
from neuron_moe.shared_experts import SharedExperts
from neuron_moe.spec import SharedSpec
from neuron_moe.weights.packed import is_packing_available

needs_compiler = pytest.mark.skipif(
    bool(compiled_products.why_not()), reason="no C++ compiler on this machine"
)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_the_same(dtype: torch.dtype, bias: bool) -> None:
    if not is_packing_available(dtype):
        pytest.skip(f"torch packs no {dtype} on this processor")
    linear = nn.Linear(64, 96, bias=bias, dtype=dtype).requires_grad_(False)
    packed = PackedLinear(linear)
    for shape in ((1, 1, 64), (2, 7, 64)):
        hidden = torch.randn(shape, dtype=dtype)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(packed(hidden), linear(hidden), rtol=tolerance, atol=tolerance)
    assert packed.state_dict().keys() == linear.state_dict().keys()
    assert all(
        torch.equal(value, packed.state_dict()[name]) for name, value in linear.state_dict().items()
    )


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(64, 96), (70, 37)])
def test_a_compiled_layer_computes_the_same(
    dtype: torch.dtype, bias: bool, sizes: tuple[int, int]
) -> None:
    linear = nn.Linear(*sizes, bias=bias, dtype=dtype).requires_grad_(False)
    compiled = CompiledLinear(linear)
    exact = nn.Linear(*sizes, bias=bias).requires_grad_(False)
    exact.load_state_dict(linear.state_dict())
    for shape in ((1, 1), (2, 7), (3, 50), (0, 1)):
        hidden = torch.randn(*shape, sizes[0], dtype=dtype)
        output = compiled(hidden)
        assert output.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(
            output.float(), exact(hidden.float()), rtol=tolerance, atol=tolerance
        )
    assert compiled.weight.data_ptr() == linear.weight.data_ptr()  # no second copy
    assert compiled.state_dict().keys() == linear.state_dict().keys()


@pytest.mark.parametrize(
    ("form", "kind"),
    [("packed", PackedLinear), pytest.param("compiled", CompiledLinear, marks=needs_compiler)],
)
def test_a_model_in_another_form_generates_the_same_tokens(
    form: str, kind: type[nn.Module], checkpoint_of: Callable[..., Path]
) -> None:
    plain = load_model(checkpoint_of(), dtype=torch.float32)
    settled = load_model(checkpoint_of(), dtype=torch.float32, product_form=form)
    assert any(isinstance(each, kind) for each in settled.modules())
    options = GenerationOptions(max_new_tokens=12)
    assert (
        generate(settled, PROMPTS, options).token_ids == generate(plain, PROMPTS, options).token_ids
    )
    assert settled.state_dict().keys() == plain.state_dict().keys()


TIMES = {
    "compiled": ({"plain": 1.0, "packed": 0.9, "compiled": 0.2}, "compiled"),
    "packed": ({"plain": 1.0, "packed": 0.1, "compiled": 0.6}, "packed"),
    "much slower at few rows": ({"plain": 1.0, "packed": 0.9, "compiled": 2.0}, "packed"),
    "slower at few rows": ({"plain": 0.2, "packed": 0.5, "compiled": 0.6}, "plain"),
    "cannot run": ({"plain": 1.0, "packed": 0.9}, "packed"),
}


@pytest.mark.parametrize("case", TIMES)
def test_a_projection_takes_the_form_that_is_faster_at_few_rows_and_many(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, expected = TIMES[case]
    times = {1: few, 256: {"plain": 10.0, "packed": 5.0, "compiled": 2.0}}
    monkeypatch.setattr(form_choice, "linear_forms", lambda weight: ["plain", "packed", "compiled"])
    monkeypatch.setattr(form_choice, "linear_times", lambda weight: times)
    assert form_choice.form_of_linear(torch.zeros(2, 2)) == expected


def test_of_a_dtype_that_no_form_knows_projections_stay_plain(
    checkpoint_of: Callable[..., Path],
) -> None:
    model = load_model(checkpoint_of(), dtype=torch.float16)
    assert [settle_linears(model, form) for form in ("measured", "compiled")] == [0, 0]


def test_what_the_machine_does_not_speed_up_stays(
    checkpoint_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(checkpoint_of())
    asked: list[int] = []
    monkeypatch.setattr(
        dense_forms, "form_of_linear", lambda weight: asked.append(weight) or "plain"
    )
    assert settle_linears(model, "measured") == 0
    assert asked
    routers = [each.linear_router.weight for each in model.modules() if isinstance(each, Router)]
    assert not {id(weight) for weight in routers} & {id(weight) for weight in asked}
    assert settle_linears(model, "grouped") == 0


def test_a_shared_weight_stays_one(checkpoint_of: Callable[..., Path]) -> None:
    model = load_model(checkpoint_of(), dtype=torch.float32)
    model.lm_head.weight = model.embed_tokens.weight
    settle_linears(model, "packed")
    assert model.lm_head.weight is model.embed_tokens.weight


@pytest.mark.parametrize("is_fused", [False, True])
def test_packed_shared_experts_are_not_unpacked_at_each_step(
    is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SharedSpec(
        hidden_size=64,
        intermediate_size=96,
        is_fused=is_fused,
        is_gated=True,
    )
    shared = SharedExperts(spec)
    shared.requires_grad_(False)
    hidden = torch.randn(5, 64)
    expected = shared(hidden)
    assert settle_linears(shared, "packed") == (2 if is_fused else 3)
    monkeypatch.delattr(PackedLinear, "weight")
    torch.testing.assert_close(shared(hidden), expected, rtol=1e-5, atol=1e-6)

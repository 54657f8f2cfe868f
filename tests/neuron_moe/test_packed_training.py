"""Packed experts: gradients are right or refused, edits are seen or refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK
from neuron_moe.errors import WeightError
from neuron_moe.weights.packed import is_packing_available
from neuron_moe.weights.product_forms import FORMS, STRAIGHT_FORMS

pytestmark = pytest.mark.skipif(not is_packing_available(), reason="this torch has no oneDNN")
E, H, I, K = 8, 64, 48, 2  # noqa: E741
PREPARE: dict[str, Callable[[MoE], None]] = {
    "pack_weights": lambda moe: moe.expert_mlps.pack_weights(),
    **{
        f"settle_forms {form}": lambda moe, form=form: moe.expert_mlps.settle_forms(form)
        for form in FORMS
        if form not in STRAIGHT_FORMS
    },
}


def layer(prepare: str = "") -> MoE:
    torch.manual_seed(0)
    moe = MoE(
        RouterTopK(E, K, H), ExpertMLPsV2(RoutedExpertsMLPOpsConfig(E, H, I, K, "silu", True))
    )
    if prepare:
        PREPARE[prepare](moe)
    return moe


def run(moe: MoE, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    hidden = hidden.clone().requires_grad_()
    output = moe(hidden)[0]
    output.square().sum().backward()
    assert hidden.grad is not None
    return output, hidden.grad, {name: each.grad for name, each in moe.named_parameters()}


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("prepare", PREPARE)
def test_gradients_are_those_of_the_plain_layer_or_refused(prepare: str, tokens: int) -> None:
    hidden = torch.randn(1, tokens, H)
    plain, prepared = layer(), layer(prepare)
    expected = run(plain, hidden)
    if prepared.expert_mlps.weights().packed_down is not None:
        with pytest.raises(RuntimeError, match="unpack_weights"):
            run(prepared, hidden)
        prepared.expert_mlps.mlp_op.requires_grad_(False)
        found = run(prepared, hidden)
        for one, other in zip(found[:2], expected[:2], strict=True):
            torch.testing.assert_close(one, other)
        prepared.expert_mlps.mlp_op.requires_grad_(True)
        prepared.expert_mlps.unpack_weights()
        prepared.zero_grad()
    found = run(prepared, hidden)
    torch.testing.assert_close(found, expected)


def test_an_optimizer_made_before_packing_trains_the_same_parameters_after_unpacking() -> None:
    packed, plain, hidden = layer(), layer(), torch.randn(1, 9, H)
    optimizers = [torch.optim.AdamW(moe.parameters(), lr=0.01) for moe in (packed, plain)]
    packed.expert_mlps.pack_weights()
    packed.expert_mlps.unpack_weights()
    for moe, optimizer in zip((packed, plain), optimizers, strict=True):
        run(moe, hidden)
        optimizer.step()
    torch.testing.assert_close(packed.state_dict(), plain.state_dict())


WRITES: dict[str, Callable[[Tensor], object]] = {
    "mul_": lambda weight: weight.mul_(0.5),
    "copy_": lambda weight: weight.copy_(torch.ones(weight.shape)),
    "data.copy_": lambda weight: weight.data.copy_(torch.ones(weight.shape)),
    "foreach": lambda weight: torch._foreach_mul_([weight], 0.5),
    "index": lambda weight: weight.__setitem__(0, 1.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_writing_to_a_packed_weight_raises(write: str) -> None:
    moe = layer("pack_weights")
    before = moe.state_dict()

    def write_and_use() -> None:
        WRITES[write](moe.expert_mlps.mlp_op.down_proj.weight)
        moe(torch.randn(1, 4, H))

    with torch.no_grad(), pytest.raises(RuntimeError):
        write_and_use()
    if write != "index":
        assert torch.equal(
            moe.state_dict()["expert_mlps.mlp_op.down_proj.weight"],
            before["expert_mlps.mlp_op.down_proj.weight"],
        )


def test_a_filled_packed_weight_is_seen_at_the_next_use() -> None:
    moe = layer("pack_weights")
    with torch.no_grad():
        moe.expert_mlps.mlp_op.down_proj.weight.zero_()
        with pytest.raises(WeightError, match="unpack_weights"):
            moe(torch.randn(1, 4, H))
    moe = layer("pack_weights")
    moe.expert_mlps.mlp_op.down_proj.weight.data.fill_(1.0)
    with pytest.raises(WeightError, match="was written to"):
        moe.weights_changed()


@pytest.mark.parametrize("assign", ["Parameter", "data"])
@pytest.mark.parametrize("prepare", ["pack_weights", "settle_forms padded", "settle_forms grouped"])
def test_assigned_numbers_are_those_that_count(prepare: str, assign: str) -> None:
    prepared, plain, hidden = layer(prepare), layer(), torch.randn(1, 4, H)
    with torch.no_grad():
        prepared(hidden)
        new = torch.randn(E, I, H)
        for moe in (prepared, plain):
            linear = moe.expert_mlps.mlp_op.down_proj
            if assign == "data":
                linear.weight.data = new.clone()
            else:
                linear.weight = torch.nn.Parameter(new.clone())
        torch.testing.assert_close(prepared(hidden)[0], plain(hidden)[0])
    assert torch.equal(prepared.state_dict()["expert_mlps.mlp_op.down_proj.weight"], new)


def test_grouped_products_of_odd_rows_are_refused() -> None:
    experts = ExpertMLPsV2(RoutedExpertsMLPOpsConfig(4, 66, 48, 2, "silu", True))
    with pytest.raises(ValueError, match="rows of 66 numbers take 264 bytes"):
        experts.settle_forms("grouped")

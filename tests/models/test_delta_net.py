"""Gated DeltaNet: the chunked form, the step and the formula agree; padding leaves no trace."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from neuron_moe.models.attention import StateView
from neuron_moe.models.delta_net import (
    DeltaNetSizes,
    GatedDeltaNet,
    Inputs,
    convolve,
    recur_cached,
)
from neuron_moe.models.delta_rule import update, update_by_channel, update_in_chunks
from neuron_moe.models.loader import load_model
from tests.models.families import FAMILIES, write_checkpoint

SIZES = DeltaNetSizes(
    hidden_size=12, num_key_heads=2, num_value_heads=4, key_size=5, value_size=3, conv_width=4
)


def draw(num_tokens: int) -> tuple[Tensor, ...]:
    """Operands of the rule in float64; keys are short enough that nothing explodes."""
    heads = 2, 3, num_tokens
    query, key = (F.normalize(torch.randn(*heads, 5).double(), dim=-1) for _ in range(2))
    value, memory = torch.randn(*heads, 4).double(), torch.randn(2, 3, 5, 4).double()
    return query, key, value, -torch.rand(heads).double() * 3, torch.rand(heads).double(), memory


def formula(operands: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """One token after the other, as the papers write it: M (I - b k k^T) with a decay."""
    query, key, value, log_decay, rate, memory = operands
    out = []
    for token in range(query.shape[2]):
        k, v = key[:, :, token, :, None], value[:, :, token, None, :]
        b = rate[:, :, token, None, None]
        keep = torch.eye(5).double() - b * k @ k.transpose(2, 3)
        memory = keep @ (memory * log_decay[:, :, token, None, None].exp()) + b * (k @ v)
        out.append(query[:, :, token, None, :] @ memory)
    return torch.cat(out, dim=2), memory


@given(num_tokens=st.integers(1, 20), chunk=st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_chunks_compute_the_formula(num_tokens: int, chunk: int) -> None:
    operands = draw(num_tokens)
    for ours, truth in zip(update_in_chunks(*operands, chunk), formula(operands), strict=True):
        torch.testing.assert_close(ours, truth)


def test_a_step_computes_the_formula() -> None:
    operands = draw(1)
    for ours, truth in zip(update(*operands), formula(operands), strict=True):
        torch.testing.assert_close(ours, truth)


@pytest.mark.parametrize("num_tokens", [1, 9, 20])
def test_a_decay_for_each_number_of_a_key(num_tokens: int) -> None:
    query, key, value, log_decay, rate, memory = draw(num_tokens)
    log_decay = log_decay[..., None] * torch.rand_like(key) * 50
    steps, kept = [], memory
    for token in range(num_tokens):
        now = (part[:, :, token : token + 1] for part in (query, key, value, log_decay, rate))
        step, kept = update(*now, kept)
        steps.append(step)
    out, after = update_by_channel(query, key, value, log_decay, rate, memory, chunk=8)
    torch.testing.assert_close(out, torch.cat(steps, dim=2))
    torch.testing.assert_close(after, kept)
    alike = log_decay[..., :1].expand_as(log_decay)
    of_tokens = update_in_chunks(query, key, value, alike[..., 0], rate, memory)
    for ours, truth in zip(
        update_by_channel(query, key, value, alike, rate, memory), of_tokens, strict=True
    ):
        torch.testing.assert_close(ours, truth)


def test_a_decay_of_hundreds_a_token_does_not_overflow() -> None:
    query, key, value, log_decay, rate, memory = draw(20)
    out, after = update_in_chunks(query, key, value, log_decay * 200, rate, memory)
    assert out.isfinite().all()
    assert after.isfinite().all()


@pytest.fixture
def net() -> GatedDeltaNet:
    """A layer with random weights."""
    layer = GatedDeltaNet(SIZES, 1e-6, torch.float32)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def inputs_of(num_tokens: int, real: Tensor | None = None) -> Inputs:
    shape = 2, num_tokens
    return Inputs(
        torch.randn(*shape, sum(SIZES.parts)), -torch.rand(*shape, 4), torch.rand(*shape, 4), real
    )


def test_the_convolution_is_that_of_torch(net: GatedDeltaNet) -> None:
    inputs, last = inputs_of(7), torch.randn(2, 3, sum(SIZES.parts))
    out, kept = convolve(inputs, last, net.conv_weight)
    whole = torch.cat((last, inputs.mixed_USC), dim=1)
    mixed = F.conv1d(whole.transpose(1, 2), net.conv_weight, groups=sum(SIZES.parts))
    torch.testing.assert_close(out, mixed.transpose(1, 2))
    assert torch.equal(kept, whole[:, -3:])


@pytest.mark.parametrize("where", ["left", "right", "between", "everywhere"])
@torch.no_grad()
def test_padding_leaves_no_trace(net: GatedDeltaNet, where: str) -> None:
    real = torch.ones(2, 9, dtype=torch.bool)
    gaps = {"left": range(4), "right": range(6, 9), "between": (2, 3, 6), "everywhere": range(9)}
    real[1, list(gaps[where])] = False
    first, second = inputs_of(5), inputs_of(9, real)
    _, state = net.recur(first, net.empty_state(2, first.mixed_USC))
    out, after = net.recur(second, state)
    for row in range(2):
        alone = tuple(part[row : row + 1] for part in state)
        tokens = Inputs(*(part[row : row + 1, real[row]] for part in second[:3]))
        if real[row].any():
            expected, alone = net.recur(tokens, alone)
            torch.testing.assert_close(out[row : row + 1, real[row]], expected)
        for found, wanted in zip(after, alone, strict=True):
            torch.testing.assert_close(found[row : row + 1], wanted)


@torch.no_grad()
def test_the_state_in_the_cache_is_written_in_place(net: GatedDeltaNet) -> None:
    inputs = inputs_of(3)
    tensors = net.empty_state(2, inputs.mixed_USC)
    recur_cached(net, inputs, StateView(tensors))
    _, new = net.recur(inputs, net.empty_state(2, inputs.mixed_USC))
    for kept, made in zip(tensors, new, strict=True):
        assert torch.equal(kept, made)


def test_without_a_view_the_core_of_the_model_says_what_it_needs(net: GatedDeltaNet) -> None:
    with pytest.raises(ValueError, match="view=None: the core that comes with the model needs"):
        recur_cached(net, inputs_of(1), None)


BAD: dict[str, tuple[dict[str, int], str]] = {
    "heads": ({"num_value_heads": 3}, "num_value_heads=3: must be a multiple of num_key_heads=2"),
    "width": ({"conv_width": 0}, "conv_width=0"),
}


@pytest.mark.parametrize("case", BAD)
def test_sizes_that_cannot_be_are_refused(case: str) -> None:
    changes, message = BAD[case]
    sizes: Callable[..., DeltaNetSizes] = DeltaNetSizes
    values = {name: getattr(SIZES, name) for name in DeltaNetSizes.__slots__}
    with pytest.raises(ValueError, match=message):
        sizes(**{**values, **changes})


def test_decay_and_gated_norm_stay_in_float32(tmp_path: Path) -> None:
    write_checkpoint(FAMILIES["qwen3_5_moe"].config(), tmp_path, seed=0)
    model: Any = load_model(tmp_path, dtype=torch.bfloat16)
    exact = {
        name.split(".")[-1] for name, p in model.named_parameters() if p.dtype != torch.bfloat16
    }
    assert {"A_log", "norm_weight"} <= exact
    states = model.new_cache(1, 8).states[0]
    assert [state.dtype for state in states] == [torch.bfloat16, torch.float32]

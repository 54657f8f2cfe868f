"""MoE layers equal those of transformers: every model, path and form."""

import copy

import pytest
import torch

from tests.kernels import PACKS_BFLOAT16
from tests.neuron_moe.one_path import OnePath
from tests.neuron_moe.peers import HIDDEN, PEERS, make_peer
from tests.tolerances import BFLOAT16_FACTOR, FLOAT32_RELATIVE, relative_error, rms_error

TOKENS = (1, 7, 64, 1000)
PATHS = ("blockwise", "selective", "all_experts")
FORMS = {"eager": False, "static": True}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", PEERS)
def test_every_path_equals_transformers_in_float32(name: str, path: str, form: str) -> None:
    peer = make_peer(name)
    moe = peer.build(peer.layer, torch.float32)
    moe.expert_mlps.backend = OnePath(path, static=FORMS[form])
    for tokens in TOKENS:
        if form == "static" and path == "selective" and tokens > 64:
            continue  # gathers one copy of the weights for each of 8000 pairs
        hidden_BSH = torch.randn(1, tokens, HIDDEN)
        with torch.no_grad():
            error = relative_error(moe(hidden_BSH)[0], peer.output(hidden_BSH))
        assert error < FLOAT32_RELATIVE, f"T={tokens}"


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", PEERS)
def test_bfloat16_is_no_worse_than_transformers(name: str, tokens: int) -> None:
    peer = make_peer(name)
    with torch.no_grad():  # round once, so that both dtypes see the same weights
        for parameter in peer.layer.parameters():
            parameter.copy_(parameter.bfloat16().float())
    moe = peer.build(peer.layer, torch.bfloat16)
    hidden_BSH = torch.randn(1, tokens, HIDDEN).bfloat16()
    with torch.no_grad():
        truth = peer.output(hidden_BSH.float())
        rounded = make_peer(name)
        rounded.layer.load_state_dict(copy.deepcopy(peer.layer.state_dict()))
        rounded.layer.bfloat16()
        theirs = rms_error(rounded.output(hidden_BSH), truth)
        ours = rms_error(moe(hidden_BSH)[0], truth)
    assert ours <= BFLOAT16_FACTOR * theirs


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="fp32"),
        pytest.param(torch.bfloat16, id="bf16", marks=PACKS_BFLOAT16),
    ],
)
@pytest.mark.parametrize("name", PEERS)
def test_packed_weights_change_nothing(name: str, dtype: torch.dtype) -> None:
    peer = make_peer(name)
    plain = peer.build(peer.layer, dtype)
    packed = peer.build(peer.layer, dtype)
    packed.expert_mlps.pack_weights()
    hidden_BSH = torch.randn(2, 5, HIDDEN).to(dtype)
    with torch.no_grad():
        expected, actual = plain(hidden_BSH)[0], packed(hidden_BSH)[0]
    allowed = FLOAT32_RELATIVE if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert relative_error(actual, expected) < allowed
    for key, value in plain.state_dict().items():
        assert torch.equal(value, packed.state_dict()[key]), key

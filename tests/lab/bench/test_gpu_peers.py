"""What `bench gpu` times beside ours computes the same, gradients too; on the CPU without a GPU."""

import pytest
import torch
from torch import Tensor

from tests.kernels import NO_TRITON, OLDEST_TRITON

pytest.importorskip("triton", minversion=OLDEST_TRITON, reason=NO_TRITON)

from lab.bench.gpu_peers import (
    PEERS,
    Inputs,
    Ours,
    Peer,
    Shape,
    Weights,
    is_installed,
)

SHAPE = Shape(64, 32, 4, 2)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
RUN_ANYWHERE = ("grouped_mm", "transformers")
NAMES = [
    name for name in PEERS if is_installed(name) and (DEVICE == "cuda" or name in RUN_ANYWHERE)
]


def draw() -> tuple[Weights, Inputs]:
    generator = torch.Generator().manual_seed(0)
    H, I, E, K = SHAPE  # noqa: E741
    sizes = ((E, H, 2 * I), (E, I, H), (24, H))
    first, down, hidden = (torch.randn(*size, generator=generator) / 5 for size in sizes)
    index = torch.rand(24, E, generator=generator).topk(K).indices.int()
    affinities = torch.rand(24, K, generator=generator).softmax(1)
    weights = Weights(first.to(DEVICE, DTYPE), down.to(DEVICE, DTYPE))
    leaves = hidden.to(DEVICE, DTYPE).requires_grad_(), affinities.to(DEVICE).requires_grad_()
    return weights, Inputs(*leaves, index.to(DEVICE))


def run(peer: Peer, inputs: Inputs) -> tuple[Tensor, ...]:
    """Return the output and, of a peer with a backward pass, the gradient of the hidden states."""
    bound = peer.bind(inputs)
    output = bound.run()
    if not bound.wanted:
        return (output.float(),)
    gradients = torch.autograd.grad(output, bound.wanted, torch.ones_like(output))
    return output.detach().float(), gradients[0].float()


@pytest.mark.parametrize("name", NAMES)
def test_a_peer_computes_what_ours_computes(name: str) -> None:
    weights, inputs = draw()
    mine = run(Ours(SHAPE, weights, 100), inputs)
    theirs = run(PEERS[name](SHAPE, weights), inputs)
    assert [*map(torch.Tensor.size, theirs)] == [*map(torch.Tensor.size, mine)][: len(theirs)]
    for found, expected in zip(theirs, mine, strict=False):
        assert float((found - expected).norm() / expected.norm()) < 2e-2


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PEERS["liger"], "needs", "no_such_module.at_all")
    assert not is_installed("liger")
    assert is_installed("grouped_mm")

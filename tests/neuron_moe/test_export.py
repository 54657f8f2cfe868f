"""torch.export takes a MoE layer, prefill and decode, without sizes that depend on data."""

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from neuron_moe import MoE, RouterTopK, SharedExperts
from neuron_moe.backends.torch_backend import TorchBackend
from tests.neuron_moe.peers import HIDDEN, PEERS, make_peer
from tests.neuron_moe.test_moe import make_experts
from tests.tolerances import FLOAT32_RELATIVE, relative_error

SHAPES = {
    "decode-selective": (1, 1),
    "decode-all_experts": (40, 1),
    "prefill-all_experts": (1, 64),
    "prefill-blockwise": (1, 200),
}


def assert_static(program: torch.export.ExportedProgram) -> None:
    """Fail if a node leaves the graph's device or has a size only the data knows."""
    for node in program.graph.nodes:
        assert "item" not in str(node.target).replace("getitem", ""), node
        assert "nonzero" not in str(node.target), node
        value = node.meta.get("val")
        for size in getattr(value, "shape", ()):
            assert not free_unbacked_symbols(size), node


# For all experts, affinities and choices are scattered; for blocks slots, and tokens are counted.
SCATTERS = {"selective": (0, 0), "all_experts": (2, 0), "blockwise": (1, 1)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PEERS)
def test_layers_export_and_agree(name: str, shape: str) -> None:
    peer = make_peer(name)
    moe = peer.build(peer.layer, torch.float32)
    hidden = torch.randn(*SHAPES[shape], HIDDEN)
    with torch.no_grad():
        program = torch.export.export(moe, (hidden,))
        assert_static(program)
        called = [str(node.target) for node in program.graph.nodes]
        found = called.count("aten.scatter.src"), called.count("aten.scatter_add.default")
        assert found == SCATTERS[shape.rpartition("-")[2]]
        other = torch.randn_like(hidden)
        assert relative_error(program.module()(other)[0], moe(other)[0]) < FLOAT32_RELATIVE


def test_export_with_padding_mask_capacity_and_shared_experts() -> None:
    experts = make_experts(8, 2, capacity_factor=1.0, normalize_top_k_affinities=True)
    moe = MoE(RouterTopK(8, 2, 12), experts, SharedExperts(12, 6, 1, "silu")).eval()
    hidden, mask = torch.randn(2, 100, 12), torch.rand(2, 100) < 0.8
    with torch.no_grad():
        program = torch.export.export(moe, (hidden, mask))
        assert_static(program)
        actual = program.module()(hidden, mask)[0]
        assert relative_error(actual, moe(hidden, mask)[0]) < FLOAT32_RELATIVE


def test_static_form_refuses_packed_weights() -> None:
    experts = make_experts(4, 2)
    experts.pack_weights()
    experts.backend = TorchBackend(static=True)
    with pytest.raises(ValueError, match=r"packed weights.*Export before pack_weights"):
        experts(torch.randn(3, 12), torch.rand(3, 2), torch.tensor([[0, 1]] * 3), 3)

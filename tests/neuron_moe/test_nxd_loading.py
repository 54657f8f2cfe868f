"""State dicts on their way into layers with NxD's names, and what NxD's sharder finds there."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from neuron_moe import ExpertMLPsV2, MoE, RouterTopK, SharedExperts
from neuron_moe.errors import WeightError
from neuron_moe.nxd_compat import initialize_moe_module
from neuron_moe.nxd_compat.nxd import NXD_LAYERS
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.config import ParallelConfig
from neuron_moe.sharded.sharding import shard_state_dict
from tests.neuron_moe.test_nxd_hazards import (
    OAI,
    E,
    H,
    I,
    K,
    config,
    inference_config,
    layer,
    tokens,
)

BIASED = {**OAI, "bias": True}
FIRST, DOWN = (f"expert_mlps.mlp_op.{name}_proj.bias" for name in ("gate_up", "down"))


def baked(state: dict[str, Tensor], tp_size: int = 1) -> dict[str, Tensor]:
    """Return what NxD's hook makes of a state dict."""
    found = dict(state)
    found[FIRST] = state[FIRST].clone()
    found[FIRST][:, state[FIRST].shape[1] // 2 :] += OAI["hidden_act_bias"]
    found[DOWN] = state[DOWN] / tp_size
    found["expert_mlps.spmd_rank.rank"] = torch.zeros(1, dtype=torch.int32)
    return found


def test_a_baked_state_dict_is_refused() -> None:
    built = layer(config(**BIASED))
    with pytest.raises(WeightError, match=r"median of its up half is 1\.11, so hidden_act"):
        built.load_state_dict(baked(built.state_dict()))


def test_a_plain_state_dict_is_not_refused() -> None:
    built = layer(config(**BIASED))
    for value in (0.45, -3.0):
        state = {**built.state_dict(), FIRST: torch.full((E, 2 * I), value)}
        built.load_state_dict(state)


def test_weights_that_want_a_gradient_are_looked_at_quietly() -> None:
    built = layer(config(**BIASED))
    state = {name: nn.Parameter(value) for name, value in built.state_dict().items()}
    built.load_state_dict(state)
    built.presharded = True
    built.load_state_dict(state)


def test_a_baked_state_dict_is_undone_on_request() -> None:
    wanted, built = layer(config(**BIASED)), layer(config(**BIASED))
    built.presharded = True
    built.load_state_dict(baked(wanted.state_dict()))
    with torch.no_grad():
        x = tokens(2, 24)
        torch.testing.assert_close(built(x)[0], wanted(x)[0])


def test_numbers_are_loaded_as_they_are_on_request() -> None:
    built = layer(config(**BIASED))
    state = baked(built.state_dict())
    built.presharded = False
    built.load_state_dict(state)
    assert torch.equal(built.state_dict()[FIRST], state[FIRST])


def test_a_baked_part_of_a_rank_is_undone() -> None:
    wanted = layer(config(**BIASED))
    with parallel_state.as_rank(ParallelConfig(tp=4), 2):
        built = layer(config(**BIASED))
    plain = shard_state_dict(built, wanted.state_dict())
    built.presharded = True
    built.load_state_dict(baked(plain, tp_size=4))
    for name in (FIRST, DOWN):
        torch.testing.assert_close(built.state_dict()[name], plain[name])


def test_padded_columns_were_not_baked() -> None:
    padded = config(**BIASED, intermediate_size_actual=I - 4)
    built = layer(padded)
    plain = {name: value.clone() for name, value in built.state_dict().items()}
    plain[FIRST][:, 2 * I - 4 :] = 0
    state = baked(plain)
    state[FIRST][:, 2 * I - 4 :] = 0  # as NxD leaves them
    built.presharded = True
    built.load_state_dict(state)
    torch.testing.assert_close(built.state_dict()[FIRST], plain[FIRST])


def test_keys_of_nxds_own_modules_are_no_surprise() -> None:
    built = layer()
    state = dict(built.state_dict())
    state["router.weight_T"] = state["router.linear_router.weight"].t()
    state["moe_fused_tkg.router.linear_router.weight"] = state["router.linear_router.weight"]
    state["expert_mlps.spmd_rank.rank"] = torch.zeros(1, dtype=torch.int32)
    state["expert_mlps.mlp_op_tkg.down_proj.weight"] = torch.zeros(1)
    assert built.load_state_dict(state, strict=True)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        built.load_state_dict({**state, "expert_mlps.mlp_up.weight": torch.zeros(1)})


def shared_layer(**keys: Any) -> MoE:
    torch.manual_seed(0)
    shared = SharedExperts(H, I, 1, "silu", **keys)
    return MoE(RouterTopK(E, K, H), ExpertMLPsV2(config()), shared).eval()


def transposed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: value.t().contiguous() if name.startswith("shared") else value
        for name, value in state.items()
    }


def test_transposed_shared_experts_are_refused_or_turned_back() -> None:
    wanted, built = shared_layer(), shared_layer(transpose_weights=True)
    state = transposed(wanted.state_dict())
    with pytest.raises(WeightError, match="NxD's hook transposes it"):
        built.load_state_dict(state)
    built.presharded = True
    built.load_state_dict(state)
    assert all(
        torch.equal(value, built.state_dict()[name]) for name, value in wanted.state_dict().items()
    )


def test_nxdi_cannot_leave_a_weight_random() -> None:
    model = nn.ModuleDict({"mlp": initialize_moe_module(inference_config())})
    state = dict(model.state_dict())
    model.load_state_dict({"other": torch.zeros(1), **state}, strict=False)
    del state["mlp.expert_mlps.mlp_op.down_proj.weight"]
    with pytest.raises(WeightError, match=r"down_proj\.weight: is not in the state dict"):
        model.load_state_dict(state, strict=False)
    layer().load_state_dict({}, strict=False)  # torch's rule elsewhere


def test_the_part_of_another_rank_is_refused() -> None:
    with parallel_state.as_rank(ParallelConfig(ep=4), 1):
        experts = ExpertMLPsV2(config(enable_spmd_rank=True))
    assert experts.spmd_rank.get_local_expert_indices().tolist() == [[2, 3]]
    state = dict(experts.state_dict())
    zeros = {**state, "spmd_rank.local_expert_indices": torch.zeros(1, 2, dtype=torch.int32)}
    experts.load_state_dict(zeros)  # as NxD's modules hold them before its hook
    assert experts.spmd_rank.get_local_expert_indices().tolist() == [[2, 3]]
    wrong = {**state, "spmd_rank.local_expert_indices": torch.tensor([[4, 5]], dtype=torch.int32)}
    with pytest.raises(WeightError, match="cut for this rank"):
        experts.load_state_dict(wrong)


class BaseParallelLinear(nn.Module):
    """Stands for NxD's."""


class SPMDRank(nn.Module):
    """Stands for NxD's."""


@pytest.fixture
def nxd_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(NXD_LAYERS)
    vars(module).update(BaseParallelLinear=BaseParallelLinear, SPMDRank=SPMDRank)
    monkeypatch.setitem(sys.modules, NXD_LAYERS, module)


def cuts(module: nn.Module) -> dict[str, tuple[int, int, int] | None]:
    """Return axis, stride and number of parts of each parameter that NxD's sharder would slice."""
    return {
        name: (p.partition_dim, p.partition_stride, p.num_partitions)  # type: ignore[attr-defined]
        if p.tensor_model_parallel  # type: ignore[attr-defined]
        else None
        for name, p in module.named_parameters()
        if hasattr(p, "tensor_model_parallel")
    }


@pytest.mark.usefixtures("nxd_layers")
def test_nxds_sharder_finds_its_classes_and_attributes() -> None:
    with parallel_state.as_rank(ParallelConfig(tp=2, ep=2), 1):
        experts = ExpertMLPsV2(config(**BIASED, enable_spmd_rank=True))
        shared = SharedExperts(H, I, 1, "silu", fused_gate_up_projection=True)
    experts = experts.bfloat16().to(torch.float32)
    assert cuts(experts) == {
        "mlp_op.gate_up_proj.weight": (2, 2, 2),
        "mlp_op.gate_up_proj.bias": (1, 2, 2),
        "mlp_op.down_proj.weight": (1, 1, 2),
        "mlp_op.down_proj.bias": None,
        "spmd_rank.rank": (0, 1, 1),
        "spmd_rank.local_expert_indices": (0, 1, 1),
    }
    assert cuts(shared) == {"gate_up_proj.weight": (0, 2, 2), "down_proj.weight": (1, 1, 2)}
    for linear in (experts.mlp_op.first, experts.mlp_op.down_proj, shared.down_proj):
        assert isinstance(linear, BaseParallelLinear)
    assert isinstance(experts.spmd_rank, SPMDRank)
    weight: Any = experts.mlp_op.first.weight
    assert weight.expert_model_parallel
    assert weight.is_prefill
    assert weight.expert_distribution is None


@pytest.mark.usefixtures("nxd_layers")
def test_decodes_own_copy_is_marked_as_decodes() -> None:
    hybrid = ParallelConfig(tp=4, moe_tp=4, moe_ep=1, decode_moe_tp=1, decode_moe_ep=4)
    with parallel_state.as_rank(hybrid, 1):
        experts = ExpertMLPsV2(config())
    weight: Any = experts.mlp_op_tkg.first.weight
    assert weight.expert_model_parallel
    assert not hasattr(weight, "is_prefill")
    assert not hasattr(experts.mlp_op.first.weight, "expert_model_parallel")
    assert weight.num_partitions == 1

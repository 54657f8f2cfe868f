"""Our layers in a model of torchtitan: its configuration, checkpoints both ways, its balance."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchtitan.models.qwen3", reason="torchtitan is not here")
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from lab.train.titan import main, small_qwen3, use_neuron_moe
from neuron_moe.parallel import ParallelConfig, parallel_state

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:In CPU autocast"),  # its router
    pytest.mark.filterwarnings("ignore:.*deprecated"),
]


def build(config: Any) -> nn.Module:
    with torch.device("meta"):
        model: Any = config.build()
    model.to_empty(device="cpu").init_states()
    found: nn.Module = model.train()
    return found


def pair() -> tuple[Any, nn.Module, nn.Module]:
    """Return a configuration, and models of torchtitan's layers and of ours."""
    config, ours = small_qwen3(), small_qwen3()
    use_neuron_moe(ours, save_percent=0)
    torch.manual_seed(0)
    theirs = build(config)
    torch.manual_seed(0)
    return config, theirs, build(ours)


def test_weights_are_drawn_saved_and_loaded_as_torchtitans() -> None:
    config, theirs, ours = pair()
    state = {name: each.clone() for name, each in ours.state_dict().items()}
    assert state.keys() == theirs.state_dict().keys()
    assert all(torch.equal(state[name], each) for name, each in theirs.state_dict().items())
    adapter = Qwen3StateDictAdapter(config, None)
    published = adapter.to_hf(state)
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in published
    for weight in ours.parameters():
        nn.init.zeros_(weight)
    ours.load_state_dict(adapter.from_hf(published), strict=False)  # it has no selection bias
    assert all(torch.equal(ours.state_dict()[name], each) for name, each in state.items())
    tokens_T = torch.arange(20)
    outputs = [model(tokens_T, positions=tokens_T) for model in (theirs, ours)]
    torch.testing.assert_close(*outputs, rtol=0.0, atol=0.01)  # its experts are bfloat16


def test_its_hook_moves_our_biases_by_our_load() -> None:
    _, theirs, ours = pair()
    tokens_T = torch.arange(50)
    found = []
    for model in (theirs, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        alone = SimpleNamespace(get_optional_mesh=lambda name: None, ep_enabled=False, tp=1)
        register_moe_load_balancing_hook(optimizer, [model], alone)
        model(tokens_T, positions=tokens_T).sum().backward()
        optimizer.step()
        biases = [layer.moe.expert_bias_E.clone() for layer in model.layers.values()]
        loads = [layer.moe.tokens_per_expert_E for layer in model.layers.values()]
        assert not any(bool(load.any()) for load in loads)  # they start again
        found.append(torch.stack(biases))
    assert float(found[0].abs().max()) > 0
    assert torch.equal(*found)


def test_a_whole_checkpoint_gives_a_rank_its_experts(run_ranks: Any) -> None:
    _, theirs, _ = pair()
    state = theirs.state_dict()

    def run(rank: int) -> bool:
        config = ParallelConfig(ep=2, dp=2, strategy="all_to_all")
        parallel_state.initialize_model_parallel(config=config, watch=False)
        config = small_qwen3()
        use_neuron_moe(config)
        ours = config.build()
        ours.load_state_dict(state)
        name = "layers.0.moe.routed_experts.inner_experts.w1_EFD"
        return torch.equal(ours.state_dict()[name], state[name][4 * rank : 4 * rank + 4])

    assert run_ranks(2, run) == [True, True]


def test_layers_of_another_formula_are_left_alone() -> None:
    from torchtitan.models.gpt_oss import model_registry

    with pytest.raises(ValueError, match="formula is its own"):
        use_neuron_moe(model_registry("debugmodel").model)


def test_the_script_trains_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "3"]) == 0
    for line in capsys.readouterr().out.splitlines():
        theirs, ours = (float(part.split()[-1]) for part in line.split(","))
        assert abs(theirs - ours) < 0.01

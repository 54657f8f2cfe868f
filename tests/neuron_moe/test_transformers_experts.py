"""Hugging Face models train through a backend of ours as they do by themselves."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from neuron_moe.transformers_experts import register_experts

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}


def qwen() -> nn.Module:
    config = Qwen3MoeConfig(
        **SIZES, num_experts=4, moe_intermediate_size=24, intermediate_size=24, norm_topk_prob=True
    )
    return Qwen3MoeForCausalLM(config)


def gpt_oss() -> nn.Module:
    config = GptOssConfig(**SIZES, num_local_experts=4, intermediate_size=24)
    model = GptOssForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.normal_(std=0.5)  # large enough for the clamps to matter
    return model


def train(model: nn.Module, implementation: str, steps: int = 3) -> list[torch.Tensor]:
    """Return losses, then weights, of a few steps."""
    model.set_experts_implementation(implementation)  # type: ignore[operator]
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("save_percent", [pytest.param(None, marks=pytest.mark.long), 0])
@pytest.mark.parametrize("build", [qwen, gpt_oss])
def test_a_model_trains_as_by_itself(build: type, save_percent: int | None) -> None:
    torch.manual_seed(0)
    models = build(), build()
    models[1].load_state_dict(models[0].state_dict())
    expected = train(models[0], "eager")
    found = train(models[1], register_experts(save_percent=save_percent))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6)


def test_a_backend_without_gradient_and_an_unknown_activation_are_refused() -> None:
    with pytest.raises(ValueError, match="backend='nki'"):
        register_experts("nki")
    model = qwen()
    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeExperts":
            module.act_fn = nn.Softplus()
    with pytest.raises(ValueError, match="activation"):
        train(model, register_experts(), steps=1)


CLAMPED = {
    "deepseek_v4": "DeepseekV4Experts",
    "glm5_next": "Glm5NextTextExperts",
    "hy_v4": "HYV4Experts",
}


@pytest.mark.parametrize("name", CLAMPED)
def test_a_clamp_far_out_is_computed(name: str) -> None:
    try:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    except ImportError:
        pytest.skip(f"this transformers has no {name}")
    sizes = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4)
    widths = dict.fromkeys(("moe_intermediate_size", "intermediate_size"), 16)
    config = SimpleNamespace(
        **sizes,
        **widths,
        hidden_size=32,
        hidden_act="silu",
        swiglu_limit=10.0,
        _experts_implementation="eager",
    )
    experts = getattr(module, CLAMPED[name])(config)
    experts.config = config
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0, 0.5)
        hidden_TH = 3 * torch.randn(64, 32)
        index_TK = torch.stack([torch.randperm(4)[:2] for _ in range(64)])
        affinities_TK = torch.full((64, 2), 0.5)
        expected = experts(hidden_TH, index_TK, affinities_TK)
        ours = ALL_EXPERTS_FUNCTIONS[register_experts("torch")]
        found = ours(experts, hidden_TH, index_TK, affinities_TK)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_limit_and_alpha_are_read_again_where_they_change() -> None:
    experts = gpt_oss().model.layers[0].mlp.experts  # type: ignore[union-attr, operator]
    ours = ALL_EXPERTS_FUNCTIONS[register_experts("torch")]
    given = 5 * torch.randn(9, 32), torch.randint(4, (9, 2)), torch.rand(9, 2)
    for experts.alpha, experts.limit in ((1.702, 7.0), (2.0, 3.0), (1.0, 100.0)):
        torch.testing.assert_close(ours(experts, *given), experts(*given), rtol=1e-4, atol=1e-3)


def test_a_clamp_that_no_attribute_tells_is_refused() -> None:
    experts = qwen().model.layers[0].mlp.experts  # type: ignore[union-attr, operator]
    apply = type(experts)._apply_gate
    experts._apply_gate = lambda rows: apply(experts, rows).clamp(max=200.0)
    ours = ALL_EXPERTS_FUNCTIONS[register_experts("torch")]
    with pytest.raises(ValueError, match="its activation is none of"):
        ours(experts, torch.randn(3, 32), torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1))

"""GPT-OSS against transformers on the same files: logits, tokens, padding, window, export."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from neuron_moe.models.attention import CacheView, Reach, attention_mask, count_places
from neuron_moe.models.decoder import Tokens
from neuron_moe.models.generation import GenerationOptions, generate, pad_left
from neuron_moe.models.gpt_oss import GptOssConfig, Model
from neuron_moe.models.loader import load_model
from neuron_moe.models.rope import rope_tables
from tests.models.test_families import PROMPT, RAGGED, reference_tokens, relative_error

Checkpoints = Callable[..., Path]
References = Callable[..., Any]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "mxfp4": {},
    "bf16-experts": {"expert_format": "bf16"},
    "yarn-short-context": {"rope_scaling": {**YARN, "truncate": False}},
    "yarn-truncated": {"rope_scaling": {**YARN, "truncate": True}},
    "other-base": {"rope_scaling": {**YARN, "attention_factor": 1.3}, "rope_theta": 10000.0},
    "every-expert": {"num_experts_per_tok": 8},
    "one-expert-a-token": {"num_experts_per_tok": 1},
    "window-of-one": {"sliding_window": 1},
    "window-of-two": {"sliding_window": 2},
    "all-sliding": {"layer_types": ["sliding_attention"] * 2},
    "all-full": {"layer_types": ["full_attention"] * 2},
    "no-attention-bias": {"attention_bias": False},
    "one-key-head": {"num_key_value_heads": 1},
    "ungrouped": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(
    variant: str, checkpoint_of: Checkpoints, reference_of: References
) -> None:
    folder = checkpoint_of(**VARIANTS[variant])
    ours = load_model(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference_of(folder)(PROMPT).logits
        assert relative_error(ours(PROMPT), expected) < 1e-4


def test_the_clamps_are_reached_and_agree(
    checkpoint_of: Checkpoints, reference_of: References
) -> None:
    ours, reference = (
        load_model(checkpoint_of(), dtype=torch.float32),
        reference_of(checkpoint_of()),
    )
    unlimited = load_model(checkpoint_of(swiglu_limit=1e4), dtype=torch.float32)
    with torch.inference_mode():
        for layer in range(2):
            for model in (ours, unlimited):
                model.layers[layer].moe.expert_mlps.mlp_op.gate_up_proj.weight.mul_(4)
            reference.model.layers[layer].mlp.experts.gate_up_proj.mul_(4)
        expected = reference(PROMPT).logits
        assert relative_error(ours(PROMPT), expected) < 1e-4
        assert relative_error(unlimited(PROMPT), expected) > 1e-2


@pytest.mark.parametrize("variant", ["mxfp4", "yarn-short-context", "window-of-two"])
def test_greedy_tokens_are_those_of_transformers(
    variant: str, checkpoint_of: Checkpoints, reference_of: References
) -> None:
    folder = checkpoint_of(**VARIANTS[variant])
    ours = load_model(folder, dtype=torch.float32)
    result = generate(ours, RAGGED, GenerationOptions(max_new_tokens=24))
    assert result.token_ids == reference_tokens(reference_of(folder), RAGGED, 24)


def test_left_padding_changes_nothing(checkpoint_of: Checkpoints) -> None:
    model = load_model(checkpoint_of(), dtype=torch.float32)
    ids, real = pad_left(RAGGED, 299)
    with torch.inference_mode():
        together = model(ids, real_US=real)
        for row, prompt in enumerate(RAGGED):
            alone = model(torch.tensor([prompt]))
            assert relative_error(together[row : row + 1, -len(prompt) :], alone) < 1e-5


def test_last_only_is_the_last_row(checkpoint_of: Checkpoints) -> None:
    model = load_model(checkpoint_of(), dtype=torch.float32)
    with torch.inference_mode():
        last = model(PROMPT, last_only=True)
        assert last.shape == (1, 1, 300)
        assert relative_error(last, model(PROMPT)[:, -1:]) < 1e-6


def test_a_sliding_layer_forgets_what_left_its_window(checkpoint_of: Checkpoints) -> None:
    """Two sliding layers of eight reach back 2 * 7 tokens, not one further."""
    model = load_model(checkpoint_of(**VARIANTS["all-sliding"]), dtype=torch.float32)
    changed_far, changed_near = PROMPT.clone(), PROMPT.clone()
    changed_far[0, 39 - 15] += 1
    changed_near[0, 39 - 14] += 1
    with torch.inference_mode():
        last = model(PROMPT)[:, -1]
        assert torch.equal(model(changed_far)[:, -1], last)
        assert not torch.equal(model(changed_near)[:, -1], last)


def test_bfloat16_is_as_near_to_float32_as_transformers(
    checkpoint_of: Checkpoints, reference_of: References
) -> None:
    folder = checkpoint_of()
    with torch.inference_mode():
        exact = reference_of(folder)(PROMPT).logits
        theirs = reference_of(folder, torch.bfloat16)(PROMPT).logits
        ours = load_model(folder, dtype=torch.bfloat16)(PROMPT)
    assert ours.dtype == torch.bfloat16
    error = (ours.float() - exact).square().mean().sqrt()
    assert error < 1.5 * (theirs.float() - exact).square().mean().sqrt()


def test_an_unknown_backend_is_refused(config_of: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="backend='gpu'"):
        Model(GptOssConfig.from_hf(config_of()), backend="gpu")


def test_an_unknown_phase_is_refused(checkpoint_of: Callable[..., Path]) -> None:
    model = load_model(checkpoint_of())
    with pytest.raises(ValueError, match="phase='decod'"):
        model.forward_tokens(torch.tensor([1]), torch.tensor([0]), phase="decod")


def layer_inputs(config: GptOssConfig, num_new: int, num_positions: int) -> tuple[Any, ...]:
    """Two sequences whose new tokens fill the last of the positions; the first has padding."""
    real = torch.ones(2, num_positions, dtype=torch.bool)
    real[0, :3] = False
    positions = torch.arange(num_positions - num_new, num_positions)
    places = count_places(real)[:, -num_new:]
    rope = rope_tables(config.rope, config.head_dim, places)
    shape = (2, config.num_key_value_heads, num_positions, config.head_dim)
    mask = attention_mask(real, positions, 0, Reach(config.sliding_window))
    return (
        torch.randn(2, num_new, config.hidden_size),
        Tokens(places, rope, real[:, -num_new:]),
        CacheView(mask, (torch.randn(shape), torch.randn(shape)), positions),
    )


EXPORTS = {  # new tokens a sequence (of two), positions, experts a token, path of the MoE layer
    "prefill-blockwise": (100, 100, 4, "blockwise"),
    "prefill-all-experts": (24, 24, 4, "all_experts"),
    "decode-all-experts": (1, 24, 4, "all_experts"),
    "decode-selective": (1, 24, 1, "selective"),
}


@pytest.mark.parametrize("case", EXPORTS)
def test_a_decoder_layer_exports_with_static_shapes(
    case: str, config_of: Callable[..., dict[str, Any]]
) -> None:
    num_new, num_positions, top_k, path = EXPORTS[case]
    config = GptOssConfig.from_hf(config_of(num_experts_per_tok=top_k))
    layer = Model(config, dtype=torch.float32).layers[0].eval().requires_grad_(False)
    torch.nn.init.normal_(layer.self_attn.sinks)
    assert layer.moe.explain(case.split("-")[0], 2 * num_new).path == path
    inputs = layer_inputs(config, num_new, num_positions)
    keys = inputs[2].tensors[0].clone()
    program = torch.export.export(layer, inputs)
    for node in program.graph.nodes:
        assert "nonzero" not in str(node.target)
        assert "_local_scalar_dense" not in str(node.target)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            assert all(isinstance(size, int) for size in value.shape), node
    expected = layer(*inputs)
    new_keys = inputs[2].tensors[0].clone()
    inputs[2].tensors[0].copy_(keys)
    assert relative_error(program.module()(*inputs), expected) < 1e-5
    assert relative_error(inputs[2].tensors[0], new_keys) < 1e-6

"""Ling 3.0: limits that transformers leaves out, queries made of latents, layers left out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from neuron_moe.models.loader import load_model
from tests.models.families import FAMILIES, write_checkpoint

LIMITS = {
    "expert_swiglu_limit_list": [0, 0.3, None],
    "share_expert_swiglu_limit_list": [0.2, 0, 0.4],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ling")
    write_checkpoint(FAMILIES["bailing_hybrid"].config(), path, seed=2)
    return path


def changed(folder: Path, target: Path, **keys: Any) -> Path:
    """Return a checkpoint with other keys in config.json."""
    config = json.loads((folder / "config.json").read_text()) | keys
    (target / "config.json").write_text(json.dumps(config))
    if not (target / "model.safetensors").exists():
        (target / "model.safetensors").symlink_to(folder / "model.safetensors")
    return target


def expected(moe: Any, hidden_TH: Tensor, routed: float, shared: float) -> Tensor:
    """Compute a layer pair by pair; routed experts clamp before silu, shared ones behind it."""
    routing = moe.router(hidden_TH[None])
    experts, mlp = moe.expert_mlps.mlp_op, moe.shared_experts
    gate, up = (getattr(mlp, f"{name}_proj")(hidden_TH) for name in ("gate", "up"))
    rows = mlp.down_proj(F.silu(gate).clamp(max=shared) * up.clamp(-shared, shared))
    for token, hidden_H in enumerate(hidden_TH):
        chosen = zip(
            routing.expert_index_TK[token], routing.expert_affinities_TK[token], strict=True
        )
        for expert, weight in chosen:
            gate, up = (hidden_H @ experts.gate_up_proj.weight[expert]).chunk(2)
            inner = F.silu(gate.clamp(max=routed)) * up.clamp(-routed, routed)
            rows[token] += weight * (inner @ experts.down_proj.weight[expert])
    return rows


@torch.inference_mode()
def test_routed_experts_clamp_before_silu_and_shared_ones_behind_it(
    folder: Path, tmp_path: Path
) -> None:
    model: Any = load_model(changed(folder, tmp_path, **LIMITS), dtype=torch.float32)
    stream = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0))
    for layer, limits in ((1, (0.3, torch.inf)), (2, (torch.inf, 0.4))):
        moe = model.layers[layer].moe
        made = (moe(stream)[0] - stream)[0]
        plain = expected(moe, moe.rmsnorm(stream)[0], torch.inf, torch.inf)
        wanted = expected(moe, moe.rmsnorm(stream)[0], *limits)
        assert (wanted - plain).abs().max() > 1e-2
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)
    dense: Any = load_model(folder, dtype=torch.float32)
    assert torch.equal(model.layers[0].mlp(stream), dense.layers[0].mlp(stream))


@torch.inference_mode()
def test_queries_may_be_made_of_latents(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    attention = "model.layers.1.attention."
    whole = tensors.pop(attention + "q_proj.weight")
    latent = {"q_a_proj": torch.randn(24, 64), "q_a_layernorm": torch.ones(24)}
    latent |= {"q_b_proj": torch.randn(len(whole), 24)}
    tensors |= {f"{attention}{name}.weight": tensor for name, tensor in latent.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model: Any = load_model(changed(folder, tmp_path, q_lora_rank=24), dtype=torch.float32)
    assert torch.equal(model.layers[1].self_attn.q_a_proj.weight, latent["q_a_proj"])
    assert model(torch.arange(3, 9)[None]).isfinite().all()


def test_the_layer_that_predicts_and_the_published_name_of_an_output(
    folder: Path, tmp_path: Path
) -> None:
    tensors = load_file(folder / "model.safetensors")
    last = {key: value for key, value in tensors.items() if key.startswith("model.layers.1.")}
    for name in ("enorm", "hnorm", "eh_proj", "final_layernorm"):
        tensors[f"model.layers.3.{name}.weight"] = torch.ones(4, 4)
    tensors |= {key.replace("layers.1.", "layers.3."): value for key, value in last.items()}
    for layer in (0, 2):
        attention = f"model.layers.{layer}.attention."
        tensors[attention + "o_proj.weight"] = tensors.pop(attention + "dense.weight")
    save_file(
        {key: value.clone() for key, value in tensors.items()}, tmp_path / "model.safetensors"
    )
    target = changed(folder, tmp_path, num_nextn_predict_layers=1)
    model, plain = load_model(target).state_dict(), load_model(folder).state_dict()
    assert model.keys() == plain.keys()
    assert all(torch.equal(model[key], plain[key]) for key in plain)

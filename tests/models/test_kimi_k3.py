"""Kimi-K3 under its published names, and configurations of it and Hy4 that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from neuron_moe.models.layerwise import LayerwiseModel
from neuron_moe.models.loader import load_model, parse_config
from neuron_moe.models.whole_model import plan_model
from neuron_moe.quantize.mxfp4 import decode_mxfp4, encode_mxfp4
from tests.models.families import FAMILIES, write_checkpoint

SPEEDS = 16  # in the file, of three heads
TOWER = {
    "vision_tower.encoder.blocks.0.norm0.weight": (8,),
    "vision_tower.encoder.blocks.0.norm1.weight": (8,),
    "vision_tower.encoder.blocks.0.wqkv.weight": (24, 8),
    "vision_tower.encoder.blocks.0.wo.weight": (8, 8),
    "vision_tower.encoder.blocks.0.mlp.fc0.weight": (16, 8),
    "vision_tower.encoder.blocks.0.mlp.fc1.weight": (8, 16),
    "vision_tower.encoder.final_layernorm.weight": (8,),
    "vision_tower.patch_embed.pos_emb.weight": (4, 4, 8),
    "vision_tower.patch_embed.proj.weight": (8, 3, 2, 2),
    "mm_projector.post_norm.weight": (64,),
    "mm_projector.proj.0.weight": (32, 32),
    "mm_projector.proj.2.weight": (64, 32),
}

pytestmark = pytest.mark.skipif(
    "kimi_k3" not in CONFIG_MAPPING, reason="transformers has not all parts of it"
)


def write_published(folder: Path) -> dict[str, torch.Tensor]:
    """Write a tiny checkpoint as it is published: experts in MXFP4, beside a vision tower.

    Returns the experts' weights as they are in the file.
    """
    config = FAMILIES["kimi_k3-groups"].config(routed_expert_hidden_size=64)
    write_checkpoint(config, folder, seed=4)
    tensors, decoded = load_file(folder / "model.safetensors"), {}
    for name in [key for key in tensors if ".experts." in key]:
        blocks, scales = encode_mxfp4(tensors.pop(name))
        decoded[name] = decode_mxfp4(blocks, scales, torch.float32)
        tensors[name.replace("weight", "weight_packed")] = blocks.flatten(-2)
        tensors[name.replace("weight", "weight_scale")] = scales
    tensors |= {name: torch.ones(shape) for name, shape in TOWER.items()}
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    written = json.loads(path.read_text())
    group = {"weights": {"type": "float", "num_bits": 4, "group_size": 32}, "targets": ["Linear"]}
    written["text_config"]["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": group},
    }
    path.write_text(json.dumps(written))
    return decoded


def test_a_published_checkpoint_is_read_with_none_of_its_tensors_left(tmp_path: Path) -> None:
    decoded = write_published(tmp_path)
    speeds = load_file(tmp_path / "model.safetensors")[
        "language_model.model.layers.1.self_attn.A_log"
    ]
    model: Any = load_model(tmp_path, dtype=torch.float32)
    assert speeds.shape == (SPEEDS,)
    assert torch.equal(model.layers[1].self_attn.A_log, speeds[:3].float())
    source = "language_model.model.layers.4.block_sparse_moe.experts.7.w2.weight"
    held = model.layers[4].moe.expert_mlps.mlp_op.down_proj.weight[7]
    assert torch.equal(held.t(), decoded[source])
    assert model(torch.arange(9)[None]).isfinite().all()


PUBLISHED = {  # sizes of moonshotai/Kimi-K3, of which five layers are taken here
    "model_type": "kimi_linear",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 5,
    "intermediate_size": 33792,
    "first_k_dense_replace": 1,
    "num_attention_heads": 96,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 1048576,
    "num_key_value_heads": 96,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "latent_moe_use_norm": True,
    "hidden_act": "situ",
    "attn_res_block_size": 12,
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5,
    "linear_attn_config": {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3, 5],
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
}


def test_the_planner_counts_what_the_model_holds() -> None:
    tower = {"vt_num_hidden_layers": 27}
    values = {"model_type": "kimi_k3", "text_config": PUBLISHED, "vision_config": tower}
    sizes, model, *_ = plan_model("kimi_k3", values)
    assert model is not None
    inner = sizes.num_experts * sizes.expert_hidden_size * sizes.intermediate_size
    shared = sizes.hidden_size * sizes.shared_size
    counted = 3 * (inner + shared) * sizes.num_moe_layers + sizes.dense_parameters
    held = sum(parameter.numel() for parameter in model.parameters())
    assert counted == pytest.approx(held, rel=1e-4)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "k3-blocks": ("kimi_k3", {"attn_res_block_size": None}, "attn_res_block_size is missing"),
    "k3-latent": ("kimi_k3", {"routed_expert_hidden_size": 0}, "routed_expert_hidden_size=0: must"),
    "k3-caps": ("kimi_k3", {"activation_situ_beta": -1.0}, "activation_situ_beta=-1.0: must be"),
    "k3-gate": ("kimi_k3", {"mla_use_output_gate": False}, "mla_use_output_gate=False: must be"),
    "k3-activation": ("kimi_k3", {"hidden_act": "gelu"}, "hidden_act='gelu': must be 'silu'"),
    "k3-scores": ("kimi_k3", {"moe_router_activation_func": "softmax"}, "func='softmax': must be"),
    "k3-unknown": ("kimi_k3", {"situ": 4}, "unknown key situ=4"),
    "hy4-limit": ("hy_v4", {"swiglu_limit": 0.0}, "swiglu_limit=0.0: must be positive"),
    "hy4-switch": ("hy_v4", {"gated_mla": False}, "gated_mla=False: must be True"),
    "hy4-gate": ("hy_v4", {"gating_type": "headwise"}, "gating_type='headwise': must be"),
    "hy4-streams": ("hy_v4", {"hc_mult": 0}, "hc_mult=0: must be"),
    "hy4-reach": ("hy_v4", {"index_topk": 0}, "index_topk=0: must be"),
}
K3_SECTION = FAMILIES["kimi_k3"].changes["linear_attn_config"]
REFUSED |= {
    "k3-bound": (
        "kimi_k3",
        {"linear_attn_config": {**K3_SECTION, "gate_lower_bound": 0.5}},
        "gate_lower_bound=0.5: must be below 0",
    ),
    "k3-low-rank": (
        "kimi_k3",
        {"linear_attn_config": {**K3_SECTION, "use_full_rank_gate": False}},
        "use_full_rank_gate=False: must be True",
    ),
}


@pytest.mark.parametrize("family", ["kimi_k3", "hy_v4"])
def test_layers_between_several_streams_run_not_alone(family: str, tmp_path: Path) -> None:
    write_checkpoint(FAMILIES[family].config(), tmp_path, seed=1)
    shown = f"model_type='{family}' take more than one residual stream"
    with pytest.raises(ValueError, match=shown):
        LayerwiseModel(tmp_path, torch.float32)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(name: str) -> None:
    family, changes, match = REFUSED[name]
    usual = {"rms_norm_eps": 1e-5, "rope_theta": 1e4}
    values = {**usual, **FAMILIES[family].config(), **changes}
    if family == "kimi_k3":
        tower = {"vt_num_hidden_layers": 1}
        text = {key: value for key, value in values.items() if key != "model_type"}
        text["model_type"] = "kimi_linear"
        values = {"model_type": family, "text_config": text, "vision_config": tower}
    with pytest.raises(ValueError, match=match):
        parse_config(values, "config.json")

"""config.json of GPT-OSS: what is read, and how a wrong one is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GptOssConfig as ReferenceConfig

from neuron_moe.configs import load_config
from neuron_moe.models.gpt_oss import GptOssConfig


def test_shipped_configurations_alternate_and_choose_four() -> None:
    for name in ("gpt_oss_20b", "gpt_oss_120b"):
        config = GptOssConfig.from_hf(load_config(name))
        assert [config.window(layer) for layer in range(4)] == [128, None, 128, None]
        assert config.num_experts_per_tok == 4
        assert config.hidden_size == config.intermediate_size == 2880


def test_an_unknown_shipped_configuration_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"config='gpt_oss_20'.*Did you mean 'gpt_oss_20b'"):
        load_config("gpt_oss_20")


def test_both_generations_of_config_json_read_alike() -> None:
    old = load_config("gpt_oss_20b")
    new = {key: value for key, value in old.items() if key not in ("rope_scaling", "rope_theta")}
    new |= {
        "rope_parameters": {**old["rope_scaling"], "rope_theta": 150000.0},
        "swiglu_alpha": 1.702,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "transformers_version": "5.23.0",
    }
    assert GptOssConfig.from_hf(old) == GptOssConfig.from_hf(new)


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    reference = ReferenceConfig(num_hidden_layers=4, num_local_experts=8, eos_token_id=[1, 2])
    reference.save_pretrained(tmp_path)
    config = GptOssConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert config.num_hidden_layers == 4
    assert config.eos_token_ids == (1, 2)
    assert config.rope.kind == "yarn"
    assert config.rope.truncate is False


def test_layer_types_alternate_where_the_key_is_missing(
    config_of: Callable[..., dict[str, Any]],
) -> None:
    config = GptOssConfig.from_hf(config_of(layer_types=None, num_hidden_layers=3))
    assert config.layer_types == ("sliding_attention", "full_attention", "sliding_attention")


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
BAD = {
    "misspelt-key": ({"num_hiden_layers": 2}, "num_hiden_layers=2 .did you mean 'num_hidden_lay"),
    "unknown-key": ({"mlp_bias": True}, "unknown key mlp_bias=True"),
    "missing-key": ({"hidden_size": None}, "hidden_size is missing"),
    "renamed-key": (
        {"hidden_size": None, "hiden_size": 64},
        "hidden_size is missing.*Did you mean it by 'hiden_size'",
    ),
    "wrong-type": ({"hidden_size": "64"}, "hidden_size='64': must be int, not str"),
    "bool-for-int": ({"hidden_size": True}, "hidden_size=True: must be int, not bool"),
    "float-for-int": ({"num_local_experts": 8.0}, "num_local_experts=8.0: must be int"),
    "zero-layers": ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    "zero-window": ({"sliding_window": 0}, "sliding_window=0"),
    "top-k-too-large": ({"num_experts_per_tok": 9}, "top_k=9: must not exceed num_experts=8"),
    "top-k-contradiction": (
        {"experts_per_token": 2},
        "num_experts_per_tok=4, experts_per_token=2: must agree",
    ),
    "heads": ({"num_key_value_heads": 3}, "num_attention_heads=4: must be a multiple of"),
    "odd-head": ({"head_dim": 15}, "head_dim=15: must be even"),
    "layer-types-count": ({"layer_types": ["full_attention"]}, "must name num_hidden_layers=2"),
    "layer-types-name": ({"layer_types": ["chunked"] * 2}, "each sliding_attention or full_att"),
    "other-model": ({"model_type": "mixtral"}, "model_type='mixtral': must be 'gpt_oss'"),
    "other-activation": ({"hidden_act": "mish"}, "hidden_act='mish': must be one of gelu"),
    "tied": ({"tie_word_embeddings": 1}, "tie_word_embeddings=1: must be bool, not int"),
    "other-quantization": (
        {"quantization_config": {"quant_method": "awq"}},
        r"weights of AWQ, integers of 4 bits: quant_method must be mxfp4.*without the method",
    ),
    "stop-token": ({"eos_token_id": "</s>"}, "eos_token_id='</s>': must be a token id"),
    "eps-nan": ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: must be finite"),
    "eps-infinite": ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf: must be finite"),
    "eps-negative": ({"rms_norm_eps": -1e-5}, "rms_norm_eps=-1e-05: must not be negative"),
    "theta-nan": ({"rope_theta": float("nan")}, "rope_theta=nan: must be finite"),
    "theta-huge": ({"rope_theta": 10**400}, "rope_theta=a number of a hundred digits"),
    "size-huge": ({"hidden_size": 2**62}, "hidden_size=4611686018427387904: must be finite and at"),
    "layers-huge": ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be .* 10000"),
    "layer-types-nested": ({"layer_types": [["full_attention"]] * 2}, "must be a list of names"),
    "limit-zero": ({"swiglu_limit": 0.0}, "swiglu_limit=0.0: must be positive"),
    "rope-string": ({"rope_scaling": "yarn"}, "rope_scaling='yarn': must be an object"),
    **{
        f"yarn-{name}-{value}": ({"rope_scaling": {**YARN, name: value}}, f"{name}={value}: must")
        for name, value in [
            ("beta_fast", 0.0),
            ("beta_slow", -1.0),
            ("beta_fast", float("inf")),
            ("attention_factor", 0.0),
            ("mscale", -1.0),
        ]
    },
    "rope-type": (
        {"rope_scaling": {"rope_type": "longrope"}},
        "rope_type='longrope': must be 'default' or 'linear' or 'dynamic' or 'yarn'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_config_is_refused_by_key_and_value(
    case: str, config_of: Callable[..., dict[str, Any]]
) -> None:
    changes, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        GptOssConfig.from_hf(config_of(**changes))


def test_something_else_than_a_mapping_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a mapping"):
        GptOssConfig.from_hf([("hidden_size", 64)])  # type: ignore[arg-type]

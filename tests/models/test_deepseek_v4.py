"""DeepSeek-V4: what is published, padding and chunks, streams, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from neuron_moe.checkpoint import save_checkpoint, unique_parameters
from neuron_moe.configs import load_config
from neuron_moe.models.decoder import DecoderModel
from neuron_moe.models.deepseek_v4 import Model, weight_map
from neuron_moe.models.deepseek_v4_config import DeepseekV4Config
from neuron_moe.models.generation import pad_left
from neuron_moe.models.hyper_connections import HyperConnection, StreamHead, StreamSpec
from neuron_moe.models.loader import load_model
from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.models.sizes import Spread, cache_bytes_per_token
from neuron_moe.models.whole_model import StepWork, dense_times
from neuron_moe.parallel.topology import instance
from neuron_moe.planner.coefficients import Machine
from neuron_moe.quantize.fp8 import E4M3_OCP, dequantize_fp8, quantize_fp8
from neuron_moe.quantize.mxfp4 import decode_mxfp4, encode_mxfp4
from tests.models.families import FAMILIES, reference_of, write_checkpoint

PROMPTS = [[5, 6, 7], [100, *range(30)], [42], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12]]
IDS = torch.arange(40)[None] * 7 % 290
FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")  # beside routed experts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("deepseek_v4")
    write_checkpoint(FAMILIES["deepseek_v4"].config(), made, seed=4)
    return made


@pytest.fixture(scope="module")
def published(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same under published names, with a layer that predicts further tokens."""
    made, model = tmp_path_factory.mktemp("published"), load_model(folder)
    names = weight_map(model.config)  # type: ignore[arg-type]
    save_checkpoint(unique_parameters(model), names, made, variant="published")
    (made / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(made / "model.safetensors")
    layer = {name: kept for name, kept in tensors.items() if name.startswith("layers.1.")}
    more = {f"mtp.0.{name.removeprefix('layers.1.')}": kept for name, kept in layer.items()}
    more |= {f"mtp.0.{name}.weight": torch.ones(64) for name in ("enorm", "hnorm", "norm")}
    more |= {f"mtp.0.{name}_proj.weight": torch.ones(64, 64) for name in "eh"}
    more |= {f"mtp.0.{name}": tensors[name].clone() for name in tensors if "hc_head" in name}
    save_file(tensors | {name: kept.clone() for name, kept in more.items()}, _file(made))
    return made


def _file(folder: Path) -> Path:
    return folder / "model.safetensors"


@torch.inference_mode()
def logits_of(folder: Path) -> Tensor:
    logits: Tensor = load_model(folder, dtype=torch.float32)(IDS)
    return logits


def test_transformers_reads_the_names_that_are_published(folder: Path, published: Path) -> None:
    expected, again = reference_of(folder).state_dict(), reference_of(published).state_dict()
    for name, tensor in expected.items():
        assert torch.equal(tensor, again[name]), name
    assert torch.equal(logits_of(folder), logits_of(published))


def test_the_published_number_formats_are_read(published: Path, tmp_path: Path) -> None:
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(_file(published)).items():
        beside = name.removesuffix("weight") + "scale"
        if ".experts." in name:
            blocks, scales = encode_mxfp4(tensor)
            stored[name] = blocks.flatten(-2).view(torch.int8)
            stored[beside] = scales.view(torch.float8_e8m0fnu)
            plain[name] = decode_mxfp4(blocks, scales)
        elif name.endswith(tuple(f"{each}.weight" for each in FP8)) and "compressor" not in name:
            made = quantize_fp8(tensor, E4M3_OCP, "blockwise_symmetric", power_of_two=True)
            stored |= {name: made.codes, beside: made.scale.to(torch.float8_e8m0fnu)}
            plain[name] = dequantize_fp8(made, torch.float32)
        else:
            stored[name] = plain[name] = tensor
    config = json.loads((published / "config.json").read_text())
    config |= {"expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}}
    config["quantization_config"] |= {"scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    for where, tensors in (("stored", stored), ("plain", plain)):
        (tmp_path / where).mkdir()
        save_file(tensors, _file(tmp_path / where))
        (tmp_path / where / "config.json").write_text(json.dumps(config))
    assert sum(tensor.dtype.itemsize == 1 for tensor in stored.values()) > 100
    assert torch.equal(logits_of(tmp_path / "stored"), logits_of(tmp_path / "plain"))


@pytest.mark.parametrize("chunk", [1, 3, 5, 17])
@torch.inference_mode()
def test_padding_and_chunks_change_nothing(folder: Path, chunk: int) -> None:
    model = load_model(folder, dtype=torch.float32)
    assert isinstance(model, DecoderModel)
    ids_US, real_US = pad_left(PROMPTS, 0)
    cache = model.new_cache(len(PROMPTS), ids_US.shape[1] + 3)
    starts = range(0, ids_US.shape[1], chunk)
    parts = [
        model(ids_US[:, s : s + chunk], real_US=real_US[:, s : s + chunk], cache=cache)
        for s in starts
    ]
    logits_USV = torch.cat(parts, dim=1)
    for row, prompt in enumerate(PROMPTS):
        alone = model(torch.tensor([prompt]))[0]
        found = logits_USV[row][real_US[row]]
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4 * float(alone.abs().max()))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_streams_are_mixed_as_transformers_mixes_them(count: int) -> None:
    torch.manual_seed(count)
    values = {"hc_mult": count, "hc_sinkhorn_iters": 3, "hc_eps": 1e-2}
    config = theirs.DeepseekV4Config(**FAMILIES["deepseek_v4"].config() | values)
    spec = StreamSpec(hidden_size=64, num_streams=count, iterations=3, eps=1e-2, norm_eps=1e-6)
    connection, head = theirs.DeepseekV4HyperConnection(config), theirs.DeepseekV4HyperHead(config)
    ours, our_head = HyperConnection(spec), StreamHead(spec)
    for module in (connection, head):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(connection.state_dict())
    our_head.load_state_dict({k.removeprefix("hc_"): v for k, v in head.state_dict().items()})
    streams_USNH, block = torch.randn(2, 5, count, 64), torch.nn.Linear(64, 64)
    with torch.no_grad():
        post, comb, collapsed = connection(streams_USNH)
        expected = post.unsqueeze(-1) * block(collapsed).unsqueeze(-2) + comb.mT @ streams_USNH
        torch.testing.assert_close(ours(streams_USNH, block), expected)
        torch.testing.assert_close(our_head(streams_USNH), head(streams_USNH))


def test_a_table_of_experts_must_be_whole_numbers(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(_file(folder))
    name = "model.layers.0.ffn.gate.tid2eid"
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors | {name: tensors[name].int()}, _file(tmp_path))
    assert torch.equal(logits_of(tmp_path), logits_of(folder))
    save_file(tensors | {name: tensors[name].float()}, _file(tmp_path))
    with pytest.raises(ValueError, match=r"tid2eid: dtype torch\.float32 must be int32 or int64"):
        load_model(tmp_path)


def test_entries_count_as_memory_and_time() -> None:
    values = load_config("deepseek_v4_flash")
    config = DeepseekV4Config.from_hf(values)
    with torch.device("meta"):
        model = Model(config)
    # A key a layer, and of 21 layers an entry of 512 and one of 128 for 4 tokens, of 20 for 128.
    assert cache_bytes_per_token(model, Spread(), 2) == 2 * (43 * 512 + 21 * (128 + 32) + 20 * 4)
    sparse, heavy = (model.layers[layer].self_attn for layer in (2, 3))
    assert (sparse.entries(1024), sparse.entries(8192)) == ((256, 0), (512, 2048))
    assert (heavy.entries(8192), model.layers[0].self_attn.entries(8192)) == ((64, 0), (0, 0))
    machine = Machine.build(instance("trn2.48xlarge"))
    times = []
    for context in (1024, 65536):
        work = StepWork(phase="decode", sequences=4, new_tokens=1, context=context)
        parts = dense_times(model, config, Spread(tp=4, ep=16), machine, work).parts
        times.append([part.us for part in parts if part.name == "attention"])
    assert sum(short < long for short, long in zip(*times, strict=True)) == 2


def test_a_plan_is_that_of_a_layer_whose_router_scores() -> None:
    layer = RankLayer(load_config("deepseek_v4_flash"), "v4", tp=8, ep=8, backend="nki")
    assert layer.plan("decode", 16).decision.kernel == "nki.decode_layer"


SIZES: dict[str, Any] = {"hidden_size": 8, "num_streams": 2, "iterations": 1, "norm_eps": 1e-6}


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_streams": 0}, "num_streams=0"), ({"eps": -1.0}, "eps=-1.0"), ({"iterations": 0}, "it")],
)
def test_streams_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StreamSpec(**{**SIZES, "eps": 1e-6, **changes})

"""The loader: model files found by name, checkpoints read or refused as a whole."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from neuron_moe.checkpoint import open_checkpoint, save_checkpoint, unique_parameters
from neuron_moe.models import gpt_oss
from neuron_moe.models.loader import find_model_file, load_model, model_types, read_config


@pytest.fixture
def checkpoint(checkpoint_of, tmp_path) -> Path:
    """A checkpoint of the test's own, to be spoilt."""
    return Path(shutil.copytree(checkpoint_of(), tmp_path / "checkpoint"))


def assert_same(model: nn.Module, other: nn.Module) -> None:
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].to(tensor.dtype)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_parameters_have_the_dtype_asked_for_and_the_router_float32(checkpoint_of, dtype):
    model = load_model(checkpoint_of(), dtype=dtype)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {d for name, d in dtypes.items() if ".router." in name} == {torch.float32}
    assert {d for name, d in dtypes.items() if ".router." not in name} == {dtype}


@pytest.mark.parametrize("variant", ["mxfp4", "bf16"])
def test_a_model_saved_again_has_the_very_tensors_of_its_checkpoint(
    checkpoint_of, tmp_path, variant
):
    folder = checkpoint_of(expert_format=variant)
    model = load_model(folder)
    weight_map = gpt_oss.weight_map(model.config)
    save_checkpoint(
        unique_parameters(model), weight_map, tmp_path, variant=variant, max_shard_mib=1
    )
    before, after = open_checkpoint(folder), open_checkpoint(tmp_path)
    assert {name: (info.shape, info.dtype) for name, info in before.tensors.items()} == {
        name: (info.shape, info.dtype) for name, info in after.tensors.items()
    }
    for name in before.tensors:
        if not name.endswith(("_blocks", "_scales")):
            assert torch.equal(before.read(name), after.read(name)), name
    shutil.copy(folder / "config.json", tmp_path)
    assert_same(load_model(tmp_path), model)  # codes may differ where their values do not


def test_both_storage_forms_of_the_same_values_load_alike(checkpoint_of, tmp_path):
    model = load_model(checkpoint_of())
    save_checkpoint(
        unique_parameters(model), gpt_oss.weight_map(model.config), tmp_path, variant="bf16"
    )
    shutil.copy(checkpoint_of() / "config.json", tmp_path)
    assert_same(load_model(tmp_path), model)


def test_transformers_reads_what_we_save(checkpoint_of, reference_of, tmp_path):
    model = load_model(checkpoint_of(), dtype=torch.float32)
    weight_map = gpt_oss.weight_map(model.config)
    save_checkpoint(
        unique_parameters(model), weight_map, tmp_path, variant="mxfp4", max_shard_mib=1
    )
    shutil.copy(checkpoint_of() / "config.json", tmp_path)
    ours, theirs = reference_of(tmp_path), reference_of(checkpoint_of())
    assert_same(ours, theirs)


def test_progress_is_reported_up_to_the_total(checkpoint_of):
    reports = []
    model = load_model(checkpoint_of(), progress=lambda *report: reports.append(report))
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert reports[-1] == (total, total)


# What is refused before any weight is looked at


def test_an_unknown_option_of_the_model_is_refused(checkpoint_of):
    with pytest.raises(TypeError, match=r"'bakend'\. Did you mean 'backend'"):
        load_model(checkpoint_of(), bakend="torch")


def test_a_dtype_that_is_no_parameter_dtype_is_refused(checkpoint_of):
    with pytest.raises(
        ValueError, match=r"dtype=torch\.int8: must be torch\.bfloat16.*Use torch\.bfloat16"
    ):
        load_model(checkpoint_of(), dtype=torch.int8)


@pytest.mark.parametrize("model_type", ["GPT_OSS", "layers", None])
def test_a_model_type_without_a_file_is_refused(model_type):
    with pytest.raises(ValueError, match=rf"model_type={model_type!r}: must be one of .*gpt_oss"):
        find_model_file(model_type)


def test_a_file_may_read_several_model_types():
    assert find_model_file("llama4") is find_model_file("llama4_text")
    assert {"gpt_oss", "llama4", "llama4_text"} <= set(model_types())
    with pytest.raises(ValueError, match="Did you mean 'gpt_oss'"):
        find_model_file("gpt_os")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (None, FileNotFoundError, r"config\.json: must exist beside the weights.*Check the path"),
        ("{", ValueError, r"config\.json: must be JSON, but .*Download it again"),
        ("[]", ValueError, r"config\.json: must be a JSON object, not a list\. Download"),
    ],
    ids=["missing", "no-json", "no-object"],
)
def test_a_bad_config_file_is_refused(tmp_path, text, error, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=message):
        read_config(tmp_path)


def test_a_buffer_left_without_memory_is_refused(checkpoint_of, monkeypatch):
    class Forgetful(gpt_oss.Model):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            self.register_buffer("table", torch.arange(4), persistent=False)

    monkeypatch.setattr(gpt_oss, "Model", Forgetful)
    with pytest.raises(ValueError, match=r"table: still on the meta device.*device=.cpu."):
        load_model(checkpoint_of())


# Corrupted and foreign checkpoints

ROUTER = "model.layers.1.mlp.router.weight"  # [8, 64] bfloat16
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"  # [8, 64, 192] once decoded
BIAS, BLOCKS, SCALES = (GATE_UP + kind for kind in ("_bias", "_blocks", "_scales"))
Spoil = Callable[[Path], object]


def tensors(**changes: Callable[[torch.Tensor], torch.Tensor | None]) -> Spoil:
    """Change tensors, named as the constants above; what becomes None is dropped."""

    def spoil(directory: Path) -> None:
        values: dict[str, torch.Tensor | None] = load_file(directory / "model.safetensors")
        for constant, change in changes.items():
            name = globals()[constant]
            values[name] = change(values[name])
        kept = {name: value.contiguous() for name, value in values.items() if value is not None}
        save_file(kept, directory / "model.safetensors")

    return spoil


def add(name: str, value: torch.Tensor) -> Spoil:
    """Add a tensor."""
    file = "model.safetensors"
    return lambda d: save_file({**load_file(d / file), name: value}, d / file)


def put(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Set one element."""
    return lambda t: t.index_put([torch.tensor(0)] * t.ndim, torch.tensor(value, dtype=t.dtype))


def drop(_: torch.Tensor) -> None:
    """Drop a tensor."""


# What is done to a good checkpoint; what the message must say: the value, the rule, the way out.
# Damages of files, headers and the index: test_damages.py.
CORRUPTIONS = {
    "pickle-only": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        [r"must hold model\.safetensors or", r"pytorch_model\.bin is a pickle", "convert"],
    ),
    "gguf-only": (
        lambda d: (d / "model.safetensors").rename(d / "model.gguf"),
        [r"must hold model\.safetensors or", r"model\.gguf is llama\.cpp's", "Take the model"],
    ),
    "no-weights": (
        lambda d: (d / "model.safetensors").unlink(),
        [r"must hold model\.safetensors or", "Check the path"],
    ),
    "nan": (
        tensors(ROUTER=put(float("nan"))),
        [rf"{ROUTER} in .* holds 1 NaN or infinite", "must be finite", "download it again"],
    ),
    "infinity": (
        tensors(ROUTER=lambda t: put(float("-inf"))(t.float())),
        [rf"{ROUTER} in .* holds 1 NaN or infinite", "must be finite", "download it again"],
    ),
    "scale-nan": (
        tensors(SCALES=put(255)),
        [rf"{SCALES} holds 1 scales of 255", "must be finite", "download it again"],
    ),
    "scale-overflow": (
        tensors(SCALES=put(254), BLOCKS=lambda t: t.fill_(0x77)),
        [rf"{SCALES} holds scales so large", "must be finite", "download it again"],
    ),
    "missing-key": (
        tensors(ROUTER=drop),
        [
            "1 problem; every tensor must be used and every parameter filled",
            rf"missing: {ROUTER} \(it fills layers\.1\.moe\.router\.linear_router\.weight\)",
            r"Check that config\.json belongs to these weights",
        ],
    ),
    "blocks-without-scales": (
        tensors(SCALES=drop),
        ["1 problem", rf"missing: {SCALES}", r"Check that config\.json"],
    ),
    "extra-key": (
        add("lm_head.scale", torch.ones(2)),
        [r"extra: lm_head\.scale \(no rule uses it\)", "must be used", r"Check that config\.json"],
    ),
    "extra-layer": (
        add("model.layers.2.mlp.router.bias", torch.ones(8)),
        [r"extra: .*layers\.2.* \(layer must be below 2\)", r"Check that config\.json"],
    ),
    "misspelt-key": (
        lambda d: [tensors(ROUTER=drop)(d), add(ROUTER + "s", torch.ones(8, 64))(d)],
        ["2 problems", rf"missing: {ROUTER} ", rf"extra: {ROUTER}s ", r"Check that config\.json"],
    ),
    "two-storage-forms": (
        add(GATE_UP, torch.ones(8, 64, 192)),
        [r"gate_up_proj\.weight: the checkpoint holds it twice, as 'mxfp4' and 'bf16'; keep one"],
    ),
    "wrong-shape": (
        tensors(ROUTER=lambda t: t[:, :-1]),
        [rf"shape: {ROUTER}: gives .* \[8, 63\], must be \[8, 64\]", r"Check that config\.json"],
    ),
    "wrong-groups": (
        tensors(BLOCKS=lambda t: torch.cat((t, t), dim=2)),
        [rf"{BLOCKS}, {SCALES}: scales \[8, 192, 2\]: must be \[8, 192, 4\]", "same weight"],
    ),
    "wrong-expert-count": (
        tensors(BLOCKS=lambda t: t[:7], SCALES=lambda t: t[:7]),
        [r"gives .* \[7, 64, 192\], must be \[8, 64, 192\]", r"Check that config\.json"],
    ),
    "too-few-axes": (
        tensors(BIAS=lambda t: t[0, 0]),
        [rf"{BIAS} \[\]: must have at least 1 axes", "Check that the tensor is what"],
    ),
    "odd-gate-up": (
        tensors(BIAS=lambda t: t[:, 1:]),
        [rf"{BIAS} \[8, 191\]: the last axis must be even", r"Check intermediate_size in config"],
    ),
    "decoded-blocks": (
        tensors(BLOCKS=lambda t: t.bfloat16()),
        [rf"{BLOCKS}: dtype torch\.bfloat16 must be uint8 MXFP4 codes", "export them again"],
    ),
    "integer-weight": (
        tensors(ROUTER=lambda t: t.long()),
        [rf"{ROUTER}: dtype torch\.int64 must be bfloat16, float16 or float32", "convert"],
    ),
}


@pytest.mark.parametrize("case", CORRUPTIONS)
def test_a_corrupted_checkpoint_is_refused(checkpoint, case):
    spoil, sayings = CORRUPTIONS[case]
    spoil(checkpoint)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_model(checkpoint)
    for saying in sayings:
        caught.match(saying)


@given(place=st.integers(8, 4000), bit=st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_a_flipped_bit_in_the_header_is_refused_or_harmless(checkpoint_of, place, bit):
    intact = checkpoint_of() / "model.safetensors"
    data = bytearray(intact.read_bytes())
    assert int.from_bytes(data[:8], "little") > 4000
    data[place] ^= 1 << bit
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        file.write_bytes(data)
        shutil.copy(checkpoint_of() / "config.json", folder)
        try:
            model = load_model(folder)
        except ValueError as error:
            assert folder in str(error)  # noqa: PT017
        else:
            assert_same(model, load_model(checkpoint_of()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', r"the key 'a' stands there twice, as 1 and 2"),
        ('{"a": {"b": 1, "b": 1}}', r"the key 'b' stands there twice"),
        ('{"a": NaN}', r"NaN is no number of JSON"),
        ('{"a": -Infinity}', r"-Infinity is no number of JSON"),
        ('{"a": 1e400}', r"1e400 is larger than any number of 64 bits"),
    ],
)
def test_json_that_can_be_read_in_two_ways_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)

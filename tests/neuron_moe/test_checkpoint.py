"""Weight maps and checkpoints: transforms, strict reading, slices, export, memory."""

import doctest
import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import neuron_moe.checkpoint.transforms
import neuron_moe.checkpoint.weight_map
from neuron_moe.checkpoint import (
    Rule,
    WeightMap,
    chain,
    concat_gate_up,
    concat_mixed,
    deinterleave_gate_up,
    first_of,
    identity,
    load_weights,
    mxfp4,
    open_checkpoint,
    read_parameters,
    reader,
    save_checkpoint,
    split_rows,
    transpose,
    unique_parameters,
)
from neuron_moe.checkpoint.lazy import everything, from_tensor, pieces, take
from neuron_moe.checkpoint.reader import DTYPES, LFS_POINTER
from neuron_moe.checkpoint.transforms import invert_in_parts
from neuron_moe.quantize import decode_mxfp4, encode_mxfp4

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE, VOCABULARY = 2, 4, 64, 96, 9000


class Layer(nn.Module):
    """A router and experts, as small as they come."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, dtype=torch.float32)
        gate_up_shape, down_shape = (HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, *gate_up_shape, dtype=dtype))
        self.gate_up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INTERMEDIATE, dtype=dtype))
        self.down = nn.Parameter(torch.randn(EXPERTS, *down_shape, dtype=dtype))


class Net(nn.Module):
    """Embedding and layers; nothing that runs, only parameters."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN, dtype=dtype)
        self.layers = nn.ModuleList(Layer(dtype) for _ in range(LAYERS))


def net_map() -> WeightMap:
    """The map of Net: the layout of GPT-OSS, and one with a tensor per expert."""
    disk, ours = "model.layers.{layer}.mlp.", "layers.{layer}."
    expert = disk + "experts.{expert}."
    packed_gate_up = disk + "gate_up_blocks", disk + "gate_up_scales"
    packed_down = disk + "down_blocks", disk + "down_scales"
    split_gate_up = expert + "gate.weight", expert + "up.weight"
    return WeightMap(
        [
            Rule("model.embed.weight", "embed.weight"),
            Rule(disk + "router.weight", ours + "router.weight"),
            Rule(disk + "router.bias", ours + "router.bias"),
            Rule(disk + "gate_up_bias", ours + "gate_up_bias", deinterleave_gate_up),
            Rule(
                packed_gate_up,
                ours + "gate_up",
                chain(mxfp4, transpose, deinterleave_gate_up),
                variant="mxfp4",
            ),
            Rule(packed_down, ours + "down", chain(mxfp4, transpose), variant="mxfp4"),
            Rule(disk + "gate_up", ours + "gate_up", deinterleave_gate_up, variant="bf16"),
            Rule(disk + "down", ours + "down", variant="bf16"),
            Rule(
                split_gate_up, ours + "gate_up", chain(concat_gate_up, transpose), variant="split"
            ),
            Rule(expert + "down.weight", ours + "down", transpose, variant="split"),
        ],
        sizes={"layer": LAYERS, "expert": EXPERTS},
        ignored=["model.layers.{layer}.rotary.inv_freq"],
    )


def mxfp4_net(dtype: torch.dtype = torch.bfloat16) -> Net:
    """Return a Net whose experts are MXFP4 values, so that MXFP4 keeps them."""
    net = Net(dtype)
    for layer in net.layers:
        for weight in (layer.gate_up, layer.down):
            rounded = decode_mxfp4(*encode_mxfp4(weight.detach().transpose(1, 2)))
            weight.data = rounded.transpose(1, 2).to(dtype).contiguous()
        layer.router.to(torch.bfloat16).to(torch.float32)
    return net


def load_net(directory: Path, dtype: torch.dtype = torch.bfloat16, **options) -> Net:
    with torch.device("meta"):
        net = Net(dtype)
    load_weights(net, open_checkpoint(directory), net_map(), **options)
    return net


def save_net(net: Net, directory: Path, variant: str = "mxfp4", **options) -> list[Path]:
    return save_checkpoint(unique_parameters(net), net_map(), directory, variant=variant, **options)


def assert_same(net: nn.Module, other: nn.Module) -> None:
    ours, theirs = net.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(
    "module", [neuron_moe.checkpoint.transforms, neuron_moe.checkpoint.weight_map]
)
def test_examples_in_docstrings_are_true(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


# Transforms


@pytest.mark.parametrize("shape", [(4,), (4, 2, 3)])
def test_rows_that_fill_up_a_tensor_are_left_out_and_written_as_zeros(
    shape: tuple[int, ...],
) -> None:
    tensor = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    tensor[3] = 0
    assert torch.equal(first_of(3, 4)(tensor), tensor[:3])
    assert torch.equal(invert_in_parts(first_of(3, 4), tensor[:3])[0], tensor)
    with pytest.raises(ValueError, match=r"must have at least 5 rows"):
        first_of(5, 8)(tensor)


TRANSFORMS = {
    "identity": identity,
    "transpose": transpose,
    "deinterleave_gate_up": deinterleave_gate_up,
    "concat_gate_up": concat_gate_up,
    "concat_mixed": concat_mixed,
    "mxfp4": mxfp4,
    "mxfp4-transpose-deinterleave": chain(mxfp4, transpose, deinterleave_gate_up),
    "concat-transpose": chain(concat_gate_up, transpose),
    "transpose-transpose": chain(transpose, transpose),
    "split_rows": split_rows(2),
    "split_rows-concat-transpose": chain(split_rows(2), concat_gate_up, transpose),
}


def sources_of(name: str, experts: int, rows: int, groups: int) -> tuple[torch.Tensor, ...]:
    """Return sources in memory for a transform; rows are doubled, so that they pair up."""
    if name.startswith("mxfp4"):
        weight = torch.randn(experts, 2 * rows, 32 * groups)
        return encode_mxfp4(weight)
    count = TRANSFORMS[name].num_sources
    if name.startswith("split_rows"):
        return tuple(torch.randn(2 * rows, 2 * groups) for _ in range(count))
    return tuple(torch.randn(experts, 2 * rows, 2 * groups) for _ in range(count))


sizes = st.integers(1, 4)


@pytest.mark.parametrize("name", TRANSFORMS)
@given(experts=sizes, rows=sizes, groups=sizes)
@settings(max_examples=15, deadline=None)
def test_a_transform_runs_backward(name, experts, rows, groups):
    transform, sources = TRANSFORMS[name], sources_of(name, experts, rows, groups)
    back = transform.invert(transform(*sources))
    assert len(back) == transform.num_sources
    for source, again in zip(sources, back, strict=True):
        assert torch.equal(source, again)


@pytest.mark.parametrize("name", TRANSFORMS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_reading_a_part_equals_taking_it_from_the_whole(name, data):
    transform = TRANSFORMS[name]
    sources = sources_of(name, *(data.draw(sizes) for _ in range(3)))
    lazy = transform.apply(*map(from_tensor, sources))
    whole = transform(*sources)
    assert lazy.shape == tuple(whole.shape)
    selection = tuple(data.draw(indices_below(size)) for size in whole.shape)
    assert torch.equal(lazy.read(selection), take(whole, selection))


@st.composite
def indices_below(draw, size: int):
    """Draw a range or a tuple of indices, not empty."""
    if draw(st.booleans()):
        start = draw(st.integers(0, size - 1))
        return range(start, draw(st.integers(start + 1, size)))
    return tuple(draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6)))


@given(shape=st.lists(st.integers(0, 70), min_size=0, max_size=3), max_bytes=st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_pieces_cover_a_tensor_exactly_once(shape, max_bytes):
    count = torch.zeros(shape, dtype=torch.int32)
    source = torch.arange(count.numel()).view(shape)
    for piece, place in pieces(everything(shape), 2, max_bytes):
        take(count, place).add_(1)
        size = 2 * math.prod(map(len, piece))
        assert size <= max(max_bytes, 2 * shape[-1] if shape else 2)
        assert torch.equal(take(source, piece), take(source, place))
    assert (count == 1).all()


def test_only_one_step_of_a_chain_takes_several_sources():
    with pytest.raises(ValueError, match="concat and mxfp4 take several sources: only one"):
        chain(concat_gate_up, mxfp4)


# Files


@pytest.fixture
def net() -> Net:
    return mxfp4_net()


def test_every_dtype_is_read_as_the_formats_own_library_reads_it(tmp_path):
    tensors = {name: torch.arange(24).view(2, 3, 4).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    assert checkpoint.tensors.keys() == expected.keys()
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in expected.values())
    for name, tensor in expected.items():
        ours = checkpoint.read(name)
        assert ours.dtype == tensor.dtype, name
        assert ours.shape == tensor.shape, name
        assert torch.equal(ours.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


def test_a_single_file_can_be_opened_by_its_own_name(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "part.safetensors")
    assert open_checkpoint(tmp_path / "part.safetensors").read("a").tolist() == [1, 1]


def test_a_pointer_of_git_lfs_is_told_from_a_cut_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(LFS_POINTER + b".github.com/spec/v1\nsize 9\n")
    with pytest.raises(ValueError, match=r"name a file of Git LFS .* git lfs pull"):
        open_checkpoint(tmp_path)


def test_a_name_that_is_not_there_is_refused(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"b: .* holds no such tensor\. Look among"):
        open_checkpoint(tmp_path).read("b")


@pytest.mark.parametrize("variant", ["mxfp4", "bf16", "split"])
@pytest.mark.parametrize("max_shard_mib", [1, 4096], ids=["sharded", "single"])
def test_what_is_saved_is_loaded_again(tmp_path, net, variant, max_shard_mib):
    files = save_net(net, tmp_path, variant=variant, max_shard_mib=max_shard_mib)
    assert sorted(files) == sorted(tmp_path.iterdir())
    assert (len(files) > 2) == (max_shard_mib == 1)
    assert_same(load_net(tmp_path), net)
    widened = load_net(tmp_path, torch.float32)
    assert torch.equal(widened.layers[1].gate_up, net.layers[1].gate_up.float())


def test_shards_stay_below_their_limit_and_the_index_counts_their_bytes(tmp_path, net):
    files = save_net(net, tmp_path, variant="bf16", max_shard_mib=1)
    index = json.loads(files[-1].read_text())
    sizes = {file.name: open_checkpoint(file).nbytes for file in files[:-1]}
    assert sum(sizes.values()) == index["metadata"]["total_size"]
    oversized = [name for name, size in sizes.items() if size > 1 << 20]
    assert len(oversized) == 1  # the embedding alone is larger than a shard
    assert list(open_checkpoint(tmp_path / oversized[0]).tensors) == ["model.embed.weight"]


def test_experts_that_are_views_of_one_tensor_are_saved_each_on_its_own(tmp_path):
    weight_map = WeightMap([Rule("experts.{expert}", "weight")], sizes={"expert": 3})
    weight = torch.randn(3, 40, 50, dtype=torch.bfloat16)
    (file,) = save_checkpoint({"weight": weight}, weight_map, tmp_path)
    assert file.stat().st_size < weight.nbytes + 1000  # not the whole tensor for each of them
    for name, tensor in load_file(file).items():
        assert torch.equal(tensor, weight[int(name[-1])])
    assert torch.equal(
        read_parameters(open_checkpoint(tmp_path), weight_map, {"weight": weight})["weight"], weight
    )


def test_saving_as_float32_keeps_float32(tmp_path):
    net = Net(torch.float32)
    save_net(net, tmp_path, variant="bf16", dtype=torch.float32)
    assert_same(load_net(tmp_path, torch.float32), net)


def test_a_failed_save_leaves_no_file(tmp_path, net):
    net.layers[1].down.data[0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down .*NaN or infinity.*Repair"):
        save_net(net, tmp_path, variant="bf16", max_shard_mib=1)
    assert list(tmp_path.iterdir()) == []


def test_of_two_saves_into_one_directory_one_is_told(tmp_path, net):
    class Interrupted(WeightMap):
        def export(self, parameters, variant=None):
            for number, pair in enumerate(super().export(parameters, variant)):
                if number == 3:
                    with pytest.raises(ValueError, match=r"another save or conversion is writing"):
                        save_checkpoint(other, net_map(), tmp_path, variant="bf16")
                yield pair

    other = {name: torch.zeros_like(tensor) for name, tensor in unique_parameters(net).items()}
    plain = net_map()
    weight_map = Interrupted(plain.rules, plain.sizes, plain.ignored)
    files = save_checkpoint(
        unique_parameters(net), weight_map, tmp_path, variant="bf16", max_shard_mib=1
    )
    assert sorted(files) == sorted(tmp_path.iterdir())
    assert_same(load_net(tmp_path), net)


def test_a_save_that_fails_while_it_names_its_files_leaves_none(tmp_path, net, monkeypatch):
    def fail(self: Path, target: Path) -> Path:
        if target.name.startswith("model-00002"):
            raise OSError("no space")
        return rename(self, target)

    rename = Path.rename
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no space"):
        save_net(net, tmp_path, variant="bf16", max_shard_mib=1)
    assert list(tmp_path.iterdir()) == []


SAVE_REFUSALS = {
    "variant-unknown": (
        {"variant": "mxpf4"},
        r"variant='mxpf4': must be one of mxfp4, bf16, split.*Did you mean 'mxfp4'",
    ),
    "variant-needed": (
        {},
        r"variant=None: must be one of mxfp4, bf16, split.*Pass variant='mxfp4'",
    ),
    "shard-size": (
        {"variant": "bf16", "max_shard_mib": 0},
        r"max_shard_mib=0: must be a positive int",
    ),
    "dtype": (
        {"variant": "bf16", "dtype": torch.int8},
        r"dtype=torch\.int8: must be bfloat16 or float32",
    ),
}


@pytest.mark.parametrize("case", SAVE_REFUSALS)
def test_saving_refuses(tmp_path, net, case):
    options, message = SAVE_REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        save_checkpoint(unique_parameters(net), net_map(), tmp_path, **options)


def test_saving_beside_other_weights_is_refused(tmp_path, net):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"must not hold weights yet, .*Choose another directory"):
        save_net(net, tmp_path, variant="bf16")


def test_saving_a_model_the_map_was_not_written_for_is_refused(tmp_path, net):
    parameters = unique_parameters(net) | {"head.weight": torch.ones(2)}
    with pytest.raises(ValueError, match=r"head\.weight: must be both a parameter and the target"):
        save_checkpoint(parameters, net_map(), tmp_path, variant="bf16")


# Strictness; every kind of corruption of a GPT-OSS checkpoint is in tests/models/test_loader.py


def rewrite(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Change tensors of a single-file checkpoint, or drop those that become None."""
    tensors = {**load_file(directory / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors")


LAST = "model.layers.1.mlp.down_scales"


@pytest.mark.parametrize("problem", ["missing", "nan"])
def test_a_module_stays_untouched_when_its_last_tensor_is_bad(tmp_path, net, problem):
    save_net(net, tmp_path)
    bad = load_file(tmp_path / "model.safetensors")[LAST]
    bad[-1, -1, -1] = 255
    rewrite(tmp_path, {LAST: bad if problem == "nan" else None})
    target = Net()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(ValueError, match=LAST):
        load_weights(target, open_checkpoint(tmp_path), net_map())
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_all_problems_are_told_at_once_and_long_lists_are_cut(tmp_path, net):
    save_net(net, tmp_path)
    extra = {f"extra.{number}": torch.ones(1) for number in range(20)}
    rewrite(tmp_path, {LAST: None, **extra})
    with pytest.raises(ValueError, match="21 problems") as caught:
        load_net(tmp_path)
    assert str(caught.value).count("extra: extra.") == 8
    caught.match("extra: and 12 more")
    caught.match(r"missing: model\.layers\.1")


def test_ignored_keys_are_not_extra(tmp_path, net):
    save_net(net, tmp_path)
    rewrite(tmp_path, {"model.layers.1.rotary.inv_freq": torch.ones(2)})
    assert_same(load_net(tmp_path), net)


def test_stacked_parts_must_agree(tmp_path, net):
    save_net(net, tmp_path, variant="split")
    rewrite(tmp_path, {"model.layers.0.mlp.experts.2.down.weight": torch.ones(HIDDEN, 95)})
    with pytest.raises(
        ValueError, match=r"experts\.2\.down\.weight: \[64, 95\] .*must be \[64, 96\]"
    ):
        load_net(tmp_path)


def test_values_that_overflow_a_narrower_parameter_are_refused(tmp_path, net):
    net.layers[0].gate_up_bias.data[0, 0] = 1e30
    save_net(net, tmp_path, variant="bf16")
    with pytest.raises(ValueError, match=r"gate_up_bias: values exceed 65504.*torch\.float32"):
        load_net(tmp_path, torch.float16)


# Maps

A, B = "a.{layer}", "b.{layer}"
MAP_REFUSALS = {
    "sources": (
        lambda: WeightMap([Rule((A, B), "x.{layer}")], {"layer": 2}),
        r"rule for x\.\{layer\}: 2 sources, but identity takes 1\. Give it",
    ),
    "size-unknown": (
        lambda: WeightMap([Rule(A, "x.{layer}")]),
        r"pattern a\.\{layer\}: the size of \{layer\} must be in sizes.*Add sizes=",
    ),
    "size-zero": (
        lambda: WeightMap([Rule(A, "x.{layer}")], {"layer": 0}),
        r"sizes\['layer'\]=0: must be a positive int",
    ),
    "placeholders-differ": (
        lambda: WeightMap([Rule((A, "b.{expert}"), "x", mxfp4)], {"layer": 2, "expert": 2}),
        r"all sources must have the placeholders of a\.\{layer\}.*Split the rule",
    ),
    "target-placeholder": (
        lambda: WeightMap([Rule("a", "x.{layer}")], {"layer": 2}),
        r"its placeholders must be those of a, .*Correct the target",
    ),
    "target-twice": (
        lambda: WeightMap([Rule("a", "x"), Rule("b", "x")]),
        r"rule for x: 2 rules fill it with variant='', must be one.*Give each",
    ),
}


@pytest.mark.parametrize("case", MAP_REFUSALS)
def test_a_map_that_cannot_work_is_refused(case):
    build, message = MAP_REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        build()


def test_parameters_and_rules_must_match(tmp_path):
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "model.safetensors")
    weight_map = WeightMap([Rule("a", "x"), Rule("b", "y")])
    with pytest.raises(ValueError, match="2 problems") as caught:
        read_parameters(
            open_checkpoint(tmp_path), weight_map, {"x": torch.ones(1), "z": torch.ones(1)}
        )
    caught.match("y: a rule fills it, but the model has no such parameter")
    caught.match("z: the model has it, but no rule fills it")


def test_tied_parameters_stay_one(tmp_path):
    def tied() -> nn.Module:
        module = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        module["head"].weight = module["embed"].weight
        return module

    weight_map = WeightMap([Rule("model.embed", "embed.weight")])
    module = tied()
    save_checkpoint(unique_parameters(module), weight_map, tmp_path, dtype=torch.float32)
    with torch.device("meta"):
        loaded = tied()
    load_weights(loaded, open_checkpoint(tmp_path), weight_map)
    assert loaded["head"].weight is loaded["embed"].weight
    assert torch.equal(loaded["head"].weight, module["head"].weight)


# Slices, progress, memory


@pytest.mark.parametrize("variant", ["mxfp4", "bf16", "split"])
@pytest.mark.parametrize("rank", range(3))
def test_a_rank_reads_exactly_its_slice(tmp_path, net, variant, rank):
    size = INTERMEDIATE // 3  # 32 is a group; 2 x 32 is across groups of the other layout
    mine = range(rank * size, (rank + 1) * size)
    experts = (3, 0)  # a placement of experts, in its own order
    gate_and_up = (*mine, *(INTERMEDIATE + column for column in mine))

    def shard(name, shape):
        whole = everything(shape)
        if name.endswith("gate_up"):
            return (experts, whole[1], gate_and_up)
        if name.endswith("gate_up_bias"):
            return (experts, gate_and_up)
        return (experts, mine, whole[2]) if name.endswith("down") else whole

    save_net(net, tmp_path, variant=variant)
    expected = {
        name: take(tensor.detach(), shard(name, tensor.shape))
        for name, tensor in unique_parameters(net).items()
    }
    read = read_parameters(open_checkpoint(tmp_path), net_map(), expected, shard=shard)
    for name, tensor in expected.items():
        assert torch.equal(read[name], tensor), name


OF_THE_WRONG_SIZE = r"gives layers\.0\.down \[4, 96, 64\], .* rank holds \[2, 96, 64\], must be"
OUTSIDE = r"layers\.0\.down: the shard must be within \[4, 96, 64\]"


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        pytest.param((range(2), range(96), range(64)), OF_THE_WRONG_SIZE, id="part"),
        pytest.param((range(2, 5), range(96), range(64)), OUTSIDE, id="beyond"),
        pytest.param(((-1,), range(96), range(64)), OUTSIDE, id="negative"),
        pytest.param((range(4), range(96)), OUTSIDE, id="too-few-axes"),
    ],
)
def test_a_slice_that_is_not_this_ranks_is_refused(tmp_path, net, selection, message):
    save_net(net, tmp_path)

    def shard(name, shape):
        return selection if name == "layers.0.down" else everything(shape)

    with pytest.raises(ValueError, match=message):
        load_net(tmp_path, shard=shard)


@pytest.mark.parametrize("piece_bytes", [1000, 100_000])
def test_pieces_make_no_difference_and_progress_reaches_the_total(tmp_path, net, piece_bytes):
    save_net(net, tmp_path)
    reports = []
    read = read_parameters(
        open_checkpoint(tmp_path),
        net_map(),
        unique_parameters(net),
        progress=lambda done, total: reports.append((done, total)),
        piece_bytes=piece_bytes,
    )
    for name, tensor in unique_parameters(net).items():
        assert torch.equal(read[name], tensor), name
    total = sum(tensor.nbytes for tensor in unique_parameters(net).values())
    assert {report[1] for report in reports} == {total}
    done = [report[0] for report in reports]
    assert done == sorted(done)
    assert done[-1] == total


MEMORY_PROBE = """
    import sys
    import torch
    from neuron_moe.checkpoint import *

    def status(field):
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

    torch.set_num_threads(1)
    weight_map = WeightMap([
        Rule("embed", "embed"),
        Rule(("blocks", "scales"), "experts", chain(mxfp4, transpose, deinterleave_gate_up)),
    ])
    parameters = {
        "embed": torch.empty(48 << 10, 1024, dtype=torch.bfloat16, device="meta"),
        "experts": torch.empty(8, 1024, 4096, dtype=torch.bfloat16, device="meta"),
    }
    checkpoint = open_checkpoint(sys.argv[1])
    before = status("VmRSS")
    read = read_parameters(checkpoint, weight_map, parameters, piece_bytes=8 << 20)
    print(status("VmHWM") - before, sum(tensor.nbytes for tensor in read.values()))
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    before = status("VmRSS")
    save_checkpoint(read, weight_map, sys.argv[1] + "/again")
    print(status("VmHWM") - before, open_checkpoint(sys.argv[1] + "/again").nbytes)
"""


def kernel_tells_peak_memory() -> bool:
    status, clear_refs = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    return clear_refs.exists() and "VmHWM" in status.read_text()


@pytest.mark.skipif(not kernel_tells_peak_memory(), reason="needs VmHWM in /proc, as Linux has")
def test_loading_and_saving_need_little_memory_beside_the_parameters(tmp_path):
    embed = torch.zeros(48 << 10, 1024, dtype=torch.bfloat16)  # 96 MiB
    blocks = torch.full((8, 4096, 32, 16), 0x21, dtype=torch.uint8)  # 32 M values
    scales = torch.full((8, 4096, 32), 120, dtype=torch.uint8)
    save_file({"embed": embed, "blocks": blocks, "scales": scales}, tmp_path / "model.safetensors")
    probe = [sys.executable, "-c", textwrap.dedent(MEMORY_PROBE), str(tmp_path)]
    run = subprocess.run(probe, capture_output=True, text=True, check=True, timeout=120)
    load_bytes, parameter_bytes, save_bytes, file_bytes = map(int, run.stdout.split())
    assert parameter_bytes == 160 << 20
    # A few pieces of 8 MiB; a second copy of the embedding alone would be 96 MiB.
    assert load_bytes < parameter_bytes + (48 << 20)
    # The embedding goes to the file as it is; the codes of the experts take 17 MiB, and the
    # temporaries of one expert of 8 MiB come on top.
    assert file_bytes == (96 << 20) + (17 << 20)
    assert save_bytes < (17 << 20) + (64 << 20)


PARTS = {
    "three-axes": (torch.bfloat16, (7, 33, 50)),
    "wide-rows": (torch.float32, (40, 9000)),
    "vector": (torch.float16, (11,)),
    "scalar": (torch.float32, ()),
    "bytes": (torch.uint8, (3, 4, 5, 6)),
}


@pytest.mark.parametrize("case", PARTS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_part_of_a_file_is_read_as_of_the_whole(case, data, tmp_path_factory):
    dtype, shape = PARTS[case]
    file = tmp_path_factory.getbasetemp() / f"{case}.safetensors"
    whole = torch.arange(math.prod(shape)).remainder(251).to(dtype).view(shape)
    if not file.exists():
        save_file({"before": torch.zeros(3), "x": whole}, file)
    selection = tuple(
        data.draw(
            st.tuples(st.integers(0, size - 1), st.integers(1, size)).map(
                lambda ends: range(min(ends[0], ends[1] - 1), ends[1])
            )
            | st.permutations(range(size)).map(lambda order: tuple(order[: 1 + len(order) // 2]))
        )
        for size in shape
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_MOST_AT_ONCE", 500)  # several blocks of rows
        part = open_checkpoint(file).lazy("x").read(selection)
    assert torch.equal(part, take(whole, selection))


def test_a_file_that_was_cut_since_it_was_opened_is_named(tmp_path):
    file = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(4000)}, file)
    opened = open_checkpoint(file)
    with file.open("r+b") as stream:
        stream.truncate(1000)
    with pytest.raises(ValueError, match=r"x\.safetensors: ends at byte 1000, but was longer"):
        opened.read("x")

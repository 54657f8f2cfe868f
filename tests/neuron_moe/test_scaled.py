"""Codes and the scales beside them: read as published, stored as they are read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from neuron_moe.checkpoint import LazyTensor, open_checkpoint
from neuron_moe.checkpoint.encodings import ENCODINGS
from neuron_moe.checkpoint.lazy import runs, stack
from neuron_moe.quantize.mxfp4 import decode_mxfp4, encode_mxfp4

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAME = "layers.0.mlp.weight"
PARTS = [
    (range(200), range(300)),
    (range(100, 140), range(127, 129)),
    ((199, 3, 128), range(300)),
    (range(1), (299, 0, 130)),
]


def saved(folder: Path, **tensors: Tensor) -> LazyTensor:
    """Write tensors, named by what follows `weight`, and open the weight."""
    named = {NAME + suffix: tensor for suffix, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert list(checkpoint.tensors) == [NAME]
    return checkpoint.lazy(NAME)


def codes_of(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return (torch.randn(shape) * 60).to(dtype)


SCALES = {
    "blocks": ("_scale_inv", (2, 3), lambda row, column: (row // 128, column // 128)),
    "rows": ("_scale", (200, 1), lambda row, column: (row, 0)),
    "parts of rows": ("_scale", (200, 6), lambda row, column: (row, column // 50)),
    "columns": ("_scale", (1, 300), lambda row, column: (0, column)),
    "one": ("_scale", (1,), lambda row, column: (0,)),
    "scalar": ("_scale", (), lambda row, column: ()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", SCALES)
def test_every_element_is_its_code_times_its_scale(
    tmp_path: Path, form: str, dtype: torch.dtype
) -> None:
    suffix, shape, where = SCALES[form]
    codes, scale = codes_of(200, 300), (torch.rand(shape) + 0.5).to(dtype)
    weight = saved(tmp_path, **{"": codes, suffix: scale})
    assert weight.dtype == torch.float32
    for rows, columns in PARTS:
        found = weight.read((rows, columns))
        for i, row in enumerate(rows):
            for j in range(0, len(columns), 37):
                expected = codes[row, columns[j]].float() * scale[where(row, columns[j])].float()
                assert found[i, j] == expected, (row, columns[j])


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float32], ids=str)
def test_scales_may_stand_where_the_weight_does(tmp_path: Path, dtype: torch.dtype) -> None:
    codes, scale = codes_of(200, 300), (2.0 ** torch.randint(-9, 9, (2, 3))).to(dtype)
    tensors = {NAME: codes, "layers.0.mlp.scale": scale}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == [NAME]
    spread = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = codes.float() * spread[:200, :300]
    for rows, columns in PARTS:
        found = checkpoint.lazy(NAME).read((rows, columns))
        assert torch.equal(found, expected[list(rows)][:, list(columns)])


def test_mxfp4_may_be_int8_with_e8m0_beside(tmp_path: Path) -> None:
    values = torch.randn(8, 96)
    blocks, scales = encode_mxfp4(values)
    packed = {NAME: blocks.flatten(-2).view(torch.int8)}
    packed |= {"layers.0.mlp.scale": scales.view(torch.float8_e8m0fnu)}
    save_file(packed, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == [NAME]
    expected = decode_mxfp4(blocks, scales)
    assert torch.equal(checkpoint.read(NAME), expected)
    found = checkpoint.lazy(NAME).read(((7, 2, 5), range(32, 96)))
    assert torch.equal(found, expected[[7, 2, 5], 32:])


def test_int4_of_compressed_tensors_is_eight_codes_to_a_word(tmp_path: Path) -> None:
    codes, scale = torch.randint(-8, 8, (6, 96)), torch.rand(6, 3).to(torch.bfloat16)
    words = [
        [
            sum((int(code) + 8) << 4 * place for place, code in enumerate(row[start : start + 8]))
            for start in range(0, 96, 8)
        ]
        for row in codes
    ]
    packed = torch.tensor(words).to(torch.uint32).view(torch.int32)
    tensors = {"_packed": packed, "_scale": scale, "_shape": torch.tensor([6, 96])}
    weight = saved(tmp_path, **tensors)
    expected = codes.float() * scale.float().repeat_interleave(32, 1)
    assert torch.equal(weight.read((range(6), range(96))), expected)
    found = weight.read(((5, 1), (70, 3, 9, 95)))
    assert torch.equal(found, expected[[5, 1]][:, [70, 3, 9, 95]])


def test_experts_in_one_tensor_have_scales_of_their_own(tmp_path: Path) -> None:
    codes, scale = codes_of(4, 6, 10), torch.rand(4, 1, 10)
    weight = saved(tmp_path, **{"": codes, "_scale": scale})
    found = weight.read(((3, 1), range(2, 5), range(10)))
    assert torch.equal(found, (codes.float() * scale)[[3, 1], 2:5])


@pytest.mark.parametrize("shape", [(6,), (6, 6)], ids=["row", "rows of experts"])
def test_scales_without_an_axis_for_columns_are_of_rows(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    codes, scale = codes_of(*shape, 6), torch.rand(shape)  # square: columns would fit, too
    weight = saved(tmp_path, **{"": codes, "_scale": scale})
    found = weight.read(((4, 1), *(range(6) for _ in shape)))
    assert torch.equal(found, (codes.float() * scale[..., None])[[4, 1]])


def test_scales_of_weights_that_are_not_codes_stay_tensors(tmp_path: Path) -> None:
    tensors = {NAME: torch.ones(2, 2), NAME + "_scale": torch.ones(2, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert set(open_checkpoint(tmp_path).tensors) == set(tensors)


def read_all(folder: Path, tensors: dict[str, Tensor]) -> None:
    weight = saved(folder, **tensors)
    weight.read(tuple(range(size) for size in weight.shape))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"": codes_of(200, 300), "_scale_inv": torch.ones(2, 2)}, r"be \[2, 3\], one for each bl"),
        ({"": codes_of(200, 300), "_scale": torch.ones(100, 1)}, r"_scale \[100, 1\]: must have"),
        ({"": codes_of(4, 4), "_scale": torch.ones(4, 1, dtype=torch.int32)}, "dtype torch.int32"),
        ({"": codes_of(4, 4), "_scale": torch.ones(4, 0)}, r"_scale \[4, 0\]: must have one value"),
        ({"": codes_of(4, 4), "_scale": torch.ones(4, 3)}, r"_scale \[4, 3\]: .* parts of a row"),
        ({"": codes_of(4, 4), "_scale": torch.full((4, 1), float("inf"))}, "4 NaN or infinite"),
        ({"": torch.full((4, 4), 448.0).to(E4M3), "_scale": torch.full((1,), 3e38)}, "so large"),
    ],
    ids=["grid", "rows", "dtype", "none", "parts", "infinite", "overflow"],
)
def test_scales_that_do_not_belong_to_their_codes_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_all(tmp_path, tensors)


def test_an_expert_whose_codes_lack_scales_is_named(tmp_path: Path) -> None:
    tensors = {f"experts.{expert}.weight": codes_of(4, 4) for expert in range(2)}
    tensors |= {"experts.0.weight_scale": torch.ones(4, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    parts = [checkpoint.lazy(f"experts.{expert}.weight") for expert in range(2)]
    with pytest.raises(ValueError, match=r"experts.1.weight: .*codes have scales beside them"):
        stack(parts)


@pytest.mark.parametrize("in_axis", [-1, -2])
@pytest.mark.parametrize("name", ENCODINGS)
def test_what_is_stored_has_the_shapes_that_were_promised(name: str, in_axis: int) -> None:
    encoding, values = ENCODINGS[name], torch.randn(3, 160, 288)
    if name == "mxfp4" and in_axis == -2:
        with pytest.raises(ValueError, match="MXFP4 needs a last axis of inputs"):
            encoding.shapes(NAME, (3, 160, 288), in_axis)
        return
    stored = encoding.encode(NAME, values, in_axis, None)
    promised = encoding.shapes(NAME, (3, 160, 288), in_axis)
    assert {key: (t.dtype, tuple(t.shape)) for key, t in stored.items()} == {
        key: (shape.dtype, shape.shape) for key, shape in promised.items()
    }
    error = (encoding.decode(NAME, stored, in_axis).float() - values).abs().max()
    assert error < {"bf16": 0.02, "mxfp4": 2.0}.get(name, 0.7)


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_reader_sees_what_was_stored(tmp_path: Path, name: str) -> None:
    encoding, values = ENCODINGS[name], torch.randn(160, 288)
    stored = encoding.encode(NAME, values, -1, None)
    weight = saved(
        tmp_path, **{key.removeprefix(NAME): t.contiguous() for key, t in stored.items()}
    )
    found = weight.read((range(160), range(288)))
    assert torch.equal(found.float(), encoding.decode(NAME, stored, -1).float())
    again = encoding.encode(NAME, found, -1, None)
    assert torch.equal(encoding.decode(NAME, again, -1).float(), found.float()) or name.startswith(
        "fp8_blocks"
    )


def test_codes_above_240_are_halved_and_their_scale_doubled() -> None:
    codes = torch.tensor([[448.0, -3.0, 0.5], [240.0, 1.0, -0.0625]]).to(E4M3)
    scale = torch.tensor([[0.3], [0.7]])
    spread = scale.expand(2, 3)
    stored = ENCODINGS["e4m3"].encode(NAME, codes.float() * spread, -1, spread)
    assert stored[NAME].float().tolist() == [[224.0, -1.5, 0.25], [240.0, 1.0, -0.0625]]
    assert torch.equal(stored[NAME + "_scale"], torch.tensor([[0.6], [0.7]]))


def test_codes_in_blocks_are_kept() -> None:
    codes, grid = codes_of(200, 300), torch.rand(2, 3) + 0.1
    spread = grid.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    stored = ENCODINGS["fp8_blocks"].encode(NAME, codes.float() * spread, -1, spread)
    assert torch.equal(stored[NAME].float(), codes.float())
    assert torch.equal(stored[NAME + "_scale_inv"], grid)


def test_runs_are_cut_where_indices_leave_gaps() -> None:
    assert runs((0, 1, 2, 8, 9)) == [range(3), range(8, 10)]
    assert runs((3, 2)) == [range(3, 4), range(2, 3)]

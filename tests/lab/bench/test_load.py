"""bench load: pieces that are streamed are the rank's weights; memory and bytes within limits."""

import json
import mmap
from pathlib import Path

import pytest
import torch

from lab.bench.load import CountedCheckpoint, TouchedPages
from neuron_moe.checkpoint import open_checkpoint, unique_parameters
from neuron_moe.checkpoint.lazy import take
from neuron_moe.checkpoint.reader import TensorInfo
from neuron_moe.models import gpt_oss
from neuron_moe.models.loader import build_model, load_model
from neuron_moe.models.sample_checkpoint import make_checkpoint
from neuron_moe.parallel import ParallelConfig, parallel_state
from neuron_moe.sharded.load import stream_shard
from neuron_moe.tools import cli


def test_streamed_pieces_are_the_weights_a_rank_loads(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    opened = open_checkpoint(tmp_path)
    counted = CountedCheckpoint(opened.path, opened.tensors, opened.scales)
    with parallel_state.as_rank(ParallelConfig(tp=2, ep=2), 3):
        whole = unique_parameters(load_model(tmp_path))
        model = build_model(tmp_path)
        found = {name: torch.empty_like(tensor) for name, tensor in whole.items()}
        layers = []
        for name, place, piece in stream_shard(model, counted, gpt_oss.weight_map(model.config)):
            take(found[name], place).copy_(piece)
            layers.append(int(name.split(".")[1]) if name.startswith("layers.") else -1)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    in_layers = [layer for layer in layers if layer >= 0]
    assert in_layers == sorted(in_layers)
    assert 0 < sum(counted.counts) < opened.nbytes
    assert sum(counted.counts) < counted.pages.nbytes


@pytest.mark.parametrize(
    ("shape", "selection"),
    [
        ((5, 40, 300), (range(1, 3), range(7, 30), range(10, 20))),
        ((9, 5000), (range(2, 9), range(4000, 5000))),
        ((30000,), (range(100, 20000),)),
        ((), ()),
    ],
)
def test_pages_are_those_of_every_element_asked_for(
    shape: tuple[int, ...], selection: tuple[range, ...], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    info, pages = TensorInfo("x", shape, torch.bfloat16, file, 1234), TouchedPages()
    pages.add(info, selection)
    pages.add(info, selection)
    byte_of = 1234 + 2 * torch.arange(max(1, torch.Size(shape).numel())).view(shape)
    touched = {int(byte) // mmap.PAGESIZE for byte in take(byte_of, selection).flatten()}
    assert pages.nbytes == mmap.PAGESIZE * len(touched)


@pytest.mark.slow
def test_a_rank_reads_its_share_and_holds_a_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "load", "--gib", "1.5", "--folder", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["holds"]
    for row in report["rows"].values():
        assert row["asked_bytes"] <= 1.1 * row["share_bytes"]
        assert row["disk_bytes"] <= 1.05 * row["page_bytes"]  # nothing is read ahead
        assert row["peak_bytes"] - row["before_bytes"] <= row["layer_bytes"] + (512 << 20)
        assert row["streamed_bytes"] == row["share_bytes"]

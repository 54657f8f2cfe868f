"""`bench gpu` goes from point to point, all peers in turn, and on without a peer that fails."""

import json
from typing import Any

import pytest
import torch

from lab.bench import gpu, gpu_clock, gpu_decode, gpu_peers
from neuron_moe.tools.cli import main
from tests.kernels import NO_TRITON, OLDEST_TRITON

SMALL = gpu_peers.Shape(8, 4, 2, 1)


class Failing(gpu_peers.Peer):
    """A peer of other people that is installed and fails."""

    needs = "torch"

    def __init__(self, *_: Any) -> None:
        raise OSError("no such tile")


class Uncapturable(gpu_peers.Peer):
    """A peer of other people that turns out to wait for the device."""

    needs = "torch"


@pytest.fixture
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = gpu_peers.Weights(torch.zeros(2, 8, 8), torch.zeros(2, 4, 8))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu, "SHAPES", {"a": SMALL, "b": SMALL})
    monkeypatch.setattr(gpu, "make_weights", lambda shape: weights)
    monkeypatch.setattr(gpu, "make_inputs", lambda *_: None)
    monkeypatch.setattr(gpu, "_dense", lambda *_: {"fwd_ms": 1.0})
    for name, peer in (("sonicmoe", Failing), ("momoe", Uncapturable)):
        monkeypatch.setitem(gpu_peers.PEERS, name, peer)


@pytest.mark.usefixtures("_a_gpu")
def test_points_are_measured_one_after_another_without_the_peer_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "_measure", lambda *_: {"fwd_ms": 2.0})
    options = ["--tokens", "64", "32", "--shapes", "b", "a", "--decode", "--save-percents", "0"]
    assert main(["bench", "gpu", *options, "--peers", "sonicmoe", "grouped_mm"]) == 0
    shown = capsys.readouterr()
    found = [tuple(line.split()[:2]) for line in shown.out.splitlines()[1:]]
    in_turn = [(shape, tokens) for tokens in ("64", "32") for shape in "ba"]
    assert found == [point for point in in_turn for _ in ("ours", "grouped_mm", "dense")]
    assert shown.err.count("OSError: no such tile") == 4


@pytest.mark.usefixtures("_a_gpu")
def test_a_peer_that_no_graph_captures_is_queued_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(gpu, "captured", fail)
    monkeypatch.setattr(gpu, "clock", lambda run, repeats: gpu_clock.spread([3.0]))
    monkeypatch.setattr(
        gpu, "_measure", lambda peer, *_: {"fwd_ms": gpu._time(peer, lambda: None, 1)}
    )
    weights = gpu.make_weights(SMALL)
    point = gpu.Point("a", 64, "random")
    row = gpu.measure_peer(point, "momoe", Uncapturable(SMALL, weights), 1)
    assert (row["peer"], row["fwd_ms"]) == ("momoe, queued", 3.0)
    with pytest.raises(RuntimeError, match="capturing"):  # ours must be captured
        gpu.measure_peer(point, "ours", gpu_peers.Ours(SMALL, weights, 0), 1)


@pytest.mark.usefixtures("_a_gpu")
def test_decode_stands_beside_both_floors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ms = gpu_clock.spread
    times = gpu_decode.DecodeTimes(16, ms([0.02]), ms([0.03]), ms([0.033, 0.036, 0.045]))
    monkeypatch.setattr(gpu, "decode_times", lambda sets, inputs, repeats: [times])
    options = ["--tokens", "--decode", "1", "--shapes", "b", "--save-percents"]
    assert main(["bench", "gpu", *options, "--peers", "--json"]) == 0
    *_, header, line, shown = capsys.readouterr().out.splitlines()
    assert header.split() == [*gpu_decode.HEADER]
    assert line.split() == [
        "b",
        "1",
        "16",
        *["20.0", "30.0", "1.50", "36.0", "33.0", "45.0", "1.80", "1.20"],
    ]
    found = json.loads(shown)
    (decode,), rows = found["decode"], found["rows"]
    assert (decode["ours_over_copy"], decode["ours_over_read"]) == pytest.approx((1.8, 1.2))
    assert [(row["peer"].split(",")[0], row["fwd_ms"]) for row in rows] == [
        ("weights at copy speed", 0.02),
        ("weights read alone", 0.03),
        ("ours", 0.036),
    ]


def test_all_weights_of_chosen_experts_are_read() -> None:
    pytest.importorskip("triton", minversion=OLDEST_TRITON, reason=NO_TRITON)
    from lab.bench.gpu_read import read_matrices

    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrices = [torch.zeros(3, 7, 5, device=device), torch.zeros(3, 100, 70, device=device)]
    matrices[1][2, 99, 69] = 2.0**100  # a sum that is stored
    for chosen, seen in (([1, 0], 0.0), ([0, 2], 2.0**100)):
        out = torch.zeros(1, device=device)
        read_matrices(torch.tensor(chosen, dtype=torch.int32, device=device), *matrices, out)
        assert float(out) == seen

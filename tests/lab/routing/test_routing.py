"""neuron-moe routing: load, pairs and margins against counts by hand; what others read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.routing import main
from lab.routing.analysis import balance_of, margins_of, pair_lift, strongest_pairs
from lab.routing.texts import cut_sequences, read_texts
from neuron_moe.models.routing_trace import RoutingTrace
from tests.tools.pages.asks import check_page


def trace_of(index: Any, num_experts: int, margin: Any = None) -> RoutingTrace:
    return RoutingTrace(
        expert_index_LTK=np.asarray(index, np.uint8),
        sequence_starts=np.zeros(1, np.int32),
        num_experts=num_experts,
        margin_LT=None if margin is None else np.asarray(margin, np.float16),
    )


def test_pairs_are_those_that_were_planted() -> None:
    rng = np.random.default_rng(0)
    index = np.stack([rng.permutation(16)[:4] for _ in range(4000)])
    even = pair_lift(trace_of([index], 16), 0)
    off_diagonal = even[~np.eye(16, dtype=bool)]
    assert abs(np.nanmean(off_diagonal) - 1.0) < 0.01  # by chance is 1
    assert np.isnan(np.diag(even)).all()
    planted = index.copy()
    planted[:600] = [3, 11, 0, 7]
    found = strongest_pairs(trace_of([index, planted], 16), 6)
    assert {pair.layer for pair in found} == {1}
    assert {pair.experts for pair in found} == {(0, 3), (0, 7), (0, 11), (3, 7), (3, 11), (7, 11)}
    both = ((planted == 3).any(1) & (planted == 11).any(1)).mean()
    assert next(pair for pair in found if pair.experts == (3, 11)).share == pytest.approx(both)


def test_margins_are_quantiles_of_what_was_recorded() -> None:
    margin = np.linspace(0.0, 1.0, 101)[None]
    (found,) = margins_of(trace_of(np.zeros((1, 101, 1)), 2, margin))
    assert (found.low, found.median) == pytest.approx((0.05, 0.5), abs=1e-3)
    assert found.in_rounding == pytest.approx(1 / 101)
    assert margins_of(trace_of(np.zeros((1, 3, 1)), 2)) == []


def test_placing_by_load_evens_ranks_out() -> None:
    rng = np.random.default_rng(0)
    weight = np.repeat([8.0, 1.0], 4)  # the first rank's experts are busy
    index = np.stack(
        [rng.choice(8, 2, replace=False, p=weight / weight.sum()) for _ in range(2000)]
    )
    found = balance_of(trace_of([index], 8), 2)
    assert found.before > 1.5
    assert found.packed < 1.05
    assert 1.0 < found.ranks_a_token < 2.0


def test_traces_join_and_keep_their_margins(tmp_path: Path) -> None:
    parts = [trace_of([[[0, 1], [2, 3]]], 4, [[0.5, 0.25]]), trace_of([[[3, 1]]], 4, [[1.0]])]
    joined = RoutingTrace.joined(parts)
    joined.save(tmp_path / "all.npz")
    again = RoutingTrace.load(tmp_path / "all.npz")
    assert again.expert_index_LTK.tolist() == [[[0, 1], [2, 3], [3, 1]]]
    assert again.sequence_starts.tolist() == [0, 2]
    assert again.margin_LT is not None
    assert again.margin_LT.tolist() == [[0.5, 0.25, 1.0]]
    with pytest.raises(ValueError, match="2 different models"):
        RoutingTrace.joined([parts[0], trace_of([[[0, 1]]], 8)])


def test_texts_of_both_kinds_are_read(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"domain": "x", "text": "1"}\n{"domain": "y", "text": "2"}\n')
    plain = tmp_path / "mine.txt"
    plain.write_text("whole text")
    assert read_texts(lines) == {"x": ["1"], "y": ["2"]}
    assert read_texts(plain) == {"mine": ["whole text"]}
    lines.write_text('{"domain": "a"}\n')
    with pytest.raises(ValueError, match="line 1: must be a JSON object with domain and text"):
        read_texts(lines)

    class Codec:
        def encode(self, text: str) -> list[int]:
            return list(map(ord, text))

    codec: Any = Codec()
    assert [len(each) for each in cut_sequences(["abcde", "fg"], codec, 6, 2)] == [2, 2, 1, 1]


def test_what_follows_names_the_file_that_was_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three experts on two ranks, without margins, there is still something to say."""
    file, page = tmp_path / "mine.npz", tmp_path / "page.html"
    trace_of([[[0, 1], [1, 2]]], 3).save(file)
    assert main(["--trace", str(file), "--ranks", "2", "--report", str(page)]) == 0
    assert f"neuron-moe tune --trace {file} --model" in capsys.readouterr().out
    check_page(page.read_text())


@pytest.mark.long
def test_what_is_recorded_follows_and_is_read_by_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "song.txt"
    text.write_text("And it came to pass in those days, that the king commanded. " * 8)
    out, page = tmp_path / "traces", tmp_path / "routing.html"
    words = ["--texts", str(text), "--tokens", "96", "--out", str(out)]
    assert main([*words, "--report", str(page), "--json"]) == 0
    *shown, last = capsys.readouterr().out.strip().splitlines()
    report = json.loads(last)
    assert report["tokens"] == {"song": 96}
    assert len(report["margins"]["song"]) == 6
    assert report["kernel_us_by_block_size"].keys() == {"32", "64", "128"}
    for sentence in report["follows"]:
        assert f"- {sentence}" in shown
    assert len(shown) <= 30  # one screen
    check_page(page.read_text())
    trace = RoutingTrace.load(out / "all.npz")
    assert trace.num_tokens == 96
    assert main(["--trace", str(out / "song.npz")]) == 0
    assert report["pairs"][0]["layer"] == strongest_pairs(trace, 1)[0].layer

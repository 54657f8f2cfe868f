"""The work that a layer needs: by hand, whatever ranks and kernels do with it."""

import html
import json
from pathlib import Path

import numpy as np
import pytest

from neuron_moe.configs import load_config
from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.plan import Step
from neuron_moe.tools.profile import main as profile
from neuron_moe.tools.timing.layers import choose_experts
from neuron_moe.tools.timing.useful_work import UsefulWork, expert_work, layer_work
from neuron_moe.tools.tune.problem import Problem

H, I, E, K, T = 256, 96, 16, 4, 40  # noqa: E741  the axis letters
SMALL = {
    "hidden_size": H,
    "moe_intermediate_size": I,
    "num_experts": E,
    "num_experts_per_tok": K,
    "num_hidden_layers": 1,
}


def rank(ep: int = 1) -> RankLayer:
    return RankLayer(load_config("qwen3_30b_a3b") | SMALL, "small", ep=ep, backend="nki")


def test_the_work_is_a_products_rows_and_each_used_weight_once() -> None:
    index_TK = np.array([[0, 2], [2, 5], [-1, 7]], np.int32)  # of experts 0 to 3: three choices
    cells = 3 * H * I
    rows = 2 * 3 * H * 2  # tokens in and out
    assert expert_work(H, I, 4, index_TK) == UsefulWork(3 * cells, 2 * cells * 2 + rows)
    narrow = expert_work(H, I, 4, index_TK, matrices=2, weight_bytes=1)
    assert narrow == UsefulWork(2 * cells, 2 * cells * 2 // 3 + rows)
    assert narrow.flops == 2 * narrow.macs


def test_the_least_time_is_the_larger_of_multiplications_and_bytes() -> None:
    # 2 * 128 * 128 cells at 2.4 GHz; 725 bytes a nanosecond of two cores.
    assert UsefulWork(78_643_200, 0).roofline_us() == pytest.approx(1.0)
    assert UsefulWork(78_643_200, 0).roofline_us(1) == pytest.approx(2.0)
    assert UsefulWork(78_643_200, 1_450_000).roofline_us() == pytest.approx(2.0)


@pytest.mark.parametrize("ep", [1, 2, 8, 16])
def test_every_choice_counts_once_over_all_ranks(ep: int) -> None:
    index_TK = choose_experts("uniform", T, E, K)
    each = E // ep
    parts = [
        expert_work(H, I, each, np.where(index_TK // each == one, index_TK % each, -1))
        for one in range(ep)
    ]
    assert sum(part.macs for part in parts) == T * K * 3 * H * I
    assert all(part.macs > 0 and part.roofline_us() > 0.0 for part in parts)


@pytest.mark.parametrize("ep", [1, 2, 8, 16])
def test_tune_counts_every_choice_of_a_rank(ep: int) -> None:
    """Also those of tokens whose other experts are elsewhere, which with few experts all are."""
    index_TK = choose_experts("uniform", T, E, K)
    local_TK = np.where(index_TK < E // ep, index_TK, -1)
    work = Problem.of(rank(ep), T, local_TK, "plain").work()
    assert work == expert_work(H, I, E // ep, index_TK)
    assert work.macs == (local_TK >= 0).sum() * 3 * H * I > 0


def test_a_layers_work_has_its_router_and_shared_experts() -> None:
    index_TK = choose_experts("uniform", T, E, K)
    parts = rank().parts(Step("prefill", T))
    alone = expert_work(H, I, E, index_TK)
    assert layer_work(parts, index_TK) == alone + UsefulWork(T * E * H, E * H * 2)
    scout = RankLayer(load_config("llama4_scout"), "scout", tp=8, backend="nki")
    parts = scout.parts(Step("prefill", T))
    assert parts.shared is not None
    without = layer_work(parts, index_TK).macs - 3 * T * 5120 * parts.shared.width
    assert without == T * 16 * 5120 + index_TK.size * 3 * 5120 * 1024


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_profile_tells_what_is_issued_beyond_the_layers_own_work(
    phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(load_config("qwen3_30b_a3b") | SMALL))
    out = tmp_path / "profile.json"
    words = ["--model", str(path), "--ep", "16", "--phase", phase, "--tokens", "160"]
    assert profile([*words, "--json", str(out), "--report", str(tmp_path / "page.html")]) == 0
    result = json.loads(out.read_text())
    useful, issued = result["useful"], [one["roofline"] for one in result["launches"]]
    pairs, tokens = useful["flops"] / 2 - 160 * E * H, 160
    assert 0 < pairs / (3 * H * I) < tokens  # a sixteenth of the choices are this rank's
    for name in ("flops", "hbm_bytes"):
        assert useful[name] + useful["overhead"][name] == sum(one[name] for one in issued)
    assert useful["overhead"]["flops"] > useful["flops"]  # tiles are mostly of other ranks' rows
    assert useful["share"] < sum(one["roofline_us"] for one in issued) / sum(
        one["us"] for one in result["launches"]
    )
    printed, page = capsys.readouterr().out, (tmp_path / "page.html").read_text()
    for words_of_it in ("the layer's own work", "overhead: issued beyond it"):
        assert words_of_it in printed
        assert words_of_it in html.unescape(page)

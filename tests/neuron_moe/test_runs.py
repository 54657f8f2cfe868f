"""How experts are parted into runs that are computed at once: none is lost, none is too large."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from neuron_moe.backends import chosen_experts, torch_backend
from neuron_moe.backends.chosen_experts import Run
from neuron_moe.weights import LocalRouting


@pytest.mark.parametrize("per_thread", [1, 2, 4])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("experts", [1, 2, 5, 8, 9])
def test_every_thread_gets_its_share_of_the_experts(
    experts: int, threads: int, per_thread: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = Run(list(range(experts)), [1 + expert % 3 for expert in range(experts)])
        parts = chosen_experts._split_for_threads(whole, per_thread)
    finally:
        torch.set_num_threads(before)
    assert list(chain(*(part.experts for part in parts))) == whole.experts
    assert list(chain(*(part.counts for part in parts))) == whole.counts
    share = -(-experts // (per_thread * threads))
    assert [len(part.experts) for part in parts[:-1]] == [share] * (len(parts) - 1)
    assert 1 <= len(parts[-1].experts) <= share


@pytest.mark.parametrize(
    ("path", "called"),
    [
        ("selective", "_gathered_weights"),
        ("all_experts", "_every_expert"),
        ("blockwise", "_blocks"),
    ],
)
def test_a_static_step_takes_the_path_that_was_decided(
    path: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    for name in ("_gathered_weights", "_every_expert", "_blocks"):
        monkeypatch.setattr(torch_backend, name, lambda *_, name=name: seen.append(name))
    index_TK = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)
    routing = LocalRouting(index_TK, torch.ones(2, 2))
    parts = SimpleNamespace(
        weights=SimpleNamespace(num_experts=4, packed_gate_up=None, packed_down=None),
        tuning=SimpleNamespace(save_percent=None, pad_num_blocks_to_even=False),
    )
    plan: Any = SimpleNamespace(
        parts=parts,
        path=path,
        _is_static=lambda *_: True,
        decision=SimpleNamespace(work=SimpleNamespace(block_size=2)),
    )
    torch_backend.TorchPlan.experts(plan, torch.zeros(2, 8), routing)
    assert seen == [called]


def test_a_run_has_as_many_rows_as_one_activation_serves() -> None:
    most = chosen_experts._ROWS_PER_RUN
    counts = [most, most - 1, 1, 1, most + 7, 2, most - 2, 3]
    parts = chosen_experts._split(Run(list(range(8)), counts), 8)
    assert [part.counts for part in parts] == [
        [most],
        [most - 1, 1],
        [1],
        [most + 7],
        [2, most - 2],
        [3],
    ]

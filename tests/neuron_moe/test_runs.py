"""How experts are parted into runs that are computed at once: none is lost, none is too large."""

from itertools import chain

import pytest
import torch

from neuron_moe.backends import chosen_experts
from neuron_moe.backends.chosen_experts import Run


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

"""No configuration key that nobody reads: a value makes a difference, or is refused by name."""

import inspect
from typing import Any

import pytest

import neuron_moe
from tests.neuron_moe.parallel.conftest import run_ranks  # noqa: F401  a fixture
from tests.repo.config_keys import OWNERS, PROBES, Probe, verdict, verdicts_of_rank

ALONE = [probe for probe in PROBES if probe.place == "one"]
ON_RANKS = [probe for probe in PROBES if probe.place != "one"]
_verdicts: dict[str, str] = {}


@pytest.mark.parametrize("owner", OWNERS)
def test_every_key_is_probed(owner: str) -> None:
    keys = set(inspect.signature(getattr(neuron_moe, owner)).parameters)
    probed = {probe.key for probe in PROBES if probe.owner == owner}
    assert keys - probed == set(), "keys without a probe in tests/repo/config_keys.py"
    assert probed - keys == set(), "probes of keys that are gone"


@pytest.mark.parametrize("probe", ALONE, ids=str)
def test_a_key_is_read_or_refused(probe: Probe) -> None:
    assert verdict(probe) == ""


@pytest.mark.parametrize("probe", ON_RANKS, ids=str)
def test_a_key_of_several_ranks_is_read_or_refused(probe: Probe, run_ranks: Any) -> None:  # noqa: F811
    if not _verdicts:  # all of them in one start of two processes
        ranks = run_ranks(2, lambda _: verdicts_of_rank(ON_RANKS))
        for each, *found in zip(ON_RANKS, *ranks, strict=True):
            _verdicts[str(each)] = "" if "" in found else found[0]
    assert _verdicts[str(probe)] == ""

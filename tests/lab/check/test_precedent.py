"""neuron-moe check precedent: what our kernels use, launch by launch, beside public kernels."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from lab.check import our_uses, precedent
from lab.check.case_file import read_cases
from lab.check.chip_cases import SMALL
from lab.check.kernels import NO_LIMITS, run_case
from lab.check.vendor import run_case as run_vendor
from lab.check.vendor_cases.case import Case, Limits
from lab.check.vendor_cases.library import LIBRARY_VARIABLE, VendorLibrary
from neuron_moe.spec import Tuning
from nki_sim.precedent import TABLE, Table, recording
from tests.rows import thinned


def test_what_is_recorded_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NKI_LIBRARY_PATH", raising=False)
    with pytest.raises(ValueError, match="--library CHECKOUT"):
        precedent.main(["--write", str(tmp_path / "t.json")])


def test_our_runs_are_of_every_kernel_and_phase() -> None:
    names = [name for name, _ in our_uses.our_runs()]
    assert len(names) == len(set(names)) > 20
    assert any("prefill" in name and "one launch" in name for name in names)
    assert "small/prefill-split-on-H" in names


PREFILL = next(case for case in SMALL if case.id == "small/prefill-gpt-oss")
SHARDS = tuple(
    replace(PREFILL, id=f"small/prefill-{shard}", params={**PREFILL.params, "shard_plan": shard})
    for shard in ("block", "intermediate", "hidden")
)


@pytest.mark.parametrize("case", thinned([*SMALL[3:], *SHARDS], 3), ids=lambda case: case.id)
def test_small_cases_are_right_with_precedents_alone(case: Case) -> None:
    asked = {**case.params, **our_uses.case_params(Tuning())}
    with recording() as recorder:
        found = run_case(replace(case, params=asked), NO_LIMITS)
    assert found.outcome == "passed", found.reason
    assert [one.what for one in Table.read(TABLE).without(recorder)] == []


@pytest.mark.skipif(
    LIBRARY_VARIABLE not in os.environ,
    reason=f"{LIBRARY_VARIABLE} is not set: it names a checkout of the vendor's kernel library",
)
@pytest.mark.filterwarnings("ignore")
def test_the_shipped_table_has_what_a_vendor_kernel_uses() -> None:
    library = VendorLibrary(Path(os.environ[LIBRARY_VARIABLE]))
    cases = read_cases(Path(__file__).with_name("vendor_cases.json"), match="r07")
    with recording() as recorder:
        assert run_vendor(cases[0], library, Limits()).outcome == "passed"
    assert len(recorder.uses) > 20
    assert Table.read().without(recorder) == []

"""bench decode and prefill --chip trn3: MX kernels over a file of cases."""

import json
from pathlib import Path
from typing import Any

import pytest

from lab.bench.comparison import mx
from lab.bench.decode import command as decode
from lab.bench.prefill import command as prefill
from lab.check.outcomes import Outcome
from lab.check.vendor_cases.case import Case
from neuron_moe.tools.timing.timelines import exactly
from nki_sim.hardware import TRN3
from tests.lab.check.test_mx_cases import case, entry


@pytest.mark.parametrize(("command", "name"), [(decode, "all"), (prefill, "prefill")])
def test_ours_are_timed(command: Any, name: str, tmp_path: Path) -> None:
    cases, out = tmp_path / "cases.json", tmp_path / "out.json"
    cases.write_text(json.dumps({"cases": [entry("all"), entry("prefill")]}))
    assert command.main(["--chip", "trn3", "--cases", str(cases), "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    (row,) = result["rows"]
    assert (row["id"], row["theirs"]) == (name, None)
    assert 0 < row["ours"]["low_us"] <= row["ours"]["us"] <= row["ours"]["high_us"]
    assert result["chip"] == "trn3"
    assert "hbm_bytes_per_ns" in result["coefficients"]["documented"]
    assert "psum_accumulate_factor" in result["coefficients"]["assumed"]


def test_a_ratio_takes_two_right_results_of_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: dict[str, tuple[str, str]] = {"ours": ("passed", ""), "theirs": ("passed", "")}

    def timed(check: Any) -> Any:
        side = "ours" if not seen else "theirs"
        seen.append(side)
        result, reason = found[side]
        us = 10.0 if side == "ours" else 25.0
        return Outcome.of(problem, result, reason), [exactly(us)]

    monkeypatch.setattr(mx, "_timed", timed)
    monkeypatch.setattr(mx, "VendorLibrary", lambda path: path)
    problem: Case = case("all")
    ratios = []
    for side, outcome in (
        ("ours", ("passed", "")),
        ("theirs", ("failed", "library fault")),
        ("theirs", ("passed", "T 64 -> 32 to fit")),
    ):
        seen: list[str] = []
        found |= {"ours": ("passed", ""), "theirs": ("passed", "")} | {side: outcome}
        ratios.append(mx.compare_case(problem, Path("library")).ratio)
    both = [mx.program([exactly(us)], TRN3) for us in (25.0, 10.0)]
    assert ratios == [both[0].over(both[1]), None, None]


def test_cases_are_asked_for() -> None:
    with pytest.raises(ValueError, match="--chip trn3: compares over a file of cases"):
        decode.main(["--chip", "trn3"])

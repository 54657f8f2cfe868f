"""neuron-moe chip fallbacks: what NKI leaves open, settled one by one, and what each would cost.

    neuron-moe chip fallbacks

Each open feature has a kernel of some twenty lines that needs nothing else: right, wrong, or not
compiled. Beside it stands the switch that makes our kernels do without, whether their results are
right with it (against the formula in float64), and its cost: simulated time with the switch over
without.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from lab.check.chip_cases import CASES
from lab.check.kernel_cases.adapters import run
from lab.check.outcomes import tell
from lab.check.vendor_cases.case import Case, Limits, seed_of
from lab.chip.device import Device
from lab.chip.devices import find_device
from lab.chip.open_features.answers import ask
from lab.chip.open_features.listing import OPEN_FEATURES, Fallback, OpenFeature
from neuron_moe.tools.console import format_table, tell_json
from neuron_moe.tools.parsers import Parser

_LIMITS = Limits(macs=math.inf, input_bytes=math.inf)


def main(argv: list[str] | None = None) -> int:
    """Settle all; return 0 if every feature works or every fallback is right."""
    parser = Parser("chip fallbacks", __doc__)
    parser.add_argument("--against", metavar="sim:SEED", help="a simulated chip; default: the chip")
    parser.add_argument("--full", action="store_true", help="tell costs on the shapes of models")
    parser.add_json_option()
    options = parser.parse_args(argv)
    device = find_device(options.against)
    rows = [settle(feature, device, options.full) for feature in OPEN_FEATURES]
    print(_table(rows))
    tell_json(options.json, "chip fallbacks", device=device.name, features=rows)
    return 0 if all(row["works"] or _is_safe(row) for row in rows) else 1


def _is_safe(row: dict[str, Any]) -> bool:
    return bool(row["fallbacks"]) and all(one["right"] for one in row["fallbacks"])


def settle(feature: OpenFeature, device: Device, on_full: bool = False) -> dict[str, Any]:
    """Run the kernel of a feature on a device, and simulate its fallbacks."""
    why = answer(feature, device)
    return {
        "feature": feature.name,
        "question": feature.question,
        "works": not why,
        "why": why,
        "fallbacks": [cost(one, on_full) for one in feature.fallbacks]
        if device.kind == "simulated"
        else [],
    }


def answer(feature: OpenFeature, device: Device) -> str:
    """Return why a feature does not work on a device, or ""; on a chip nothing dangerous is run."""
    if feature.danger and device.kind == "measured":
        return f"not tried: {feature.danger}; chip check --dangerous tries it"
    try:
        return ask(feature, device)
    except Exception as error:  # noqa: BLE001  whatever it is, it is the answer
        return tell(error, ("open_features",))


def cost(fallback: Fallback, on_full: bool = False) -> dict[str, Any]:
    """Simulate our kernel without and with a fallback; return what it costs and if it is right."""
    case = CASES[fallback.full if on_full else fallback.case]
    plain, changed = (
        run(with_changes(case, changes), _LIMITS) for changes in ({}, fallback.changes)
    )
    return {
        "switch": fallback.switch,
        "case": case.id,
        "right": not changed.failure,
        "why": changed.failure,
        "us": plain.simulated_us,
        "fallback_us": changed.simulated_us,
        "cost": changed.simulated_us / plain.simulated_us,
    }


def with_changes(case: Case, changes: dict[str, Any]) -> Case:
    """Return a case with some parameters changed, and the inputs it has without."""
    return dataclasses.replace(case, params={**case.params, "seed": seed_of(case), **changes})


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [["open feature", "works", "fallback", "right", "us", "with it", "cost"]]
    for row in rows:
        first = [row["feature"], "yes" if row["works"] else f"no: {row['why']}"]
        for one in row["fallbacks"] or [None]:
            cells = ["none known", "-", "-", "-", "-"]
            if one is not None:
                cells = [
                    f"{one['switch']} ({one['case']})",
                    "yes" if one["right"] else one["why"],
                    f"{one['us']:.1f}",
                    f"{one['fallback_us']:.1f}",
                    f"x{one['cost']:.2f}",
                ]
            lines.append([*first, *cells])
            first = ["", ""]
    return f"{format_table(lines, numbers_from=3)}\ntimes simulated"

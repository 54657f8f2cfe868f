"""The layouts of a model as a page, and the tables that the screen shows too."""

from __future__ import annotations

from collections.abc import Sequence

from neuron_moe.models.whole_model import ServingTimes
from neuron_moe.planner.coefficients import COEFFICIENTS
from neuron_moe.planner.search import PHASES, LayoutCosts, explain
from neuron_moe.tools.commands.plan_pictures import pictures_of_plan
from neuron_moe.tools.console import format_bytes
from neuron_moe.tools.pages import Details, Items, Page, Row, Section, Table, Text


def plan_page(costs: LayoutCosts, served: Sequence[ServingTimes], target: str, source: str) -> Page:
    """Return the page of `neuron-moe plan`.

    Args:
        costs: of one MoE layer.
        served: layouts of the whole model, the best first; may be empty.
        target: by which they are ranked.
        source: of the recorded routing.
    """
    machine = costs.machine
    answer = f"No layout serves the whole model for {target}."
    sections = []
    if served:
        best = served[0]
        answer = (
            f"Best for {target}: {best}.\nFirst token after {best.ttft_ms:.1f} ms, then"
            f" {best.tpot_ms:.2f} ms a token: {best.tokens_per_s:,.0f} tokens/s."
        )
        sections.append(Section("The whole model, best first", [Table(serving_rows(served))]))
    sections.append(Section("One MoE layer against EP", [Row(pictures_of_plan(costs))]))
    for phase in PHASES:
        best_layer = costs.ranking(phase)[0]
        text = f"{best_layer.layout}: {best_layer.cost.total_us:.0f} us on the busiest rank"
        table = Table(layout_rows(costs, phase), caption="us a layer, and busiest rank / mean")
        sections.append(
            Section(
                f"{phase}, {costs.tokens[phase]} tokens, under {costs.decisive} routing",
                [Text(text), Items(explain(costs, phase)), Details("all layouts", [table])],
            )
        )
    sections.append(
        Section(
            "Coefficients",
            [Details("values and sources", [Table(coefficient_rows(), numbers_from=9)])],
        )
    )
    remarks = ("all: computed from the coefficients; bounds from below", f"routing: {source}")
    title = f"{costs.model.name} on {machine.nodes} x {machine.instance.name}"
    return Page(f"{title}, {machine.ranks} ranks", answer, sections, remarks)


def serving_rows(served: Sequence[ServingTimes]) -> list[tuple[str, ...]]:
    """Return the layouts of the whole model, a heading first."""
    head = ("layout", "TTFT ms", "TPOT ms", "tokens/s", "most sequences", "weights a rank")
    return [
        head,
        *(
            (
                str(each),
                f"{each.ttft_ms:.1f}",
                f"{each.tpot_ms:.2f}",
                f"{each.tokens_per_s:,.0f}",
                str(each.max_batch),
                format_bytes(each.weight_bytes),
            )
            for each in served
        ),
    ]


def layout_rows(costs: LayoutCosts, phase: str) -> list[tuple[str, ...]]:
    """Return the layouts of one layer under each routing, a heading first."""
    routings = list(dict.fromkeys(entry.routing for entry in costs.entries))
    rows = [("layout", *(name for routing in routings for name in (routing, "busiest")))]
    for layout in dict.fromkeys(entry.layout for entry in costs.entries):
        cells = []
        for routing in routings:
            cost = costs.find(layout, phase, routing).cost
            cells += [f"{cost.total_us:.0f}", f"{cost.busiest_over_mean:.2f} x"]
        rows.append((str(layout), *cells))
    return rows


def coefficient_rows() -> list[tuple[str, ...]]:
    """Return what times are computed from, with sources, a heading first."""
    head = ("name", "value", "unit", "kind", "source")
    found = COEFFICIENTS.items()
    return [head, *((n, f"{c.value:.4g}", c.unit, c.kind, c.source) for n, c in found)]

"""A profile as a page: lanes, lines and roofline of every launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any, Final, NamedTuple

from neuron_moe.tools.pages import Block, Details, Items, Listing, Page, Section, Table, picture_of
from neuron_moe.tools.profile.roofline import (
    roofline_figure,
    roofline_point,
    roofline_text,
    useful_rows,
)
from neuron_moe.tools.profile.what_if import sensitivity_rows
from nki_sim.time.lines import LineTime
from nki_sim.time.picture import lanes_figure
from nki_sim.time.timeline import Timeline

_MOST_LINES: Final = 25
_LONGEST: Final = 90  # characters of a statement


class Launch(NamedTuple):
    """A kernel that was simulated: its name, and its timeline."""

    name: str
    run: Timeline


def launch_rows(launches: Sequence[Launch]) -> list[list[str]]:
    """Return the times of all launches, a heading first."""
    total = sum(launch.run.total_us for launch in launches)
    rows = [["launch", "us", "share", "of the roofline, as issued"]]
    rows += [
        [
            one.name,
            f"{one.run.total_us:,.2f}",
            f"{one.run.total_us / total:.0%}",
            f"{one.run.roofline_share:.0%}",
        ]
        for one in launches
    ]
    return [*rows, ["all, one after the other", f"{total:,.2f}", "", ""]]


def profile_page(what: str, launches: Sequence[Launch], beside: Mapping[str, Any]) -> Page:
    """Return the report.

    Args:
        what: was profiled.
        launches: in order.
        beside: what is shown beside their times: `useful`, `sensitivity` and `what_if_text`.
    """
    longest = max(launches, key=lambda launch: launch.run.total_ns)
    hottest = longest.run.line_times()[0]
    share = hottest.path_ns / longest.run.total_ns
    total_us = sum(one.run.total_us for one in launches)
    answer = (
        f"{total_us:,.2f} us. {hottest.place} holds up {share:.0%} of {longest.name}:\n"
        f"{_short(hottest)}"
    )
    sections = [_section(launch) for launch in launches]
    points = {one.name: roofline_point(one.run) for one in launches}
    figure = roofline_figure(points, f"{longest.run.chip.name}: launches under the roofline")
    if figure is not None:
        sections.append(Section("Roofline", [picture_of(figure, "each launch under its roof")]))
    if len(launches) > 1:
        sections.insert(0, Section("Launches", [Table(launch_rows(launches))]))
    if "useful" in beside:
        title = "The layer's own work, and what is issued beyond it"
        sections.insert(0, Section(title, [Table(useful_rows(beside["useful"]))]))
    asked = list[Block]()
    if "what_if_text" in beside:
        asked.append(Listing(beside["what_if_text"]))
    if "sensitivity" in beside:
        asked.append(Table(sensitivity_rows(beside["sensitivity"])))
    if asked:
        sections.append(Section(f"Other coefficients, {beside['launch']}", asked))
    remarks = ["All times are simulated, queues in the order of the source."]
    return Page(f"Profile of {what}", answer, sections, remarks)


def _section(launch: Launch) -> Section:
    run = launch.run
    rows = [["line", "source", "lane", "held up, us", "share", "busy, us", "count"]]
    rows += [
        [
            " ".join([one.place, one.origin]),
            _short(one),
            one.lane,
            f"{one.path_ns / 1e3:,.2f}",
            f"{one.path_ns / run.total_ns:.1%}",
            f"{one.busy_ns / 1e3:,.2f}",
            f"{one.instructions:,}",
        ]
        for one in run.line_times()[:_MOST_LINES]
    ]
    text = roofline_text(roofline_point(run))
    return Section(
        launch.name,
        [
            picture_of(
                lanes_figure(run, run.headline()),
                f"engines of {launch.name} over time, coloured by source line",
            ),
            Items([part.strip() for part in text.split(";")]),
            Table(rows, 3, f"the lines that hold up {launch.name} longest"),
            Details("totals", [Listing(run.totals())]),
        ],
    )


def _short(line: LineTime) -> str:
    return shorten(line.source or line.op, _LONGEST, placeholder=" ...")

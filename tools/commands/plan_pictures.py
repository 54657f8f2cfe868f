"""Pictures of layouts: layer time and bytes on the wire against the expert-parallel degree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from neuron_moe.planner.search import PHASES, LayoutCosts
from neuron_moe.planner.wire import FORMULAS, WireSizes
from neuron_moe.tools.pages import Picture, picture_of
from neuron_moe.tools.pictures import save_figure

_COLOURS = {"uniform": "#9a9a9a", "zipf": "#c8501e", "recorded": "#2a6fb0"}
_WIRE_STYLES = {
    "all-reduce": ("#9a9a9a", "-"),
    "naive gather": ("#c8501e", "--"),
    "replicate": ("#2a6fb0", "-"),
    "all-to-all": ("#3a8f3a", "-"),
}


def draw_plan(costs: LayoutCosts, path: Path) -> Path:
    """Draw times of both phases and prefill bytes against EP.

    Args:
        costs: the numbers.
        path: PNG to write.
    """
    figure = Figure(figsize=(10.0, 8.0), dpi=120, layout="constrained")
    panels = figure.subplots(2, 2).flat
    for axes, draw in zip(panels, _drawings(costs).values(), strict=False):
        draw(axes)
    panels[3].axis("off")
    handles, labels = panels[0].get_legend_handles_labels()
    panels[3].legend(handles, labels, loc="upper left", title="times", title_fontsize=9)
    panels[0].get_legend().remove()
    panels[1].get_legend().remove()
    machine = costs.machine
    figure.suptitle(
        f"{costs.model.name} on {machine.nodes} x {machine.instance.name}, {machine.ranks} ranks:"
        " one MoE layer [computed]",
        fontsize=11,
    )
    return save_figure(figure, path)


def pictures_of_plan(costs: LayoutCosts) -> list[Picture]:
    """Return the same as pictures of a page."""
    found = []
    for caption, draw in _drawings(costs).items():
        figure = Figure(figsize=(4.8, 4.0), layout="constrained")
        draw(figure.add_subplot())
        found.append(picture_of(figure, f"{caption} [computed]"))
    return found


def _drawings(costs: LayoutCosts) -> dict[str, Callable[[Axes], None]]:
    times: dict[str, Callable[[Axes], None]] = {
        f"{phase}, {costs.tokens[phase]} tokens, better strategy": partial(
            _draw_times, costs=costs, phase=phase
        )
        for phase in PHASES
    }
    caption = f"bytes into a rank, prefill, {costs.tokens['prefill']} tokens"
    return {**times, caption: partial(_draw_bytes, costs=costs)}


def _draw_times(axes: Axes, costs: LayoutCosts, phase: str) -> None:
    routings = dict.fromkeys(entry.routing for entry in costs.entries)
    for number, routing in enumerate(routings):
        for is_balanced, style in ((False, "--"), (True, "-")):
            best: dict[int, float] = {}
            for entry in costs.ranking(phase, routing):
                if entry.layout.is_balanced == is_balanced or entry.layout.ep == 1:
                    best.setdefault(entry.layout.ep, entry.cost.total_us)
            degrees = sorted(best)
            label = f"{routing}, {'EPLB' if is_balanced else 'equal runs'}"
            times = [best[ep] for ep in degrees]
            # Lines may be on each other: the first ones are drawn wider.
            width = len(routings) - number
            axes.plot(
                degrees,
                times,
                style,
                marker="o",
                color=_COLOURS[routing],
                label=label,
                linewidth=1.5 * width,
                markersize=3 + 2 * width,
                alpha=0.85,
            )
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    _finish(axes, costs, f"{phase}, {costs.tokens[phase]} tokens, better strategy")
    axes.set_ylabel("us a layer, busiest rank")


def _draw_bytes(axes: Axes, costs: LayoutCosts) -> None:
    model, ranks = costs.model, costs.machine.ranks
    degrees = sorted({entry.layout.ep for entry in costs.entries})
    for number, (name, formula) in enumerate(FORMULAS.items()):
        values = [
            formula(
                WireSizes(
                    tokens=costs.tokens["prefill"],
                    hidden_size=model.hidden_size,
                    top_k=model.top_k,
                    num_experts=model.num_experts,
                    tp=ranks // ep,
                    ep=ep,
                )
            )
            / 2**20
            for ep in degrees
        ]
        colour, style = _WIRE_STYLES[name]
        width = len(FORMULAS) - number
        axes.plot(
            degrees,
            values,
            style,
            marker="o",
            color=colour,
            label=name,
            linewidth=1.2 * width,
            markersize=3 + 2 * width,
            alpha=0.85,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    _finish(axes, costs, f"bytes into a rank, prefill, {costs.tokens['prefill']} tokens")
    axes.set_ylabel("MiB a layer")


def _finish(axes: Axes, costs: LayoutCosts, title: str) -> None:
    degrees = sorted({entry.layout.ep for entry in costs.entries})
    axes.set_xscale("log", base=2)
    axes.set_xticks(degrees, [str(ep) for ep in degrees])
    axes.set_xlabel("EP (TP = ranks / EP)")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.legend(fontsize=7)
    axes.set_title(title, fontsize=9, loc="left")

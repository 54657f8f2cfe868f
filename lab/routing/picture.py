"""Heat maps of load by layer and domain, and of experts that are chosen together.

One colour at several strengths, so that a page can show them in light and dark. Letters: D domains,
L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgb
from matplotlib.figure import Figure

from lab.routing.analysis import Floats, pair_lift
from neuron_moe.models.routing_trace import RoutingTrace

_COLOUR = "#2a6fb0"
_STRENGTHS = LinearSegmentedColormap.from_list("load", [(*to_rgb(_COLOUR), a) for a in (0.0, 1.0)])
_MOST_CELLS = 1 << 11  # of a heat map whose cells are shapes of their own


def draw_domains(traces: Mapping[str, RoutingTrace], path: Path, *, title: str) -> Path:
    """Draw the load of every expert, a panel a layer, a row a domain, against the layer's mean.

    Args:
        traces: by domain.
        path: PNG to write.
        title: says what was run; the numbers are measured.
    """
    figure = load_figure(traces)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def load_figure(traces: Mapping[str, RoutingTrace]) -> Figure:
    """Return the loads of all layers and domains as one figure."""
    loads_DLE = np.stack([trace.load_LE() for trace in traces.values()]).astype(np.float64)
    share_DLE = loads_DLE / np.maximum(loads_DLE.mean(axis=2, keepdims=True), 1e-9)
    num_domains, num_layers, _ = share_DLE.shape
    height = 0.8 + num_layers * (0.35 + 0.16 * num_domains)
    figure = Figure(figsize=(8.0, height), layout="constrained")
    panels = figure.subplots(num_layers, 1, sharex=True, squeeze=False)[:, 0]
    for layer, axes in enumerate(panels):
        _draw_cells(axes, share_DLE[:, layer], float(share_DLE.max()))
        axes.set_yticks(np.arange(num_domains) + 0.5, list(traces), fontsize=8)
        busiest = share_DLE[:, layer].max()
        axes.set_title(f"layer {layer}: busiest {busiest:.1f} x mean", fontsize=8, loc="left")
    panels[-1].set_xlabel("expert")
    _add_bar(figure, panels, float(share_DLE.max()), "load / mean of the layer [measured]")
    return figure


def pair_figure(trace: RoutingTrace, layer: int, *, most: float = 4.0) -> Figure:
    """Return how often experts of a layer are chosen together over chance, up to `most`."""
    lift_EE = np.nan_to_num(pair_lift(trace, layer))
    figure = Figure(figsize=(4.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    _draw_cells(axes, lift_EE, most)
    axes.set_aspect("equal")
    axes.set_xlabel("expert")
    axes.set_ylabel("expert")
    _add_bar(figure, axes, most, "chosen together / by chance")
    return figure


def _draw_cells(axes: Axes, values: Floats, most: float) -> None:
    """Draw cells, the first row above."""
    axes.pcolormesh(
        values, cmap=_STRENGTHS, vmin=0.0, vmax=most, rasterized=values.size > _MOST_CELLS
    )
    axes.invert_yaxis()


def _add_bar(figure: Figure, axes: Axes | Iterable[Axes], most: float, label: str) -> None:
    mappable = ScalarMappable(Normalize(0.0, most), _STRENGTHS)
    bar = figure.colorbar(mappable, ax=axes, pad=0.01)
    bar.set_label(label, fontsize=8)

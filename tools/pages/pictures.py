"""Figures of matplotlib as SVG in the colours of a page, so that they follow light and dark."""

from __future__ import annotations

import hashlib
import io
import re

from matplotlib import rc_context
from matplotlib.figure import Figure

from neuron_moe.tools.pages.page import Picture

# The colours our pictures are drawn in, and the page's names for them.
_COLOURS = {
    "#000000": "--ink",
    "#111111": "--ink",
    "#333333": "--ink",
    "#ffffff": "--back",
    "#cccccc": "--line",
    "#dddddd": "--line",
    "#b0b0b0": "--line",
    "#2a6fb0": "--c0",
    "#c8501e": "--c1",
    "#6f4fb0": "--c2",
    "#3a8f3a": "--c3",
    "#9a9a9a": "--c4",
}
_PIXELS_PER_INCH = 96


def picture_of(figure: Figure, caption: str) -> Picture:
    """Return a figure as an element of a page.

    Args:
        figure: drawn in the colours of our pictures; others stay as they are in light and dark.
        caption: what is seen; it stands under the picture.
    """
    name = "p" + hashlib.sha256(caption.encode()).hexdigest()[:8]
    written = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(written, format="svg", metadata=nothing, transparent=True)
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :].rstrip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r' xmlns(?::xlink)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href=", "href=")
    # Identifiers are of the document: two pictures may not share one.
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    for colour, variable in _COLOURS.items():
        svg = svg.replace(colour, f"var({variable})")
    return Picture(svg, caption, round(figure.get_figwidth() * _PIXELS_PER_INCH))

"""Figures of matplotlib's as SVG that are dark on dark pages, as the pictures of plans are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from fnddp.show.drawing import INK, PAPER

# Of what is drawn, and on dark pages. Colours that are not here read on both.
DARK = {
    INK: "#eceff1",
    PAPER: "#1e2429",
    "#000000": "#ffffff",
    "#eceff1": "#2c363c",  # boxes
    "#37474f": "#cfd8dc",
    "#1565c0": "#64b5f6",
    "#d84315": "#ff8a65",
    "#0072b2": "#3f7fd9",
}
_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
_STYLE: dict[Any, str] = {
    **dict.fromkeys(_INKED, INK),
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    # Text as paths: the picture is the same everywhere. No random ids: it is the same in every run.
    "svg.fonttype": "path",
    "svg.hashsalt": "fnddp",
    "font.family": "DejaVu Sans",
}


def save(draw: Callable[[], Figure], file: Path) -> None:
    """Writes the figure that `draw` makes as SVG.

    Viewers that know no style sheets show it as on light pages.
    """
    with mpl.rc_context(_STYLE):
        draw().savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
    start, tag, rest = file.read_text().partition("<defs>\n")
    file.write_text(start + _sheet() + tag + "\n".join(line.rstrip() for line in rest.splitlines()) + "\n")


def _sheet() -> str:
    """matplotlib writes colours into each element's own style, over which only what is important wins."""
    rules = (
        f'[style*="{what}: {light}"] {{{what}: {dark} !important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    return "<style>@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}</style>\n"

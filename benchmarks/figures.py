"""Figures of matplotlib as SVG that turns dark on dark pages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

INK, PAPER = "#263238", "#ffffff"
# Colours on light pages, and their replacements on dark pages. Other colours are readable on both.
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
    # Text as paths: the picture is the same on every machine. No random ids: it is the same in every run.
    "svg.fonttype": "path",
    "svg.hashsalt": "fnddp",
    "font.family": "DejaVu Sans",
}


def save(draw: Callable[[], Figure], file: Path) -> None:
    """Write the figure of `draw` as SVG; renderers without style sheets show the colours of light pages."""
    with mpl.rc_context(_STYLE):
        draw().savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
    start, tag, rest = file.read_text().partition("<defs>\n")
    # matplotlib writes colours into each element's own style; only `!important` rules override these.
    rules = (
        f'[style*="{what}: {light}"] {{{what}: {dark} !important}}\n'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    sheet = f"<style>@media (prefers-color-scheme: dark) {{\n{''.join(rules)}}}</style>\n"
    file.write_text(start + sheet + tag + "\n".join(line.rstrip() for line in rest.splitlines()) + "\n")

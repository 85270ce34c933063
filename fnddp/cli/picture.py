"""Figures of matplotlib as SVG that turns dark on dark pages; results are saved as files."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

RESULTS = "results.json"
INK, PAPER = "#263238", "#ffffff"
# Okabe and Ito's palette, distinct for colour-blind readers too.
COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
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


def write(out: Path, name: str, draw: Callable[[], Figure], found: dict[str, Any]) -> None:
    """Write a picture and its numbers, `found`, into the folder `out`."""
    write_results(out, found)
    if name.endswith(".svg"):
        save(draw, out / name)
    else:
        draw().savefig(out / name, dpi=150)
    print(f"Wrote {out / name} and {out / RESULTS}")


def write_results(out: Path, found: dict[str, Any]) -> None:
    """Write numbers into the folder `out`, atomically: an interrupted run keeps the earlier ones."""
    out.mkdir(parents=True, exist_ok=True)
    temporary = out / f"{RESULTS}.new"
    temporary.write_text(json.dumps(_finite(found), indent=1) + "\n")
    temporary.replace(out / RESULTS)


def _finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent by None."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def dress(axes: Axes, **grid: Any) -> None:
    """Draw a faint grid, and no frame above and on the right."""
    axes.grid(alpha=0.3, **grid)
    axes.spines[["top", "right"]].set_visible(False)


def label(axis: Axis, text: str, unit: str = "") -> None:
    """Label an axis at even distances, or at 1, 2, 5, 10, ... if it is logarithmic and long, so that no two overlap."""
    low, high = axis.get_view_interval()
    fine = LogLocator(subs=(1, 2, 5)) if high < 1000 * low else LogLocator()
    axis.set_major_locator(MaxNLocator(5) if axis.get_scale() != "log" or high < 5 * low else fine)
    axis.set_major_formatter(EngFormatter(unit) if unit else "{x:.4g}")
    axis.set_minor_locator(NullLocator())
    axis.set_label_text(text)

"""Results of commands as files: pictures by matplotlib, and numbers as JSON."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

RESULTS = "results.json"
# Okabe and Ito's palette, distinct for colour-blind readers too.
COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")


def write(out: Path, name: str, draw: Callable[[], Figure], found: dict[str, Any]) -> None:
    """Write a picture and its numbers, `found`, into the folder `out`."""
    write_results(out, found)
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

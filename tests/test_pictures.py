"""Pictures of the docs fit light and dark pages."""

import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from fnddp.cli import picture
from fnddp.show.drawing import INK, PAPER

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
SHOWN = sorted(
    {name for page in PAGES for name in re.findall(r"!\[[^]]*\]\((?:docs/)?(assets/[^)]+)\)", page.read_text())}
)
LEAST = 2.0  # of contrast, for lines and marks that are wide


def luminance(colour: str) -> float:
    """As WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def drawn() -> Figure:
    figure = Figure()
    figure.subplots().plot([1, 2], [3, 4], color="black")
    return figure


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_drawn_reads_on_dark_pages(name: str) -> None:
    text = (DOCS / name).read_text()
    assert "prefers-color-scheme: dark" in text
    styles = re.findall(r'style="([^"]*)"', text)
    colours = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", " ".join(styles))) - {PAPER}
    assert colours or name.endswith("plan.svg"), "its colours are elsewhere"
    for colour in colours:
        on_dark = picture.DARK.get(colour, colour)
        assert contrast(on_dark, picture.DARK[PAPER]) > (1.1 if colour == "#eceff1" else LEAST), colour


def test_a_figure_is_the_same_in_every_run_and_dark_on_dark_pages(tmp_path: Path) -> None:
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    for file in (first, second):
        picture.save(drawn, file)
    text = first.read_text()
    assert text == second.read_text()
    for colour in (INK, PAPER, "#000000"):
        assert re.search(rf'style="[^"]*(fill|stroke): {colour}', text), colour
        assert f'[style*="fill: {colour}"] {{fill: {picture.DARK[colour]} !important}}' in text

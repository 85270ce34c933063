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


def drawn() -> Figure:
    figure = Figure()
    figure.subplots().plot([1, 2], [3, 4], color="black")
    return figure


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_drawn_knows_dark_pages(name: str) -> None:
    assert "prefers-color-scheme: dark" in (DOCS / name).read_text()


def test_a_figure_is_the_same_in_every_run_and_dark_on_dark_pages(tmp_path: Path) -> None:
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    for file in (first, second):
        picture.save(drawn, file)
    text = first.read_text()
    assert text == second.read_text()
    for colour in (INK, PAPER, "#000000"):
        assert re.search(rf'style="[^"]*(fill|stroke): {colour}', text), colour
        assert f'[style*="fill: {colour}"] {{fill: {picture.DARK[colour]} !important}}' in text

"""Every Python block of README.md and of the documentation runs, and prints what the page says that it prints.

The blocks of a page run in order, in one namespace. A ```text block that follows a ```python block is its output, with
"..." for anything. A block that is to be shown but not run is not marked python. A page that begins with
`<!-- needs PACKAGE -->` is skipped where that is not installed; what it warns of is its own affair.
"""

import contextlib
import doctest
import io
import json
import linecache
import os
import re
import runpy
import sys
import textwrap
import types
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?) *```$", re.MULTILINE)


class Block(NamedTuple):
    language: str
    text: str
    begin: int
    end: int


def fenced(page: str) -> list[Block]:
    return [
        Block(match[2].partition(" ")[0], textwrap.dedent(match[3]), match.start(3), match.end())
        for match in FENCE.finditer(page)
    ]


def run(name: str, text: str, namespace: dict[str, object]) -> None:
    blocks = fenced(text)
    assert 2 * len(blocks) == len(re.findall("^ *```", text, re.MULTILINE)), f"{name}: a block is not closed"
    for block, following in zip_longest(blocks, blocks[1:]):
        if block.language != "python":
            continue
        # Blank lines before the code make the numbers in tracebacks those of the page.
        lines = text.count("\n", 0, block.begin)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("\n" * lines + block.text, name, "exec"), namespace)
        is_output = following is not None and following.language == "text"
        if is_output and re.fullmatch(r"\s*```text\n", text[block.end : following.begin]):
            says, prints = following.text, printed.getvalue()
            is_said = doctest.OutputChecker().check_output(says, prints, FLAGS)
            assert is_said, f"{name}:{lines + 1}: the page says\n{says}\nbut the code prints\n{prints}"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, own_transforms: None) -> Iterator[types.ModuleType]:
    """A module for the page's names (a state's annotations are looked up there). What pages change is undone."""
    page, environment = types.ModuleType("fnddp_docs_page"), dict(os.environ)
    monkeypatch.setitem(sys.modules, page.__name__, page)
    with torch.random.fork_rng():
        yield page
    linecache.checkcache()
    os.environ.clear()
    os.environ.update(environment)
    if dist.is_initialized():
        dist.destroy_process_group()


# Inductor's own imports warn.
@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_page_runs(page: Path, module: types.ModuleType) -> None:
    text = page.read_text()
    peer = re.match("<!-- needs (.*) -->\n", text)
    if peer and find_spec(peer[1]) is None:
        pytest.skip(f"needs {peer[1]}")
    with warnings.catch_warnings():
        if peer:
            warnings.simplefilter("default")
        run(str(page), text, module.__dict__)
    assert not dist.is_initialized(), f"{page}: the last block must call dist.destroy_process_group()"


def between(text: str, marker: str) -> str:
    return text.split(f"<!-- {marker} -->\n")[1].split(f"<!-- /{marker} -->")[0]


def test_figures_of_the_readme_are_those_of_the_files_that_they_come_from() -> None:
    text, assets = PAGES[0].read_text(), ROOT / "docs" / "assets"
    assert between(text, "which-pipeline") == (assets / "which-pipeline-short.md").read_text()
    table = runpy.run_path(str(ROOT / "docs" / "measured.py"))["table"]
    assert between(text, "measured") == table(json.loads((assets / "bench.json").read_text()))
    gallery = (ROOT / "docs" / "gallery.md").read_text()
    for times in re.findall(r"(\d+) to (\d+) times fewer bytes", text)[0]:
        assert f" {times}.0x in" in gallery, times
    project = (ROOT / "pyproject.toml").read_text()
    for name, written in (("PyTorch", "torch>="), ("Python", 'requires-python = ">=')):
        (least,) = re.findall(rf"{name} ([0-9.]+)\s+or\s+later", text)
        assert f'{written}{least}"' in project


APPENDICES = {
    *("bench.md", "codec-times.md", "drop-in.md", "leaf-cost.md", "outer-loss.md", "torchft-runs.md"),
    *("convergence-method.md", "cost-accuracy.md", "fsdp-runs.md", "launches.md", "tune-digits.md"),
}


def test_pages_are_short() -> None:
    """Words that are read, without code; methods of measurement are in appendices."""
    words: dict[str, int] = {}
    for page in (ROOT / "docs").glob("*.md"):
        words[page.name] = len(re.sub(r"<!--.*?-->", "", FENCE.sub("", page.read_text())).split())
    exempt = {*APPENDICES, "fsdp.md"}  # which has the table of what was run where
    assert {name: n for name, n in words.items() if n > 1200 and name not in exempt} == {}
    assert len(PAGES[0].read_text().splitlines()) <= 125


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_outside_of_the_site_lead_to_files(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text())
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_files_that_pages_show_are_there() -> None:
    """A block of Python that shows a file is marked {.py}: ruff formats `py`, and would make the line an expression."""
    shown = {line for page in PAGES for line in page.read_text().splitlines() if re.match(r"\W*8\s*<\s*-", line)}
    found = [re.fullmatch(r'--8<-- "(.+)"', line) for line in shown]
    assert all(found), shown
    files = {match[1] for match in found if match}
    assert "examples/functional.py" in files
    assert {file for file in files if not (ROOT / file).is_file()} == set()


PEERS = ("Lightning", "Accelerate", "transformers", "Ray Train", "torchft", "TensorBoard")


def test_peers_are_of_the_versions_that_ci_installs() -> None:
    """And the tests that the table names are there."""
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    table = (ROOT / "docs" / "integrations.md").read_text()
    for peer in PEERS:
        assert re.search(
            rf"^\| \[{peer}\]\(\S+\) {re.escape(pinned[peer.lower().split()[0]])} \|", table, re.MULTILINE
        ), peer
    for name in re.findall(r"`(test_\w+\.py)`", table):
        assert (ROOT / "tests" / name).is_file(), name

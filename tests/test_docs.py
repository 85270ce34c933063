"""Examples run, and every Python block of README.md and of the documentation, which prints what the page says.

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
import subprocess
import sys
import textwrap
import types
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import yaml

import fnddp
from tests.forks import Scripts

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]
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
    text, results = PAGES[0].read_text(), ROOT / "benchmarks" / "results"
    page = (ROOT / "docs" / "which-pipeline.md").read_text()
    assert between(text, "training") == (results / "slow-link.md").read_text()
    table = runpy.run_path(str(results.parent / "measured.py"))["table"]
    assert between(text, "measured") == table(json.loads((results / "bench.json").read_text()))
    short = (results / "which-pipeline-short.md").read_text()
    assert between(page, "short") == short
    ((few, nats),) = re.findall(
        r"up to (\d+) times fewer .* ends (\S+) nats above the plain mean on average", text, re.S
    )
    assert f"({few} times fewer)" in short
    assert f"rank=8))` | +{nats} |" in (results / "convergence-verdicts.md").read_text()
    claims = re.findall(r"(0\.\d+) to (0\.\d+) of the time", text)
    for rate, (least, most) in zip(("1 Gbit/s", "200 Mbit/s"), claims, strict=True):
        row = re.findall(rf"^\| {rate} \| (0\.\d+) \| (0\.\d+) \| (0\.\d+) \|", page, re.M)[0]
        assert (least, most) == (min(row), max(row))
    project = (ROOT / "pyproject.toml").read_text()
    for name, written in (("PyTorch", "torch>="), ("Python", 'requires-python = ">=')):
        (least,) = re.findall(rf"{name} ([0-9.]+)\s+or\s+later", text)
        assert f'{written}{least}"' in project


def test_commands_of_pages_are_for_any_user() -> None:
    """Root in a container has no sudo; who is not root knows when to write it."""
    assert [page for page in PAGES if any("sudo" in block.text for block in fenced(page.read_text()))] == []


def test_first_blocks_fit_a_window_of_1280_pixels() -> None:
    """In pages that are written by hand; a browser cuts longer lines. Users begin with those of 80 columns."""
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        if name in ("README.md", *(f"docs/{each}.md" for each in ("index", "quickstart", "ddp", "fsdp", "owners"))):
            first = next(block for block in fenced(page.read_text()) if block.language == "python")
            assert max(map(len, first.text.splitlines())) <= 80, name
        first = next((block for block in fenced(page.read_text()) if block.language != "text"), None)
        if first is not None and page.parent.name == "docs":
            assert max(map(len, first.text.splitlines())) <= 87, name


def test_one_line_installs_it() -> None:
    pages = [PAGES[0], ROOT / "docs" / "index.md", ROOT / "docs" / "quickstart.md"]
    (line,) = {line for page in pages for line in page.read_text().splitlines() if line.startswith("git clone URL")}
    assert all(page.read_text().count(line) == 1 for page in pages)


WATCHED = """
import runpy, sys
import torch.distributed as dist
end = dist.destroy_process_group
def ended():
    sys.stdout.write(f"world size {dist.get_world_size()}\\n")
    end()
dist.destroy_process_group = ended
names = runpy.run_path(sys.argv[1])
params = {name: p.detach() for name, p in names["module"].named_parameters()}
sys.stdout.write(f"trained to {sum(p.double().sum().item() for p in params.values())}\\n")
"""


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md", "docs/ddp.md"])
def test_the_blocks_of_a_page_run_unchanged_under_torchrun(name: str, tmp_path: Path) -> None:
    """In one world, not in one world for each rank."""
    blocks = [block.text for block in fenced((ROOT / name).read_text()) if block.language == "python"]
    last = next(i for i, block in enumerate(blocks) if "destroy_process_group()" in block)
    (tmp_path / "page.py").write_text("".join(blocks[: last + 1]))
    (tmp_path / "watched.py").write_text(WATCHED)
    text = Scripts(tmp_path / "watched.py", str(tmp_path / "page.py"), ranks=2).said(SECONDS)
    assert text.count("world size 2") == 2
    trained = re.findall("trained to (.+)", text)
    assert len(trained) == 2
    assert len({*trained}) == 1


def test_links_lead_to_files() -> None:
    """Also those that leave the site, which mkdocs does not check."""
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]:
        links = re.findall(r"\]\(([^)#\s]+)", FENCE.sub("", page.read_text()))
        assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == [], page


def test_tests_that_pages_name_are_there() -> None:
    """But those of torch, which the reference of its class lists."""
    texts = "\n".join(map(Path.read_text, (ROOT / "tests").rglob("*.py")))
    known = {*re.findall(r"^(?:def|class) (test_\w+)", texts, re.M)}
    for page in PAGES:
        assert page.stem == "ddp-reference" or {*re.findall(r"`(test_\w+)`", page.read_text())} <= known, page


def test_the_changelog_and_the_citation_have_this_version() -> None:
    """And the changelog has a place for the next one: docs/release.md."""
    sections = re.split(r"^## \[(.+?)\].*\n", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1:]
    assert sections[::2][:2] == ["Unreleased", fnddp.__version__]
    assert len(sections[3].splitlines()) <= 80
    assert f"\nversion: {fnddp.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_workflow_calls_the_parts_of_ci() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1]["run"] == ".ci/run '${{ matrix.part }}'"
    parts = {*job["strategy"]["matrix"]["part"]}
    script = (ROOT / ".ci" / "run").read_text()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    (least,) = re.findall(r'"torch>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    assert parts == {*re.findall(r"wants (\w+)", script), f"torch=={least}.*", "torch"}


class Attributes(HTMLParser):
    """The attributes of all tags of a page, as a browser reads them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += attrs

    @property
    def broken(self) -> list[str]:
        """Names that no attribute has: parts of a value that was not escaped."""
        return [name for name, _ in self.found if not re.fullmatch(r"[\w:@.-]+", name)]


def test_cells_of_a_table_that_folds_have_the_text_of_their_header() -> None:
    labelled = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["on_page_content"]
    table = '<table><th>link</th><th>below 1 &amp; <code>sync="auto"</code></th><td>a</td><td>b</td></table>'
    page = Attributes(labelled(f'<div class="folds">{table}</div>'))
    assert page.broken == []
    assert [value for name, value in page.found if name == "data-column"] == ["link", 'below 1 & sync="auto"']


def test_peers_are_of_the_versions_that_ci_installs() -> None:
    """And the tests that the table names are there."""
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    table = (ROOT / "docs" / "integrations.md").read_text()
    for peer in ("Lightning", "Accelerate", "transformers", "Ray Train", "torchft", "TensorBoard"):
        version = re.escape(pinned[peer.lower().split()[0]])
        assert re.search(rf"^\| \[{peer}\]\(\S+\) {version} \|", table, re.MULTILINE), peer
    for name in re.findall(r"`(test_\w+\.py)`", table):
        assert (ROOT / "tests" / name).is_file(), name


# Examples run as their docstrings say: alone, on ranks under torchrun, and with the peers that they need.

EXAMPLES = ROOT / "examples"
SAYS = {
    "accumulation.py": "accumulated gradients are those of the whole batch: yes",
    "diloco.py": "resumed in the middle of an exchange, with the same parameters to the bit: yes",
    "drop_in.py": "torch's class gives the same parameters and buffers to the bit: yes",
    "functional.py": "of the test set",
    "existing_ddp.py": "the resumed run has the same parameters to the bit: yes",
    "module.py": "the module resumed with the same parameters to the bit: yes",
    "muon_owners.py": "the resumed run has the same weights to the bit: yes",
    "own_transform.py": "sampled(allreduce, 0.1) keeps the laws",
    "topk.py": "error_feedback(largest(0.05)) keeps the laws; 64 MiB are 6,710,888 bytes",
    "two_shot.py": "error_feedback(int8_two_shot()) keeps the laws; 64 MiB are 17,843,200 bytes",
    "uneven.py": "all ranks have the same parameters to the bit: yes",
}
# With a peer: which one, and on how many ranks (0: the example starts two itself).
WITH_PEERS = {
    "integrations/distributed_checkpoint.py": ("torch", 2),
    "integrations/fsdp_axes.py": ("torch", 4),
    "integrations/fsdp_experts.py": ("torch", 4),
    "integrations/fsdp_diloco.py": ("torch", 4),
    "integrations/fsdp_replicas.py": ("torch", 4),
    "integrations/huggingface_gpt2.py": ("transformers", 2),
    "integrations/lightning_digits.py": ("lightning", 0),
}
# Of benchmarks. One process, whatever the ranks: what it is asked, what it says.
SIMULATED = {
    "convergence.py": ("--quick", "runs, 0.0 hours of CPU"),
    "muon_bits.py": ("--quick", "fewer bytes than DDP"),
    "one_bit.py": ("--quick", "steps of gradients wait"),
    "outer_convergence.py": ("--quick", "6 runs on"),
}
ELSEWHERE = {"kill_and_rejoin.py", "machines/ray_train.py", "machines/train.py"}  # test_torchft.py, test_machines.py
SECONDS = 200


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("name", SAYS)
def test_examples_run_alone_and_on_ranks(name: str, ranks: int) -> None:
    text = Scripts(EXAMPLES / name, ranks=ranks).said(SECONDS)
    assert text.count(SAYS[name]) == 1  # rank 0 alone speaks
    assert f"world size {ranks or 1}" in text


@pytest.mark.parametrize("name", WITH_PEERS)
def test_examples_with_peers_resume_to_the_bit(name: str) -> None:
    peer, ranks = WITH_PEERS[name]
    if find_spec(peer) is None:
        pytest.skip(f"needs {peer}")
    text = Scripts(EXAMPLES / name, ranks=ranks, strict=False).said(SECONDS)  # the peers' warnings are theirs
    assert len(re.findall("resumed runs? ha(s|ve) the same parameters to the bit: yes", text)) == 1
    assert f"world size {ranks or 2}" in text


@pytest.mark.parametrize("name", SIMULATED)
def test_studies_run(name: str) -> None:
    option, says = SIMULATED[name]
    assert says in Scripts(ROOT / "benchmarks" / name, option).said(SECONDS)


def test_every_example_is_tested() -> None:
    files = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert files == {*SAYS, *WITH_PEERS, *ELSEWHERE}

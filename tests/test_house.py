"""The order of the house: a file imports only what comes before it, typing included."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import fnddp

ROOT = Path(fnddp.__file__).parent

# Reading order is data-flow order. A folder, or a file without its suffix.
ORDER = [
    *("version", "torch_private", "device", "wire", "core"),
    *("reducers", "transforms", "codecs", "schedules"),
    *("ir", "cost", "show", "plan", "run", "adapters"),
    *("distributed", "simulate", "laws", "outer", "integrations", "api", "__init__", "cli", "__main__"),
]


def files() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py"))


def place(file: Path) -> int:
    name = file.relative_to(ROOT).with_suffix("").as_posix()
    matches = [i for i, entry in enumerate(ORDER) if name == entry or name.startswith(f"{entry}/")]
    assert matches, f"{name} has no place in the house: add it to ORDER"
    return max(matches, key=lambda i: len(ORDER[i]))


def imported(file: Path) -> set[Path]:
    found: set[Path] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fnddp":
            assert node.level == 0, f"{file}: imports are absolute"
            base = ROOT.joinpath(*node.module.split(".")[1:])
            for name in node.names:
                candidates = [base / f"{name.name}.py", base / name.name / "__init__.py", base.with_suffix(".py")]
                candidates.append(base / "__init__.py")
                found.add(next(path for path in candidates if path.exists()))
    return found


def test_imports_point_upwards():
    for file in files():
        for other in imported(file):
            if other.name != "__init__.py" or other.parent.name == "passes":
                assert place(other) <= place(file), f"{file} imports {other}, which comes later"


def test_there_is_no_circle():
    graph = {file: imported(file) for file in files()}
    done: set[Path] = set()

    def visit(file: Path, above: tuple[Path, ...]) -> None:
        assert file not in above, f"a circle: {[str(path.relative_to(ROOT)) for path in (*above, file)]}"
        if file not in done:
            for other in graph[file]:
                visit(other, (*above, file))
            done.add(file)

    for file in graph:
        visit(file, ())


def test_private_names_of_torch_are_in_one_file():
    """What a new release of torch may break. (ranks.py is torch's own threaded ranks for tests.)"""
    allowed = {"torch_private.py", "ranks.py"}
    for file in files():
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").startswith("torch")
                and file.name not in allowed
            ):
                parts = [*(node.module or "").split("."), *(name.name for name in node.names)]
                assert not [part for part in parts if part.startswith("_") and part != "__future__"], f"{file}: {parts}"


def test_the_page_on_architecture_names_what_is_there():
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    folders = [
        name for row in re.findall(r"^\| (`.*?) \|", page, re.M) for name in re.findall(r"`(\w+(?:/|\.py))`", row)
    ]
    assert "run/" in folders
    assert [name for name in folders if not (ROOT / name).exists()] == []
    named = re.findall(r"^\d\. `fnddp/(\S+)`: (.*)$", page, re.M)
    assert len(named) == 5
    for file, names in named:
        text = (ROOT / file).read_text()
        assert [name for name in re.findall(r"`(\w+)`", names) if not re.search(rf"(def|class) {name}\b", text)] == []
    texts = [file.read_text() for file in files()]
    for owner, method in re.findall(r"`([A-Z]\w+)\.(\w+)`", page):
        assert any(re.search(rf"class {owner}\b[\s\S]*def {method}\b", text) for text in texts), f"{owner}.{method}"


ASKED_FOR = """
import sys, fnddp
early = [name for name in sys.modules if name.startswith(("fnddp.outer", "fnddp.integrations", "fnddp.cli"))]
assert not early, early
assert "outer" in dir(fnddp)
assert fnddp.outer.diloco(fnddp.allreduce, every=2)
from fnddp import outer
assert fnddp.outer is outer is sys.modules["fnddp.outer"]
assert isinstance(fnddp.outer.parse("local_sgd(every=2)"), outer.local_sgd)
"""


def test_outer_steps_and_integrations_are_imported_when_asked_for():
    subprocess.run([sys.executable, "-c", ASKED_FOR], check=True, cwd=ROOT.parent)

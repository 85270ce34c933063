"""The order of the house: a file imports only what comes before it, typing included, and a step enters few files."""

import ast
import importlib
import inspect
import pydoc
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import allreduce
from tests.ranks import on_ranks

ROOT = Path(fnddp.__file__).parent

# Reading order is data-flow order. A folder, or a file without its suffix.
ORDER = [
    *("version", "torch_private", "device", "wire", "core"),
    *("tree", "collectives", "random", "options"),
    *("kernels", "reducers", "transforms", "codecs", "schedules"),
    *("ir", "cost", "show", "plan", "run", "adapters"),
    *("simulation", "laws", "outer", "integrations", "api", "__init__", "cli", "__main__"),
]


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


@cache
def nodes(file: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(file.read_text()))]


def place(file: Path) -> int:
    name = file.relative_to(ROOT).with_suffix("").as_posix()
    matches = [i for i, entry in enumerate(ORDER) if name == entry or name.startswith(f"{entry}/")]
    assert matches, f"{name} has no place in the house: add it to ORDER"
    return max(matches, key=lambda i: len(ORDER[i]))


def imported(file: Path) -> set[Path]:
    found: set[Path] = set()
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fnddp":
            assert node.level == 0, f"{file}: imports are absolute"
            base = ROOT.joinpath(*node.module.split(".")[1:])
            for name in node.names:
                candidates = [base / f"{name.name}.py", base / name.name / "__init__.py", base.with_suffix(".py")]
                found.add(next(path for path in (*candidates, base / "__init__.py") if path.exists()))
    return found


BUDGET = 34_018


def test_the_library_stays_within_its_budget_of_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = sum(len(file.read_text().splitlines()) for file in files())
    with capsys.disabled():
        print(f"\nthe library has {lines} lines of {BUDGET}")
    assert lines <= BUDGET, "take something out; raise BUDGET only with a reason in the commit"


def test_imports_point_upwards():
    for file in files():
        for other in imported(file):
            if other.name != "__init__.py" or other.parent.name == "passes":
                assert place(other) <= place(file), f"{file} imports {other}, which comes later"


def test_there_is_no_circle():
    TopologicalSorter({file: imported(file) for file in files()}).prepare()


def test_private_names_of_torch_are_in_one_file():
    """What a new release of torch may break. (ranks.py is torch's own threaded ranks for tests.)"""
    for file in [file for file in files() if file.name not in ("torch_private.py", "ranks.py")]:
        for node in nodes(file):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                parts = [*(node.module or "").split("."), *(name.name for name in node.names)]
                assert not [part for part in parts if part.startswith("_") and part != "__future__"], f"{file}: {parts}"


def test_a_class_has_a_name_of_its_own():
    """One meaning each, private ones, too; torchft has torch's name for its class, as we have."""
    names = Counter(node.name for file in files() for node in nodes(file) if isinstance(node, ast.ClassDef))
    assert [name for name, n in names.items() if n > 1 and name != "DistributedDataParallel"] == []


def test_one_file_ends_the_steps_of_backwards():
    """Apart from `value_and_grad`, which begins and ends its step in one call."""
    for file in [file for folder in ("adapters", "integrations", "outer") for file in (ROOT / folder).rglob("*.py")]:
        calls = [node.func for node in nodes(file) if isinstance(node, ast.Call)]
        verbs = {call.attr for call in calls if isinstance(call, ast.Attribute)} & {"agree", "give_up", "finish"}
        assert not verbs or file.name in ("backward.py", "functional.py"), f"{file}: {verbs}"


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


# What others must know of any pipeline, also of a user's: of `every`, `two_shot(server_memory=True)`, clipping.
OF_ONE = {"skips", "sent_is_exact", "wants_whole_leaves"}
DERIVED = {"agrees", "gives_later", "carries", "takes_weight"}  # or set by one alone: `to_owners`, `weighted`


def flags_of(cls: type) -> set[str]:
    """Return what transforms may set: switches, and properties that others follow from."""
    flags = {name for name, value in vars(cls).items() if isinstance(value, bool | frozenset | property)}
    return {name for name in flags if not name.startswith("_")} - {"ops", "groups"} - DERIVED


def test_flags_of_transforms_are_at_most_ten_and_on_the_page_for_authors():
    page = (ROOT.parent / "docs" / "writing-a-transform.md").read_text()
    told = re.findall(r"^\| `(\w+)`", page.partition("{ #flags }")[2], re.M)
    assert set(told) == flags_of(fnddp.Sync) | flags_of(fnddp.Codec)
    assert len(told) <= 10
    texts = [file.read_text() for file in files() if "core" not in file.parts]
    for flag in told:
        users = sum(len(re.findall(rf"^    (?:def )?{flag}\b.*[=:]", text, re.M)) for text in texts)
        assert users >= 1 + (flag not in OF_ONE), f"{flag} has one user: let that one do without"


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


# Its function is pickled by value, since it is in __main__, and with it the module that its globals name. The first
# import is of a part, from which texts of the whole are read.
PICKLED = """
import pickle, types
import fnddp.integrations.fsdp
import cloudpickle, fnddp
def worker(text):
    return fnddp.parse(text)
assert type(fnddp) is types.ModuleType
assert pickle.loads(cloudpickle.dumps(fnddp)) is fnddp
unpickled = pickle.loads(cloudpickle.dumps(worker))
assert repr(unpickled("fp16(allreduce)")) == "fp16(allreduce)"
"""


@pytest.mark.parametrize("script", [ASKED_FOR, PICKLED], ids=["imported when asked for", "pickled with functions"])
def test_outer_steps_and_integrations_are(script: str):
    if script is PICKLED:
        pytest.importorskip("cloudpickle")
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT.parent)


def test_no_name_hides_a_module():
    """`import fnddp.a.b as b` binds what is `b` in `fnddp.a`: a function of that name there would take its place."""
    for file in files():
        package, _, name = ".".join(file.relative_to(ROOT.parent).with_suffix("").parts).rpartition(".")
        package, _, name = package.rpartition(".") if name == "__init__" else (package, _, name)
        if name not in ("fnddp", "__main__") and (find_spec("triton") or package != "fnddp.kernels"):
            module = importlib.import_module(f"{package}.{name}")
            assert getattr(sys.modules[package], name) is module


# A reader who follows a gradient meets few files of the library: those with a frame in one steady step.

LIMITS = {"module": 14, "register": 12, "value_and_grad": 12}


def files_within(step: Callable[[], Any]) -> list[str]:
    """Return the files of the library with a frame in `step`, forward and backward, on any thread."""
    seen: set[str] = set()
    set_profile = getattr(threading, "setprofile_all_threads", sys.setprofile)  # 3.11: backward runs on this thread

    def note(frame: Any, _: str, __: Any) -> None:
        seen.add(frame.f_code.co_filename)

    set_profile(note)
    try:
        step()
    finally:
        set_profile(None)
    return sorted(str(Path(file).relative_to(ROOT)) for file in seen if Path(file).is_relative_to(ROOT))


def steps_of(adapter: str) -> Callable[[], Any]:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.ones(2, 8)
    if adapter == "value_and_grad":
        params = {name: p.detach() for name, p in model.named_parameters()}
        step = fnddp.value_and_grad(lambda p, x: torch.func.functional_call(model, p, (x,)).sum(), allreduce)
        return lambda: step(params, (), x)
    wrapped = fnddp.DistributedDataParallel(model) if adapter == "module" else TorchDDP(model)
    if adapter == "register":
        fnddp.register(wrapped, allreduce)

    def train() -> None:
        wrapped.zero_grad()
        wrapped(x).sum().backward()

    return train


@pytest.mark.parametrize("adapter", LIMITS)
@on_ranks(2)
def test_a_steady_step_of_the_plain_mean_enters_few_files(rank: int, adapter: str) -> None:
    step = steps_of(adapter)
    for _ in range(12):
        step()
    files = files_within(step)
    assert len(files) <= LIMITS[adapter], files


def test_options_named_seed_are_explained_and_the_laws_are_listed():
    assert "laws" in dir(fnddp)
    for name, make in ((name, getattr(fnddp, name)) for name in dir(fnddp)):
        has_seed = "seed" in getattr(make, "__dataclass_fields__", getattr(make, "__annotations__", {}))
        if has_seed and (isinstance(make, type) or inspect.isfunction(make)):
            assert re.search(r"^ +[\w, ]*\bseed: ", make.__doc__ or "", re.M), name


def test_the_help_of_the_class_shows_no_argument_of_torchs_twice():
    """What is inherited from `nn.Module` is two thirds of `help`; the rest is what is ours or differs."""
    text = pydoc.plain(pydoc.render_doc(fnddp.DistributedDataParallel))
    own = text.partition("Methods inherited from torch.nn.modules.module.Module")[0]
    assert len(own.splitlines()) < 320
    args = (fnddp.DistributedDataParallel.__doc__ or "").partition("Args:")[2].partition("Raises:")[0]
    assert "gradient_as_bucket_view" not in args

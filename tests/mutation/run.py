"""Mutation tests of the library's core: a seeded sample of small changes, each of which some test must notice.

Outside CI (pytest does not collect it).

    python tests/mutation/run.py                        # a sample of every folder, by the first ring of tests
    python tests/mutation/run.py --thorough             # by both rings: `-m thorough`, too
    python tests/mutation/run.py plan run --sample 100 --seed 7

A copy of the repository holds one mutant after the other; pytest runs the tests of its folder there, up to the first
failure. Left out is a mutant with which `fnddp` cannot be imported, or that runs out of time.
"""

import argparse
import ast
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SECONDS = {False: 400, True: 1200}  # that a mutant gets, in one ring and in both

# The files of a folder, and its tests, the quick and the general first; doctests come before them.
SUITES = {
    "plan": (
        ("fnddp/plan/**/*.py", "fnddp/ir/*.py"),
        "plan engine period show kinds carriers cost stats powersgd backends passes plan_cli hierarchical laws",
    ),
    "run": (
        ("fnddp/run/*.py",),
        "engine adapters stats weights functional backward backends kinds wire module schedules "
        "plan failures choose ways drop_in/ accelerator/test_ways.py accelerator/test_graphs.py",
    ),
    "memory": (("fnddp/transforms/memory.py",), "memory transforms schedules laws"),
    "transforms": (("fnddp/transforms/*.py",), "transforms powersgd schedules codecs memory laws carriers"),
    "module": (
        ("fnddp/adapters/**/*.py",),
        "stats backward backward_life nested_backward adapters drop_in/ functional weights module register owners "
        "wire state agreement checkpoint schedules choose transforms failures ways accelerator/test_graphs.py",
    ),
}


def paths_of(suite: str) -> list[str]:
    files, tests = SUITES[suite]
    names = [name if "/" in name else f"test_{name}.py" for name in tests.split()]
    return [*(pattern.partition("/*")[0] for pattern in files), *(f"tests/{name}" for name in names)]


# An operator, and what takes its place: one or two of the others, or a sample would be one of comparisons.
SWAPS: dict[type, tuple[type, ...]] = {
    **{ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,)},
    **{ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.And: (ast.Or,), ast.Or: (ast.And,)},
    **{ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt)},
    **{ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,), ast.Pow: (ast.Mult,)},
    **{ast.FloorDiv: (ast.Mult,), ast.Mod: (ast.FloorDiv,), ast.BitOr: (ast.BitAnd,), ast.BitAnd: (ast.BitOr,)},
    **{ast.BitXor: (ast.BitOr,), ast.LShift: (ast.RShift,), ast.RShift: (ast.LShift,), ast.USub: (ast.UAdd,)},
}


class Mutant(NamedTuple):
    path: str
    begin: tuple[int, int]  # a line, and a byte of it
    end: tuple[int, int]
    text: str  # what takes the place of the source between them

    def of(self, source: str) -> str:
        lines = source.encode().splitlines(keepends=True)
        first, last = lines[self.begin[0] - 1][: self.begin[1]], lines[self.end[0] - 1][self.end[1] :]
        return b"".join([*lines[: self.begin[0] - 1], first, self.text.encode(), last, *lines[self.end[0] :]]).decode()


def changes(node: Any) -> Iterator[tuple[Any, ast.AST]]:
    """Yield a node in `node`, and what takes its place."""

    def other(**fields: Any) -> tuple[Any, ast.AST]:
        return node, type(node)(**dict(ast.iter_fields(node)) | fields)

    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield from (other(ops=[*ops[:i], new(), *ops[i + 1 :]]) for new in SWAPS[type(op)])
        case ast.UnaryOp(op=ast.Not() | ast.Invert()):
            yield node, node.operand
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign() | ast.UnaryOp():
            yield from (other(op=new()) for new in SWAPS.get(type(node.op), ()))
        case ast.Constant(value=bool()):
            yield other(value=not node.value)
        case ast.Constant(value=int() | float()):
            yield from (other(value=node.value + more) for more in (1, -1))
        case ast.Break() | ast.Continue():
            yield node, ast.Continue() if isinstance(node, ast.Break) else ast.Break()
        case ast.Expr(value=ast.Call()) | ast.Raise():
            yield node, ast.Pass()
        case ast.If() | ast.While() | ast.IfExp():
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
        case ast.For() | ast.comprehension():
            yield node.iter, ast.List([])
        case ast.ExceptHandler(type=ast.expr()):
            yield node.type, ast.Tuple([])
        case _:
            pass


def checked(node: ast.AST) -> Iterator[ast.AST]:
    """Yield `node` and all within it, apart from annotations and assertions, in which no test has anything to notice.

    `strict=True` is an assertion, and `frozen=True` a promise to readers. Python 3.11 places no parts of f-strings.
    """
    promised = isinstance(node, ast.keyword) and node.arg in ("strict", "frozen")
    if promised or isinstance(node, ast.Assert | ast.JoinedStr):
        return
    yield node
    for name, field in ast.iter_fields(node):
        for each in field if isinstance(field, list) else [field]:
            if isinstance(each, ast.AST) and name not in ("annotation", "returns"):
                yield from checked(each)


def sites(suite: str) -> dict[tuple[str, tuple[int, int]], list[Mutant]]:
    found: dict[tuple[str, tuple[int, int]], list[Mutant]] = {}
    for path in sorted(path for pattern in SUITES[suite][0] for path in ROOT.glob(pattern)):
        name = str(path.relative_to(ROOT))
        for old, new in (change for node in checked(ast.parse(path.read_text())) for change in changes(node)):
            begin, end = (old.lineno, old.col_offset), (old.end_lineno, old.end_col_offset)
            found.setdefault((name, begin), []).append(Mutant(name, begin, end, ast.unparse(new)))
    return found


def run_tests(suite: str, tree: Path, thorough: bool) -> str:
    """Return `killed by TEST`, `survived`, `incompetent` or `timed out`."""
    imports = subprocess.run([sys.executable, "-c", "import fnddp.api"], cwd=tree, capture_output=True)
    if imports.returncode:
        return "incompetent"
    rings = "" if thorough else "not thorough"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", rings, *paths_of(suite)]
    options = {"cwd": tree, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **options) as running:
        try:
            told, _ = running.communicate(timeout=SECONDS[thorough])
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # its ranks too
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", told, re.MULTILINE)
    return "survived" if running.returncode == 0 else f"killed by {failed[1] if failed else told}"


def sample(suite: str, size: int, seed: int) -> list[Mutant]:
    places, draw = sites(suite), random.Random(f"{seed} {suite}")
    print(f"{suite}: {sum(map(len, places.values()))} mutants in {len(places)} places", flush=True)
    return [draw.choice(places[place]) for place in draw.sample(sorted(places), min(size, len(places)))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], help="folders; all, when none is named")
    parser.add_argument("--sample", type=int, default=40, help="mutants for each folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--thorough", action="store_true", help="run the second ring of tests, too")
    given = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutant may have the size and the second of what comes next
    with tempfile.TemporaryDirectory(prefix="fnddp-mutants-", ignore_cleanup_errors=True) as folder:
        tree = Path(shutil.copytree(ROOT, Path(folder) / "fnddp", ignore=shutil.ignore_patterns(".*", "__pycache__")))
        for name in given.suites or SUITES:
            if (passed := run_tests(name, tree, given.thorough)) != "survived":
                raise SystemExit(f"{name}, without a mutant: {passed}")
            counts: Counter[str] = Counter()
            for mutant in sample(name, given.sample, given.seed):
                mutated, begin = mutant.of((ROOT / mutant.path).read_text()), time.monotonic()
                (tree / mutant.path).write_text(mutated)
                result = run_tests(name, tree, given.thorough)
                shutil.copy2(ROOT / mutant.path, tree / mutant.path)
                took = f"[{time.monotonic() - begin:.0f} s]  {mutant.path}:{mutant.begin[0]}"
                print(f"{result}  {took}: {mutated.splitlines()[mutant.begin[0] - 1].strip()}", flush=True)
                counts[result.split()[0]] += 1
            score = counts["killed"] / max(1, counts["killed"] + counts["survived"])
            print(f"{name}: {dict(counts)}, score {score:.0%}")


if __name__ == "__main__":
    main()

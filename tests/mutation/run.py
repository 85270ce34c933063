"""Mutation tests of the library's core: a seeded sample of small changes, each of which some test must notice.

Outside CI (pytest does not collect it). It uses the operators of cosmic-ray: pip install cosmic-ray

    python tests/mutation/run.py                        # a sample of every folder, by the first ring of tests
    python tests/mutation/run.py --thorough             # by both rings: `-m thorough`, too
    python tests/mutation/run.py plan run --sample 100 --seed 7

One warm process has imported torch; each mutant is a fork of it that imports the changed module and runs the tests of
its folder up to the first failure, file after file. The gloo pool is forked too, so that the ranks run the mutant. A
mutant with which `fnddp` cannot be imported is left out, and so is one that runs out of time.
"""

import argparse
import ast
import contextlib
import difflib
import importlib
import importlib.abc
import importlib.util
import itertools
import multiprocessing
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import parso
import pytest
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[2]
WARM = ["torch", "torch.distributed", "torch._dynamo", "torch._inductor.utils", "torch.testing", "optree"]
WARM += ["torch.fx.experimental.proxy_tensor", "torch.distributed._functional_collectives"]


HANGS = 40  # seconds after which ranks are not waited for
SECONDS = {False: 400, True: 1200}  # that a mutant gets, in one ring and in both


# The files of a folder, and its tests, the quick and the general first; doctests come before them.
SUITES = {
    "plan": (
        ("fnddp/plan/**/*.py", "fnddp/ir/*.py"),
        "plan engine period show kinds carriers cost step stats powersgd backends passes plan_cli hierarchical "
        "execute laws",
    ),
    "run": (
        ("fnddp/run/*.py",),
        "engine adapters stats weights functional backward step backends kinds wire module schedules "
        "execute plan failures drop_in/",
    ),
    "memory": (("fnddp/transforms/memory.py",), "memory transforms schedules laws"),
    "transforms": (("fnddp/transforms/*.py",), "transforms powersgd schedules codecs memory laws carriers"),
    "module": (
        ("fnddp/adapters/**/*.py",),
        "stats backward adapters drop_in/ functional weights module register "
        "wire state agreement checkpoint schedules failures",
    ),
}


def paths_of(suite: str) -> list[str]:
    files, tests = SUITES[suite]
    names = [name if name.endswith("/") else f"test_{name}.py" for name in tests.split()]
    return [*(pattern.partition("/*")[0] for pattern in files), *(f"tests/{name}" for name in names)]


class DeleteStatement(Operator):
    """Leaves out a statement that is called for its effect, and a raise: cosmic-ray has no such operator."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.parent is not None and node.parent.type == "simple_stmt":
            called = node.type == "atom_expr" and node.children[-1].type == "trailer"
            if node.type == "raise_stmt" or called:
                yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        nothing = parso.parse("pass").children[0]
        nothing.prefix = node.get_first_leaf().prefix
        return nothing

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        return ()


# One or two replacements of each operator: a sample of eleven for each minus would be one of minuses.
KEPT = {
    *("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt"),
    *("Is_IsNot", "IsNot_Is", "Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul"),
    *("BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitOr", "LShift_RShift", "RShift_LShift"),
    *("USub_UAdd", "Invert_UAdd", "Delete_Not"),
}


def operators() -> dict[str, Operator]:
    found: dict[str, Operator] = {"DeleteStatement": DeleteStatement()}
    for name in operator_names():
        short = name.removeprefix("core/")
        replaced = short.split("_", 1)[1] if short.startswith("Replace") and "_" in short else ""
        if not short.startswith("Variable") and (replaced in KEPT or not replaced):
            found[short] = get_operator(name)()
    return found


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    operator: str
    occurrence: int

    def source(self, known: dict[str, Operator]) -> str | None:
        return mutate_code((ROOT / self.path).read_text(), known[self.operator], self.occurrence)

    def change(self, mutated: str) -> str:
        lines = (ROOT / self.path).read_text().splitlines(), mutated.splitlines()
        changed = [line for line in difflib.ndiff(*lines) if line[:2] in ("- ", "+ ")]
        return f"{self.path}: " + " ".join(f"{line[0]} {line[2:].strip()}" for line in changed)


def unchecked(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where no test has anything to notice: annotations, assertions, `strict=True`, which is one, and what is a promise
    to readers: `frozen=True`, and that a method is abstract which all classes have."""
    found: list[Any] = []
    for node in ast.walk(ast.parse(source)):
        found += [node] if isinstance(node, ast.Assert) else []
        found += [node.value] if isinstance(node, ast.keyword) and node.arg in ("strict", "frozen") else []
        for decorator in getattr(node, "decorator_list", []):
            if ast.unparse(decorator) == "abc.abstractmethod":
                decorator.col_offset -= 1  # with its @
                found.append(decorator)
        found += [part for name in ("annotation", "returns") if isinstance(part := getattr(node, name, None), ast.expr)]
    return [((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)) for part in found]


def sites(suite: str, known: dict[str, Operator]) -> dict[tuple[str, int, int], list[Mutant]]:
    found: dict[tuple[str, int, int], list[Mutant]] = {}
    for pattern in SUITES[suite][0]:
        for path in sorted(ROOT.glob(pattern)):
            source, name = path.read_text(), str(path.relative_to(ROOT))
            skipped, module = unchecked(source), parso.parse(source)
            for operator_name, operator in known.items():
                positions = [at for node in preorder(module) for at, *_ in operator.mutation_positions(node)]
                for occurrence, at in enumerate(positions):
                    if not any(first <= at < last for first, last in skipped):
                        mutant = Mutant(name, at[0], operator_name, occurrence)
                        found.setdefault((name, *at), []).append(mutant)
    return found


def preorder(node: Any) -> Iterator[Any]:
    # the order in which cosmic-ray counts occurrences
    yield node
    for child in getattr(node, "children", []):
        yield from preorder(child)


class Mutated(importlib.abc.MetaPathFinder):
    def __init__(self, path: str, source: str) -> None:
        self.path, self.source = ROOT / path, source
        self.name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        source = self.source

        class Loader(SourceFileLoader):
            def get_code(self, fullname: str) -> CodeType:
                return compile(source, self.path, "exec", dont_inherit=True)

        return importlib.util.spec_from_file_location(fullname, self.path, loader=Loader(fullname, str(self.path)))


def forked_gloo() -> None:
    """Lets the pool of `tests/ranks.py` be forked, and now: before autograd has threads."""
    spawn = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: spawn("fork")  # type: ignore[assignment]
    ranks = importlib.import_module("tests.ranks")
    make = ranks.GlooPool
    pool = make()
    pool.close = lambda: None  # it is for all files
    run = make.run
    make.run = lambda self, n, fn, *given, timeout=HANGS: run(self, n, fn, *given, timeout=min(timeout, HANGS))
    ranks.GlooPool = lambda: pool if pool.alive else make()


def run_tests(suite: str, mutant: Mutated | None, thorough: bool, report: Callable[[str], None]) -> None:
    if mutant is not None:
        sys.meta_path.insert(0, mutant)
    try:
        importlib.import_module("fnddp")
    except BaseException:
        report("incompetent\n")
        return
    try:
        forked_gloo()
    except BaseException as error:
        report(f"killed {error!r}\n")
        return
    options = ["-x", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--doctest-modules", "--rootdir", str(ROOT)]
    rings = ["not thorough", "thorough"] if thorough else ["not thorough"]
    for ring, tests in itertools.product(rings, paths_of(suite)):  # to collect all at once takes longer than most live
        first = Failure()
        code = pytest.main([*options, "-m", ring, tests], plugins=[first])
        if code in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):  # interrupted: a file does not import
            report(f"killed {first.name}\n")
            return
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            report(f"pytest ends with {code}\n")
            return
    report("survived\n")


class Failure:
    name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.name = self.name or report.nodeid

    pytest_collectreport = pytest_runtest_logreport


def in_fork(suite: str, mutant: Mutated | None, thorough: bool) -> str:
    """`killed <by what>`, `survived`, `incompetent` or `timed out`."""
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.setsid()
        with Path(os.devnull if mutant else "/dev/stderr").open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        run_tests(suite, mutant, thorough, lambda line: (os.write(write, line.encode()), None)[1])
        os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], SECONDS[thorough])
    result = os.read(read, 4096).decode().strip() if ready else "timed out"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # its ranks too
    os.waitpid(child, 0)
    os.close(read)
    return result or "killed by a crash"


def sample(suite: str, known: dict[str, Operator], size: int, seed: int) -> list[Mutant]:
    places, draw = sites(suite, known), random.Random(f"{seed} {suite}")
    print(f"{suite}: {sum(map(len, places.values()))} mutants in {len(places)} places", flush=True)
    return [draw.choice(places[place]) for place in draw.sample(sorted(places), min(size, len(places)))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], help="folders; all, when none is named")
    parser.add_argument("--sample", type=int, default=40, help="mutants for each folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--thorough", action="store_true", help="run the second ring of tests, too")
    given = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for module in WARM:
        importlib.import_module(module)
    known = operators()
    for name in given.suites or SUITES:
        passed = in_fork(name, None, given.thorough)
        if passed != "survived":
            raise SystemExit(f"{name}, without a mutant: {passed}; see the output above")
        counts: Counter[str] = Counter()
        for mutant in sample(name, known, given.sample, given.seed):
            mutated, begin = mutant.source(known), time.monotonic()
            assert mutated is not None
            result = in_fork(name, Mutated(mutant.path, mutated), given.thorough)
            took = f"[{time.monotonic() - begin:.0f} s]  line {mutant.line}  {mutant.operator}"
            print(f"{result}  {took}  {mutant.change(mutated)}", flush=True)
            counts[result.split()[0]] += 1
        score = counts["killed"] / max(1, counts["killed"] + counts["survived"])
        print(f"{name}: {dict(counts)}, score {score:.0%}")


if __name__ == "__main__":
    main()

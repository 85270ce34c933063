"""Mutation tests of the library's core: a seeded sample of small changes, each of which some test must notice.

Outside CI (pytest does not collect it). It uses the operators of cosmic-ray: pip install cosmic-ray

    python tests/mutation/run.py                        # a sample of every folder, by the first ring of tests
    python tests/mutation/run.py --thorough             # by both rings: `-m thorough`, too
    python tests/mutation/run.py plan run --sample 100 --seed 7

A copy of the repository holds one mutant after the other. One warm process has imported torch; for each mutant, a fork
of it runs the tests of its folder there, file after file, up to the first failure. Left out is a mutant with which
`fnddp` cannot be imported, or that runs out of time.
"""

import argparse
import ast
import contextlib
import importlib
import itertools
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import parso
import pytest
from cosmic_ray.ast import ast_nodes
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[2]
WARM = ["torch", "torch.distributed", "torch._dynamo", "torch._inductor.utils", "torch.testing", "optree"]
WARM += ["torch.fx.experimental.proxy_tensor", "torch.distributed._functional_collectives"]

SECONDS = {False: 400, True: 1200}  # that a mutant gets, in one ring and in both
INCOMPETENT = 99  # the exit status with a mutant that cannot be imported
SAID = "said.txt"  # what tests print, in the copy

# The files of a folder, and its tests, the quick and the general first; doctests come before them.
SUITES = {
    "plan": (
        ("fnddp/plan/**/*.py", "fnddp/ir/*.py"),
        "plan engine period show kinds carriers cost stats powersgd backends passes plan_cli hierarchical laws",
    ),
    "run": (
        ("fnddp/run/*.py",),
        "engine adapters stats weights functional backward backends kinds wire module schedules "
        "plan failures choose drop_in/",
    ),
    "memory": (("fnddp/transforms/memory.py",), "memory transforms schedules laws"),
    "transforms": (("fnddp/transforms/*.py",), "transforms powersgd schedules codecs memory laws carriers"),
    "module": (
        ("fnddp/adapters/**/*.py",),
        "stats backward backward_life nested_backward adapters drop_in/ functional weights module register owners "
        "wire state agreement checkpoint schedules choose transforms failures ways",
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


class Mutant(NamedTuple):
    path: str
    line: int
    operator: str
    occurrence: int


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
                positions = [at for node in ast_nodes(module) for at, *_ in operator.mutation_positions(node)]
                for occurrence, at in enumerate(positions):
                    if not any(first <= at < last for first, last in skipped):
                        mutant = Mutant(name, at[0], operator_name, occurrence)
                        found.setdefault((name, *at), []).append(mutant)
    return found


def run_tests(suite: str, tree: Path, thorough: bool) -> None:
    """Exit with the status of the first file of tests that fails in `tree`; for a fork."""
    os.setsid()
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    with (tree / SAID).open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    try:
        importlib.import_module("fnddp")
    except BaseException:
        os._exit(INCOMPETENT)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--doctest-modules", "--rootdir", str(tree)]
    rings = ["not thorough", "thorough"] if thorough else ["not thorough"]
    for ring, tests in itertools.product(rings, paths_of(suite)):  # to collect all at once takes longer than most live
        code = pytest.main([*options, "-m", ring, tests])
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            os._exit(code)
    os._exit(0)


def in_fork(suite: str, tree: Path, thorough: bool) -> str:
    """Return `killed by TEST`, `survived`, `incompetent` or `timed out`."""
    fork = multiprocessing.get_context("fork").Process(target=run_tests, args=(suite, tree, thorough))
    fork.start()
    fork.join(SECONDS[thorough])
    code = fork.exitcode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(fork.pid, signal.SIGKILL)  # its ranks too
    fork.join()
    if code in (None, 0, INCOMPETENT):
        return {None: "timed out", 0: "survived", INCOMPETENT: "incompetent"}[code]
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", (tree / SAID).read_text(), re.MULTILINE)
    return f"killed by {failed[1] if failed else f'status {code}'}"


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
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for module in WARM:
        importlib.import_module(module)
    known = operators()
    with tempfile.TemporaryDirectory(prefix="fnddp-mutants-", ignore_cleanup_errors=True) as folder:
        tree = Path(shutil.copytree(ROOT, Path(folder) / "fnddp", ignore=shutil.ignore_patterns(".*", "__pycache__")))
        for name in given.suites or SUITES:
            passed = in_fork(name, tree, given.thorough)
            if passed != "survived":
                raise SystemExit(f"{name}, without a mutant: {passed}\n{(tree / SAID).read_text()}")
            sys.dont_write_bytecode = True  # a mutant may have the size and the second of what comes next
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            counts: Counter[str] = Counter()
            for mutant in sample(name, known, given.sample, given.seed):
                source, begin = (ROOT / mutant.path).read_text(), time.monotonic()
                mutated = mutate_code(source, known[mutant.operator], mutant.occurrence)
                (tree / mutant.path).write_text(mutated)
                result = in_fork(name, tree, given.thorough)
                shutil.copy2(ROOT / mutant.path, tree / mutant.path)
                took = f"[{time.monotonic() - begin:.0f} s]  {mutant.operator}  {mutant.path}:{mutant.line}"
                print(f"{result}  {took}: {mutated.splitlines()[mutant.line - 1].strip()}", flush=True)
                counts[result.split()[0]] += 1
            score = counts["killed"] / max(1, counts["killed"] + counts["survived"])
            print(f"{name}: {dict(counts)}, score {score:.0%}")


if __name__ == "__main__":
    main()

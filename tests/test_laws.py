"""Every law, over every registered name and over random nestings, on 1 to 4 ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fnddp
from fnddp.sync import registry
from fnddp import tree as trees_of
from fnddp.plan.reuse import Donation
from tests.laws import (
    DONATIONS,
    LAWS,
    STEPS,
    engine_step,
    law_5_lossless_is_exact,
    law_6_lowered_is_eager,
    law_7_resuming_an_engine_is_bit_exact,
    law_8_error_feedback_loses_nothing,
    make_engine,
)
from tests.pipelines import EXAMPLES, LOSSLESS, TREES, grads, nestings
from tests.ranks import run_threads

OPS = [
    "all_reduce(op='sum')",
    "bucketize(all_reduce(op='max'))",
    "warmup(all_reduce(op='min'), 1, all_reduce(op='min'))",
]


def test_every_registered_name_has_an_example():
    ours = {name for name, entry in registry.items() if entry.__module__.startswith("fnddp")}
    assert set(EXAMPLES) == ours


def trees_for(sync: fnddp.Sync) -> list[str]:
    # a partition's patterns must match, and a sum or max of complex numbers is not what these examples are about
    return ["model"] if "*weight" in repr(sync) else list(TREES)


def applies(law, sync: fnddp.Sync) -> bool:
    return law is not law_8_error_feedback_loses_nothing or sync.ops == {"mean"}


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("law", LAWS)
def test_registry(law, n):
    for text in EXAMPLES.values():
        sync = fnddp.parse(text)
        for tree in trees_for(sync):
            if applies(law, sync):
                run_threads(n, law, sync, tree)


@pytest.mark.parametrize("law", LAWS)
@given(sync=nestings(), n=st.integers(1, 4), tree=st.sampled_from(TREES))
def test_nestings(law, sync, n, tree):
    run_threads(n, law, sync, tree)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("text", LOSSLESS + OPS)
def test_lossless_is_exact(text, n):
    sync = fnddp.parse(text)
    for tree in trees_for(sync):
        if tree != "mixed" or sync.ops <= {"mean", "sum"}:
            run_threads(n, law_5_lossless_is_exact, sync, tree)


def check_laws(rank: int, laws: list, texts: list[str], trees: list[str]) -> None:
    for text in texts:
        sync = fnddp.parse(text)
        for law in laws:
            for tree in trees_for(sync):
                if tree in trees and applies(law, sync):
                    law(rank, sync, tree)


@pytest.mark.parametrize(("n", "trees"), [(2, ["model", "mixed"]), (3, ["mixed"]), (4, ["model"])])
def test_on_gloo_processes(gloo, n, trees):
    gloo(n, check_laws, LAWS, list(EXAMPLES.values()), trees)
    gloo(n, check_laws, [law_5_lossless_is_exact], LOSSLESS, trees)

"""Every law, over every registered name and over random nestings, on 1 to 4 ranks.

The first ring has three ranks, and one tree for each example; the second one rank with all trees, and two or four.
"""

import copy
import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fnddp
from fnddp.core.sync import registry
from fnddp.laws import (
    DONATIONS,
    LAWS,
    LOWERED,
    Law,
    applies,
    bits,
    engine_step,
    law_2_all_ranks_get_the_same_bits,
    law_4_sent_reduces_to_mean,
    law_5_lossless_is_exact,
    law_8_error_feedback_loses_nothing,
    law_10_simulated_is_real,
    law_11_weighted_is_pooled,
    make_engine,
)
from fnddp.plan.draft import Donation
from fnddp.plan.lower import Traces
from fnddp.simulation.ranks import run_threads
from tests.pipelines import EXAMPLES, LOSSLESS, TREES, grads, nestings
from tests.rings import one_of
from tests.traces import TracesOfThreads

PARTS = 5  # of the registry: each test has a time limit
ABOUT_RANKS = [
    law_2_all_ranks_get_the_same_bits,
    law_4_sent_reduces_to_mean,
    law_8_error_feedback_loses_nothing,
    law_10_simulated_is_real,
    law_11_weighted_is_pooled,
]
EAGER = [law for law in LAWS if law not in [*LOWERED, law_5_lossless_is_exact]]

OPS = [
    "all_reduce(op='sum')",
    "bucketize(all_reduce(op='max'))",
    "warmup(all_reduce(op='min'), 1, all_reduce(op='min'))",
]


def test_every_registered_name_has_an_example():
    ours = {name for name, entry in registry.items() if entry.__module__.startswith("fnddp")}
    assert set(EXAMPLES) == ours


SIZES = [n if n == 3 else pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2, 3, 4)]


def trees_for(sync: fnddp.Sync, n: int, i: int) -> list[str]:
    """The trees on which example `i` is tried."""
    if n in (2, 4) and (i + n // 2) % 2:
        return []  # on threads each example has one of the two; gloo processes have both
    if "*weight" in repr(sync):
        return ["model"]  # a partition's patterns must match
    return list(TREES) if n == 1 else [("model", "mixed")[(i + n) % 2]]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("law", EAGER)
def test_registry(law, n):
    for i, text in enumerate(EXAMPLES.values()):
        sync = fnddp.parse(text)
        for tree in trees_for(sync, n, i) if applies(law, sync) else ():
            run_threads(n, law, sync, TREES[tree])


@pytest.mark.thorough
@pytest.mark.parametrize("law", EAGER)
@given(sync=nestings(), n=st.integers(1, 4), tree=st.sampled_from(list(TREES)))
def test_nestings(law, sync, n, tree):
    if applies(law, sync):
        run_threads(n, law, sync, TREES[tree])


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("text", LOSSLESS + OPS)
def test_lossless_is_exact(text, n):
    sync = fnddp.parse(text)
    for tree in TREES if "*weight" not in text else ["model"]:  # patterns must match
        if tree != "mixed" or sync.ops <= {"mean", "sum"}:  # complex numbers have no max
            run_threads(n, law_5_lossless_is_exact, sync, TREES[tree])


def texts_on_gloo(n: int, part: int) -> list[str]:
    """All on two ranks, and each on either three or four: collectives between processes are what takes the time."""
    texts = list(EXAMPLES.values())
    return (texts if n == 2 else texts[n % 2 :: 2])[part::PARTS]


def check_on_gloo(rank: int, laws: list, texts: list[str], tree: str) -> None:
    for i, text in enumerate(texts):
        sync, of_tree = fnddp.parse(text), TREES["model" if "*weight" in text else tree]
        for law in laws:
            if applies(law, sync):
                law(rank, sync, of_tree, **({"donation": DONATIONS[i % 4], "seed": i} if law in LOWERED else {}))


# A ring of two adds an element in one order, wherever it lies in a buffer; a larger one is near.
ON_GLOO = [(2, "mixed", ABOUT_RANKS), (3, "mixed", ABOUT_RANKS), (4, "model", ABOUT_RANKS)]
ON_GLOO += [(2, "mixed", LOWERED[:1]), (3, "model", LOWERED[:1]), (4, "model", LOWERED[:1])]


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("n", "tree", "laws"), ON_GLOO, ids=lambda given: str(given)[:5])
def test_on_gloo_processes(gloo, n, tree, laws, part):
    gloo(n, check_on_gloo, laws, texts_on_gloo(n, part), tree)
    gloo(n, check_on_gloo, [law_5_lossless_is_exact], LOSSLESS[part::PARTS], tree)


# Law 6, and law 7 through an engine: the registry with what adapters donate in turn, and random nestings.


def run_lowered(n: int, sync: fnddp.Sync, tree: str, laws: Sequence[Law], donation: Donation, seed: int) -> None:
    """One trace for all ranks and laws: it takes longer than all the rest."""
    options = {"donation": donation, "seed": seed, "traces": TracesOfThreads()}
    run_threads(n, lambda rank: [law(rank, sync, TREES[tree], **options) for law in laws])


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("part", range(PARTS))
def test_registry_lowered(n, part):
    for i, text in list(enumerate(EXAMPLES.values()))[part::PARTS]:
        sync = fnddp.parse(text)
        for j, tree in enumerate(trees_for(sync, n, i)):
            laws = LOWERED if n == 3 else LOWERED[:1]
            run_lowered(n, sync, tree, laws, DONATIONS[(i + j + n) % len(DONATIONS)], seed=i + n)


# A trace takes 0.1 to 0.5 s, so there are few examples; --hypothesis-profile=thorough has many.
FEW = settings(max_examples=15) if settings.get_current_profile_name() == "fnddp" else settings()


@pytest.mark.thorough
@FEW
@given(
    sync=nestings(),
    n=st.integers(1, 4),
    tree=st.sampled_from(list(TREES)),
    donation=st.sampled_from(DONATIONS),
    seed=st.integers(0, 9),
)
def test_nestings_lowered(sync, n, tree, donation, seed):
    run_lowered(n, sync, tree, LOWERED, donation, seed)


# Not laws for everyone: what the transforms of this package keep beyond them.


@pytest.mark.parametrize("name", one_of(4, EXAMPLES))
def test_channels_last_gradients_stay_channels_last(name):
    sync, example, traces = fnddp.parse(EXAMPLES[name]), grads("model", 0), Traces()
    mean, state = fnddp.laws.called(sync, example, sync.init(example))
    start = sync.init(example)
    if mean["conv.weight"] is None:  # no update in the first step
        start, (mean, _) = state, fnddp.laws.called(sync, example, state)
    for donation in DONATIONS[::2]:
        engine = make_engine(sync, example, donation, traces=traces)
        done = engine_step(engine, copy.deepcopy(start), example, random.Random(0))
        assert done.mean["conv.weight"].stride() == mean["conv.weight"].stride() == example["conv.weight"].stride()


@pytest.mark.parametrize("name", EXAMPLES)
def test_means_and_states_do_not_depend_on_memory_formats(name):
    sync, generator = fnddp.parse(EXAMPLES[name]), torch.Generator().manual_seed(0)
    shapes = {"conv.weight": (16, 12, 3, 3), "weight": (300, 200), "bias": (7,)}
    rows = [{path: torch.randn(shape, generator=generator) for path, shape in shapes.items()} for _ in range(3)]
    others = [{path: leaf.transpose(0, -1).contiguous().transpose(0, -1) for path, leaf in r.items()} for r in rows]
    states = sync.init(rows[0]), sync.init(others[0])
    for grads_in_step in zip(rows, others, strict=True):
        means, states = zip(*map(partial(fnddp.laws.called, sync), grads_in_step, states), strict=True)
        assert bits(means[0]) == bits(means[1])
        assert bits(states[0]) == bits(states[1])

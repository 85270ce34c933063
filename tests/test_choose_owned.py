"""`choose_owned`: bytes are those of `own`, pairs those of the study, and slower links take fewer bytes."""

import json
import random
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fnddp
from fnddp import Link, WireCounter, choose_owned
from fnddp.run import choose_owned as choosing
from fnddp.run.hops import several
from tests.ranks import on_ranks
from tests.test_owners import Net, batch, loss_of, net, optimizers

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SOME = 0.02  # nats, for which there are a dozen pairs
EXACT = ("two_shot", "allgather")
EIGHT = ("error_feedback(quantize(two_shot))", "ef21(quantize(allgather))")
FOUR = ("error_feedback(quantize(two_shot, bits=4))", "ef21(quantize(allgather, bits=4))")


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(320, 96, bias=False), nn.Linear(96, 200, bias=False))


@cache
def plans(make: type[Net] | Any, ranks: int) -> choosing.Plans:
    with torch.device("meta"):
        model = make()
    muon = optimizers(model) if isinstance(model, Net) else torch.optim.Muon(model.parameters())
    return choosing.owned_plans("test", model, several(muon), choosing.pairs(SOME), ranks)


def sent(of: tuple[fnddp.Plan, tuple[fnddp.Plan, ...]]) -> int:
    return of[0].wire_bytes + sum(plan.wire_bytes for plan in of[1])


def taken(link: Link, make: Any = small, ranks: int = 4, **options: Any) -> tuple[str, str]:
    best = choosing.owned_choice(plans(make, ranks), link, **options).best
    return best.pipeline, best.weights


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("muon_bits")


def test_the_packaged_losses_are_what_the_study_writes(study: Any) -> None:
    found = study.found_in(study.lines_of(study.RESULTS / "muon-bits.jsonl"))
    assert study.packaged(found, json.loads(study.TIMES.read_text())) == study.DATA.read_text()


@pytest.mark.thorough
def test_the_table_of_docs_has_what_is_taken(study: Any) -> None:
    table = (study.RESULTS / "muon-links.md").read_text().splitlines()
    made = study.which((2,)).splitlines()
    assert made == [row for row in table if not re.match(r"\| (8|32) \|", row)]


def test_pairs_are_those_that_seeds_clear() -> None:
    assert choosing.pairs(0.0) == ((*EXACT, 0.0),)
    some = {within: {each[:2] for each in choosing.pairs(within)} for within in (0.01, SOME, 9.0)}
    assert EIGHT in some[0.01] < some[SOME] < some[9.0]
    assert FOUR in some[SOME] - some[0.01]
    for each in choosing.pairs(9.0):
        assert {*each[:2]} <= {*choosing.hop_seconds()}
        assert [repr(fnddp.parse(text)) for text in each[:2]] == [*each[:2]]


@pytest.mark.parametrize("pair", [EXACT, EIGHT, ("two_shot", FOUR[1])])
@on_ranks(2, pytest.param(3, marks=pytest.mark.thorough))
def test_bytes_are_those_that_own_sends(rank: int, pair: tuple[str, str]) -> None:
    n = torch.distributed.get_world_size()
    planned = {each[:2]: sent(of) for each, of in plans(Net, n).items()}
    model = net()
    of = optimizers(model)
    owned = fnddp.own(model, of, *pair)
    loss_of(owned(batch(rank, 0), True)).backward()  # connects
    with WireCounter() as counter:
        for each in of:
            each.step()
            each.zero_grad()
        loss_of(owned(batch(rank, 1), True)).backward()
    assert owned.plan is not None
    assert planned[pair] == owned.plan.wire_bytes + sum(plan.wire_bytes for plan in owned.weight_plans if plan)
    assert planned[pair] == counter.wire_bytes


@pytest.mark.thorough
def test_slower_links_never_take_more_bytes() -> None:
    draw = random.Random(35)
    seen: set[tuple[str, str]] = set()
    for make in (small, Net):
        for ranks in (2, 4):
            for _ in range(20):
                latency, codec = draw.choice((0, 5e-6, 2e-5)), draw.uniform(0.2, 5)
                seconds = {text: codec * each for text, each in choosing.hop_seconds().items()}
                rates = sorted(10 ** draw.uniform(5, 10) for _ in range(12))
                of = [taken(Link(rate, latency), make, ranks, codec_seconds=seconds) for rate in rates]
                nbytes = {each[:2]: sent(x) for each, x in plans(make, ranks).items()}
                assert [nbytes[each] for each in of] == sorted(nbytes[each] for each in of), (
                    make,
                    ranks,
                    latency,
                    codec,
                )
                seen.update(of)
    assert len(seen) >= 3


def test_what_is_returned_is_what_own_takes() -> None:
    model = small()
    muon = torch.optim.Muon(model.parameters())
    pair = choose_owned(model, [muon], Link(1e4), SOME, world_size=4)
    assert (repr(pair.gradients), repr(pair.weights)) == taken(Link(1e4)) == FOUR
    assert fnddp.own(model, muon, *pair).plan is None
    exact = pair.costs[0]
    assert (exact.pipeline, exact.weights) == EXACT
    assert exact.step(0.0) > min(each.step(0.0) for each in pair.costs)


def test_a_backward_that_hides_the_first_hop_leaves_it_exact() -> None:
    slow = Link(1e7)
    assert taken(slow, backward_seconds=0.0)[0] != "two_shot"
    assert taken(slow, backward_seconds=100.0) == EXACT
    large = {"two_shot": 0.0, "allgather": 0.0, FOUR[0]: 1.0, FOUR[1]: 0.0}
    assert taken(slow, codec_seconds=large) == ("two_shot", FOUR[1])


def test_codecs_without_a_time_are_not_taken() -> None:
    assert taken(Link(1e4), codec_seconds={}) == EXACT
    assert taken(Link(1e4), codec_seconds=dict.fromkeys(EIGHT, 1e-9)) == EIGHT


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_leaves_for_which_no_loss_was_measured_keep_exact_hops(dtype: torch.dtype) -> None:
    model = small()
    model.register_parameter("own", nn.Parameter(torch.ones(3, dtype=dtype)))
    own, *matrices = model.parameters()
    of = [torch.optim.Muon(matrices), torch.optim.AdamW([own])]
    assert [*map(repr, choose_owned(model, of, Link(1e4), world_size=2))] == [*EXACT]


def test_what_does_not_fit_is_refused() -> None:
    model = small()
    first, second = model.parameters()
    muon, adamw = torch.optim.Muon([second]), torch.optim.AdamW([first])
    link = Link(1e6)
    with pytest.raises(ValueError, match=r"measured with Muon, but the optimizer is AdamW; add torch.optim.Muon"):
        choose_owned(model, torch.optim.AdamW(model.parameters()), link, world_size=2)
    with pytest.raises(ValueError, match="choose_owned: '0.weight' is in no optimizer"):
        choose_owned(model, muon, link, world_size=2)
    for within in (-0.1, float("nan")):
        with pytest.raises(ValueError, match=f"within must be a number of nats of at least 0, got {within}"):
            choose_owned(model, [muon, adamw], link, within, world_size=2)
    both = torch.optim.Muon(model.parameters())
    with pytest.raises(ValueError, match="'1 gibt' is not a link"):
        choose_owned(model, both, "1 gibt", world_size=2)
    with pytest.raises(ValueError, match=r"codec_seconds has 'quantize\(two_shot\)', which is not among"):
        choose_owned(model, both, "1gbit", world_size=2, codec_seconds={"quantize(two_shot)": 0.0})

"""The cost model against numbers worked out by hand, and `measure_link` on real ranks. Nothing here depends on time."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

import fnddp
from fnddp import Link
from fnddp.cost import measure
from fnddp.cost.estimate import estimate
from fnddp.cost.link import ALGORITHMS
from fnddp.cost.measure import Sample, fit_link
from fnddp.simulation.ranks import run_threads
from fnddp.wire.kinds import KINDS

A, B, G = 1e-3, 1e6, 3e-6  # 1 ms, 1 MB/s; the sum, at 3 us a byte, is slower than the link, at 1 us
S = 8000  # bytes: 8 ms at B


@dataclass(frozen=True)
class Fake:
    """A plan's collective, as far as the model looks."""

    wire_bytes: int = S
    slot: int = 0
    depth: int = 0
    group: str | None = None
    world_size: int = 2
    kind: str = "all_reduce"


# 4 ranks: messages in a row, and 3/4 of the payload (6 ms) in each pass; to add it takes 3 times as long.
BY_HAND = {
    ("gloo", "all_reduce"): (12, 24e-3),  # 4(n-1) messages
    ("ring", "all_reduce"): (6, 24e-3),
    ("halving_doubling", "all_reduce"): (4, 24e-3),
    ("gloo", "reduce_scatter"): (12, 24e-3),  # a whole all_reduce
    ("ring", "reduce_scatter"): (3, 18e-3),
    ("halving_doubling", "reduce_scatter"): (2, 18e-3),
    ("gloo", "all_gather"): (6, 24e-3),  # S is one rank's part: three of them arrive
    ("ring", "all_gather"): (3, 24e-3),
    ("halving_doubling", "all_gather"): (2, 24e-3),
    **{(algorithm, "all_to_all"): (3, 6e-3) for algorithm in ALGORITHMS},
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", KINDS)
def test_formulas(algorithm, kind):
    link, (messages, seconds) = Link(B, A, G, algorithm), BY_HAND[algorithm, kind]
    assert link.seconds(kind, S, 4) == pytest.approx(messages * A + seconds)
    assert link.seconds(kind, S, 1) == link.link_bytes(kind, S, 1) == 0


def test_a_sum_that_is_faster_than_the_link_costs_nothing():
    assert Link(B, A, 1 / B).seconds("all_reduce", S, 4) == Link(B, A).seconds("all_reduce", S, 4)


def test_h100_pair():
    # nccl-tests: 1 GiB on two H100 PCIe in 9,306.7 us; its "bus bandwidth" is 115.4 GB/s.
    link = Link.parse("115.4GB/s")
    assert link.seconds("all_reduce", 2**30, 2) == pytest.approx(9306.7e-6, rel=1e-3)


def test_link_bytes():
    for kind, sent in {"all_reduce": 1500, "reduce_scatter": 750, "all_gather": 3000, "all_to_all": 750}.items():
        assert Link(B, algorithm="ring").link_bytes(kind, 1000, 4) == sent
    assert Link(B, algorithm="gloo").link_bytes("reduce_scatter", 1000, 4) == 1500
    with pytest.raises(ValueError, match="'gossip' is not a kind of collective; known: all_reduce"):
        Link(B).seconds("gossip", S, 2)
    with pytest.raises(ValueError, match="no collective has 8000 bytes on 0 ranks"):
        Link(B).link_bytes("all_reduce", S, 0)


def test_halving_and_doubling_round_ranks_up():
    link = Link(math.inf, A, algorithm="halving_doubling")
    assert link.seconds("all_reduce", S, 5) == link.seconds("all_reduce", S, 8) == pytest.approx(6 * A)


def two_levels(inner: Link, g: int, **outer) -> Link:
    return Link(inner=inner, ranks_per_node=g, algorithm="ring", **outer)


def test_hierarchical_by_hand():
    # g = 4, N = 2: 2(g-1)[a_i + S/(g B_i)] + 2(N-1)[a_o + S/(g N B_o)]
    link = two_levels(Link(10 * B, A / 10, algorithm="ring"), 4, bandwidth=B, latency=A)
    by_hand = 6 * (A / 10 + S / (4 * 10 * B)) + 2 * (A + S / (4 * 2 * B))
    assert link.seconds("all_reduce", S, 8) == pytest.approx(by_hand)
    assert link.link_bytes("all_reduce", S, 8) == S / 4  # 2 * 1/2 of S/4
    assert link.link_bytes("all_reduce", S, 4) == 0
    assert link.seconds("all_reduce", S, 3) == link.inner.seconds("all_reduce", S, 3)
    assert link.seconds("all_reduce", S, 1) == 0
    for kind in ("all_reduce", "reduce_scatter", "all_gather"):  # equal levels move bytes as one does
        flat = Link(B, algorithm="ring")
        assert two_levels(flat, 4, bandwidth=B).seconds(kind, S, 12) == pytest.approx(flat.seconds(kind, S, 12))
    with pytest.raises(ValueError, match="6 ranks do not fill nodes of 4"):
        link.seconds("all_reduce", S, 6)


def test_parse():
    assert Link.parse("1 Gbit/s") == Link.parse("1000mbit") == Link.parse("1Gbps") == Link(125e6)
    assert Link.parse("25gbit:20us") == Link(3.125e9, 20e-6)
    assert Link.parse("1.5 kB/s : 2ms") == Link(1500, 2e-3)
    assert Link.parse("8bit:1s") == Link(1, 1)


def test_what_is_no_link_and_no_time():
    for text in ("", "200", "nan bit", "gbit", "100mbps", "1gb/s", "1gbit:", "1gbit:20", "-1gbit", ":1s"):
        with pytest.raises(ValueError, match="is not a link: write a rate and optionally a latency, such as 200mbit"):
            Link.parse(text)
    with pytest.raises(TypeError, match=r"expected a link as text, such as '1gbit:20us', got 1000000000.0"):
        Link.parse(1e9)  # pyright: ignore[reportArgumentType]
    plan = fnddp.lower(fnddp.allreduce, {"w": torch.empty(8, device="meta")}, world_size=2)
    for wrong in (1e9, {None: 1e9}):
        with pytest.raises(TypeError, match=r"expected a link as text, such as '1gbit:20us', got 1000000000.0"):
            plan.estimate(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"seconds of forward, backward and segments must be at least 0, got .*=-1"):
        plan.estimate("1gbit", backward_seconds=-1)
    with pytest.raises(ValueError, match=r"seconds of forward, backward and segments must be at least 0, got .*-1"):
        fnddp.Compute(segments=(0.0, -1.0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bandwidth": 0}, "bandwidth must be a positive number, got 0 bytes/s"),
        ({"bandwidth": math.nan}, "bandwidth must be a positive number"),
        ({"bandwidth": "1gbit"}, r"got '1gbit'; Link.parse\('1gbit'\) reads text"),
        ({"latency": -1}, "latency must be a finite number and not negative, got -1"),
        ({"latency": "20us"}, "latency must be a finite number and not negative, got '20us'"),
        ({"algorithm": "tree"}, "algorithm must be one of gloo, ring, halving_doubling, got 'tree'"),
        ({"ranks_per_node": 8}, "inner and ranks_per_node go together"),
        ({"inner": Link(B)}, "inner and ranks_per_node go together"),
    ],
)
def test_wrong_links(wrong, message):
    with pytest.raises(ValueError, match=message):
        Link(**{"bandwidth": B, **wrong})


def test_a_link_prints_as_the_call_that_made_it():
    for link in (Link.parse("25gbit:20us"), two_levels(Link(B), 4, bandwidth=B, latency=A, gamma=G)):
        assert eval(repr(link)) == link
    in_nodes = "8 Mbit/s, 0 s a message; in nodes of 8: 8 Gbit/s, 1 us a message"
    assert str(two_levels(Link(1e9, 1e-6), 8, bandwidth=B)) == in_nodes


SMALL = (4**6, 4**7, 4**8)  # payloads for measure_link, which takes seconds otherwise
RING = Link(B)  # S on two ranks: 8 ms


@pytest.mark.parametrize(
    ("backward", "step"),
    [
        (0.0, 0.024),  # nothing to hide behind
        (0.300, 0.308),  # only the last bucket is left
        (0.024, 0.032),  # each bucket is done as the next one arrives
        (0.012, 0.028),  # backward ends early: the first arrives at 4 ms, then 24 ms of collectives
    ],
)
def test_exposed_tail(backward, step):
    costs = estimate([Fake(slot=slot) for slot in range(3)], RING, backward_seconds=backward)
    assert costs.communication_seconds == pytest.approx(0.024)
    assert costs.seconds == pytest.approx(step)
    assert costs.exposed_seconds == pytest.approx(step - backward)


def test_dependent_rounds_of_the_last_bucket_add_up():
    # Two buckets of two rounds, as PowerSGD's: the first bucket's second round is behind the second one's first.
    rounds = [Fake(slot=0), Fake(slot=1), Fake(slot=1, depth=1), Fake(slot=2, depth=1)]
    assert estimate(rounds, RING, backward_seconds=1.0).exposed_seconds == pytest.approx(0.024)
    one_bucket = estimate([Fake(), Fake(slot=1, depth=1)], RING, backward_seconds=1.0)
    assert (one_bucket.exposed_seconds, one_bucket.seconds) == pytest.approx((0.016, 1.016))


def test_a_burst_passes_once_and_fills_up_again():
    link = replace(RING, burst=4000.0)  # half of S
    seconds = [cost.seconds for cost in estimate([Fake()] * 3, link).collectives]
    assert seconds == pytest.approx([0.004, 0.008, 0.008])
    late = estimate([Fake(slot=slot) for slot in range(2)], link, backward_seconds=1.0)
    assert [cost.seconds for cost in late.collectives] == pytest.approx([0.004, 0.004])
    assert estimate([Fake(wire_bytes=1000)] * 4, link).communication_seconds == pytest.approx(0)
    assert estimate([Fake()], Link(math.inf, burst=1.0)).communication_seconds == 0


def test_links_by_group():
    mixed = [Fake(), Fake(group="nodes"), Fake(world_size=1)]
    costs = estimate(mixed, {None: RING, "nodes": Link(2 * B)})
    assert [cost.seconds for cost in costs.collectives] == pytest.approx([0.008, 0.004, 0])
    with pytest.raises(ValueError, match=r"process group 'nodes' has no link; links are given for \[None\]"):
        estimate(mixed, {None: RING})


def test_estimate_of_nothing():
    nothing = estimate([], RING, backward_seconds=0.5)
    assert (nothing.wire_bytes, nothing.link_bytes, nothing.exposed_seconds, nothing.seconds) == (0, 0, 0, 0.5)


@pytest.mark.parametrize(
    ("algorithm", "n", "latency"), [("gloo", 2, 5e-5), ("ring", 3, 0.0), ("halving_doubling", 8, 5e-5)]
)
def test_a_fit_finds_the_link(algorithm, n, latency):
    link = Link(24e6, latency, algorithm=algorithm)
    samples = [Sample(4**k, link.seconds("all_reduce", 4**k, n)) for k in range(6, 12)]
    found = fit_link(samples, n, algorithm)
    assert found.algorithm == algorithm
    assert found.bandwidth == pytest.approx(link.bandwidth)
    assert found.latency == pytest.approx(link.latency, abs=1e-12)
    # A sample that waited for the CPU, and one that fitted into a token bucket, change nothing.
    spoilt = [samples[0], samples[1]._replace(seconds=0.5, spread=0.9), samples[2]._replace(seconds=1e-5), *samples[3:]]
    assert fit_link(spoilt, n, algorithm).bandwidth == pytest.approx(link.bandwidth)


def test_a_fit_of_times_that_do_not_grow():
    found = fit_link([Sample(1000, 0.3), Sample(2000, 0.2), Sample(4000, 0.1)], 2)
    assert found.bandwidth > 0
    assert found.latency >= 0


def test_ranks_measure_the_same_link(monkeypatch):
    monkeypatch.setattr(measure, "_SIZES", SMALL)

    def body(rank: int) -> list[Link]:
        half = fnddp.measure_link(dist.new_group([0, 1]), dtype=torch.float16, seconds=0.02)
        return [fnddp.measure_link(seconds=0.02), half]

    first, second = run_threads(2, body)
    assert first == second
    for link in first:
        assert 0 < link.bandwidth < math.inf
        assert (link.gamma, link.algorithm) == (0, "gloo")


def test_one_rank_has_no_link():
    with pytest.raises(RuntimeError, match="one rank has no link to measure; start several ranks, or describe it"):
        fnddp.measure_link()

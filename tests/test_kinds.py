"""Every kind of collective: the same bits eager and lowered, exact bytes, and one message for what can share one."""

import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fnddp
from fnddp import Exchange
from fnddp.core import collectives
from fnddp.laws import DONATIONS, bits, engine_step, make_engine
from fnddp.simulate.ranks import run_threads
from fnddp.torch_private import functional_collectives
from tests.ranks import on_ranks

MOVING = ("all_gather", "all_to_all")  # which compute nothing
KINDS = ("all_reduce", *MOVING, "reduce_scatter")
FLOAT8 = torch.float8_e4m3fn


def rotated(leaf: torch.Tensor, n: int) -> torch.Tensor:
    return torch.stack([leaf.roll(r) if leaf.dtype != FLOAT8 else leaf for r in range(n)])


@fnddp.transform
class carried(fnddp.Sync):
    """Gives what one kind of collective makes of the leaves, as numbers of their own dtypes."""

    kind: str

    ops = frozenset({"mean"})
    groups = frozenset({None})

    def over(self, group, *, unnamed_only=False):
        return self

    def init(self, grads):
        return ()

    def exchange(self, leaves, state):
        if self.kind == "all_reduce":
            reduced = collectives.all_reduce(leaves, "sum", None)
        else:
            reduced = {path: self.of(leaves[path]) for path in sorted(leaves)}
        return Exchange({path: reduced[path] for path in leaves}, leaves, state)

    def of(self, leaf):
        n = collectives.world_size(None)
        if self.kind == "all_gather":
            return last(collectives.all_gather(leaf), leaf)
        if self.kind == "all_to_all":
            return last(collectives.all_to_all(rotated(leaf, n)), leaf)
        return collectives.reduce_scatter(rotated(leaf, n))


def last(rows, like):
    made = rows[-1]
    return made.clone() if like.dtype in (torch.bool, FLOAT8) else made + 1


def mixed(rank: int, step: int = 0, *, moving: bool = True) -> dict[str, torch.Tensor]:
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(10 * step + rank))
    leaves = {
        "float": normal(7, 3),
        "half": normal(5).half(),
        "complex": normal(3, dtype=torch.complex64),
        "other": normal(40),
        "scalar": normal(()),
        "empty": normal(0, 2),
        "long": torch.tensor([rank, -3, 1 << 40]),
    }
    if moving:
        leaves |= {
            "bool": torch.tensor([rank == 0, True, False]),
            "byte": torch.tensor([rank, 255, 7, 0, 1], dtype=torch.uint8),
            "eighth": normal(9).to(FLOAT8),
        }
    return leaves


def check_same_bits(rank: int, kind: str) -> None:
    sync = carried(kind)
    exact = dist.get_world_size() == 2 or kind in MOVING or dist.get_backend() == "threaded"
    of = partial(mixed, moving=kind in MOVING)
    for donation in DONATIONS:
        engine = make_engine(sync, of(rank), donation)
        for step in range(3):
            expected, _ = sync(of(rank, step), ())
            done = engine_step(engine, (), of(rank, step), random.Random(rank + step))
            if exact:
                assert bits(done.mean) == bits(expected), (donation, step)
            else:  # a ring adds in another order elsewhere in a buffer
                for path, leaf in expected.items():
                    torch.testing.assert_close(done.mean[path], leaf)
        assert engine.plan is not None
        assert {c.kind.name for c in engine.plan.collectives} == {kind}
        with fnddp.WireCounter() as eager:
            sync(of(rank), ())
        assert eager.wire_bytes == engine.plan.wire_bytes
        assert eager.collectives == sum(len(c.payloads) for c in engine.plan.collectives)


@pytest.mark.parametrize("kind", KINDS)
def test_lowered_is_eager_on_threads(kind):
    run_threads(3, check_same_bits, kind)


@pytest.mark.thorough
@on_ranks(2, 3)
def test_lowered_is_eager_on_gloo(rank):
    for kind in KINDS:
        check_same_bits(rank, kind)


def planned(kind: str, **options: Any) -> fnddp.Plan:
    return fnddp.lower(carried(kind), mixed(0, moving=kind in MOVING), world_size=8, **options)


# Bytes of one rank's leaves: 21 floats, 5 halves, 3 complex, 40 and 1 floats, 3 longs; 3 bools, 5 bytes, 9 eighths.
REAL = 4 * (21 + 40 + 1) + 8 * 3 + 2 * 5 + 8 * 3
ALL = REAL + 3 + 5 + 9


@pytest.mark.parametrize(
    ("kind", "wire_bytes", "link_bytes"),
    [
        ("all_reduce", REAL, REAL * 2 * 7 / 8),
        ("all_gather", ALL, ALL * 7),
        ("reduce_scatter", 8 * REAL, 8 * REAL * 7 / 8),
        ("all_to_all", 8 * ALL, 8 * ALL * 7 / 8),
    ],
)
def test_bytes(kind, wire_bytes, link_bytes):
    plan = planned(kind)
    assert plan.wire_bytes == wire_bytes
    assert sum(c.link_bytes for c in plan.collectives) == pytest.approx(link_bytes, rel=1e-12)


def test_rows_of_bytes_begin_where_each_dtype_may_begin():
    dtypes = (torch.float16, torch.float64, torch.float32, torch.bfloat16)
    leaves = {str(i): torch.ones(3 + 2 * i, dtype=dtype) for i, dtype in enumerate(dtypes)}
    (collective,) = fnddp.lower(carried("all_gather"), leaves, world_size=4).collectives
    assert [payload.dtype.itemsize for payload in collective.payloads] == [8, 4, 2, 2]
    assert [payload.offset for payload in collective.payloads] == [0, 40, 68, 74]  # 5 * 8, 7 * 4, 3 * 2 bytes
    assert collective.width == 96  # 74 + 9 * 2, up to a multiple of 8


@pytest.mark.parametrize("kind", KINDS)
def test_launched_before_the_last_gradient_and_before_the_commit(kind):
    plan = planned(kind, first_bucket_mb=0.00001, bucket_cap_mb=0.0001)
    launching = [segment for segment in plan.segments if segment.launches is not None]
    assert len({segment.slot for segment in launching}) > 1  # as buckets arrive
    committing = [i for i, segment in enumerate(plan.segments) if segment.commits]
    assert all(plan.segments.index(segment) < committing[0] for segment in launching)
    assert not any(plan.segments[i].launches for i in committing)


@fnddp.transform
class outlandish(carried):
    """Calls a collective that is none of the kinds, or none."""

    kind: str = "broadcast"

    def exchange(self, leaves, state):
        if self.kind == "none":
            return Exchange({path: leaf * 1 for path, leaf in leaves.items()}, leaves, state)
        name = dist.group.WORLD.group_name if dist.is_initialized() else "default"
        made = {path: functional_collectives.broadcast(leaves[path], 0, name) for path in sorted(leaves)}
        mean = {path: functional_collectives.wait_tensor(made[path]) for path in leaves}
        return Exchange(mean, leaves, state)


def test_what_is_no_kind_is_not_lowered():
    with pytest.raises(fnddp.LoweringError, match="no place in a schedule"):
        fnddp.lower(outlandish(), {"w": torch.empty(12)}, world_size=4)


@pytest.mark.thorough
@pytest.mark.parametrize("sync", [outlandish(), outlandish("none")], ids=repr)
@on_ranks(2, 3)
def test_steps_without_planned_collectives_vote(rank, sync):
    """In a step in which the first rank alone has the first leaf, and nobody the second, and in one that fails."""
    grads = {"w": torch.arange(12.0) + rank, "v": torch.ones(5) * rank}
    engine = make_engine(sync, grads)
    expected, _ = sync(grads, ())
    done = engine_step(engine, (), grads, random.Random(0))
    assert engine.plan is None or not engine.plan.collectives
    assert bits(done.mean) == bits({path: expected[path] for path in done.mean})
    engine.begin(())
    if rank == 0:
        engine.step.feed("w", grads["w"].clone())
    assert engine.step.finish().unused == {"v"}
    engine.begin(())
    if rank == 0:
        engine.fail(ValueError("of rank 0"))
    else:
        with pytest.raises(fnddp.StepFailedError, match="of rank 0"):
            engine.run({path: leaf.clone() for path, leaf in grads.items()})
    engine_step(engine, (), grads, random.Random(0))


@fnddp.transform
class remembering(fnddp.Sync):
    """Exchanges what it remembers too, which depends on no leaf."""

    inner: fnddp.Sync

    def init(self, grads):
        return {path: torch.ones(3) for path in grads}

    def exchange(self, leaves, state):
        summed = {path: collectives.all_gather(part).sum(0) for path, part in state.items()}
        return Exchange(self.inner.exchange(leaves, ()).mean, leaves, summed)


def test_what_only_a_state_needs_travels_with_the_first_bucket():
    plan = fnddp.lower(remembering(fnddp.allreduce), {"w": torch.ones(3)}, world_size=2)
    gathered, _ = plan.collectives
    assert (gathered.kind.name, gathered.bucket, gathered.slot, gathered.depth) == ("all_gather", 0, 0, 0)
    assert gathered.payloads[0].label == "(state)"
    assert not any(segment.launches for segment in plan.segments if segment.commits)

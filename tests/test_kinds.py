"""Every kind of collective: the same bits eager and lowered, exact bytes, and one message for what can share one."""

import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fnddp
from fnddp import allgather, collectives, laws, tree
from fnddp.laws import DONATIONS, engine_step, law_6_lowered_is_eager, make_engine
from fnddp.run.program import Buffer
from fnddp.simulation.ranks import run_threads
from fnddp.torch_private import functional_collectives
from fnddp.tree import Leaves
from fnddp.wire import kinds
from fnddp.wire.c10d import C10D
from tests.ranks import on_ranks
from tests.test_passes import Applied

MOVING = ("all_gather", "all_to_all")  # which compute nothing
KINDS = ("all_reduce", *MOVING, "reduce_scatter")
FLOAT8 = torch.float8_e4m3fn


def carried(kind: str) -> Applied:
    """Gives what one kind of collective makes of the leaves, as numbers of their own dtypes."""

    def rows(leaf: Tensor) -> Tensor:
        n = collectives.world_size(None)
        return torch.stack([leaf.roll(r) if leaf.dtype != FLOAT8 else leaf for r in range(n)])

    def send(leaves: Leaves) -> Leaves:
        if kind == "all_reduce":
            return collectives.all_reduce(leaves, "sum", None)
        move = getattr(collectives, kind)
        made = {path: move(leaves[path] if kind == "all_gather" else rows(leaves[path])) for path in sorted(leaves)}
        return {path: made[path] if kind == "reduce_scatter" else last(made[path]) for path in leaves}

    return Applied(send=send)


def last(rows: Tensor) -> Tensor:
    return rows[-1].clone() if rows.dtype in (torch.bool, FLOAT8) else rows[-1] + 1


def mixed(rank: int, step: int = 0, *, moving: bool = True) -> Leaves:
    leaves = tree.flatten(laws.mixed(rank, step))[0]
    leaves |= {"byte": torch.tensor([rank, 255, 7, 0, 1], dtype=torch.uint8), "eighth": leaves["strided"].to(FLOAT8)}
    computes_nothing = (torch.bool, torch.uint8, FLOAT8)
    return {path: leaf for path, leaf in leaves.items() if moving or leaf.dtype not in computes_nothing}


def check_kind(rank: int, kind: str) -> None:
    sync, leaves = carried(kind), partial(mixed, moving=kind in MOVING)
    for donation in DONATIONS:
        law_6_lowered_is_eager(rank, sync, leaves, donation=donation)
    with fnddp.WireCounter() as eager:
        sync(leaves(rank), ())
    plan = fnddp.lower(sync, leaves(rank))
    assert {c.kind.name for c in plan.collectives} == {kind}
    assert eager.wire_bytes == plan.wire_bytes
    assert eager.collectives == sum(len(c.payloads) for c in plan.collectives)


@pytest.mark.parametrize("kind", KINDS)
def test_lowered_is_eager_on_threads(kind):
    run_threads(3, check_kind, kind)


@pytest.mark.thorough
@on_ranks(2, 3)
def test_lowered_is_eager_on_gloo(rank):
    for kind in KINDS if dist.get_world_size() == 2 else KINDS[:2]:  # of the others each rank has its own
        check_kind(rank, kind)


@pytest.mark.parametrize("kind", kinds.KINDS.values(), ids=str)
@on_ranks(1, threads=True)
def test_a_rank_alone_sends_nothing(rank, monkeypatch, kind):
    monkeypatch.setattr(kinds.Kind, "call", None)
    send = torch.tensor([[1.0, -2.0, 3.0]] if kind.sends_rows else [1.0, -2.0, 3.0])
    receive = send if kind.is_in_place else torch.empty(1, 3) if kind.receives_rows else torch.empty(3)
    work = C10D.start(kind, send, receive, "sum" if kind.computes else None, None)
    assert work.is_completed()
    work.wait()
    assert receive.flatten().tolist() == [1, -2, 3]


@pytest.mark.parametrize(("kind", "payloads", "hops"), [*zip(KINDS, (1, 1, 8, 8), (2, 8, 1, 1), strict=True)])
def test_bytes(kind, payloads, hops):
    """A rank sends its leaves, or 8 rows of them; 7/8 of that or all of it goes to others, in all_reduce twice."""
    leaves = mixed(0, moving=kind in MOVING)
    plan = fnddp.lower(carried(kind), leaves, world_size=8)
    wire_bytes = payloads * sum(leaf.nbytes for leaf in leaves.values())
    assert plan.wire_bytes == wire_bytes
    assert sum(c.link_bytes for c in plan.collectives) == pytest.approx(wire_bytes * hops * 7 / 8, rel=1e-12)


def test_rows_of_bytes_begin_where_each_dtype_may_begin():
    dtypes = (torch.float16, torch.float64, torch.float32, torch.bfloat16)
    leaves = {str(i): torch.ones(3 + 2 * i, dtype=dtype) for i, dtype in enumerate(dtypes)}
    (collective,) = fnddp.lower(carried("all_gather"), leaves, world_size=4).collectives
    assert [payload.dtype.itemsize for payload in collective.payloads] == [8, 4, 2, 2]
    assert [payload.offset for payload in collective.payloads] == [0, 40, 68, 74]  # 5 * 8, 7 * 4, 3 * 2 bytes
    assert collective.width == 96  # 74 + 9 * 2, up to a multiple of 16


# Of 128 where that adds less than a hundredth: 28 to 12,900 bytes, but not 124 to 12,292.
@pytest.mark.parametrize(("elements", "columns"), [(1, 4), (1001, 1004), (3225, 3232), (3232, 3232), (3073, 3076)])
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather", "all_to_all"])
def test_rows_begin_at_multiples_of_16_bytes_or_of_128(kind, elements, columns):
    (collective,) = fnddp.lower(carried(kind), {"w": torch.ones(elements)}, world_size=4).collectives
    assert collective.width * collective.dtype.itemsize == 4 * columns
    assert collective.wire_bytes == 4 * elements * (4 if collective.kind.sends_rows else 1)  # of payloads alone


def test_what_pads_sums_is_zeros_however_memory_begins():
    """Or it would be taken for gradients that are not finite."""
    (collective,) = fnddp.lower(carried("reduce_scatter"), {"w": torch.ones(7)}, world_size=3).collectives
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        buffer = Buffer(collective, views_apart=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(buffer.send[:, 7:], torch.zeros(3, 1))


def test_other_collectives_are_not_lowered():
    def broadcast(leaves: Leaves) -> Leaves:
        return {path: functional_collectives.broadcast(leaf, 0, "default") for path, leaf in leaves.items()}

    with pytest.raises(fnddp.LoweringError, match="cannot be scheduled"):
        fnddp.lower(Applied(send=broadcast), {"w": torch.empty(12)}, world_size=4)


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@on_ranks(2)
def test_gathers_on_gloo_are_not_those_that_crash(rank, compiler):
    """A race in torch frees twice what names an all_gather, where its operation is another."""
    gradients = {"w": torch.full((3,), 1.0 + rank)}
    torch._dynamo.reset()
    step = allgather if compiler is None else torch.compile(allgather, backend=compiler, fullgraph=True)
    with torch.profiler.profile() as profile:
        mean, _ = step(gradients, ())
    assert mean["w"].tolist() == [1.5] * 3
    names = {event.name.removeprefix("_c10d_functional::") for event in profile.events()}
    safe = "all_gather_into_tensor_out" if compiler is None else "all_to_all_single"
    assert {name for name in names if name.startswith(("all_gather_into_tensor", "all_to_all"))} == {safe}


@on_ranks(2, threads=True)
def test_steps_without_collectives_vote(rank):
    """In a step in which the first rank alone has the first leaf, and nobody the second, and in one that fails."""
    grads = {"w": torch.ones(12), "v": torch.ones(5)}
    engine = make_engine(Applied(send=dict), grads)
    engine.begin(())
    if rank == 0:
        engine.step.feed("w", grads["w"].clone())
    assert engine.step.finish().unused == {"v"}
    assert not engine.plan.collectives
    engine.begin(())
    if rank == 0:
        engine.fail(ValueError("of rank 0"))
    else:
        with pytest.raises(fnddp.StepFailedError, match="of rank 0"):
            engine.run({path: leaf.clone() for path, leaf in grads.items()})
    engine_step(engine, (), grads, random.Random(0))


class Remembering(Applied):
    """Exchanges what it remembers too, which depends on no leaf."""

    def exchange(self, leaves, state):
        return super().exchange(leaves, ())._replace(state=collectives.all_gather(state).sum(0))


def test_collectives_of_the_state_travel_with_the_first_bucket():
    plan = fnddp.lower(Remembering(), {"w": torch.ones(3)}, world_size=2, state=torch.ones(3))
    gathered, _ = plan.collectives
    assert (gathered.kind.name, gathered.bucket, gathered.slot, gathered.depth) == ("all_gather", 0, 0, 0)
    assert gathered.payloads[0].label == "(state)"
    assert not any(segment.launches for segment in plan.segments if segment.commits)

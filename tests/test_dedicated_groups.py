"""Models on process groups of their own, whose backwards come in another order on each rank."""

import copy
import gc
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fnddp
from fnddp.wire.c10d import dedicated_to
from fnddp.wire.protocol import CollectiveError
from tests.models import Hooked, assert_equal_on_ranks, batch, grads_of
from tests.ranks import on_ranks

SECONDS = 60
pytestmark = pytest.mark.thorough
TWO_ROUNDS = ("two_shot", "powersgd(allreduce, rank=4)")


def models_of(text: str) -> list[nn.Module]:
    """Two models of equal shapes, whose messages could be taken for each other's."""
    groups = [dist.new_group(timeout=timedelta(seconds=20)) for _ in range(2)]
    return [fnddp.DistributedDataParallel(nn.Linear(4, 4), sync=text, process_group=g) for g in groups]


def loss_of(models: list[nn.Module], which: int, rank: int) -> torch.Tensor:
    return models[which](torch.ones(1, 4) * (which + 1) * (rank + 1)).sum()


def require_means(models: list[nn.Module]) -> None:
    """Require the means of gradients that are, on two ranks, 1 and 2 times the number of the model."""
    for which, model in enumerate(models):
        torch.testing.assert_close(model.module.weight.grad, torch.full((4, 4), (which + 1) * 1.5))


@pytest.mark.parametrize("text", TWO_ROUNDS)
@on_ranks(2, seconds=SECONDS)
def test_a_thread_for_each_model_which_begin_in_another_order_on_each_rank(rank: int, text: str) -> None:
    models, has_begun = models_of(text), threading.Event()

    def train(which: int) -> None:
        try:
            loss = loss_of(models, which, rank)
            if which == rank:
                loss.register_hook(lambda grad: has_begun.set())
            else:
                has_begun.wait()
            loss.backward()
        finally:
            has_begun.set()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(train, range(2)))
    require_means(models)


@pytest.mark.parametrize("again", range(4))  # which of the threads waits first is chance
@on_ranks(2, seconds=SECONDS)
def test_threads_that_set_up_on_one_group_at_once_share_what_is_dedicated_to_it(rank: int, again: int) -> None:
    groups, barrier = [dist.new_group(), dist.new_group()], threading.Barrier(4)

    def set_up(i: int) -> str:
        barrier.wait()
        return dedicated_to(groups[(i + rank) % 2], "this")

    with ThreadPoolExecutor(4) as threads:
        names = list(threads.map(set_up, range(4)))
    assert sorted(set(names)) == sorted(f"{group.group_name}/this" for group in groups)
    assert names[0] == names[2]
    assert names[1] == names[3]


@on_ranks(2, seconds=SECONDS)
def test_each_model_has_a_communicator_and_takes_that_of_one_that_is_gone_on_all_ranks(rank: int) -> None:
    def wrapped() -> Any:
        return fnddp.DistributedDataParallel(nn.Linear(3, 2), sync="fp16(allreduce)")

    def numbers(*models: Any) -> list[str]:
        own = [model._engine._own_wire._own for model in models]
        return [name.rpartition(" ")[2] for each in own for name in each.values()]

    first, second = wrapped(), wrapped()
    assert numbers(first, second) == ["0", "1"]
    first.sync = "powersgd(allreduce)"  # keeps it
    first(torch.ones(1, 3))
    assert numbers(first) == ["0"]
    kept = second if rank == 1 else None
    del second
    gc.collect()
    third = wrapped()
    assert numbers(third) == ["2"]  # rank 1 still has the second one
    del kept
    gc.collect()
    assert numbers(wrapped()) == ["1"]
    for model in (third, first):
        model(torch.full((1, 3), rank + 1.0)).sum().backward()
        assert_equal_on_ranks(grads_of(model))


@on_ranks(2, seconds=SECONDS)
def test_calls_within_calls_and_backwards_have_communicators_of_their_own(rank: int) -> None:
    """Several messages of each depend on one another, so that their timing differs between ranks."""
    model = fnddp.DistributedDataParallel(nn.Linear(3, 2), sync="powersgd(two_shot, rank=1, min_compression_rate=0)")
    sync = fnddp.parse("powersgd(allreduce, rank=1, min_compression_rate=0)")
    inner, grads = fnddp.jit(sync), {"w": torch.full((3, 4), rank + 1.0)}
    plain, _ = sync(grads, sync.init(grads))
    found: list[Any] = []

    def call(_: Any) -> None:
        found.append(inner(grads, sync.init(grads))[0])

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        made = x @ params["w"]
        made.register_hook(call)
        return made.square().sum()

    outer, state = fnddp.value_and_grad(loss, sync), sync.init(grads)
    for _ in range(5):
        model.zero_grad()
        y = model(torch.full((1, 3), rank + 1.0))
        y.register_hook(call)
        y.sum().backward()
        assert_equal_on_ranks(grads_of(model))
        _, mean, state = outer(grads, state, torch.full((2, 3), rank + 1.0))
        assert_equal_on_ranks(list(mean.values()))
    assert len(found) == 10
    for each in found:
        torch.testing.assert_close(each, plain)


@on_ranks(2, seconds=SECONDS)
def test_torchcomms_gets_plain_collectives(rank: int) -> None:
    """Its wrapper of gloo drops tags: neither messages between two ranks, nor groups of our own, but the same means."""
    leaves = {"w": torch.randn(2**18, generator=torch.Generator().manual_seed(rank))}
    syncs = [fnddp.parse(text) for text in ("fp16(allreduce)", "two_shot", "allgather")]
    expected = [fnddp.jit(sync)(leaves, ())[0]["w"] for sync in syncs]

    def refuse(*_: object) -> None:
        raise AssertionError("a message with a tag, or a group of our own")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.distributed_c10d._BackendWrapper", dist.ProcessGroupGloo, raising=False)
        for name in ("direct", "ring", "connect_again"):
            patch.setattr(f"fnddp.wire.c10d.{name}", refuse)
        group = dist.new_group()
        for sync, want in zip(syncs, expected, strict=True):
            assert torch.equal(fnddp.jit(sync.over(group))(leaves, ())[0]["w"], want)


@on_ranks(2, seconds=SECONDS)
def test_a_rank_that_does_not_set_up(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=3))
    sync = fnddp.jit(fnddp.two_shot.over(group))
    if rank == 0:
        for _ in range(2):
            with pytest.raises(
                CollectiveError, match=r"could not be connected for fnddp: .* has not reached this point"
            ):
                sync({"w": torch.ones(4)}, ())
    dist.barrier()


@on_ranks(1)
def test_an_interrupt_is_raised_once(rank: int) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fnddp.wire.c10d.connect_again", interrupted)
        for error in (KeyboardInterrupt, CollectiveError):
            with pytest.raises(error):
                dedicated_to(dist.GroupMember.WORLD, "this")


@pytest.mark.parametrize("seed", [0, 6, 8, 9])
@on_ranks(2, 3, seconds=2 * SECONDS)
def test_errors_anywhere_in_backwards_through_three_models(rank: int, seed: int) -> None:
    """Any of them share a process group; they come in any order, on groups of their own in another on each rank.

    Their messages could be taken for each other's, and would give ranks other means.
    """
    alike, own = random.Random(seed), random.Random(100 * seed + rank)
    for text in ("allreduce", *TWO_ROUNDS) * 2:
        groups = [dist.new_group(timeout=timedelta(seconds=20)) for _ in range(3)]
        on = [alike.randrange(3) for _ in range(3)]
        is_weighed, fails = alike.choice([False, True]), alike.randrange(3)
        sync = fnddp.parse(f"weighted({text})" if is_weighed else text)
        models = [fnddp.DistributedDataParallel(Hooked(), sync=sync, process_group=groups[which]) for which in on]
        for step in range(5):
            order = alike.sample(range(3), 3)
            if len({*on}) == 3:
                own.shuffle(order)
            failing = alike.sample(range(dist.get_world_size()), alike.choice([1, 1, 2])) if step == fails else []
            hooks = {own.randrange(3): lambda _: 1 / 0} if rank in failing else {}
            for model in models:
                model.zero_grad()
            expected = ZeroDivisionError if rank in failing else fnddp.StepFailedError
            with ExitStack() as stack:
                if failing:
                    stack.enter_context(pytest.raises(expected))
                for model in models if is_weighed else ():
                    stack.enter_context(model.weight(1 + rank))
                sum(models[i]((i + 1) * batch(rank, step), hooks.get(i)).sum() for i in order).backward()
            if not failing:
                assert_equal_on_ranks(*map(grads_of, models))


@on_ranks(2, seconds=SECONDS)
def test_a_rank_runs_the_forward_of_a_copy_alone_and_all_train_it(rank: int) -> None:
    model = fnddp.DistributedDataParallel(nn.Linear(4, 4), sync="two_shot")
    twin = copy.deepcopy(model)
    if rank == 0:
        twin(torch.ones(1, 4))  # with gradients on
    total = torch.ones(256, dtype=torch.int64)
    dist.all_reduce(total)
    assert total.tolist() == [2] * 256
    for each in (twin, model):
        each(torch.full((1, 4), rank + 1.0)).sum().backward()
        assert_equal_on_ranks(grads_of(each))


@on_ranks(2, seconds=SECONDS)
def test_models_that_are_unpickled_connect_before_they_share_a_backward(rank: int) -> None:
    saved = pickle.dumps(models_of("two_shot"))
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    groups = [dist.new_group(timeout=timedelta(seconds=20)) for _ in range(2)]
    models = pickle.loads(saved)
    assert [model.process_group.group_name for model in models] == [group.group_name for group in groups]
    for model in models:
        model.zero_grad()
    losses = [loss_of(models, which, rank) for which in range(2)]
    (losses[rank] + losses[1 - rank]).backward()
    require_means(models)

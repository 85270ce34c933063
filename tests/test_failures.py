"""When one rank of a `DistributedDataParallel` misbehaves, each rank sees the errors in the rows of docs/failures.md.

No test measures time. Where ranks are to give up after the process group's timeout, the module has a group of its own
with a short one, and a test whose ranks wait for longer than `DEADLINE` fails with the traces of all of them.
"""

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fnddp
from fnddp import RankMismatchError, StepFailedError
from fnddp.laws import bits
from fnddp.run.vote import Vote
from fnddp.simulation.ranks import RankFailed
from fnddp.wire.protocol import CollectiveError
from tests.models import COMPRESSED, Hooked, assert_equal_on_ranks, batch, loss_of, make_model
from tests.ranks import on_ranks
from tests.ways import failing

PLAIN = "allreduce"
CHECKED = "fp16(allreduce, check=True)"  # cannot be lowered

TIMEOUT = 3  # seconds, of a process group in which a rank is going to be missed
DEADLINE = 60  # seconds, of a test: the default group's timeout in the pool, and much more than TIMEOUT


def fails(grad: Tensor) -> Tensor:
    raise ZeroDivisionError("in my backward")


def dies(grad: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return grad


class Training:
    def __init__(self, text: str, group: dist.ProcessGroup | None = None) -> None:
        sync = fnddp.parse(text)
        self.model = fnddp.DistributedDataParallel(Hooked(), process_group=group, bucket_cap_mb=0.01, sync=sync)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, x: Tensor, in_backward: Callable[[Tensor], Tensor] | None = None) -> Exception | None:
        self.optimizer.zero_grad()
        try:
            loss_of(self.model(x, in_backward)).backward()
        except Exception as error:
            return error
        self.optimizer.step()
        return None

    @property
    def parameters(self) -> Any:
        return bits(list(self.model.parameters()))

    @property
    def all(self) -> Any:
        return self.parameters, bits(self.optimizer.state_dict()["state"]), bits(self.model.sync_state)


def short_group() -> dist.ProcessGroup:
    return dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=TIMEOUT))


def require_given_up(training: Training, rank: int, error: Exception | None, before: Any) -> None:
    """A step in which another rank was missed has left nothing, and the module does not go on."""
    assert isinstance(error, CollectiveError), repr(error)
    assert "Another rank has failed, left, or not called backward; see its own error" in str(error)
    assert training.all == before
    require_refused(training, rank)


def require_refused(training: Training, rank: int) -> None:
    with pytest.raises(RuntimeError, match="an earlier step failed on this rank.*restart from a checkpoint"):
        training.model(batch(rank, 0))


# What follows an error that the script has caught


@pytest.mark.parametrize("inputs", [(2, 4), (4, 2)])
@on_ranks(2, seconds=DEADLINE)
def test_join_goes_on_after_an_error_in_backward(rank: int, inputs: tuple[int, int]) -> None:
    """On a rank whose inputs are over, and in the last step of one whose are not."""
    training = Training(COMPRESSED)
    with training.model.join():
        errors = [
            training.step(batch(rank, i), fails if (rank, i) == (1, inputs[1] - 1) else None)
            for i in range(inputs[rank])
        ]
    assert [type(each) for each in errors if each is not None] == {
        (0, (2, 4)): [],
        (0, (4, 2)): [StepFailedError],
    }.get((rank, inputs), [ZeroDivisionError])
    assert_equal_on_ranks([p.detach() for p in training.model.parameters()])


# Ranks that differ


@on_ranks(2, threads=True, seconds=DEADLINE)
def test_arguments_that_are_refused_on_one_rank_are_an_error_on_all(rank: int) -> None:
    wrong: Any = make_model().parameters()
    for module, kind, refusal in (
        (wrong, TypeError, "expected a torch.nn.Module, got generator"),
        (make_model().requires_grad_(False), RuntimeError, "no parameter of the module requires a gradient"),
    ):
        failed = rf"about set-up: .*; rank 1: failed with {kind.__name__}: DistributedDataParallel: {refusal}"
        with pytest.raises(kind if rank else RankMismatchError, match=refusal if rank else failed):
            fnddp.DistributedDataParallel(module if rank else make_model())
    with pytest.raises(TypeError, match="expected a function that does a whole training step, got Sequential"):
        fnddp.make_graphed_callable(make_model())


# Ranks that fail and go on


def skipped_step(training: Training, x: Tensor, how: str) -> None:
    """Run a step of which the other ranks do not hear."""
    training.optimizer.zero_grad()
    if how == "forward":
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            training.model(torch.ones(8, 3))
    elif how == "loss":
        output = training.model(x) + 0
        output.register_hook(fails)
        with pytest.raises(ZeroDivisionError, match="in my backward"):  # before it has reached the module
            loss_of(output).backward()
    else:
        training.model(x)


def check_one_step_behind(rank: int, text: str, how: str) -> None:
    """Rank 1 skips step 2: its later steps meet the others' earlier ones, and the others' last one meets none."""
    training, straight = Training(text, short_group()), Training(text)
    for step in range(4):
        if rank == 1 and step == 2:
            skipped_step(training, batch(rank, step), how)
        else:
            assert training.step(batch(rank, step)) is None
    if rank == 1:
        assert training.step(batch(rank, 4)) is None  # for it all is well
    else:
        before = training.all
        require_given_up(training, rank, training.step(batch(rank, 4)), before)
    assert_equal_on_ranks(training.parameters)
    for step in (0, 1, 3, 4) if rank == 1 else range(4):
        assert straight.step(batch(rank, step)) is None
    assert training.all == straight.all


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("n", "text", "how"),
    [(3, COMPRESSED, "forward"), (3, PLAIN, "loss"), (2, COMPRESSED, "no backward")],
)
def test_a_rank_that_skips_a_step_is_one_behind(gloo, n, text, how):
    gloo(n, check_one_step_behind, text, how, timeout=DEADLINE)


@pytest.mark.thorough
@on_ranks(2, seconds=DEADLINE)
def test_a_rank_that_skips_a_step_of_a_module_with_buffers(rank: int) -> None:
    """Rank 1 raises in forward and goes on: its next forward broadcasts buffers while others reduce gradients."""
    module = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model = fnddp.DistributedDataParallel(module, process_group=short_group())
    loss_of(model(batch(rank, 0))).backward()
    before = bits(list(model.parameters()))
    if rank == 1:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(8, 3))
    for step in (1, 2):
        with pytest.raises(RuntimeError) as caught:
            loss_of(model(batch(rank, step))).backward()
        if rank == 0:
            assert isinstance(caught.value, CollectiveError) == (step == 1)
            assert "not called backward" in str(caught.value)
    assert bits(list(model.parameters())) == before
    dist.barrier()


# Ranks that hang


def check_missed(rank: int, text: str, step: int, how: str) -> None:
    """In that step rank 1 comes when the others have given up, or fails in backward and never uses the module again."""
    training = Training(text, short_group())
    for good in range(step):
        assert training.step(batch(rank, good)) is None
    before = training.all
    if rank == 1 and how == "comes late":
        dist.barrier()
    error = training.step(batch(rank, 1), fails if rank == 1 and how == "fails" else None)
    if rank != 1 or how == "fails":
        dist.barrier()
    if rank == 1 and how == "fails":
        assert isinstance(error, ZeroDivisionError)
        assert training.all == before
        require_refused(training, rank)
    else:
        require_given_up(training, rank, error, before)
    assert_equal_on_ranks(training.parameters)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("n", "text", "step", "how"),
    [
        (3, COMPRESSED, 1, "comes late"),
        (2, COMPRESSED, 0, "comes late"),
        (2, COMPRESSED, 1, "fails"),
    ],
)
def test_a_rank_that_comes_after_the_timeout_or_not_at_all(gloo, n, text, step, how):
    gloo(n, check_missed, text, step, how, timeout=DEADLINE)


# Ranks that die


def check_death(rank: int, text: str, how: str) -> None:
    training = Training(text, short_group())
    if how == "is killed before its first backward":
        if rank == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        assert training.step(batch(rank, 0)) is None
    before = training.all
    if rank == dist.get_world_size() - 1:
        if how == "raises in forward":
            training.model(torch.ones(8, 3))
        loss_of(training.model(batch(rank, 1), dies)).backward()
    require_given_up(training, rank, training.step(batch(rank, 1)), before)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("n", "text", "how"),
    [
        (3, COMPRESSED, "is killed"),
        (3, COMPRESSED, "is killed before its first backward"),
        (3, PLAIN, "raises in forward"),
    ],
)
def test_a_rank_that_dies_is_an_error_on_the_others(gloo, n, text, how):
    raises = pytest.raises(RankFailed, match="shapes cannot be multiplied")
    with nullcontext() if how.startswith("is killed") else raises as caught:
        gloo(n, check_death, text, how, timeout=DEADLINE, may_die=True)
    assert caught is None or list(caught.value.errors) == [n - 1]


# Errors at the end of a step


@on_ranks(2, seconds=DEADLINE)
def test_an_error_in_the_vote_of_one_rank_alone_is_not_taken_for_one_of_all(rank: int) -> None:
    training = Training(PLAIN, short_group())
    assert training.step(batch(rank, 0)) is None
    with failing(Vote, "outcome", error=MemoryError("in the vote")) if rank == 1 else nullcontext():
        error = training.step(batch(rank, 1))
    assert isinstance(error, MemoryError) if rank == 1 else error is None
    error = training.step(batch(rank, 2))  # rank 1 has not taken the step before
    assert isinstance(error, RuntimeError if rank == 1 else CollectiveError)


@on_ranks(2, seconds=DEADLINE)
def test_an_error_in_a_pipeline_without_a_plan_is_a_collective_error_on_the_others(rank: int) -> None:
    training = Training(CHECKED, short_group())
    assert training.step(batch(rank, 0)) is None
    before, raises = training.all, failing(type(training.model.sync), "exchange", error=ZeroDivisionError())
    with raises if rank == 1 else nullcontext():
        error = training.step(batch(rank, 1))
    assert isinstance(error, ZeroDivisionError if rank == 1 else CollectiveError)
    assert training.all == before

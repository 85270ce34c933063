"""Steps over a wire whose ranks come and go: what a step that is none leaves, and when ranks are in step again."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fnddp import CollectiveError, DistributedDataParallel, StepFailedError, allreduce, error_feedback, fp16
from fnddp.ir.program import LeafSpec
from fnddp.laws import bits
from fnddp.plan.draft import Donation
from fnddp.run.engine import Engine
from fnddp.wire.protocol import Elastic
from tests.wires import AloneWire, LostWork, ReadyWork

X = torch.ones(3, 4)


class Restless(AloneWire, Elastic):
    """In some steps another rank fails, or its vote is lost."""

    epoch = 0
    lost: Exception | None = None

    def __init__(self) -> None:
        super().__init__()
        self.trouble = ""
        self.reported: list[Exception] = []

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, ReadyWork]:
        told, work = super().vote(flags, group)
        told[1, 0] = told[1, 0] or float(self.trouble == "fails")
        return told, LostWork() if self.trouble == "is lost" else work

    def report(self, error: Exception) -> None:
        self.reported.append(error)


def wrapped(wire: Restless, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(4, 2), wire=wire, **options)


def grads(model: DistributedDataParallel) -> list[Any]:
    return [None if p.grad is None else p.grad.tolist() for p in model.module.parameters()]


@pytest.mark.parametrize("trouble", ["fails", "is lost"])
def test_a_step_that_is_none_leaves_what_was_there_before(trouble):
    wire = Restless()
    model = wrapped(wire, sync=error_feedback(fp16(allreduce)))
    model(X).sum().backward()
    model.zero_grad()
    with model.no_sync():
        model(X).sum().backward()
    held = model.module.bias.grad
    before, state = grads(model), bits(model.sync_state)
    wire.trouble = trouble
    model(X).sum().backward()  # does not raise: whoever is left goes on
    assert [type(error) for error in wire.reported] == [StepFailedError if trouble == "fails" else CollectiveError]
    assert (grads(model), bits(model.sync_state)) == (before, state)
    assert model.module.bias.grad is held
    wire.trouble = ""
    wire.epoch += 1
    model(X).sum().backward()  # and what was accumulated is synchronized now
    assert model.module.bias.grad.tolist() == [6.0, 6.0]
    assert len(wire.reported) == 1


@pytest.mark.parametrize("is_committed", [True, False])
def test_who_decides_later_may_still_say_no(is_committed):
    model = wrapped(Restless())
    with model.no_sync():
        model(X).sum().backward()
    before = grads(model)
    model(X).sum().backward()
    after = grads(model)
    assert after != before
    model._steps.settle_on(is_committed)
    assert grads(model) == (after if is_committed else before)
    assert model._steps.unsynchronized == (set() if is_committed else {"weight", "bias"})
    model._steps.settle_on(False)  # it has been settled
    assert grads(model) == (after if is_committed else before)


def test_a_rank_that_was_out_of_step_goes_on_in_the_next_epoch():
    wire, leaves = Restless(), {path: torch.ones(3) for path in "ab"}
    specs = {path: LeafSpec.of(leaf) for path, leaf in leaves.items()}
    engine = Engine(allreduce, specs, donation=Donation(), learns_order=True, bucket_caps=(1,), wire=wire)
    wire.trouble = "is lost"
    engine.begin(())
    with pytest.raises(CollectiveError):
        engine.run(leaves)
    wire.trouble = ""
    with pytest.raises(RuntimeError, match="out of step"):
        engine.begin()
    wire.epoch += 1
    engine.begin()
    for path in "ab":
        engine.step.feed(path, leaves[path])
    assert engine.step.finish().mean["a"].tolist() == [1, 1, 1]
    assert engine.plan is not None
    assert list(engine.plan.buckets) == ["b", "a"]  # a newcomer has not seen in which order they came

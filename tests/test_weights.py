"""Weighted means: a rank's gradient counts as often as its weight asks."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import fnddp
from fnddp import laws
from fnddp.laws import law_11_weighted_is_pooled
from fnddp.simulate.ranks import RankFailed, run_threads
from tests.ranks import on_ranks


def test_weights_that_are_all_0_are_an_error_on_all_ranks():
    def body(rank):
        grads = {"w": torch.full((3,), float(rank + 1))}
        for run in (fnddp.allreduce, fnddp.jit(fnddp.allreduce)):
            with pytest.raises(ValueError, match="all of 2 ranks gave 0"):
                run(grads, (), weight=0.0)
            mean, _ = run(grads, (), weight=float(rank))
            assert mean["w"].tolist() == [2.0] * 3  # the next step works

    run_threads(2, body)


@pytest.mark.parametrize(
    ("text", "grads", "match"),
    [
        ("allreduce", {"w": torch.ones(2), "count": torch.tensor([1])}, "leaf 'count' is torch.int64"),
        ("allreduce", {"flag": torch.tensor([True])}, "leaf 'flag' is torch.bool"),
        ("all_reduce(op='max')", {"w": torch.ones(2)}, "takes a max"),
        ("all_reduce(op='sum')", {"w": torch.ones(2)}, "takes a sum"),
        (
            "partition({'a': allreduce, '*': all_reduce(group='7')})",
            {"a": torch.ones(1), "b": torch.ones(1)},
            "several",
        ),
    ],
)
def test_what_knows_no_weights_says_so(text, grads, match):
    sync = fnddp.parse(text)
    with pytest.raises(ValueError, match=match):
        sync(grads, sync.init(grads), weight=2.0)
    if "7" not in text:
        with pytest.raises(ValueError, match=match):
            fnddp.jit(sync)(grads, sync.init(grads), weight=2.0)


def test_law_11_finds_a_pipeline_that_forgets_weights():
    @fnddp.transform
    class normed(fnddp.Sync):
        """Scales each gradient to length 1, and so forgets how often it counts."""

        inner: fnddp.Sync

        def init(self, grads):
            return self.inner.init(grads)

        def exchange(self, leaves, state):
            return self.inner.exchange({path: x / (x.norm() + 1e-6) for path, x in leaves.items()}, state)

        def __call__(self, grads, state, *, weight=None):
            return super().__call__(grads, state)

    with pytest.raises((laws.LawError, RankFailed), match=r"law 11|weight"):
        run_threads(2, law_11_weighted_is_pooled, normed(fnddp.allreduce), laws.model)


EXPERTS = "error_feedback(partition({'expert': none, '*': fp16(allreduce)}))"


def check_experts(rank: int) -> None:
    weights = [1.0, 3.0]
    mine = {"expert": torch.full((2,), rank + 1.0), "shared": torch.full((2,), rank + 1.0)}
    sync = fnddp.parse(EXPERTS)
    state = sync.init(mine)
    for run in (sync, fnddp.jit(sync)):
        for _ in range(2):  # jit asks for weights in the first step, and exchanges them at once in the second
            mean, _ = run(mine, state, weight=weights[rank])
            assert mean["shared"].tolist() == [1.75, 1.75]
            assert mean["expert"].tolist() == [rank + 1.0, rank + 1.0]
        mean, _ = run(mine, state, weight=1.0 - rank)
        assert mean["expert"].tolist() == [rank + 1.0, rank + 1.0]


def test_a_weight_leaves_gradients_alone_that_are_not_reduced():
    run_threads(2, check_experts)
    simulation = fnddp.simulate(fnddp.parse(EXPERTS), 2)
    rows = {path: torch.tensor([[1.0], [2.0]]) for path in ("expert", "shared")}
    done = simulation.exchange(simulation._weighted(rows, [1.0, 3.0]), simulation.init(rows))
    assert done.sent["expert"].tolist() == [[1.0], [2.0]]
    assert done.mean["shared"].tolist() == [1.75]


@on_ranks(2)
def test_weights_over_a_group_that_a_hook_does_not_name_are_refused(rank):
    groups = [torch.distributed.new_group([0]), torch.distributed.new_group([1])]
    hook = fnddp.from_hook(allreduce_hook, groups[rank])
    with pytest.raises(ValueError, match="from_hook.* does not say over which process group"):
        hook({"w": torch.ones(2)}, (), weight=1.0 + rank)
    model = fnddp.DistributedDataParallel(nn.Linear(8, 4), sync=hook)
    with pytest.raises(ValueError, match="does not say over which process group"), model.weight(1 + rank):
        model(torch.ones(1, 8)).sum().backward()
    model.zero_grad()
    model(torch.ones(1, 8)).sum().backward()  # the next step works

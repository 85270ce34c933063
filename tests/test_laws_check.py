"""`fnddp.laws.check` names the law that a transform breaks, where, and by how much; and lets sound ones pass."""

import re
from itertools import count

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

import fnddp
from fnddp import Sync, allreduce, fp16, laws, tree
from fnddp.core.sync import registry
from fnddp.simulation.ranks import RankFailed, run_threads
from tests.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("own_transforms")


def breaking(name, before=lambda leaf: leaf, after=lambda leaf: leaf, *, lies=False):
    """Return a transform that has the state of the pipeline inside, and changes what that exchanges."""

    def exchange(self, grads, state):
        done = self.inner.exchange(tree.map_leaves(before, grads), state)
        return done._replace(mean=tree.map_leaves(after, done.mean), sent=grads if lies else done.sent)

    members = {"__annotations__": {"inner": Sync}, "init": lambda self, grads: self.inner.init(grads)}
    return fnddp.transform(type(name, (Sync,), {**members, "exchange": exchange}))


widening = breaking("widening", after=torch.Tensor.double)
disagreeing = breaking("disagreeing", after=lambda leaf: leaf + dist.get_rank())
writing = breaking("writing", lambda leaf: leaf.mul_(2))
lying = breaking("lying", lambda leaf: leaf / 2, lies=True)
other_when_lowered = breaking("other_when_lowered", lambda leaf: leaf * (2 if isinstance(leaf, FakeTensor) else 1))
hiding = breaking("hiding", torch.nan_to_num)
dividing = breaking("dividing", lambda leaf: leaf / leaf.abs().max())
misprinted = breaking("misprinted")
misprinted.__repr__ = lambda self: repr(self.inner)


@pytest.mark.parametrize(
    ("broken", "grads", "message"),
    [
        (widening, laws.model, r"law 1 \(outputs are like inputs\) .* step 0: leaf 'conv.weight' is float64"),
        (hiding, laws.model, r"law 1 \(.*\) .*: gradients of all ranks are NaN, but no mean is; declare this"),
        (dividing, laws.model, r"law 1 \(.*\) .* step 4: leaf 'conv.weight': the mean of zeros is not finite"),
        (disagreeing, laws.model, r"law 2 \(.*\) .* step 0: leaf 'conv.weight', on rank 1 .* off by up to 1, in 288"),
        (writing, laws.model, r"law 3 \(.*\) .* step 0: the given gradient 'conv.weight' is off by"),
        (lying, laws.model, r"law 4 \(.*\) .* step 0: leaf 'conv.weight': .* apart, allowed"),
        (other_when_lowered, laws.bare, r"law 6 \(.*\) .* step 0 with Donation.*mean of '' is off by"),
        (misprinted, laws.model, r"law 9 \(.*\) .*: parse gives allreduce"),
    ],
)
def test_a_broken_law_is_named(broken, grads, message):
    with pytest.raises(laws.LawError, match=message) as caught:
        laws.check(broken(allreduce), ranks=(2,), grads=grads)
    assert f"broken by {broken(allreduce)!r} on rank" in str(caught.value)
    assert "of 2: " in str(caught.value)


def test_a_zero_may_have_a_sign():
    laws.check(breaking("masking", lambda leaf: leaf * (leaf > 1))(allreduce), ranks=(1,), grads=laws.bare)


def test_a_lossy_pipeline_is_not_exact():
    with pytest.raises(laws.LawError, match=r"law 5 .*fp16\(allreduce\) on rank 0 of 1: .* apart"):
        laws.law_5_lossless_is_exact(0, fp16(allreduce), laws.model)
    assert [laws.loses_nothing(0, sync, laws.model) for sync in (fp16(allreduce), allreduce)] == [False, True]


def test_a_wrong_contribution_breaks_law_8():
    with pytest.raises(laws.LawError, match=r"law 8 .*: leaf 'conv.weight': the sum of 4 mean gradients"):
        laws.law_8_error_feedback_loses_nothing(0, lying(allreduce), laws.model)


def test_a_counter_outside_of_the_state_breaks_law_7():
    steps = count(1)
    counting = breaking("counting", lambda leaf: leaf * next(steps))
    with pytest.raises(laws.LawError, match="law 7 .* step 2, resumed: the mean of 'conv.weight' is off by"):
        laws.law_7_resuming_is_exact(0, counting(allreduce), laws.model)


def test_what_cannot_be_lowered_or_has_no_text_to_parse_is_checked_too():
    laws.check(fp16(allreduce, check=True), ranks=(2,), grads=laws.model)
    del registry["misprinted"]
    laws.check(misprinted(allreduce), ranks=(1,), grads=laws.model)


def test_without_a_process_group_this_process_is_the_only_rank():
    laws.check(fp16(allreduce), on="gloo", grads=laws.model)


@pytest.mark.thorough
@on_ranks(2)
def test_on_the_ranks_of_a_process_group(rank):
    laws.check(fnddp.parse("error_feedback(powersgd(fp16(allreduce), rank=2))"), on="gloo", grads=laws.model)
    with pytest.raises(RuntimeError, match="has a default process group"):
        run_threads(2, print)


def test_a_failure_is_one_error_with_its_hint_first_and_one_traceback():
    with pytest.raises(RankFailed) as caught:
        laws.check(breaking("positive", torch.abs)(allreduce), ranks=(4,))
    said = str(caught.value)
    first, second, hint, *_ = said.splitlines()
    assert re.fullmatch(r"rank \d: .*'Bool'", first)
    assert re.match(r"while checking law 1 .* of positive\(allreduce\) on rank ", second)
    assert re.match("the test gradients have leaves of all dtypes.*'flag': 'torch.bool'.* check", hint)
    assert said.count("Traceback (most recent call last)") == 1
    assert "SystemExit" not in said
    assert not any(isinstance(error, SystemExit) for error in caught.value.errors.values())
    assert caught.value.__suppress_context__


READING = {
    "item": lambda leaf: leaf * leaf.sum().item(),
    "branch": lambda leaf: leaf + 1 if leaf.sum() > 0 else leaf,
    "mask": lambda leaf: leaf * leaf[leaf > 0].numel(),
    "tolist": lambda leaf: leaf * len(leaf.tolist()),
}


@pytest.mark.parametrize("how", READING)
def test_a_transform_that_reads_values_is_told_to_say_so(how):
    reading = breaking(f"reading_{how}", READING[how])
    with pytest.raises(laws.LawError, match=r"law 10 .* reads values of tensors, so its `traceable` must be False"):
        laws.check(reading(allreduce), ranks=(2,), grads=laws.model)

"""What pipelines repeat, against walking there step by step."""

import pytest
import torch

import fnddp
from fnddp import parse
from fnddp.core.sync import Exchange
from fnddp.plan import period as periods
from fnddp.plan.period import period
from fnddp.tree import Leaves, Tree
from tests.test_passes import Applied

PARAMS = {"w": torch.zeros(20, 10), "b": torch.zeros(10)}
N = 2


def bytes_of(text: str, steps: int) -> list[int]:
    """What each of the first steps sends, as lowered for the state that the pipeline itself has got to."""
    sync, sent = parse(text), list[int]()
    state = sync.init(PARAMS)
    for _ in range(steps):
        sent.append(fnddp.lower(sync, PARAMS, state=state, world_size=N).wire_bytes)
        _, state = sync(PARAMS, state)
    return sent


@pytest.mark.parametrize(
    ("text", "transient", "length"),
    [
        ("fp16(allreduce)", 0, 1),
        ("error_feedback(every(3, allreduce))", 0, 3),
        ("measure(fp16(allreduce), every_steps=3)", 0, 3),
        ("error_feedback(powersgd(allreduce, refresh=3))", 0, 3),
        ("error_feedback(powersgd(allreduce, alternate=True))", 0, 2),
        ("every(2, powersgd(allreduce, refresh=2))", 0, 4),
        ("every(3, random_k(allreduce, ratio=0.1))", 0, 3),
        ("warmup(every(2, fp16(allreduce)), steps=3)", 3, 2),
        # Both begin at step 0: the one exchanges in the steps in which the other does not refresh.
        ("partition({'w': powersgd(allreduce, refresh=2), 'b': every(2, allreduce)})", 0, 2),
    ],
)
def test_a_period_is_that_of_steps_run_one_by_one(text: str, transient: int, length: int) -> None:
    recurring = period(parse(text), PARAMS, world_size=N)
    assert sum(each.steps for each in recurring) == length
    sizes = [size for each in recurring for size in [each.plan.wire_bytes] * each.steps]
    assert sorted(sizes) == sorted(bytes_of(text, transient + length)[transient:])
    for each in recurring:
        again = fnddp.lower(parse(text), PARAMS, state=each.state, world_size=N)
        assert again.wire_bytes == each.plan.wire_bytes


@pytest.mark.parametrize("steps", [7, 9_999])
def test_long_periods(steps: int) -> None:
    idle, busy = period(parse(f"error_feedback(every({steps}, allreduce))"), PARAMS, world_size=N)
    assert (idle.steps, busy.steps) == (steps - 1, 1)


class Often(Applied):
    """Sends half as many bytes in each third step, by a counter that is never reset."""

    def init(self, grads: Tree) -> int:
        return 0

    def exchange(self, leaves: Leaves, state: int) -> Exchange:
        sync = fnddp.allreduce if state % 3 else fnddp.fp16(fnddp.allreduce)
        return sync.exchange(leaves, ())._replace(state=state + 1)


def test_a_counter_that_never_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periods, "LONGEST", 300)
    by_bytes = {each.plan.wire_bytes: each.steps for each in period(Often(), PARAMS, world_size=N)}
    assert by_bytes == {420: 100, 840: 200}

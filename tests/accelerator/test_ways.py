"""The table of tests/test_ways.py on the device. That its bits are the CPU's is in test_training.py.

There a rank's failure is known one step later, and ends the training of all: see docs/gpu.md. FSDP's is in `tests/gpu`.
"""

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fnddp import CollectiveError
from tests import test_ways
from tests.accelerator.conftest import ORDERS, is_done
from tests.test_ways import run_row
from tests.ways import FAMILIES, REFUSED, WAYS, Absent, Interrupt, Trap, Way

pytestmark = pytest.mark.thorough

NAMES = [
    *("module", "register", "value_and_grad", "jit", "own", "compress", "compress_shards", "compress_replicas"),
    *("own_matrices", "diloco", "streaming_diloco"),  # other outer steps differ from these in what they compute
]
FORWARD, BACKWARD = "an error of all ranks in forward", "an error of all ranks in backward"
CELLS = {
    "a failure at each point": Absent("below"),
    "a failure in the first step": Absent("below"),
    "a checkpoint after a failure": Absent("training ends"),
    "an error in the update": Absent("others know of it one step later"),
    "a thread that evaluates": Absent("kernels run in any thread that waits"),
}
RANDOM = {"a gradient that is not finite": Absent("random numbers go on: the host does not know of it in that step")}
OF_ROW = {
    **{name: {BACKWARD: REFUSED} for name in ("module", "register", "own")},
    "value_and_grad": {FORWARD: REFUSED, BACKWARD: REFUSED},
    "compress": RANDOM,
    "compress_shards": RANDOM,
}


def run(rank: int, device: str, name: str, folder: str) -> dict[str, Any]:
    way, here = WAYS[name], [(text, [each for each in names if each in NAMES]) for text, names in FAMILIES]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Way, "device", device)
        patch.setattr(way, "cells", {**way.cells, **CELLS, **OF_ROW.get(name, {})})
        patch.setattr(test_ways, "FAMILIES", here)
        return run_row(rank, name, folder)


@pytest.mark.parametrize("name", NAMES)
def test_each_event_leaves_a_way_in_as_it_was_or_is_refused(ranks: Any, tmp_path: Path, name: str) -> None:
    ranks(WAYS[name].ranks, ORDERS[NAMES.index(name) % 2], run, name, str(tmp_path))


def places(rank: int, training: Way, name: str) -> list[Any]:
    """Return all of the class, and of ways in that share its steps the first and the last call of each point."""
    return test_ways.places(rank, training, ends=name != "module")


def count(rank: int, device: str, name: str) -> int:
    training = WAYS[name](device=device)
    training.step(training.batch(rank, 0))
    return len(places(rank, training, name))


def fail(rank: int, device: str, name: str, number: int, who: int) -> None:
    """The rank that fails raises its error and refuses; the others raise when they read the state, and in a step."""
    training = WAYS[name](device=device)
    step, is_mine = training.step if training.updates else training.backward, rank == who
    training.step(training.batch(rank, 0))
    what = places(rank, training, name)[number]
    trap, point = (what, nullcontext()) if isinstance(what, str) else ("", what[0].at(what[1]))
    with pytest.raises((Trap, Interrupt)) if is_mine else nullcontext(), point if is_mine else nullcontext():
        step(training.batch(rank, 1, trap=trap if is_mine else ""))
    told: Any = pytest.raises(CollectiveError, match="another rank failed in the previous step")
    refuses = pytest.raises(RuntimeError, match=REFUSED.text) if is_mine else told
    if not is_mine and name not in ("value_and_grad", "jit"):  # whose state is the caller's
        with told:
            training.state  # noqa: B018
    if name != "register":  # a step of torch's class has collectives of its own
        with refuses:
            step(training.batch(rank, 2))
    if not is_mine:  # it has begun collectives that the other never joins, and which end with that rank
        is_done(rank)
        with suppress(RuntimeError):
            torch.accelerator.synchronize()


def fail_first(rank: int, device: str, name: str, who: int) -> None:
    """Fail in the first step, in which ranks would agree on the order of gradients: all are told in this step."""
    training = WAYS[name](device=device)
    held, raises = training.all, Trap if rank == who else CollectiveError
    with pytest.raises(raises, match=None if rank == who else "another rank has failed in this step"):
        training.backward(training.batch(rank, 0, trap="middle" if rank == who else ""))
    assert training.all == held
    with pytest.raises(RuntimeError, match=REFUSED.text):
        training.backward(training.batch(rank, 1))


@pytest.mark.parametrize("name", ["module", "value_and_grad", "own"])
@pytest.mark.parametrize("who", [0, 1])
def test_others_are_told_of_a_failure_in_the_first_step_at_once(ranks: Any, name: str, who: int) -> None:
    ranks(2, ORDERS[who], fail_first, name, who)


@pytest.mark.parametrize("name", ["module", "register", "value_and_grad", "jit", "own", "diloco"])
def test_others_are_told_of_a_failure_at_each_point_one_step_later(ranks: Any, name: str) -> None:
    for number in range(ranks(2, ORDERS[0], count, name)[0]):
        ranks(2, ORDERS[number % 2], fail, name, number, number // 2 % 2)

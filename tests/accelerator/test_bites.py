"""Each wait of the library outside of steps, left out in turn: the device then gives other bits than the CPU's.

`tests/test_streams.py` shows that each of a step's is needed, in any order of streams. Two of them are here, too, so
that each order of streams of the device finds one.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fnddp
from fnddp import device as devices
from fnddp.core import tree
from fnddp.integrations.fsdp import compress_shards
from fnddp.integrations.fsdp.unit import DecodedWeights
from fnddp.ir.program import LeafSpec
from fnddp.laws import bits
from fnddp.plan.draft import Donation
from fnddp.run.engine import Engine
from fnddp.wire import control
from fnddp.wire.c10d import C10d
from tests.accelerator.steps import FEEDBACK, local_parts, mesh_of, sgd, step_of, trained
from tests.sharded import sharded
from tests.streams import site, waits
from tests.test_streams import NEEDED

pytestmark = pytest.mark.thorough


def leaves_on(device: str) -> dict[str, Tensor]:
    return {str(i): torch.linspace(i + 1, -i, 24).reshape(4, 6).to(device) for i in range(3)}


def grads_of(leaves: dict[str, Tensor], rank: int, step: int) -> dict[str, Tensor]:
    return {name: (rank + 1.5 + step) * leaf.square() + leaf for name, leaf in reversed(leaves.items())}


def engine_of(device: str, text: str) -> tuple[Engine, dict[str, Tensor]]:
    sync, leaves = fnddp.parse(text), leaves_on(device)
    specs = {name: LeafSpec.of(leaf) for name, leaf in leaves.items()}
    options: Any = {"donation": Donation("yes"), "learns_order": False, "bucket_caps": (0.0001,)}
    return Engine(sync, specs, state=sync.init(leaves), **options), leaves


def copied(value: Any) -> Any:
    return tree.map_tensors(Tensor.clone, value)


# Scenarios: each is given the rank and the device, and returns what tells that a line did nothing.


def told_of_what_is_not_finite(rank: int, device: str) -> Any:
    """As shards tell replicas: by a number that is made on the main stream, whose memory is soon another's."""
    engine, leaves = engine_of(device, FEEDBACK)
    means = []
    for i in range(3):
        step = engine.begin()
        step.feed_all(grads_of(leaves, rank, i))
        step.watch((torch.ones((), device=device) / (0.0 if i == 1 else 1.0)).isinf())
        others = [torch.ones((), dtype=torch.bool, device=device) for _ in range(8)]
        del others
        means.append(copied((step.finish().mean, step.found_nonfinite * torch.ones(1, device=device))))
        del step
    return bits([means, engine.state])


def with_messages(rank: int, device: str) -> Any:
    weight = torch.full((3,), float(rank), device=device)
    control.broadcast([weight], None, source=1, wire=C10d())
    return [control.total(rank + 1, None), control.all_gather_object({"rank": rank}, None), bits(weight)]


def with_weights_that_stay(rank: int, device: str) -> Any:
    """A second forward sends nothing of them. Ranks that did not agree on that would wait for each other."""
    seen, sent = DecodedWeights(torch.device(device), None), list[bool]()
    row = torch.linspace(1, 2, 6).to(device)
    for _ in range(3):
        seen.follow(row, lambda mine, is_whole: (sent.append(is_whole), torch.stack([mine, mine]))[1])
    return sent


def with_weights_sharded_again(rank: int, device: str) -> Any:
    model = sharded(mesh_of(device, 1, 4)["shard"], reshard_after_forward=2)
    compress_shards(model, weights="bf16(allgather)")
    return trained(rank, device, lambda *_: (step_of(model, sgd(model)), lambda: local_parts(model)), steps=4)


# What finds that a line does nothing: a scenario, and the streams that run last.
FINDS: dict[str, tuple[Callable[[int, str], Any], str]] = {
    "integrations/fsdp/shards.py __call__ waited": (with_weights_sharded_again, "side"),
    "integrations/fsdp/unit.py _said waited": (with_weights_that_stay, "side"),
    "run/step.py watch wait": (told_of_what_is_not_finite, "default"),
    "run/step.py watch keep": (told_of_what_is_not_finite, "side"),
    "wire/control.py _reduced waited": (with_messages, "side"),
    "wire/control.py _broadcast_over waited": (with_messages, "side"),
    "wire/control.py _gathered waited": (with_messages, "side"),
}
APART = ["wire/c10d.py", "cost/measure.py"]  # which wait in threads, for gloo, and for links that are measured
RANKS = {with_weights_sharded_again: 4}


@contextmanager
def leaving_out(line: str) -> Iterator[None]:
    """Let the wait or keep in `line` of the library do nothing."""

    def elsewhere(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: None if site() == line else call(*given)

    with ExitStack() as stack:
        for owner, name in ((devices.Accelerator, "wait"), (devices.Accelerator, "keep"), (dist.Work, "wait")):
            stack.enter_context(mock.patch.object(owner, name, elsewhere(getattr(owner, name))))
        yield


def run_without(rank: int, device: str, line: str, scenario: Callable[[int, str], Any]) -> Any:
    with leaving_out(line):
        try:
            return scenario(rank, device)
        except Exception as error:  # such as of numbers that are not there yet
            return repr(error)


def test_each_wait_and_keep_is_in_the_table():
    after_errors = {"integrations/fsdp/unit.py wait waited"}  # of messages in whose place a rank has sent zeros
    assert set(FINDS) | set(NEEDED) == set(waits(APART)) - after_errors


@pytest.mark.parametrize("name", FINDS)
def test_what_is_left_out_is_found(ranks, name):
    scenario, last = FINDS[name]
    n = RANKS.get(scenario, 2)
    want = ranks(n, "cpu", scenario)
    assert ranks(n, last, run_without, "", scenario) == want
    assert ranks(n, last, run_without, waits()[name], scenario) != want

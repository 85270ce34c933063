"""Where the host waits for the device between forward and the end of `optimizer.step()`: where docs/gpu.md says, only.

Counted as what a run of six steps has in addition to a run of four, whose plans are made by then.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

import fnddp
from tests.accelerator import steps as by
from tests.accelerator.steps import FEEDBACK, Step, sgd, small, step_of
from tests.streams import site

pytestmark = pytest.mark.thorough


def with_weights(rank: int, device: str, text: str) -> tuple[Step, Any]:
    """Numbers of the host."""
    model, numbers = fnddp.DistributedDataParallel(small(rank, device)[0], sync=fnddp.parse(text)), count(3 + rank)
    return step_of(model, sgd(model), lambda: model.weight(next(numbers))), None


def with_grads_kept(rank: int, device: str, text: str) -> tuple[Step, Any]:
    return by.the_class(rank, device, text, set_to_none=False)


def with_outer_steps(rank: int, device: str, text: str) -> tuple[Step, Any]:
    local_step, found = by.outer_steps(rank, device, text)

    def step(x: Tensor) -> Tensor:
        for _ in range(3):  # and one more, in which each fragment exchanges once
            local_step(x)
        return local_step(x)

    # So that no exchange is under way after four: ranks would abandon it at different points.
    local_step(small(rank, device)[1][0])
    return step, found


@contextmanager
def counting() -> Iterator[Counter[str]]:
    from tests.accelerator import device

    found: Counter[str] = Counter()

    def note(why: str) -> None:
        found.update([f"{site().split(':')[0]} {why}".strip()])

    def assign(tensor: Tensor, index: Any, value: Any) -> None:
        if not isinstance(value, Tensor) and tensor.device.type != "cpu":
            note("assignment of a number")  # which CUDA copies from the host's memory; this device does not
        torch._C.TensorBase.__setitem__(tensor, index, value)

    device.on_wait(note)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "__setitem__", assign)
            yield found
    finally:
        device.on_wait(None)


def run(rank: int, device: str, way: Callable[..., Any], given: tuple[Any, ...]) -> dict[str, float]:
    """Return how often, and where, the host waits in a step."""
    batches, counts = small(rank, device)[1], []
    for steps in (2, 4, 6):  # functions share a lane: the first step of the second one notices the last of the first
        with counting() as found:
            step, _ = way(rank, device, *given)
            for batch in batches[:steps]:
                step(batch)
        counts.append(found)
    return {where: n / 2 for where, n in (counts[2] - counts[1]).items()}


NOTICE, SUM = "run/vote.py event", "run/vote.py copy to the host"  # of the vote of the step before; of this one's flags
BEFORE = {NOTICE: 1}
COMPARED = {f"wire/control.py copy {way} the host": 2 for way in ("from", "to")}  # which of several optimizers steps
TEXTS = [FEEDBACK, "error_feedback(powersgd(allreduce, rank=1, min_compression_rate=0))", "quantize(two_shot)"]
CLIPPED = "clip_by_global_norm(fp16(allreduce), max_norm=1.0)"
# Ranks, a way and its arguments, and what the host waits for in a step: on all ranks, or on each.
ROWS: list[tuple[int, Callable[..., Any], tuple[Any, ...], Any]] = [
    (2, by.register, ("",), {}),  # torch's class alone
    *((2, way, (FEEDBACK,), BEFORE) for way in (by.register, by.value_and_grad, by.jit)),
    *((2, by.the_class, (text,), BEFORE) for text in [*TEXTS, CLIPPED]),
    (2, by.the_class, ("fp16(allreduce, check=True)",), {NOTICE: 1, "transforms/cast.py item": 1}),
    (2, with_weights, (f"weighted({FEEDBACK})",), BEFORE),
    (2, by.branches, (FEEDBACK, 1), [{SUM: 1}, BEFORE]),
    (2, with_grads_kept, (FEEDBACK,), BEFORE),
    (2, with_grads_kept, ("all_reduce(op='sum')",), {NOTICE: 1, "adapters/module/steps.py item": 1}),
    (2, by.a_scaler, (FEEDBACK,), {"item": 1, NOTICE: 1}),  # the scaler's own
    (2, by.shards, ("",), {}),
    (2, by.shards, ("bf16(two_shot)",), BEFORE),
    (2, by.shards, ("error_feedback(quantize(two_shot, bits=4))",), BEFORE),
    (2, by.shards, ("", "ef21(quantize(allgather))"), {"integrations/fsdp/unit.py item": 4}),
    (2, by.shards, ("weighted(bf16(two_shot))",), BEFORE),
    (2, by.replicas, (FEEDBACK,), BEFORE),
    (4, by.two_axes, ("error_feedback(bf16(two_shot))", FEEDBACK, "bf16(allgather)"), BEFORE),
    (2, with_outer_steps, ("diloco(allreduce, every=4)",), BEFORE),
    (2, with_outer_steps, ("streaming_diloco(allreduce, every=4, fragments=2, delay=1)",), {NOTICE: 2}),
    (2, by.owners, ("two_shot",), {NOTICE: 2}),
    (2, by.owners, ("two_shot", "ef21(fp16(allgather))"), {NOTICE: 2, "core/tree.py copy to the host": 1}),
    (2, by.owners, ("two_shot", "allgather", 2), {NOTICE: 3, **COMPARED}),
]


@pytest.mark.parametrize(("n", "way", "given", "want"), ROWS)
def test_the_host_waits_where_the_docs_say(ranks, n, way, given, want):
    assert ranks(n, "side", run, way, given) == (want if isinstance(want, list) else [want] * n)

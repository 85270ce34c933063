"""Each wait of a stream, and each `keep`, in the library is needed: without it a training ends otherwise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from fnddp import device as devices
from tests.accelerator import test_training as training
from tests.accelerator.conftest import ORDERS
from tests.accelerator.test_training import POWERSGD, QUANTIZED
from tests.streams import site
from tests.test_streams import waits

pytestmark = pytest.mark.thorough


@contextmanager
def leaving_out(line: str) -> Iterator[None]:
    """Leave out the waits of streams, and what keeps memory for them, at a line of the library."""

    def unless(there: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: None if site() == line else there(*given)

    def wait(work: Any, *given: Any) -> Any:
        return True if site() == line else waited(work, *given)

    waited = dist.Work.wait
    accelerator = devices.Accelerator
    with (
        mock.patch.object(accelerator, "wait", unless(accelerator.wait)),
        mock.patch.object(accelerator, "keep", unless(accelerator.keep)),
        mock.patch.object(dist.Work, "wait", wait),
    ):
        yield


TRAINED: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (training.with_the_module, (POWERSGD,)),
    (training.with_value_and_grad, (QUANTIZED,)),
    (training.without_some_gradients, ()),
    (training.with_register, (POWERSGD,)),
    (training.weighted, ()),
    (training.with_the_optimizer_on_another_stream, ()),
    (training.train_small, (["every(2, powersgd(allreduce, rank=2))", "delayed(fp16(allreduce))"],)),
]


def ends(rank: int, device: str, line: str, trained: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    with leaving_out(line):
        try:
            return trained(rank, device, *given)
        except Exception as error:
            return repr(error)[:80]


@pytest.mark.parametrize("line", list(waits()))
def test_every_wait_and_keep_is_needed(ranks, line):
    """Without it some training ends otherwise, in one of the orders."""
    for trained, given in TRAINED:
        want = ranks(2, "cpu", trained, *given)
        for last in ORDERS:
            if ranks(2, last, ends, line, trained, given) != want:
                print(f"{line}: found by {trained.__name__}, {last} streams last")
                return
    raise AssertionError(f"nothing has ended otherwise without {line}")

"""The numbers of a `Link`, from all_reduces timed on the running process group."""

import math
import statistics
import time
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from fnddp.core.group import Group, group_name
from fnddp.cost.link import Link
from fnddp.device import device_of
from fnddp.wire import control
from fnddp.wire.c10d import C10D
from fnddp.wire.groups import world_size
from fnddp.wire.kinds import ALL_REDUCE, waited

_SIZES = tuple(4**power for power in range(6, 14))  # 4 KiB to 64 MiB
_MIN_SIZES = 3  # two unknowns, and one for the error
SIZE_SECONDS = 0.25
"""Seconds to spend on each size, within the bounds below."""
_MIN_CALLS, _MAX_CALLS = 3, 200
_SPREAD_FLOOR = 0.01  # the model itself is not better than that


def measure_link(group: Group = None, *, dtype: torch.dtype = torch.float32, seconds: float = SIZE_SECONDS) -> Link:
    """Measure the link between the ranks of a process group: call it on all of them, before training or between steps.

    It times all_reduces of 4 KiB to 64 MiB back to back (up to the size that takes about 0.2 s), half a second to three
    seconds in all. Alpha and B are fitted to the slowest rank's median for each size. The result is wrong if
    other traffic shares the network later, but not now.

    These times do not separate gamma from 1/B, so gamma is 0, and B is the bandwidth that an all_reduce of `dtype`
    achieves, including headers and sums. On links slower than the sum, transfers hide the sum, and B is the same for
    all dtypes; within one machine gloo is slower in float16. A token bucket (faster first bytes after a pause) is empty
    here: B is the sustained bandwidth.

    Args:
        group: A process group, its name, a device mesh, or None for the default group.
        dtype: The dtype of the payloads.
        seconds: Seconds to spend on each of at most 8 sizes. Less time also means a smaller largest payload.

    Returns:
        The same link on every rank: "gloo" for payloads on the CPU, "ring" for payloads on accelerators.

    Raises:
        RuntimeError: There is only one rank, so there is no link: pass one such as `Link.parse("1gbit")` instead.
    """
    name = group_name(group)
    n = world_size(name)
    if n == 1:
        raise RuntimeError(
            'measure_link: one rank has no link to measure; start several ranks, or describe it: Link.parse("1gbit")'
        )
    device = control.wire_device(name)
    samples: list[Sample] = []
    _timed(torch.zeros(1, dtype=dtype, device=device), name)  # connects
    for size in _SIZES:
        buffer = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
        # The first call is slow in new memory. The slowest rank's time decides how many calls there is time for.
        first = max(control.all_gather_object(_timed(buffer, name), name))
        calls = min(max(_MIN_CALLS, round(seconds / first)), _MAX_CALLS)
        times = [_timed(buffer, name) for _ in range(calls)]
        median = statistics.median(times)
        spread = statistics.median(abs(each - median) for each in times) / median
        everyone = control.all_gather_object((Sample(size, median, spread), min(times)), name)
        samples.append(max(sample for sample, _ in everyone))
        # By the fastest call: a rank that once waits for the CPU does not have a slow link.
        if len(samples) >= _MIN_SIZES and 4 * max(fastest for _, fastest in everyone) > seconds:
            break
    link = fit_link(samples, n, "ring" if device_of(device).is_asynchronous else "gloo")
    return control.all_gather_object(link, name)[0]  # rank 0's: another machine may round in another way


class Sample(NamedTuple):
    """The median time of an all_reduce, and its spread: the median deviation from this median, relative to it."""

    payload_bytes: int
    seconds: float
    spread: float = 0.0


def fit_link(samples: Sequence[Sample], world_size: int, algorithm: str = "gloo") -> Link:
    """Fit a link to the times of all_reduces: minimize absolute errors of the logarithm, divided by the spread.

    On a busy machine a small payload often waits for the CPU, and squared errors would follow such outliers. An optimum
    of absolute errors passes through samples, so it is enough to try the lines through two samples, and the lines
    through one sample and the origin.

    >>> times = {10_000: 0.0002, 100_000: 0.9, 1_000_000: 0.0101, 4_000_000: 0.0401}
    >>> print(fit_link([Sample(*each) for each in times.items()], world_size=2))
    800 Mbit/s, 25 us a message
    """
    in_a_row = Link(math.inf, 1.0, algorithm=algorithm).seconds("all_reduce", 0, world_size)  # messages
    on_link = 2 * (world_size - 1) / world_size
    points = [(on_link * each.payload_bytes, each.seconds, each.spread + _SPREAD_FLOOR) for each in samples]
    lines = [(0.0, seconds / moved) for moved, seconds, _ in points]
    for (moved, seconds, _), (more, later, _) in combinations(points, 2):
        beta = (later - seconds) / (more - moved)
        lines.append(((seconds - beta * moved) / in_a_row, beta))

    def error(line: tuple[float, float]) -> float:
        alpha, beta = line
        return sum(abs(math.log((in_a_row * alpha + beta * moved) / t)) / spread for moved, t, spread in points)

    alpha, beta = min(((alpha, beta) for alpha, beta in lines if alpha >= 0 and beta > 0), key=error)
    return Link(bandwidth=1 / beta, latency=alpha, algorithm=algorithm)


def _timed(buffer: Tensor, group: str | None) -> float:
    begin = time.perf_counter()
    waited(C10D.start(ALL_REDUCE, buffer, buffer, "sum", group))
    device_of(buffer.device).synchronize()  # the wait above is the stream's, not the host's
    return time.perf_counter() - begin

"""The numbers of a `Link`, from all_reduces timed on the running process group."""

import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fnddp import collectives
from fnddp.collectives import Group
from fnddp.plan.link import Link, messages

_SIZES = tuple(4**power for power in range(6, 14))  # 4 KiB to 64 MiB
_MIN_SIZES = 3  # two unknowns, and one to disagree
_SIZE_SECONDS = 0.25  # to spend on each size, within these bounds
_MIN_CALLS, _MAX_CALLS = 3, 50


def measure_link(group: Group = None, *, dtype: torch.dtype = torch.float32) -> Link:
    """Measures the link between the ranks of a process group: call it on all of them, before training or between steps.

    All_reduces of 4 KiB to 64 MiB are timed back to back (up to where one takes about 0.2 s), half a second to three
    seconds in all. The slowest rank's median of each size counts, and alpha and B are fitted to these by least squares
    of relative errors. The wrong number where the network is busy at other times than now.

    What it cannot tell: sizes alone do not separate gamma from 1/B, so gamma is 0, and B is the bandwidth that an
    all_reduce of `dtype` achieves, headers and sums included. On links slower than the sum, which hides behind them, B
    is the same for all dtypes; within one machine gloo is slower in float16. And a token bucket, which lets the first
    bytes after a pause pass faster, is empty here: B is what the link sustains.

    Args:
        group: A process group, its name, a device mesh, or None for the default group.
        dtype: What the payloads are made of.

    Returns:
        The same link on every rank: "gloo" for payloads on the CPU, "ring" for payloads on CUDA devices.

    Raises:
        RuntimeError: There is one rank, which has no link: write one down, such as `Link.parse("1gbit")`.

    >>> import fnddp
    >>> fnddp.measure_link()
    Traceback (most recent call last):
        ...
    RuntimeError: measure_link: one rank has no link to measure; start several, or write one down: Link.parse("1gbit")
    """
    name = collectives.group_name(group)
    n = collectives.world_size(name)
    if n == 1:
        raise RuntimeError(
            'measure_link: one rank has no link to measure; start several, or write one down: Link.parse("1gbit")'
        )
    device = collectives.wire_device(name)
    samples: list[tuple[int, float]] = []
    _timed(torch.zeros(1, dtype=dtype, device=device), name)  # connects
    for size in _SIZES:
        buffer = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
        # The first call is slow in new memory, and tells how many there is time for. Decisions are the same on all
        # ranks: they follow from the slowest.
        first = _slowest(_timed(buffer, name), name)
        calls = min(max(_MIN_CALLS, round(_SIZE_SECONDS / first)), _MAX_CALLS)
        samples.append((size, _slowest(statistics.median(_timed(buffer, name) for _ in range(calls)), name)))
        if len(samples) >= _MIN_SIZES and 4 * samples[-1][1] > _SIZE_SECONDS:
            break
    link = fit_link(samples, n, "ring" if device.type == "cuda" else "gloo")
    return collectives.all_gather_object(link, name)[0]  # other processors may round the fit in another way


def fit_link(samples: Sequence[tuple[int, float]], world_size: int, algorithm: str = "gloo") -> Link:
    """The link whose all_reduces take these times, by least squares of relative errors.

    Args:
        samples: Payload bytes and seconds. Times that do not grow with the payload give all of the largest one's time
            to the bandwidth.
        world_size: Ranks in each of them, at least 2.
        algorithm: As in `Link`.

    >>> fit_link([(1000, 0.00005), (1_000_000, 0.00905)], world_size=2)
    Link(bandwidth=110999999.99..., latency=1.02...e-05)
    """
    sizes, seconds = np.array(samples, dtype=np.float64).T
    moved = 2 * (world_size - 1) / world_size * sizes  # bytes that cross the link
    steps = np.full_like(moved, messages(algorithm, world_size))
    # Each row divided by its time: relative errors, so that the small sizes speak for alpha.
    alpha, beta = np.linalg.lstsq(np.stack([steps, moved], axis=1) / seconds[:, None], np.ones_like(seconds))[0]
    if alpha < 0:
        moved_per_second = moved / seconds
        alpha, beta = 0.0, moved_per_second.sum() / (moved_per_second**2).sum()
    if beta <= 0:
        alpha, beta = 0.0, seconds[-1] / moved[-1]
    return Link(bandwidth=float(1 / beta), latency=float(alpha), algorithm=algorithm)


def _timed(buffer: Tensor, group: str | None) -> float:
    begin = time.perf_counter()
    collectives.start_all_reduce(buffer, "sum", group).wait()
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)  # the wait above is the stream's, not the host's
    return time.perf_counter() - begin


def _slowest(seconds: float, group: str | None) -> float:
    return max(collectives.all_gather_object(seconds, group))

"""`fnddp bench --codecs`: what it costs to encode and to decode, against copying the same gradients."""

import math
from collections.abc import Sequence
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from fnddp.cli.checks import check_pipeline
from fnddp.cli.failures import WrongArgument
from fnddp.cli.terminal import Table, progress
from fnddp.core.sync import Sync
from fnddp.cost.link import Link
from fnddp.cost.step import Compute
from fnddp.ir.program import LoweringError
from fnddp.plan.lower import lower
from fnddp.run.measure import measure_segments
from fnddp.simulate.tune import on_threads

CODECS: tuple[str, ...] = (
    "allgather",
    "fp16(allgather)",
    "bf16(allgather)",
    "quantize(allgather)",
    "quantize(allgather, bits=4)",
    "quantize(allgather, bits=2)",
    "quantize(allgather, rounding='stochastic')",
    "fp8(allgather)",
    "sign(allgather)",
    "majority_vote(allgather)",
    "natural(allgather)",
    "qsgd(allgather)",
    "terngrad(allgather)",
    "topk(allgather, ratio=0.01)",
    "topk(allgather, k=64, chunk=4096)",
    "dct_topk(allgather)",
    "random_k(allgather, ratio=0.01)",
    "random_block(allgather, ratio=0.01)",
)

LEAVES, ELEMENTS = 10, 1 << 20

CAPTION = (
    "one rank, one thread, {leaves} leaves of {elements:,} float32; medians, in milliseconds\n"
    "encode: until the payloads are in the buffers of their collectives; decode: reading them, and the mean\n"
    "of a copy: the time of copying the gradients, {copy:.1f} ms, over what it takes"
)


def run(pipelines: Sequence[str]) -> int:
    """Print the costs of `pipelines`, codecs around a carrier, as a table; of all codecs if there are none."""
    grads = {f"leaf{i}": torch.randn(ELEMENTS) for i in range(LEAVES)}
    syncs = [check_pipeline(text, grads) for text in pipelines or CODECS]
    rows: list[tuple[str, ...]] = []
    with on_threads(1), progress() as show:
        copy = _seconds_of_a_copy(grads)
        for i, sync in enumerate(syncs):
            show(repr(sync), i, len(syncs))
            rows.append(_row(sync, grads, copy))
    caption = CAPTION.format(leaves=LEAVES, elements=ELEMENTS, copy=1e3 * copy)
    weights = {"bits": 4, "encode": 5, "encode\nof a copy": 2, "decode": 3, "decode\nof a copy": 1}
    Table("codec", weights, rows, caption).show()
    return 0


def _row(sync: Sync, grads: dict[str, Tensor], copy: float) -> tuple[str, ...]:
    state = sync.init(grads)
    try:
        plan = lower(sync, grads, state=state, world_size=1)
    except LoweringError as error:
        raise WrongArgument.of(error) from error
    step = plan.predict(Link(math.inf), Compute(segments=measure_segments(plan, state)))
    bits = 8 * plan.wire_bytes / (LEAVES * ELEMENTS)
    return (repr(sync), f"{bits:.2f}", *_times(step.encode_seconds, copy), *_times(step.decode_seconds, copy))


def _times(part: float, copy: float) -> tuple[str, str]:
    return (f"{1e3 * part:.1f}", f"{copy / part:.2f}") if part else ("-", "-")


def _seconds_of_a_copy(grads: dict[str, Tensor]) -> float:
    copies = {path: torch.empty_like(grad) for path, grad in grads.items()}
    times: list[float] = []
    for _ in range(9):
        begun = perf_counter()
        for path, grad in grads.items():
            copies[path].copy_(grad)
        times.append(perf_counter() - begun)
    return median(times)

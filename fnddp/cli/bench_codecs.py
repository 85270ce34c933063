"""`fnddp bench --codecs`: what it costs to encode and to decode, against copying the same gradients."""

from collections.abc import Sequence
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp.cli.bench_arms import Arm
from fnddp.cli.bench_profile import profiled
from fnddp.cli.checks import check_pipeline
from fnddp.cli.failures import WrongArgument
from fnddp.cli.terminal import Table, progress
from fnddp.core.sync import Sync
from fnddp.ir.program import LeafSpec, LoweringError
from fnddp.plan.draft import Donation
from fnddp.plan.lower import lower
from fnddp.run.engine import Engine

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
    "encode: until the payloads lie in the buffers of their collectives; decode: reading them, and the mean\n"
    "of a copy: the time of copying the gradients, {copy:.1f} ms, over what it takes"
)


def _arm(sync: Sync, grads: dict[str, Tensor]) -> Arm:
    """Return steps of one pipeline on a rank alone."""
    leaves = {path: LeafSpec.of(grad) for path, grad in grads.items()}
    engine = Engine(sync, leaves, donation=Donation("yes", state=True), learns_order=False)
    state, fed = sync.init(grads), grads

    def clear() -> None:
        nonlocal fed
        fed = {path: grad.clone() for path, grad in grads.items()}

    def step() -> None:
        nonlocal state
        at = engine.begin(state)
        state = None
        for path, grad in fed.items():
            at.feed(path, grad)
        at.finish()

    return Arm(step, clear, lambda: 0 if engine.plan is None else engine.plan.wire_bytes)


def run(pipelines: Sequence[str]) -> int:
    """Print a table, a row for each of `pipelines`: codecs around a carrier; without any, of all that there are."""
    grads = {f"leaf{i}": torch.randn(ELEMENTS) for i in range(LEAVES)}
    syncs = [check_pipeline(text, grads) for text in pipelines or CODECS]
    try:
        for sync in syncs if pipelines else ():
            lower(sync, grads, world_size=1)
    except LoweringError as error:
        raise WrongArgument.of(error) from error
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        copy = _milliseconds_of_a_copy(grads)
        with progress() as show:
            rows: list[tuple[str, ...]] = []
            for i, sync in enumerate(syncs):
                show(repr(sync), i, len(syncs))
                rows.append(_row(sync, grads, copy))
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
    caption = CAPTION.format(leaves=LEAVES, elements=ELEMENTS, copy=copy)
    weights = {"bits": 4, "encode": 5, "encode\nof a copy": 2, "decode": 3, "decode\nof a copy": 1}
    Table("codec", weights, rows, caption).show()
    return 0


def _row(sync: Sync, grads: dict[str, Tensor], copy: float) -> tuple[str, ...]:
    arm = _arm(sync, grads)
    for _ in range(2):  # lowers, and fills memory
        arm.clear()
        arm.step()
    spent, bits = profiled(arm), 8 * arm.wire_bytes() / (LEAVES * ELEMENTS)
    return (repr(sync), f"{bits:.2f}", *_times(spent["encode"], copy), *_times(spent["decode"], copy))


def _times(part: float, copy: float) -> tuple[str, str]:
    """What is not done at all takes no time, and is no part of a copy."""
    return (f"{part:.1f}", f"{copy / part:.2f}") if part else ("-", "-")


def _milliseconds_of_a_copy(grads: dict[str, Tensor]) -> float:
    copies = {path: torch.empty_like(grad) for path, grad in grads.items()}
    times: list[float] = []
    for _ in range(9):
        begun = perf_counter()
        for path, grad in grads.items():
            copies[path].copy_(grad)
        times.append(1e3 * (perf_counter() - begun))
    return median(times)

"""`fnddp bench --codecs`: the cost of encoding and decoding, compared with copying the same gradients."""

import math
from collections.abc import Sequence
from statistics import median
from timeit import repeat

import torch
from torch import Tensor

from fnddp.cli.checks import check_pipelines
from fnddp.cli.failures import wrong_if
from fnddp.cli.terminal import Grid, each
from fnddp.core.sync import Sync
from fnddp.cost.estimate import Compute
from fnddp.cost.link import Link
from fnddp.device import current, device_of
from fnddp.ir.program import LoweringError
from fnddp.plan.lower import lower
from fnddp.run.measure import measure_segments
from fnddp.simulation.tune import on_threads

CODECS: tuple[str, ...] = (
    "allgather",
    "fp16(allgather)",
    "bf16(allgather)",
    "quantize(allgather)",
    "quantize(allgather, bits=4)",
    "quantize(allgather, bits=2)",
    "quantize(allgather, rounding='stochastic')",
    "lloyd_max(allgather)",
    "lloyd_max(allgather, bits=4)",
    "fp8(allgather)",
    "fp8(allgather, format='e2m1', block=32, scale='e8m0')",
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

LEAVES = 10
ELEMENTS, ON_ACCELERATORS = 1 << 20, 1 << 22
"""Elements of a leaf: on an accelerator small leaves take only the time of their launches."""


def run(pipelines: Sequence[str], kind: str = "cpu") -> int:
    """Print a table of the costs of `pipelines`, codecs around a carrier; of all codecs if `pipelines` is empty."""
    device = device_of(current(kind))
    elements, digits = (ON_ACCELERATORS, 2) if device.is_asynchronous else (ELEMENTS, 1)
    grads = {f"leaf{i}": torch.randn(elements, device=device.device) for i in range(LEAVES)}
    syncs = check_pipelines(pipelines or CODECS, grads)
    with on_threads(1):
        pairs = [(torch.empty_like(grad), grad) for grad in grads.values()]

        def copied() -> None:
            for to, grad in pairs:
                to.copy_(grad)
            device.synchronize()

        copy = median(repeat(copied, number=1, repeat=9))
        rows = each("timing", lambda sync: _row(sync, grads, copy, digits), syncs)
    columns = {"bits": 4, "encode": 5, "encode\nof a copy": 2, "decode": 3, "decode\nof a copy": 1}
    legend = {
        "encode": "ms until the payloads are in the buffers of their collectives; median",
        "decode": "ms to read them, and for the mean",
        "of a copy": f"the time of copying the gradients, {1e3 * copy:.{digits}f} ms, over that",
    }
    note = f"One rank, one thread, {LEAVES} leaves of {elements:,} float32, on {device.name}."
    Grid("codec", columns, rows, legend, note).show()
    return 0


def _row(sync: Sync, grads: dict[str, Tensor], copy: float, digits: int) -> list[str]:
    state = sync.init(grads)
    with wrong_if(LoweringError):
        plan = lower(sync, grads, state=state, world_size=1)
    step = plan.predict(Link(math.inf), Compute(segments=measure_segments(plan, state)))
    cells = [repr(sync), f"{8 * plan.wire_bytes / sum(map(Tensor.numel, grads.values())):.2f}"]
    for part in (step.encode_seconds, step.decode_seconds):
        cells += [f"{1e3 * part:.{digits}f}", f"{copy / part:.2f}"] if part else ["-", "-"]
    return cells

"""What synchronization costs on a GPU, beside its peers in the same run: `python tests/gpu/measure.py --help`."""

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, from a checkout

import fnddp
from fnddp import Sync
from fnddp.columns import columns
from fnddp.core import tree
from fnddp.plan.draft import Donation
from fnddp.plan.lower import lower
from fnddp.run.memory import Memory
from fnddp.run.planned import Planned
from fnddp.show.meter import Meter
from fnddp.show.trace import Observer
from fnddp.wire.c10d import C10D
from fnddp.wire.groups import world_size
from tests.gpu.nccl import run_ranks

WARM_UP = 6  # the hook of torch compresses from its third step on; plans learn the order in the first

Step = Callable[[], None]
Row = tuple[str, ...]


class Sizes(NamedTuple):
    """What is measured: `layers` square matrices of `width`, a batch of `batch` rows, in `pairs` paired steps."""

    device: str
    layers: int
    width: int
    batch: int
    pairs: int

    @property
    def nbytes(self) -> int:
        return 4 * self.layers * self.width**2


def compressed() -> Sync:
    return fnddp.error_feedback(fnddp.powersgd(fnddp.allreduce, rank=4))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="NCCL or gloo")
    parser.add_argument("--quick", action="store_true", help="small sizes and few steps: to see that it runs")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="all on the first GPU (default: 1 2)")
    parser.add_argument("--pairs", type=int, help="paired steps of each comparison (default: 30)")
    parser.add_argument("--batch", type=int, help="rows of a batch (default: 1024)")
    parser.add_argument("--out", default="overlap.json", help="the Chrome trace of one overlapped step")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; try --device cpu --quick")
    layers, width, batch, pairs = (3, 128, 8, 3) if options.quick else (24, 2048, 1024, 30)
    sizes = Sizes(options.device, layers, width, options.batch or batch, options.pairs or pairs)
    name = torch.cuda.get_device_name(0) if options.device == "cuda" else f"CPU, {os.cpu_count()} cores"
    print(f"torch {torch.__version__}, {name}; {layers} x Linear({width}, {width}), batch {sizes.batch}", flush=True)
    for n in options.ranks:
        backend = "nccl" if options.device == "cuda" else "gloo"
        is_first, is_last = n == options.ranks[0], n == options.ranks[-1]
        try:
            run_ranks(n, backend, 900, measure, sizes, is_first, options.out if is_last else None)
        except Exception as error:
            if n == 1 or options.device == "cpu":
                raise
            print(f"{n} ranks on one GPU: {backend} does not let them, or failed: {str(error).strip()[-500:]}")


def measure(rank: int, sizes: Sizes, with_parts: bool, out: str | None) -> None:
    """On every rank. The first one prints."""
    torch.manual_seed(0)
    if with_parts:
        show(f"(a) {compressed()!r} on {sizes.nbytes / 4e6:.1f} M float32 gradients", parts(sizes))
    world = f"{dist.get_world_size()} rank{'s' * (dist.get_world_size() > 1)}"
    model = nn.Sequential(*[nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(sizes.layers)])
    model = model.to(sizes.device)
    comparisons = [
        (f"(b) PowerSGD rank 4, {world}", ("register", by_register), ("torch's powerSGD_hook", by_hook)),
        (f"(c) plain mean, {world}", ("fnddp's DistributedDataParallel", by_module), ("torch's", by_torch)),
    ]
    for title, ours, peer in comparisons:
        if sizes.device == "cpu" and peer[1] is by_hook:
            show(title + " (torch's hook aborts on gloo)", against(sizes, model, [ours]))
        else:
            show(title, against(sizes, model, [ours, peer]))
    if out is not None:
        trace(sizes, model, out)


def parts(sizes: Sizes) -> list[Row]:
    """Encode and decode of the plan, without what it waits for, beside a copy of the same bytes."""
    shape = (sizes.width, sizes.width)
    grads = {f"layer{i}": torch.randn(shape, device=sizes.device) for i in range(sizes.layers)}
    sync = compressed()
    state = sync.init(grads)
    plan = lower(sync, grads, state=state, donation=Donation("yes", True))
    meter = Meter()
    runner = Planned(plan, C10D, Memory(), observer=Observer(meter))
    other = {path: torch.empty_like(grad) for path, grad in grads.items()}
    encode: list[float] = []
    decode: list[float] = []
    copies: list[float] = []
    with quiet():
        for _ in range(WARM_UP + sizes.pairs):
            leaves, structure = tree.flatten_any(state)
            runner.start(leaves, {group: world_size(group) for group in plan.phase.groups})
            for path in plan.buckets:
                runner.feed(path, grads[path].clone() if path in plan.overwrites else grads[path])
                runner.advance()
            runner.wait()
            _, leaves = runner.commit()
            state = tree.unflatten_any(structure, leaves)
            wait(sizes)
            taken = meter.taken(len(plan.collectives))
            encode.append(1e3 * taken.encode_seconds)
            decode.append(1e3 * taken.decode_seconds)
            copies.append(timed(sizes, lambda: [other[path].copy_(grad) for path, grad in grads.items()]))
    rows: list[Row] = [("", "ms", "GB/s of gradients", "copies")]
    copied = statistics.median(copies[WARM_UP:])
    kinds = {
        "copy": copies,
        "encode": encode,
        "decode": decode,
        "both": list(map(sum, zip(encode, decode, strict=True))),
    }
    for kind, times in kinds.items():
        ms = statistics.median(times[WARM_UP:])
        rows.append((kind, f"{ms:.3f}", f"{sizes.nbytes / max(ms, 1e-6) / 1e6:.1f}", f"{ms / copied:.2f}"))
    return rows


def against(sizes: Sizes, model: nn.Module, arms: list[tuple[str, Callable[[nn.Module], nn.Module]]]) -> list[Row]:
    """Steps of each arm in turn, A B A B, and of no synchronization; medians, and of the ratios within a round."""
    names = ["no synchronization", *(name for name, _ in arms)]
    x = torch.randn(sizes.batch, sizes.width, device=sizes.device)
    steps = [stepper(wrap(copy.deepcopy(model)), x) for wrap in (lambda alone: alone, *(wrap for _, wrap in arms))]
    rounds = [[timed(sizes, step) for step in steps] for _ in range(WARM_UP + sizes.pairs)][WARM_UP:]
    rows: list[Row] = [("", "ms a step", "of it synchronization")]
    for i, name in enumerate(names):
        took = statistics.median([times[i] for times in rounds])
        cost = statistics.median([times[i] - times[0] for times in rounds])
        rows.append((name, f"{took:.3f}", "" if i == 0 else f"{cost:.3f}"))
    if len(arms) == 2:
        whole = statistics.median([ours / peer for _, ours, peer in rounds])
        costs = [(ours - alone) / (peer - alone) for alone, ours, peer in rounds if peer > alone]
        cost = f"{statistics.median(costs):.3f}" if costs else "-"
        rows.append((f"median of {len(rounds)} paired ratios", f"{whole:.3f}", cost))
    return rows


def by_register(model: nn.Module) -> nn.Module:
    ddp = by_torch(model)
    fnddp.register(ddp, compressed())
    return ddp


def by_hook(model: nn.Module) -> nn.Module:
    ddp = by_torch(model)
    ddp.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2), powerSGD_hook)
    return ddp


def by_module(model: nn.Module) -> nn.Module:
    return fnddp.DistributedDataParallel(model, sync=fnddp.allreduce)


def by_torch(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def stepper(model: nn.Module, x: Tensor) -> Step:
    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return step


def trace(sizes: Sizes, model: nn.Module, out: str) -> None:
    x = torch.randn(sizes.batch, sizes.width, device=sizes.device)
    os.environ["FNDDP_DEBUG"] = "2"  # which names steps in traces
    with quiet():
        step = stepper(fnddp.DistributedDataParallel(copy.deepcopy(model), sync=compressed()), x)
        for _ in range(WARM_UP):
            step()
        wait(sizes)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if sizes.device == "cuda" else [])]
        with profile(activities=kinds, acc_events=True) as profiler:
            step()
            wait(sizes)
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(out)
        print(f"(d) one overlapped step over {dist.get_world_size()} ranks: {out} (chrome://tracing, perfetto.dev)")


def timed(sizes: Sizes, step: Callable[[], Any]) -> float:
    """Milliseconds, on the device's clock where it has one; ranks begin together."""
    dist.barrier()
    wait(sizes)
    begin = mark(sizes)
    step()
    end = mark(sizes)
    wait(sizes)
    return milliseconds((begin, end))


def mark(sizes: Sizes) -> Any:
    if sizes.device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(span: tuple[Any, Any]) -> float:
    begin, end = span
    return (end - begin) * 1e3 if isinstance(begin, float) else begin.elapsed_time(end)


def wait(sizes: Sizes) -> None:
    if sizes.device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def quiet() -> Iterator[None]:
    """Without the tables that FNDDP_DEBUG=2 prints."""
    before = sys.stderr
    with Path(os.devnull).open("w") as sys.stderr:
        try:
            yield
        finally:
            sys.stderr = before


def show(title: str, rows: list[Row]) -> None:
    if dist.get_rank() != 0:
        return
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(f"\n{title}\n{columns(rows)}", flush=True)
        return
    table = Table(*rows[0], box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows[1:]:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()

"""Count what a step launches on an accelerator, for docs/launches.md: operations on tensors, views and memory apart.

No accelerator is needed: the CPU stands for one, whose plans are those of `fnddp.device.Accelerator`, and a list of
tensors that runs as one `_foreach` operation counts once. Run `python benchmarks/measure_kernels.py`.

With `--device cuda` it counts the kernels that torch's profiler sees, of Python and of Inductor, and times them.
"""

import argparse
import time
from contextlib import nullcontext
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import fnddp
from fnddp import device

RANKS, STEPS = 4, 6
ALL_REDUCE = dist.all_reduce
PIPELINES = [
    "allreduce",
    "error_feedback(powersgd(bf16(allreduce), rank=4))",
    "bucketize(quantize(two_shot))",
    "quantize(two_shot)",
    "quantize(two_shot, rounding='stochastic')",
    "fp8(two_shot)",
    "sign(two_shot)",
    "sign(two_shot, scale='max', chunk=128)",
    "error_feedback(quantize(two_shot, bits=4))",
    "error_feedback(quantize(two_shot, bits=4), residual='int8')",
    "error_feedback(bf16(allreduce))",
    "momentum_correction(quantize(two_shot, bits=4), masking=False)",
]
NOTHING = ("aten.empty", "aten.new_empty", "aten.detach", "aten.alias", "aten.lift_fresh", "aten._unsafe_view")


class Launching(device.Accelerator):
    """An accelerator made of the CPU, without streams."""

    def stream(self) -> None:
        return None

    def current(self) -> None:
        return None

    def on(self, stream: object) -> Any:
        return nullcontext()

    def wait(self, stream: object, other: object) -> None:
        pass

    keep = wait

    def of_host(self, values: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    def to_host(self, tensor: Tensor) -> Any:
        return tensor.tolist

    @property
    def backend(self) -> str:
        return "gloo"


class Launches(TorchDispatchMode):
    """Counts operations that compute, while `counts` is true, and the bytes that they read and write."""

    counts, number, nbytes = False, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not self.counts or is_view or str(func).startswith((*NOTHING, "c10d.", "_c10d_functional.")):
            return made
        arguments = func._schema.arguments
        given = [(each, kwargs.get(each.name, args[i] if i < len(args) else None)) for i, each in enumerate(arguments)]
        written = [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]
        read = [value for each, value in given if each.alias_info is None or not each.alias_info.is_write]
        if written and func._overloadname != "out" and "copy_" not in str(func):  # in place
            read += written
        self.number += _kernels(str(func), [value for _, value in given])
        self.nbytes += _kept(*args, **kwargs) if "fnddp.keep" in str(func) else _nbytes(read) + _nbytes(written or made)
        return made


def _kernels(name: str, values: list[Any]) -> int:
    """Return how many kernels an operation launches, as far as it is not one."""
    lists = [each for each in values if isinstance(each, list) and each and isinstance(each[0], Tensor)]
    if "sum_in_rank_order" in name:  # ours, which adds one row after the other
        return len(values[0]) - 1
    if "_foreach" in name and not all(map(_fits, *lists)):  # CUDA then takes one after the other
        return len(lists[0])
    return 1


def _kept(old: list[Tensor], new: list[Tensor], found: Tensor, out: list[Tensor] | None = None) -> int:
    """Return the bytes that it moves in a step without NaN: it copies next values that are not in their place yet."""
    places = [None] * len(new) if out is None else [each.data_ptr() for each in out]
    return 2 * _nbytes([each for each, place in zip(new, places, strict=True) if each.data_ptr() != place])


def _fits(first: Tensor, *others: Tensor) -> bool:
    is_dense = torch.ops.aten.is_non_overlapping_and_dense.default(first)
    return is_dense and all((first.shape, first.stride()) == (each.shape, each.stride()) for each in others)


def _nbytes(values: Any) -> int:
    tensors = [each for each in torch.utils._pytree.tree_leaves(values) if isinstance(each, Tensor)]
    return sum(each.numel() * each.element_size() for each in tensors)


class Leaves(nn.Module):
    """Matrices and vectors whose gradients are there at once: backward itself launches one operation for each."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.leaves = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return sum((leaf.sum() for leaf in self.leaves), x)


def transformer(layers: int = 12, width: int = 64) -> list[tuple[int, ...]]:
    """148 leaves: those of GPT-2, narrower."""
    block = [(width,)] * 2 + [(3 * width, width), (3 * width,), (width, width), (width,)] + [(width,)] * 2
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(512, width), (128, width), *(block * layers), (width,), (width,)]


def deep(layers: int = 192, width: int = 64) -> list[tuple[int, ...]]:
    """384 leaves: linear layers."""
    return [(width, width), (width,)] * layers


def launches(model: nn.Module) -> tuple[int, int]:
    """Return the operations of the last of some steps, and the bytes that they move."""
    mode = Launches()
    with mode:
        for step in range(STEPS):
            model.zero_grad()
            mode.counts, mode.number, mode.nbytes = step == STEPS - 1, 0, 0
            model(torch.zeros(())).backward()
    return mode.number, mode.nbytes


def complete(*args: Any, **kwargs: Any) -> Any:
    """Return an all_reduce that is complete. Otherwise gloo's thread may run what follows it, where nothing counts."""
    work = ALL_REDUCE(*args, **kwargs)
    if kwargs.get("async_op"):
        work.wait()
    return work


def of_torch(shapes: list[tuple[int, ...]]) -> tuple[int, int]:
    """Return those of torch's PowerSGD hook, in a world of one: fake process groups complete no futures."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model = TorchDDP(Leaves(shapes))
    state = torchs.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, torchs.powerSGD_hook)
    with patch.object(dist, "all_reduce", complete):
        found = launches(model)
    del model
    dist.destroy_process_group()
    return found


def ours(shapes: list[tuple[int, ...]], text: str) -> tuple[int, int]:
    """Return those of a pipeline."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    device.register("cpu", Launching)
    found = launches(fnddp.DistributedDataParallel(Leaves(shapes), sync=fnddp.parse(text)))
    device.register("cpu", device.Device)
    dist.destroy_process_group()
    return found


def on_cuda(model: nn.Module) -> tuple[int, float, float]:
    """Return kernels of a step, milliseconds that they take, and milliseconds in which the host launches them."""
    x = torch.zeros((), device="cuda")

    def step() -> float:
        model.zero_grad()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        model(x).backward()
        return 1e3 * (time.perf_counter() - begun)

    for _ in range(STEPS):
        step()
    host = median(step() for _ in range(21))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    ran = [event for event in profiler.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    ran = [event for event in ran if not event.name.startswith(("fnddp", "ProfilerStep", "c10d", "nccl:"))]  # ranges
    kernels = [event for event in ran if not event.name.startswith(("Memcpy", "Memset"))]
    return len(kernels), sum(event.device_time for event in ran) / 1e3, host


def table_of_cuda() -> None:
    """Print kernels and times of each pipeline, as Python and as Inductor run it."""
    print("| pipeline | run by | leaves | MB | kernels | ms of GPU | ms of host |\n|---|---|--:|--:|--:|--:|--:|")
    for shapes in (transformer(), deep()):
        size = f"{len(shapes)} | {4e-6 * sum(torch.Size(shape).numel() for shape in shapes):.0f}"
        bare = on_cuda(Leaves(shapes).cuda())
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
        state = torchs.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model = TorchDDP(Leaves(shapes).cuda())
        model.register_comm_hook(state, torchs.powerSGD_hook)
        rows = [("torch's `powerSGD_hook`, rank 4, one rank", "torch", on_cuda(model))]
        dist.destroy_process_group()
        for text in PIPELINES:
            for backend in (None, "inductor"):
                torch._dynamo.reset()
                dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
                made = fnddp.DistributedDataParallel(Leaves(shapes).cuda(), sync=text, backend=backend)
                rows.append((f"`{text}`", backend or "Python", on_cuda(made)))
                dist.destroy_process_group()
        for name, by, found in rows:
            number, on_gpu, of_host = (one - other for one, other in zip(found, bare, strict=True))
            print(f"| {name} | {by} | {size} | {number:,} | {on_gpu:.2f} | {of_host:.1f} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    if args.device == "cuda":
        table_of_cuda()
        return
    print("| pipeline | leaves | operations | passes over the gradients |\n|---|--:|--:|--:|")
    for shapes in (transformer(), deep()):
        nbytes = 4 * sum(torch.Size(shape).numel() for shape in shapes)
        bare, moved_by_bare = launches(Leaves(shapes))
        found = {"torch's `powerSGD_hook`, rank 4": of_torch(shapes)}
        found |= {f"`{text}`": ours(shapes, text) for text in PIPELINES}
        for name, (number, moved) in found.items():
            print(f"| {name} | {len(shapes)} | {number - bare:,} | {(moved - moved_by_bare) / nbytes:.1f} |")


if __name__ == "__main__":
    main()

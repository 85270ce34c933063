"""What `_get_ddp_logging_data` tells: how a module was wrapped, how its last sampled step went, and its last error."""

import os
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fnddp.adapters.module.slots import Trained
from fnddp.core.buckets import assign_buckets
from fnddp.ir.program import LeafSpec
from fnddp.run.engine import Engine
from fnddp.run.step import Step

_ENVIRONMENT = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_OF_BACKEND = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": ("NCCL_SOCKET_IFNAME", "NCCL_BLOCKING_WAIT", "NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT"),
}
_NAMES = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16"}
_GLOO_THREADS = 2  # as torch's ProcessGroupGloo starts for each device
_ALWAYS = 10  # steps that are always sampled


class Log:
    """Facts by torch's names. Times are in nanoseconds.

    Attributes:
        sample_rate: After the first steps, every how many of them times are taken.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.sample_rate = 100
        self._facts: dict[str, Any] = {"iteration": 0, **facts}
        self._step = 0
        self._sampled = 0
        self._at: dict[str, int] = {}

    @property
    def has_stepped(self) -> bool:
        """Whether a step has been synchronized."""
        return self._step > 0

    def data(self) -> dict[str, Any]:
        """All of it."""
        return dict(self._facts)

    def set(self, **facts: Any) -> None:
        self._facts.update(facts)

    @contextmanager
    def errors(self) -> Generator[None]:
        """Remembers an error that passes through."""
        try:
            yield
        except BaseException as error:
            self.set(has_error=1, error=f"{type(error)}: {error}")
            raise

    def forward_starts(self) -> None:
        self._at = {"forward_compute_time": time.time_ns()} if self._samples else {}

    def backward_starts(self) -> None:
        self._note("backward_compute_time")

    def fed(self, step: Step) -> None:
        if self._at and "backward_comm_time" not in self._at and step.has_sent:
            self._note("backward_comm_time")

    def backward_ends(self) -> None:
        self._note("end")

    def step_ends(self, engine: Engine, unused: Iterable[str]) -> None:
        """Writes down what the step was like."""
        if self._at.keys() >= {"forward_compute_time", "backward_compute_time", "end"}:
            self._write_times(engine, unused)
        self._at = {}
        self._step += 1

    @property
    def _samples(self) -> bool:
        return self._step <= _ALWAYS or self._step % self.sample_rate == 0

    def _note(self, what: str) -> None:
        if self._at:
            self._at.setdefault(what, time.time_ns())

    def _write_times(self, engine: Engine, unused: Iterable[str]) -> None:
        at, finished = self._at, time.time_ns()
        sent = at.get("backward_comm_time", at["end"])
        took = {
            "forward_compute_time": at["backward_compute_time"] - at["forward_compute_time"],
            "backward_compute_time": at["end"] - at["backward_compute_time"],
            "backward_comm_time": finished - sent,
            "backward_compute_comm_overlap_time": at["end"] - sent,
        }
        self._sampled += 1
        for name, nanoseconds in took.items():
            mean = self._facts.get(f"avg_{name}", 0)
            self.set(**{name: nanoseconds, f"avg_{name}": mean + (nanoseconds - mean) // self._sampled})
        self.set(
            iteration=self._step,
            forward_compute_time_start=at["forward_compute_time"],
            backward_compute_time_start=at["backward_compute_time"],
            backward_compute_time_end=at["end"],
            backward_comm_time_start=sent,
            backward_comm_time_end=finished,
            unused_parameter_size=sum(engine.leaves[name].nbytes for name in unused),
            **_schedule(engine),
        )


def _schedule(engine: Engine) -> dict[str, Any]:
    if engine.plan is None:
        return {}
    indices = {name: str(i) for i, name in enumerate(engine.leaves)}
    buckets = engine.plan.buckets
    return {
        "has_rebuilt_buckets": 1,
        "rebuilt_bucket_sizes": _sizes(engine.leaves, buckets),
        "prev_iteration_grad_ready_order_indices": ", ".join(indices[name] for name in buckets),
        "rebuilt_per_bucket_param_indices": ", ".join(
            " ".join(indices[name] for name in buckets if buckets[name] == b) for b in sorted(set(buckets.values()))
        ),
        "num_buckets_reduced": len({collective.bucket for collective in engine.plan.collectives}),
    }


def environment(group: dist.ProcessGroup | None) -> dict[str, Any]:
    """What is known of the process group and its settings."""
    if group is None:
        return {"world_size": 1, "rank": 0}
    backend = dist.get_backend(group)
    names = [*_ENVIRONMENT, *_OF_BACKEND.get(backend, ())]
    facts: dict[str, Any] = {name.lower(): os.environ.get(name, "N/A") for name in names}
    facts |= {"gloo_num_threads": _GLOO_THREADS} if backend == "gloo" else {}
    return {**facts, "world_size": group.size(), "rank": group.rank(), "backend_name": backend}


def parameter_facts(trained: Trained, caps: Sequence[float]) -> dict[str, Any]:
    """What is known of the parameters and of how they will be bucketed."""
    leaves = trained.leaves()
    buckets = assign_buckets({name: leaves[name].nbytes for name in reversed(leaves)}, caps)
    return {
        "dtypes": ", ".join(sorted({_NAMES.get(leaf.dtype, str(leaf.dtype)) for leaf in leaves.values()})),
        "total_parameter_size_bytes": sum(leaf.nbytes for leaf in leaves.values()),
        "num_parameter_tensors": len(leaves),
        "bucket_sizes": _sizes(leaves, buckets),
    }


def _sizes(leaves: Mapping[str, LeafSpec], buckets: Mapping[str, int]) -> str:
    sizes = [0] * len(set(buckets.values()))
    for name, bucket in buckets.items():
        sizes[bucket] += leaves[name].nbytes
    return ", ".join(map(str, sizes))

"""The data of `_get_ddp_logging_data`: how a module was wrapped, its last sampled step, and its last error."""

import os
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fnddp.core.buckets import assign_buckets
from fnddp.ir.program import LeafSpec
from fnddp.plan.plan import Plan
from fnddp.run.engine import Engine
from fnddp.run.step import Step

_ENVIRONMENT = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_GLOO_ENVIRONMENT = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
_NAMES = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16"}
_ALWAYS = 10  # all steps up to this one, counted from 0, are sampled


class Log:
    """Log of a wrapped module's steps, under the keys of torch's `_get_ddp_logging_data`.

    Attributes:
        facts: Values by torch's keys; times are in nanoseconds.
        sample_rate: Number of steps from one sample to the next. The first steps are all sampled.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.sample_rate = 100
        self.facts: dict[str, Any] = {"iteration": 0, **facts}
        self._step = self._sampled = 0
        self._at: dict[str, int] = {}  # times of events in this step; empty if it is not sampled

    @property
    def has_stepped(self) -> bool:
        """True once a step has been synchronized."""
        return self._step > 0

    @contextmanager
    def errors(self) -> Generator[None]:
        """Log an exception that leaves the block, and let it propagate."""
        try:
            yield
        except BaseException as error:
            self.facts.update(has_error=1, error=f"{type(error)}: {error}")
            raise

    def forward_starts(self) -> None:
        samples = self._step <= _ALWAYS or self._step % self.sample_rate == 0
        self._at = {"forward_compute_time_start": time.time_ns()} if samples else {}

    def backward_starts(self) -> None:
        self._note("backward_compute_time_start")

    def note_sending(self, step: Step) -> None:
        """Record the first time at which `step` has sent something."""
        if self._at and "backward_comm_time_start" not in self._at and step.has_sent:
            self._note("backward_comm_time_start")

    def backward_ends(self) -> None:
        self._note("backward_compute_time_end")

    def _note(self, moment: str) -> None:
        if self._at:
            self._at.setdefault(moment, time.time_ns())

    def step_ends(self, engine: Engine, unused: Iterable[str]) -> None:
        """Log the times and buckets of a sampled step; `unused` are the names of unused parameters."""
        at, self._at = self._at, {}
        if at.keys() >= {"backward_compute_time_start", "backward_compute_time_end"}:
            begins, ends = at["backward_compute_time_start"], at["backward_compute_time_end"]
            sent = at.setdefault("backward_comm_time_start", ends)  # nothing was sent before backward ended
            at["backward_comm_time_end"] = time.time_ns()
            self._sampled += 1
            for name, took in {
                "forward_compute_time": begins - at["forward_compute_time_start"],
                "backward_compute_time": ends - begins,
                "backward_comm_time": at["backward_comm_time_end"] - sent,
                "backward_compute_comm_overlap_time": ends - sent,
            }.items():
                mean = self.facts.get(f"avg_{name}", 0)
                self.facts.update({name: took, f"avg_{name}": mean + (took - mean) // self._sampled})
            size = sum(engine.leaves[name].nbytes for name in unused)
            self.facts.update(**at, iteration=self._step, unused_parameter_size=size)
            if engine.plan is not None:
                self.facts.update(_schedule(engine.leaves, engine.plan))
        self._step += 1


def _schedule(leaves: Mapping[str, LeafSpec], plan: Plan) -> dict[str, Any]:
    indices = {name: str(i) for i, name in enumerate(leaves)}
    buckets = _grouped(plan.buckets)
    return {
        "has_rebuilt_buckets": 1,
        "rebuilt_bucket_sizes": _sizes(leaves, buckets),
        "prev_iteration_grad_ready_order_indices": ", ".join(indices[name] for name in plan.buckets),
        "rebuilt_per_bucket_param_indices": ", ".join(" ".join(indices[n] for n in names) for names in buckets),
        "num_buckets_reduced": len({collective.bucket for collective in plan.collectives}),
    }


def environment(group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return the facts about the process group, None for a single process, and its environment variables."""
    if group is None:
        return {"world_size": 1, "rank": 0}
    facts = {"world_size": group.size(), "rank": group.rank(), "backend_name": dist.get_backend(group)}
    is_gloo = facts["backend_name"] == "gloo"
    names = (*_ENVIRONMENT, *_GLOO_ENVIRONMENT) if is_gloo else _ENVIRONMENT
    threads = {"gloo_num_threads": 2} if is_gloo else {}  # torch's ProcessGroupGloo starts 2 for each device
    return {**facts, **threads, **{name.lower(): os.environ.get(name, "N/A") for name in names}}


def parameter_facts(leaves: dict[str, LeafSpec], caps: Sequence[float]) -> dict[str, Any]:
    """Return the facts about the parameters and their initial buckets."""
    buckets = assign_buckets({name: leaves[name].nbytes for name in reversed(leaves)}, caps)
    return {
        "dtypes": ", ".join(sorted({_NAMES.get(leaf.dtype, str(leaf.dtype)) for leaf in leaves.values()})),
        "total_parameter_size_bytes": sum(leaf.nbytes for leaf in leaves.values()),
        "num_parameter_tensors": len(leaves),
        "bucket_sizes": _sizes(leaves, _grouped(buckets)),
    }


def _grouped(buckets: Mapping[str, int]) -> list[list[str]]:
    return [[name for name in buckets if buckets[name] == b] for b in sorted(set(buckets.values()))]


def _sizes(leaves: Mapping[str, LeafSpec], buckets: list[list[str]]) -> str:
    return ", ".join(str(sum(leaves[name].nbytes for name in names)) for names in buckets)

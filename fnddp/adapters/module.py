"""`DistributedDataParallel`: a wrapped module whose gradients are synchronized by a pipeline during backward."""

import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fnddp import collectives
from fnddp.agreement import agree, description
from fnddp.plan.engine import Engine
from fnddp.plan.ir import LeafSpec
from fnddp.plan.plan import Plan
from fnddp.plan.reuse import Donation
from fnddp.reducers.all_reduce import allreduce
from fnddp.state import require_like, shared
from fnddp.sync import State, Sync


class DistributedDataParallel(nn.Module):
    """Wraps a module so that `backward()` leaves synchronized gradients, with any pipeline.

    Gradients are handed over as backward makes them, and the pipeline's collectives run behind the rest of it. Nothing
    can hang because a parameter is unused: what does not arrive on a rank counts as zero there, and what arrives on no
    rank keeps its gradient, usually None. The wrong choice in a functional loop: there is `value_and_grad`.

    All ranks must construct it. An error in one rank's backward ends the step on all: the others raise
    `StepFailedError` when that rank uses the module again, or the process group's error when it ends or times out.

    Args:
        module: What to wrap. Its parameters and buffers are made equal to the first rank's.
        device_ids, output_device, dim: As for torch's class; the module must be on its device already.
        broadcast_buffers: Make buffers equal to the first rank's before each forward that trains.
        init_sync: Whether to verify and broadcast parameters and buffers now.
        process_group: The group of reducers that name none; None for the default one.
        bucket_cap_mb: Size of a bucket of gradients in MiB; None for 25. The first one has 1 MiB.
        find_unused_parameters, check_reduction, gradient_as_bucket_view, static_graph: Accepted, and needless here.
        sync: The pipeline.

    Attributes:
        module: The wrapped module.
        sync: The pipeline that runs: it names the process group where it named none, unless that is the default one.

    Raises:
        RankMismatchError: On all ranks, if they disagree about the pipeline or the parameters.
        ValueError: No parameter requires a gradient; `device_ids` names several devices.

    >>> from fnddp import fp16
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> model = DistributedDataParallel(nn.Linear(2, 1), sync=fp16(allreduce))
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> model.module.weight.grad
    tensor([[1., 1.]])
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        sync: Sync = allreduce,
    ) -> None:
        super().__init__()
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        self._group = collectives.group_name(process_group)
        self.sync = sync.over(process_group, unnamed_only=True)
        self._parameters_by_name = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self._parameters_by_name:
            raise ValueError(
                "DistributedDataParallel: no parameter of the module requires a gradient; use it unwrapped"
            )
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(f"DistributedDataParallel: device_ids must name one device, got {device_ids}")
        self._state: State = self.sync.init(self._parameters_by_name)
        if init_sync:
            agree(lambda: description(sync, self._parameters_by_name, self._state), process_group)
            collectives.broadcast([p.detach() for p in module.parameters()] + self._buffers_to_sync(), self._group)
        caps = {} if bucket_cap_mb is None else {"bucket_cap_mb": float(bucket_cap_mb)}
        leaves = {name: LeafSpec.of(p) for name, p in self._parameters_by_name.items()}
        self._engine = Engine(
            self.sync,
            leaves,
            donation=Donation(gradients="yes", state=True),
            learns_order=True,
            skips_unused=True,
            **caps,
        )
        self._is_armed = False  # whether the next backward is one that synchronizes
        self._accumulated: set[str] = set()  # with gradients that no step has synchronized yet
        self._kept: set[str] = set()
        self._sparse: dict[str, int] = {}
        for name, parameter in self._parameters_by_name.items():
            parameter.register_post_accumulate_grad_hook(_Feeder(self, name))

    @property
    def plan(self) -> Plan | None:
        """What the last backward ran; None before the first, and for a pipeline that cannot be lowered."""
        return self._engine.plan

    @property
    def sync_state(self) -> State:
        """The pipeline's state after the last step: a pytree keyed by the names of `module`'s parameters.

        It can be kept: later steps do not write over it. Set it to go on from a saved one, on all ranks.
        """
        return shared(self._state)

    @sync_state.setter
    def sync_state(self, state: State) -> None:
        self._state = require_like(repr(self.sync), state, self._state)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; the backward of what it returns synchronizes."""
        synchronizes = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self._engine.is_open:  # the last backward raised
            self._engine.fail(RuntimeError("its backward did not finish"))
        self._engine.refuse_after_failure()
        if synchronizes and self.training and self.broadcast_buffers:
            collectives.broadcast(self._buffers_to_sync(), self._group)
        output = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self._is_armed = synchronizes
        if synchronizes:
            # What is returned is the first to have a gradient: with it a step begins even if no parameter is used.
            for tensor in _tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._start)
        return output

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Within it forward passes do not synchronize: gradients add up until a backward outside of it."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _buffers_to_sync(self) -> list[Tensor]:
        return [buffer.detach() for buffer in self.module.buffers()]

    def _start(self, _: Tensor | None = None) -> None:
        """At the beginning of a backward."""
        if not self._engine.is_open:
            # What is there already is added to, and is the user's: it is not written over.
            self._kept = {name for name, p in self._parameters_by_name.items() if p.grad is not None}
            self._sparse = {}
            self._engine.start(self._state)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]

    def _feed(self, name: str, parameter: Tensor) -> None:
        if not self._engine.is_open:
            if not self._is_armed:  # a forward within no_sync, or of the module itself
                self._accumulated.add(name)
                return
            self._start()  # the module has returned what we know no tensors of
            self._kept.add(name)  # too late to tell
        grad = parameter.grad
        assert grad is not None
        if grad.is_sparse:
            self._sparse[name] = grad.sparse_dim()
            grad = grad.to_dense()
        if name not in self._kept:
            parameter.grad = None  # so that its memory is free once it is on its way
        self._engine.feed(name, grad, keep=name in self._kept)

    def _finish(self) -> None:
        """At the end of a backward."""
        self._is_armed = False
        try:
            # What was accumulated within no_sync, of parameters that this backward has not reached.
            missing = self._engine.missing
            for name in self._accumulated & missing if len(missing) < len(self._parameters_by_name) else ():
                if self._parameters_by_name[name].grad is not None:
                    self._feed(name, self._parameters_by_name[name])
            done = self._engine.finish()
        except BaseException as error:
            self._engine.fail(error)
            raise
        if len(done.unused) == len(self._parameters_by_name):
            return  # a backward that reached no parameter on any rank: torch.autograd.grad, for example
        self._state = done.state
        self._accumulated = set()
        for name, parameter in self._parameters_by_name.items():
            if name not in done.unused:
                mean = done.mean[name]
                parameter.grad = mean.to_sparse(self._sparse[name]) if name in self._sparse else mean


class _Feeder:
    """The hook of one parameter."""

    def __init__(self, owner: DistributedDataParallel, name: str) -> None:
        self._owner, self._name = weakref.ref(owner), name  # the garbage collector does not see hooks of tensors

    def __call__(self, parameter: Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner._feed(self._name, parameter)  # pyright: ignore[reportPrivateUsage]


def _tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors in what a module returns, whatever it is made of."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors_in(list(output.values()))
    elif isinstance(output, list | tuple | set):
        for part in output:
            yield from _tensors_in(part)
    elif is_dataclass(output):
        yield from _tensors_in([getattr(output, field.name, None) for field in fields(output)])

"""A pipeline in an existing `torch.nn.parallel.DistributedDataParallel`, through its communication hook."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fnddp import torch_private
from fnddp.adapters.backward import Backward
from fnddp.adapters.handle import PipelineHandle
from fnddp.adapters.module.slots import Slots, WrappedParameters
from fnddp.core.agreement import agree, description, reraise
from fnddp.core.group import group_name
from fnddp.core.parse import pipeline_of
from fnddp.core.sync import Sync
from fnddp.core.tree import Leaves
from fnddp.device import device_of
from fnddp.run.choose import AUTO, automatic
from fnddp.run.step import applying
from fnddp.wire.c10d import C10D
from fnddp.wire.groups import Membership
from fnddp.wire.protocol import Wire


class Handle(PipelineHandle):
    """The pipeline that `register` added to a DDP model, and its state.

    It cannot be replaced, because DDP accepts one hook and keeps it. Wrap the module again, or use fnddp's class.
    """

    def __init__(self, model: DistributedDataParallel, sync: Sync, wire: Wire, backend: str | None) -> None:
        group = group_name(model.process_group)
        self._finds_unused = model.find_unused_parameters
        self._module = model.module  # not the model: DDP holds this handle, invisibly to gc
        wrapped, fix = _wrapped(model), "wrap the module and register the pipeline again"
        self._parameters: Leaves = {**wrapped.parameters}
        self._slots = Slots(self._module, wrapped, "register", fix)
        self._names = {parameter: name for name, parameter in self._parameters.items()}
        self._known: set[Tensor] | None = None  # parameters that DDP reduces, the same in all steps
        self._count = torch_private.ddp_facts(model)["num_parameter_tensors"]
        super().__init__(self._parameters, sync, group, wire, learns_order=False, backend=backend)
        self._world = Membership(group, "register: the pipeline was registered", fix)
        self._pending: list[_Bucket] = []
        self._strides = {parameter: parameter.stride() for parameter in self._names}  # when DDP made its buckets
        self._layouts: dict[tuple[int, ...], _Layout] = {}  # of buckets, by the identities of their parameters
        self._grads_are_views = model.gradient_as_bucket_view
        self._backward = Backward(self._engine)

    def _feed(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        # Not by bucket index: in the first step of a static graph DDP gives index 0 to all buckets.
        arrived = _Bucket(bucket, self._layout_of(bucket.parameters()))
        is_first = not self._pending or arrived.layout is self._pending[0].layout
        if is_first:
            self._pending = []
            self._backward.require_idle()
        self._pending.append(arrived)
        self._backward.attempt(partial(self._put, arrived, is_first))
        if sum(len(each.layout.parameters) for each in self._pending) == self._count:
            self._end()
        return arrived.future

    def _put(self, bucket: "_Bucket", is_first: bool) -> None:
        if is_first:
            self._world.require_same()
            self._backward.begin()
        layout = bucket.layout
        if not bucket.buffer.is_sparse:
            self._require_laid_out_alike(bucket)
        if self._backward.step is not None:
            self._backward.step.put_all(layout.positions, bucket.views)

    def _layout_of(self, parameters: list[Tensor]) -> "_Layout":
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            known = [(i, p, self._names[p]) for i, p in enumerate(parameters) if p in self._names]
            strides = [self._strides[p] for _, p, _ in known]
            self._layouts[key] = _Layout(
                parameters,
                [i for i, _, _ in known],
                [p for _, p, _ in known],
                [name for _, _, name in known],
                [self._engine.positions[name] for _, _, name in known],
                strides,
                [each if _is_laid_out_by(each, p) else None for each, (_, p, _) in zip(strides, known, strict=True)],
            )
        return self._layouts[key]

    def _require_laid_out_alike(self, bucket: "_Bucket") -> None:
        """Raise a RuntimeError if strides of parameters have changed since DDP made its buckets."""
        known, grads = bucket.layout.known, bucket.views
        if self._grads_are_views:
            grads = [view if p.grad is None else p.grad for p, view in zip(known, grads, strict=True)]
        for i, (p, strides) in enumerate(zip(known, bucket.layout.strides, strict=True)):
            if p.stride() != strides or (self._grads_are_views and grads[i].stride() != bucket.views[i].stride()):
                raise RuntimeError(
                    f"register: {bucket.layout.names[i]} has strides {p.stride()} now, but had others when DDP built "
                    "its buckets, which store gradients in those strides; change the memory format before wrapping "
                    "the module"
                )

    def _before_forward(self) -> None:
        # A forward fails the open step, because that step's backward did not finish. Exceptions are a forward within
        # backward, and one without gradients: both may run during a step.
        if torch.is_grad_enabled() and not torch_private.is_within_backward():
            self._world.require_same()
            self._pending = []
            self._backward.require_idle()
            if self._compares:
                self._require_one_choice()
        self._engine.refuse_after_failure()  # DDP has collectives in forward too

    def _end(self) -> None:
        try:
            with applying(self._engine):
                self._complete(self._backward.end(self._require_known).mean)
        except BaseException as error:
            # An exception in a hook breaks DDP's reducer. Let it finish with this rank's own gradients, then raise.
            for bucket in self._pending:
                bucket.future.set_result(bucket.buffer)
            self._pending = []
            if not torch_private.is_within_backward():  # DDP's join runs hooks by itself
                raise
            _behind_ddp(partial(reraise, error))

    def _complete(self, mean: Leaves) -> None:
        """Pass the means to DDP."""
        for bucket in self._pending:
            bucket.complete(mean)
        # Outside of a backward DDP's join runs the hooks, and this rank has no gradients.
        if (self._writes_all or len(mean) < len(self._names)) and torch_private.is_within_backward():
            _behind_ddp(partial(self._write, mean))
        # DDP's buckets and their order are the same on all ranks.
        self._engine.expect([name for bucket in self._pending for name in bucket.layout.names])
        self._pending = []

    @property
    def _writes_all(self) -> bool:
        return self._finds_unused and self.sync.gives_later

    def _write(self, mean: Leaves) -> None:
        """Set `.grad` where DDP does not: None if there is no update, and means of parameters that no rank used."""
        for name in self._parameters.keys() - mean.keys():
            self._parameters[name].grad = None
        for name in mean if self._writes_all else ():
            parameter = self._parameters[name]
            if not parameter.requires_grad:  # frozen since
                continue
            if parameter.grad is None:
                parameter.grad = mean[name].clone() if mean[name].any() else None
            elif not parameter.grad.is_sparse:
                parameter.grad.detach().copy_(mean[name])

    def _require_known(self) -> None:
        if self._known is None:
            self._known = {p for bucket in self._pending for p in bucket.layout.known}
        self._slots.require_known(self._module)
        self._slots.require_all_in(self._known)


def _is_laid_out_by(strides: tuple[int, ...], parameter: Tensor) -> bool:
    """Return whether DDP lays out a gradient by its parameter's `strides`, and these are not row-major.

    If they leave gaps or overlap, DDP uses row-major strides, as autograd does.
    """
    is_row_major = strides == torch.empty(parameter.shape, device="meta").stride()
    return not is_row_major and strides == torch.empty_like(parameter, device="meta").stride()


def _wrapped(model: DistributedDataParallel) -> WrappedParameters:
    return WrappedParameters.of(model.module, model.parameters_to_ignore, ())


class _Layout(NamedTuple):
    """The layout of one of DDP's buckets. All lists but `parameters` have one entry for each known parameter.

    Attributes:
        parameters: All parameters in the bucket.
        places: Indices of the known parameters in the bucket.
        known: The known parameters: those that the pipeline synchronizes.
        names, positions: Their names, and their positions among the leaves.
        strides: Their strides when DDP made its buckets.
        other: The strides of their views; None where these are row-major.
    """

    parameters: list[Tensor]
    places: list[int]
    known: list[Tensor]
    names: list[str]
    positions: list[int]
    strides: list[tuple[int, ...]]
    other: list[tuple[int, ...] | None]


class _Bucket:
    """One of DDP's buckets in a backward, with `views` of the known gradients and the future that DDP waits for."""

    def __init__(self, bucket: dist.GradBucket, layout: _Layout) -> None:
        self.buffer, self.layout = bucket.buffer(), layout
        if self.buffer.is_sparse:  # the buffer is one gradient, without views
            views = [self.buffer.to_dense()]
        elif layout.parameters[0].is_complex():  # the buffer is real, and DDP's views are of its first half
            parts = torch.view_as_complex(self.buffer.view(-1, 2)).split([p.numel() for p in layout.parameters])
            views = [part.view(p.shape) for part, p in zip(parts, layout.parameters, strict=True)]
        else:
            views = bucket.gradients()
        self.views = views if len(layout.places) == len(views) else [views[i] for i in layout.places]
        if any(layout.other):  # DDP passes row-major views to hooks
            pairs = zip(self.views, layout.other, strict=True)
            self.views = [view.as_strided(view.shape, strides) if strides else view for view, strides in pairs]
        self.future: torch.futures.Future[Tensor] = device_of(self.buffer.device).future()

    def complete(self, mean: Leaves) -> None:
        """Pass the means in `mean` to DDP; parameters that are not in it keep this rank's own gradients."""
        result = self.buffer
        pairs = [(view, mean[name]) for name, view in zip(self.layout.names, self.views, strict=True) if name in mean]
        if self.buffer.is_sparse:
            result = next((each.to_sparse(self.buffer.sparse_dim()) for _, each in pairs), result)
        elif elsewhere := [pair for pair in pairs if pair[1].data_ptr() != pair[0].data_ptr()]:
            torch_private.foreach_copy(*zip(*elsewhere, strict=True))
        self.future.set_result(result)


def register(
    model: DistributedDataParallel, sync: Sync | str, *, wire: Wire = C10D, backend: str | None = None
) -> Handle:
    """Make an existing DDP model synchronize its gradients with `sync`.

    The hook receives gradients by parameter name as DDP's buckets become ready. The pipeline's collectives run while
    backward continues, and the means are written into DDP's buckets when all are complete. It works with `no_sync`,
    `find_unused_parameters`, `static_graph`, `gradient_as_bucket_view`, several forwards per backward, and on gloo and
    NCCL. Unused parameters count as zero gradients. Where the pipeline has no update in a step (`every`), `.grad` is
    None after backward, also for unused parameters. DDP accepts one hook and keeps it, so this cannot be combined with
    another hook. If you do not need torch's class, `fnddp.DistributedDataParallel` overlaps better, because it sees
    each gradient, not only full buckets.

    All ranks must call it. An error on one rank ends the step on all: that rank's `backward()` raises it, and the
    others' raise `StepFailedError`. The state is then unchanged, and `.grad` holds each rank's own gradients; clear
    them and continue. If the others cannot be notified of an error (on a GPU, a collective failed, a rank died, or the
    pipeline has a `from_hook`), this rank refuses further steps, and ranks that wait for it fail when it exits or when
    the process group's timeout is over. An error of backward outside the hook reaches them when the model is called
    again, if one of DDP's buckets was full before the error; DDP then refuses further steps on that rank. Otherwise
    they wait until the timeout.

    Args:
        model: The wrapped module.
        sync: The pipeline, or its text. Reducers without a group use the model's. "auto" measures and chooses one: see
            `DistributedDataParallel`.
        wire, backend: See `value_and_grad`.

    Returns:
        A handle. Its `sync_state` can be saved (`fnddp.state_dict(handle.sync_state)`) and set.

    Raises:
        RankMismatchError: On all ranks, if they disagree about the pipeline, the parameters or the state.
        RuntimeError: The model has a hook already.
        TypeError: `model` is not a `DistributedDataParallel`; the pipeline is `weighted`; a parameter has an optimizer
            that runs in backward.
        ValueError: The model was wrapped with `skip_all_reduce_unused_params=True`.

    >>> import torch.distributed as dist
    >>> from fnddp import allreduce, error_feedback, powersgd
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> model = DistributedDataParallel(torch.nn.Linear(8, 8))
    >>> handle = register(model, error_feedback(powersgd(allreduce)))
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> handle.sync_state.residual["weight"].shape
    torch.Size([8, 8])
    >>> del model, handle  # before their process group: torch joins a thread there, which may wait for this one
    >>> dist.destroy_process_group()
    """
    if DistributedDataParallel not in type(model).__mro__:  # isinstance also holds for fnddp's class, without a reducer
        raise TypeError(
            "register: expected a torch.nn.parallel.DistributedDataParallel, got "
            f"{type(model).__module__}.{type(model).__name__}; for a fnddp.DistributedDataParallel, set its `sync`"
        )
    group = group_name(model.process_group)
    pipeline = automatic(lambda: {**_wrapped(model).parameters}, group, wire) if sync == AUTO else sync
    handles: list[Handle] = []

    def set_up() -> dict[str, str]:
        if any(map(torch_private.optimizers_in_backward, _wrapped(model).parameters.values())):
            raise TypeError(
                "register: parameters have an optimizer that runs in backward, and DDP then sets a hook of its own; "
                "use fnddp.DistributedDataParallel, or remove _apply_optimizer_in_backward"
            )
        if hook := torch_private.ddp_facts(model).get("comm_hook"):
            raise RuntimeError(f"register: DDP accepts one hook, and {hook} is already set; wrap the module again")
        if model.skip_all_reduce_unused_params:
            raise ValueError(
                "register: with skip_all_reduce_unused_params, DDP calls no hook for a bucket that no rank uses, so "
                "a step may never begin or end; remove that argument, or use fnddp.DistributedDataParallel"
            )
        given = pipeline_of("register: sync", pipeline)
        if given.takes_weight:
            raise TypeError(
                f"register: {given!r} needs a weight in each step, which torch's class cannot pass; use "
                "fnddp.DistributedDataParallel, or remove weighted and scale the loss"
            )
        handles.append(Handle(model, given.over(group, unnamed_only=True), wire, backend))
        parameters = handles[0]._parameters  # pyright: ignore[reportPrivateUsage]
        return {"the backend": str(backend), **description(given, parameters, handles[0].sync_state)}

    agree(set_up, group, call="register")
    (handle,) = handles
    handle._connect(is_measured=sync == AUTO)  # pyright: ignore[reportPrivateUsage]
    model.register_comm_hook(slot := Slot(handle), fnddp_hook)
    model.register_forward_pre_hook(slot.before_forward)
    return handle


class Slot:
    """The reference from a model to its handle. A copy of the model has none, because torch does not copy hooks."""

    def __init__(self, handle: Handle | None = None) -> None:
        self._handle = handle

    def __reduce__(self) -> tuple[Any, ...]:
        return Slot, ()

    def before_forward(self, *_: object) -> None:
        if self._handle is not None:
            self._handle._before_forward()  # pyright: ignore[reportPrivateUsage]

    def feed(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        assert self._handle is not None  # in the model that has the hook
        return self._handle._feed(bucket)  # pyright: ignore[reportPrivateUsage]


@torch_private.skipped_by_dynamo
def fnddp_hook(slot: Slot, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Pass a bucket to the handle. DDP requires a plain function with these parameters as its hook."""
    return slot.feed(bucket)


def _behind_ddp(run: Callable[[], None]) -> None:
    """Run `run` at the end of the running backward, after DDP's own final callback."""
    # DDP queues its own final callback after a hook returns, so ours is queued by a callback: it comes last.
    torch_private.at_end_of_backward(lambda: torch_private.at_end_of_backward(run))

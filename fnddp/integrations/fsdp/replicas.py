"""FSDP2: a pipeline between the replicas of a sharded model, in place of HSDP's all-reduce."""

import weakref
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fnddp import torch_private
from fnddp.adapters.backward import Backward, RankWeight, WeakHook, accumulates, nodes_behind, require_synchronized
from fnddp.adapters.checkpoint import Checkpoint
from fnddp.adapters.handle import PipelineHandle
from fnddp.core.agreement import agree_over, description
from fnddp.core.group import group_name
from fnddp.core.parse import pipeline_of
from fnddp.core.sync import Sync, all_in
from fnddp.core.tree import Leaves
from fnddp.integrations.fsdp.reductions import Ends, Reduction, reductions_of
from fnddp.outer.shards import groups_of_mesh, ranks_of
from fnddp.plan.plan import Plan
from fnddp.run.choose import AUTO, automatic
from fnddp.wire import control


class Replicas(PipelineHandle):
    """The pipeline between the replicas of a model, with its state for this rank's shards: see `compress_replicas`."""

    def __init__(
        self, model: nn.Module, parameters: dict[str, DTensor], sync: Sync, group: str | None, shards: DeviceMesh
    ) -> None:
        self._shards, self._others, self._parameters = shards, groups_of_mesh(shards), parameters
        self._frozen = {name: p for name, p in model.named_parameters() if name not in parameters}
        local = _local(parameters)
        super().__init__(local, sync, group, learns_order=True, other_groups=self._others)
        self._synchronizes = self._is_armed = True  # outside of no_sync: now, and in the last forward
        self._means: weakref.WeakValueDictionary[str, DTensor] = weakref.WeakValueDictionary()  # synchronized gradients
        self._before: dict[str, DTensor] = {}  # those that `.grad` held before this backward
        self._backward = Backward(self._engine, undo=self._undo)
        self._reductions = reductions = reductions_of(model)
        self._weight = RankWeight() if reductions is None else reductions.weight
        self._fsdp = [group for _, groups in torch_private.fsdp_groups(model).values() for group in groups]
        self._ends = Ends(model)
        if reductions is not None:
            reductions.join(self._backward, self._start)

    def sync_checkpoint(self, saved_world_size: int | None = None) -> Checkpoint:
        """Return the state of this shard for torch.distributed.checkpoint, under its own prefix. All ranks call it.

        Args:
            saved_world_size: The number of replicas that saved it. The number of shards must be the same.
        """
        self._settle()
        index = self._shards.mesh.flatten().tolist().index(dist.get_rank())
        adopt = self._adopt if self._is_measured else None
        prefix = f"shard{index}of{self._shards.size()}/"
        return Checkpoint(self, self.group, saved_world_size, prefix, adopt=adopt, has_order=True)

    def prepare(self) -> Plan | None:
        """Return the plan of the next step; None for a pipeline that cannot be lowered."""
        return self._engine.prepare()

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Add up sharded gradients of forwards in the block; a later backward outside of it synchronizes the sum.

        FSDP's `set_requires_gradient_sync(False)` works too: it sends no messages at all, and keeps whole gradients.

        Raises:
            TypeError: Shards are `weighted`: they average the gradients of each backward at once.
        """
        if self.sync.takes_weight and self._reductions is not None:
            raise TypeError(
                "no_sync: shards average the gradients of each backward at once, before the weight of the whole step "
                "is known; use no_sync of the shards, or set_requires_gradient_sync(False), which keeps whole "
                "gradients until the backward that has the weight"
            )
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def weight(self, count: float) -> AbstractContextManager[None]:
        """Weight this rank's gradients by `count` in the means of backwards that begin in the block, for `weighted`.

        The mean is over the samples or tokens of all ranks, of all shards and replicas. See `Shards.weight`.
        """
        return self._weight.block(self.sync, count)

    def _after_forward(self, _: nn.Module, __: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or torch_private.is_within_backward():  # evaluation; activation checkpointing
            return
        fix = "unfreeze parameters before compress_replicas"
        require_synchronized("compress_replicas", self._frozen.items(), frozenset(), fix)
        self._backward.require_idle()
        if self._compares:
            self._require_one_choice(self._others)
        self._is_armed = self._synchronizes
        for tensor in torch_private.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(self._before_backward, nodes_behind(tensor)))

    @torch_private.skipped_by_dynamo
    def _before_backward(self, behind: list[Any], _: Tensor) -> None:
        if not any(group.reduces for group in self._fsdp):  # FSDP keeps whole gradients for a later backward
            return
        if not accumulates((p for group in self._fsdp for p in group.gathered), behind):  # of inputs, say
            return
        if not self._engine.is_open and not self._before:
            self._set_aside()
        self._start()

    def _set_aside(self) -> None:
        """Remove synchronized gradients from `.grad`, so that gradients of this backward are not added to them."""
        means = {name: grad for name, grad in self._gradients().items() if grad is self._means.get(name)}
        if not self._is_armed and any(mean.to_local().count_nonzero() for mean in means.values()):
            raise RuntimeError(
                "no_sync: unsynchronized gradients would be added to synchronized ones; call optimizer.zero_grad() "
                "first"
            )
        for name in means:
            self._parameters[name].grad = None
        self._before = means

    def _gradients(self) -> dict[str, DTensor]:
        return {name: p.grad for name, p in self._parameters.items() if isinstance(p.grad, DTensor)}

    def _start(self) -> None:
        if self._is_armed and not self._engine.is_open:
            self._backward.failure = None
            part = weight = None
            if self._reductions is not None:
                part = self._reductions.begin()
                part.weigh()
            if self.sync.takes_weight:
                mean = None if part is None else part.mean_weight
                # NaN if a rank has no weight: this fails the step.
                weight = self._weight.given if mean is None else mean.nan_to_num(0.0).item()
            self._backward.begin(weight=weight)
            self._ends.add(self._backward, partial(self._finish, part))

    def _feed(self, name: str, _: Tensor) -> None:
        if self._is_armed:  # FSDP's other collectives must still run on all ranks
            self._backward.attempt(lambda: self._put(name))

    def _put(self, name: str) -> None:
        try:
            self._start()  # if backward did not begin at the model's outputs
        except Exception:
            self._ends.add(self._backward, partial(self._finish, None))  # this will raise the error
            raise
        self._require_untaken(name)
        grad = self._parameters[name].grad
        assert isinstance(grad, DTensor)
        if grad is self._means.get(name):
            raise RuntimeError(
                f"this backward adds to the synchronized gradient of parameter {name!r}, but does not start from an "
                "output of the model; call optimizer.zero_grad() before such a backward"
            )
        if (step := self._backward.step) is not None:
            step.feed(name, grad.to_local())

    def _require_untaken(self, name: str) -> None:
        if self._parameters[name].grad is None:
            raise RuntimeError(
                f"compress_replicas: a hook took the gradient of {name!r} before replicas exchanged it; if the hook "
                "steps an optimizer, replicas now differ: step optimizers after backward, and restart from a "
                "checkpoint"
            )

    def _take_late(self, part: Reduction | None) -> None:
        """Take gradients added up under no_sync, and include the result of the shards' reductions."""
        step = self._backward.step
        missing = step.missing
        for name in self._parameters:
            if name not in missing:
                self._require_untaken(name)
        for name, grad in self._gradients().items():
            if name in missing and grad is not self._means.get(name):
                step.feed(name, grad.to_local())
        if part is not None:
            part.report_to(step)

    def _finish(self, part: Reduction | None) -> None:
        step = self._backward.step
        done = self._backward.end(partial(self._take_late, part))
        if part is not None:
            part.commit(step.found_nonfinite)
        mean, gradients = done.mean, self._gradients()
        for name, p in self._parameters.items():
            if done.has_nothing_for(name, p):
                continue
            grad = gradients.get(name)
            if name not in mean:  # no update in this step
                p.grad = None
                continue
            if grad is None:  # this rank did not use it
                p.grad = grad = cast("DTensor", torch.empty_like(p))
            if grad.to_local().data_ptr() != mean[name].data_ptr():  # the plan may have written it in place
                grad.to_local().copy_(mean[name])
        self._put_back()
        self._means.update(self._gradients())

    def _undo(self) -> None:
        if self._reductions is not None:
            self._reductions.undo()
        self._put_back()

    def _put_back(self) -> None:
        for name, before in self._before.items():
            p = self._parameters[name]
            p.grad = before if p.grad is None else before.add_(p.grad)
        self._before = {}


def compress_replicas(model: nn.Module, sync: str | Sync, replicate: DeviceMesh) -> Replicas:
    """Synchronize the gradients of the replicas of a sharded model with a pipeline. All ranks must call this.

    Shard the model over one dimension of a mesh, and pass the other one here: a 2 x 4 mesh of "replicate" and "shard"
    is HSDP, with the pipeline instead of its all-reduce between nodes. The pipeline's collectives start when FSDP has
    reduced a shard of a gradient, and overlap with the rest of backward. A leaf is this rank's shard of a parameter, by
    name; shards of matrices are matrices. `allreduce` returns the results of HSDP, bitwise equal if both add in the
    same order, as with two replicas. The wrong choice if links between shards are slow, too: FSDP sends those messages.

    Replicas begin with the parameters of the first replica. An error in the pipeline is raised on all ranks of all
    shards. After a user's error in one rank's backward, its replica's other ranks wait in FSDP until the timeout.

    Args:
        model: A model after `fully_shard(..., mesh=mesh["shard"])`, also of the model as a whole.
        sync: The pipeline, or its text. Reducers that name no group use the group of the replicas. "auto" measures
            pipelines and chooses one for all shards: see `fnddp.DistributedDataParallel`.
        replicate: One dimension of the mesh: `mesh["replicate"]`.

    Raises:
        TypeError: A parameter is not sharded, or its mesh includes `replicate`; this was called for the model before;
            `sync` needs whole leaves, as `clip_by_global_norm` does, and there are several shards; or only one of
            `sync` and the pipeline of shards is `weighted`.
        RankMismatchError: On all replicas, if they disagree about the pipeline or the parameters.

    Source: `torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py` of torch 2.13: `foreach_reduce` calls the
    post-accumulate hooks of sharded parameters.

    >>> from torch.distributed import init_device_mesh
    >>> from torch.distributed.fsdp import fully_shard
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    >>> model = fully_shard(nn.Linear(8, 8), mesh=mesh["shard"])
    >>> replicas = compress_replicas(model, "error_feedback(powersgd(allreduce))", mesh["replicate"])
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> replicas.sync_state.residual["weight"].shape
    torch.Size([8, 8])
    >>> dist.destroy_process_group()
    """
    group = group_name(replicate)
    modules = torch_private.fsdp_groups(model)
    for module, _ in modules.values():  # the last forward may have left weights whole
        module.reshard()
    made: list[Replicas] = []
    meshes = (p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    shards = max(meshes, key=DeviceMesh.size, default=cast("Any", None))  # `_sharded` refuses None
    others = groups_of_mesh(shards) if shards else []
    found = partial(_sharded, model, replicate, shards)
    given = automatic(lambda: _local(found()), group, other_groups=others) if sync == AUTO else sync

    def set_up() -> dict[str, str]:
        parameters = found()
        reductions, averages = reductions_of(model), [of.shards for _, groups in modules.values() for of in groups]
        has_mean = any(each is not None and each.size() > 1 for each in averages)
        are_weighted = (reductions is not None and reductions.takes_weight) if has_mean else None
        checked = checked_pipeline("compress_replicas", given, shards.size(), are_weighted)
        pipeline = checked.over(group, unnamed_only=True)
        made.append(Replicas(model, parameters, pipeline, group, shards))
        return description(pipeline, _local(parameters), made[-1].sync_state)

    agree_over(set_up, [group], others, call="compress_replicas")
    (replicas,) = made
    replicas._connect(is_measured=sync == AUTO)  # pyright: ignore[reportPrivateUsage]
    control.broadcast([p.to_local().detach() for p in model.parameters() if isinstance(p, DTensor)], group)
    for name, parameter in replicas._parameters.items():  # pyright: ignore[reportPrivateUsage]
        parameter.register_post_accumulate_grad_hook(WeakHook(replicas, Replicas._feed, name))  # pyright: ignore[reportPrivateUsage]
    model.register_forward_hook(replicas._after_forward)  # pyright: ignore[reportPrivateUsage]
    return replicas


def checked_pipeline(owner: str, given: str | Sync, shards: int, are_weighted: bool | None) -> Sync:
    """Return the pipeline between replicas, checked; `are_weighted` says if means over shards are, None without any."""
    sync = pipeline_of(f"{owner}: pipeline of replicas", given)
    for each in all_in(sync) if shards > 1 else ():
        if each.wants_whole_leaves:
            raise TypeError(
                f"{owner}: {type(each).__name__} needs whole leaves, but here each rank has only a shard of "
                "each leaf; remove it: torch.nn.utils.clip_grad_norm_ after backward counts all shards, and a step "
                "with NaN or infinite gradients does not change the state"
            )
    if sync.takes_weight and are_weighted is False:
        raise TypeError(
            f"{owner}: {sync!r} is weighted, but shards take the plain mean; call compress_shards(model, "
            "gradients='weighted(two_shot)') before compress_replicas"
        )
    if are_weighted and not sync.takes_weight:
        raise TypeError(f"{owner}: shards are weighted, but {sync!r} is not; write weighted({sync!r})")
    return sync


def replicas_of(model: nn.Module) -> list[Replicas]:
    """Return the results of `compress_replicas` for `model` and for parts of it."""
    hooks = (hook for module in model.modules() for hook in torch_private.forward_hooks(module).values())
    return [of for of in (getattr(hook, "__self__", None) for hook in hooks) if isinstance(of, Replicas)]


def _local(parameters: Mapping[str, DTensor]) -> Leaves:
    return {name: p.to_local() for name, p in parameters.items()}


def _sharded(model: nn.Module, replicate: DeviceMesh, shards: DeviceMesh | None) -> dict[str, DTensor]:
    """Return the parameters that require a gradient; `shards` is the largest mesh, and must contain all others."""
    if replicas_of(model):
        raise TypeError(
            "compress_replicas: it was already called for this model, and both pipelines would run; call it only once"
        )
    parameters: dict[str, DTensor] = {}
    replicas = ranks_of(replicate)
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise TypeError(
                f"compress_replicas: parameter {name!r} is not sharded, so FSDP would not reduce its gradient; call "
                "fully_shard on the whole model first, with mesh=mesh['shard']"
            )
        mesh = parameter.device_mesh
        if len(replicas & ranks_of(mesh)) > 1:
            raise TypeError(
                f"compress_replicas: parameter {name!r} is on {mesh}, which includes the replicas {sorted(replicas)}, "
                "so FSDP reduces between them already; call fully_shard with mesh=mesh['shard']"
            )
        if shards is None or not ranks_of(mesh) <= ranks_of(shards):
            raise TypeError(f"compress_replicas: parameter {name!r} is sharded over {mesh}, but others over {shards}")
        if parameter.requires_grad:
            parameters[name] = parameter
    if shards is None or not parameters:
        raise TypeError("compress_replicas: the model has no parameter that requires a gradient")
    return parameters

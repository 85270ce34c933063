"""Sharded optimizers (ZeRO-1, Muon): the rank that owns a leaf updates it, and sends the update to all ranks."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fnddp.adapters.module.steps import Steps
from fnddp.adapters.module.wrapper import DistributedDataParallel
from fnddp.adapters.owned_gradient import OwnedGradient
from fnddp.adapters.owned_leaves import OwnedLeaves
from fnddp.adapters.owned_optimizer import OwnedStates
from fnddp.core import collectives
from fnddp.core.agreement import RankMismatchError, agree
from fnddp.core.group import Group, group_name
from fnddp.core.state import describe
from fnddp.core.sync import Sync
from fnddp.device import device_of
from fnddp.plan.plan import Plan
from fnddp.reducers.halves import Owners, with_halves
from fnddp.run.hops import (
    default_cap_mb,
    first_hop,
    options_of,
    owned_in,
    owners_of,
    parameters_of,
    require_own_state,
    require_shapes,
    second_hop,
    several,
    to_their_owners,
)
from fnddp.run.step import Synchronized
from fnddp.show.text import count
from fnddp.wire import control
from fnddp.wire.groups import live_group, world_size
from fnddp.wire.protocol import CollectiveError


class _OwnerSteps(Steps):
    """Steps that return the means of this rank's own leaves only."""

    owners: "OwnerDataParallel"
    needs_earlier_gradients = True  # a placeholder must be gone before a gradient is added to it

    def _start(self, accumulated: str = "") -> Any:
        if self._open() is None:
            for each in self.owners.owned:
                each.remove_placeholders()
        taken = super()._start(accumulated)
        if taken.keeps_graph:
            self._stop(
                "gradients go to their owners, so create_graph=True has none to return on other ranks; call "
                "backward() without it, or differentiate the module itself, model.module"
            )
        return taken

    def _finish(self) -> None:
        super()._finish()
        self._restore()  # for parameters without a gradient in this backward

    def _undo(self) -> None:
        super()._undo()
        self._restore()

    def _restore(self) -> None:
        for each in self.owners.owned:
            each.restore_placeholders()

    def _end(self) -> Synchronized:
        step = self.engine.step
        assert step is not None
        step.watch(False)  # makes ranks agree on NaN or infinity: loss scalers skip on all ranks or none
        done = super()._end()
        self.owners.is_nonfinite = step.found_nonfinite
        self.owners.norms.clear()
        return done

    def _write(self, done: Synchronized, taken: Any) -> None:
        for name, mean in done.mean.items():
            parameter = self.parameters[name]
            if done.has_nothing_for(name, parameter):
                continue
            parameter.grad = None
            self.owners.receive(name, mean, taken.sparse.get(name))


class OwnerDataParallel(OwnedStates, DistributedDataParallel):
    """A wrapped module that sends gradients to the ranks that own them, and receives weights from them: see `own`.

    It is a `fnddp.DistributedDataParallel`: `no_sync`, `weight`, `plan`, `sync_state` and the rules for failures are
    the same. `.grad` of its parameters holds placeholders, with the parts of gradients that this rank owns.
    """

    owned: Sequence[OwnedLeaves]
    _steps_class, _measures, _takes_in_thawed = _OwnerSteps, False, False  # thawed parameters would have no owners

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        named: Sequence[Mapping[str, nn.Parameter]],
        owners: Sequence[Owners],
        gradients: Sync,
        weights: Sync,
        master_dtype: torch.dtype | None,
        **options: Any,
    ) -> None:
        leaves = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._half = to_their_owners(leaves, owners)
        super().__init__(module, sync=gradients, **options)
        self._steps.owners = self  # pyright: ignore[reportAttributeAccessIssue]
        self.is_nonfinite: Tensor | bool = False  # true if some rank has received NaN or infinity in the last backward
        self.norms: dict[float, dict[str, Tensor]] = {}  # gathered, but not used yet
        shared = self._group, master_dtype, self._bucket_caps, self._engine.lane, self._begin_step
        self.owned = [
            OwnedLeaves(module, optimizer, parameters, each, weights, *shared)
            for optimizer, parameters, each in zip(optimizers, named, owners, strict=True)
        ]
        of = {name: each for each in self.owned for name in each.parameters}
        self._of = {name: of[name] for name, _ in module.named_parameters() if name in of}  # the order of clipping

    # Steps of optimizers

    def _begin_step(self, sharded: OwnedLeaves) -> None:
        """Raise a RankMismatchError on all ranks, before anything changes, unless all step the same optimizer.

        Messages of two optimizers may have the same size, so ranks could otherwise mix them up.
        """
        self._steps.settle()
        self._steps.require_same_world()
        if sharded.keeps_weights or len(self.owned) > 1:
            device_of(self.device).refuse_capture(
                "own compares weights, or the optimizers that ranks step, on the host"
            )
        if len(self.owned) == 1 or world_size(self._group) == 1:
            return
        place = self.owned.index(sharded)
        name = f"{type(sharded.optimizer).__name__}, optimizer {place} of {len(self.owned)}"
        try:
            last, first = control.highest_of([place, -place], self._group)
        except RuntimeError as error:
            raise CollectiveError(
                f"own: this rank steps {name}, and not all others have come to a step: {error}. Another rank has left, "
                "or left out this step; see its own error"
            ) from error
        if last != -first:
            raise RankMismatchError(
                f"own: this rank steps {name}, and another rank another one; step the same ones in the same order on "
                "all ranks"
            )

    # Gradients

    def receive(self, name: str, mean: Tensor, sparse_dims: int | None) -> None:
        """Put a placeholder in the model's `.grad`, and add the mean to the part of it that this rank owns."""
        sharded = self._of[name]
        p, own, made = sharded.parameters[name], sharded.own.get(name), sharded.removed.pop(name, None)
        if made is None:
            made = OwnedGradient(name, p, self, sharded.dtypes[name])
        # Loss scalers of all ranks must see NaN on some rank.
        made.is_nonfinite = self.is_nonfinite if made.is_nonfinite is False else made.is_nonfinite | self.is_nonfinite
        if own is not None:
            mean = mean.to(own.dtype)
            if self.is_nonfinite is not False:
                mean = torch.where(torch.as_tensor(self.is_nonfinite, device=mean.device), math.nan, mean)
            if sparse_dims is None and mean.stride() != own.stride():
                mean = torch.empty_like(own).copy_(mean)
            mean = mean if sparse_dims is None else mean.to_sparse(sparse_dims)
            made.part = mean if made.part is None else made.part + mean
        p.grad = made

    @torch.no_grad()
    def norm_of_gradient(self, name: str, order: float) -> Tensor:
        """Return the norm of a whole gradient. All ranks call it.

        The same collective gathers the norms of all leaves, because clipping needs the next ones right after this.
        """
        left = self.norms.get(order, {})
        if name not in left:
            left = self.norms[order] = self._gather_norms(order)
        return left.pop(name)

    def _gather_norms(self, order: float) -> dict[str, Tensor]:
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in self.module.parameters()) else torch.float32
        mine = torch.zeros(len(self._of), device=self.device, dtype=dtype)
        for i, (name, each) in enumerate(self._of.items()):
            if (part := each.part_of_gradient(name)) is not None:
                mine[i] = torch.linalg.vector_norm(part, order)
        every = collectives.all_gather(mine, self._group)  # [ranks, leaves]
        norms: dict[str, Tensor] = {}
        for i, (name, each) in enumerate(self._of.items()):
            owner = each.owners.owner(name)
            norms[name] = torch.linalg.vector_norm(every[:, i], order) if owner is None else every[owner, i]
        return norms

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the gradients of all owners by their total norm. All ranks call it, before any step.

        Does the same as `torch.nn.utils.clip_grad_norm_` of the model's parameters. For leaves with one owner the norm
        is exactly torch's.

        Returns:
            The norm, the same on all ranks.
        """
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type, error_if_nonfinite)

    # Reports

    @property
    def owners(self) -> Owners:
        """The owner of each leaf."""
        assert self._half.owners is not None
        return self._half.owners

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, in the order in which they were passed to `own`."""
        return [each.optimizer for each in self.owned]

    @property
    def weight_plans(self) -> list[Plan | None]:
        """The plans of the second hop, one for each optimizer."""
        return [each.engine.prepare() for each in self.owned]

    def show_owners(self) -> str:
        """Return a table with a row for each rank: the leaves it owns for each optimizer, and its load.

        Leaves are divided to balance loads. A load counts elements, or for Muon the multiplications of an
        orthogonalization. Wire bytes, the bytes that a rank passes to its collectives, are the same on all ranks. For
        the bytes on a link see `plan.estimate("1gbit").link_bytes`, of `plan` and of each of `weight_plans`.
        """
        lines: list[str] = []
        for each in self.owned:
            owners, table = each.owners, each.owners.table(dict.fromkeys(each.parameters, False))
            what = f"{count(len(each.parameters), 'leaf', 'leaves')} over {count(owners.n, 'rank')}"
            lines.append(f"{type(each.optimizer).__name__}: {what}")
            for rank in range(owners.n):
                parts = [part for part in table.parts() if part.row == rank]
                whole, size = sum(owners.owner(part.leaf) == rank for part in parts), sum(part.count for part in parts)
                share = owners.load[rank] / (sum(owners.load) or 1)
                lines.append(
                    f"  rank {rank}: {count(whole, 'whole leaf', 'whole leaves')} and rows of {len(parts) - whole}, "
                    f"{size:,} elements, load {owners.load[rank]:.4g} ({share:.1%})"
                )
        names = [f"weights of {type(each.optimizer).__name__}" for each in self.owned]
        hops = zip(["gradients", *names], [self.plan, *self.weight_plans], strict=True)
        lines += [f"{what}: {plan.wire_bytes:,} wire bytes of a rank" for what, plan in hops if plan is not None]
        return "\n".join(lines)

    # Unsupported

    def join(self, *_: Any, **__: Any) -> AbstractContextManager[None]:  # pyright: ignore
        raise TypeError("own: join lets a rank that has no inputs left run no step, but it owns leaves; use weight(0)")

    def __getstate__(self) -> NoReturn:
        raise TypeError("own: it has the optimizers of this process; copy or pickle model.module, and call own again")

    def _pipeline_of(self, sync: Sync | str) -> Sync:
        return with_halves(first_hop("own", sync), self._half)


def own(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    gradients: str | Sync = "two_shot",
    weights: str | Sync = "allgather",
    *,
    process_group: Group = None,
    master_dtype: torch.dtype | None = None,
    cost: Callable[[str, nn.Parameter], float] | None = None,
    cut: bool = True,
    bucket_cap_mb: float | None = None,
    **options: Any,
) -> OwnerDataParallel:
    """Shard optimizers: send each gradient to the rank that owns its leaf, and that rank's update to all ranks.

    Each rank holds the optimizer's state for its own leaves, 1 / n of it (ZeRO-1), and a matrix is orthogonalized once,
    not n times (Muon). The first hop sends gradients to owners while backward runs. `optimizer.step()` updates the
    leaves that this rank owns, and then runs the second hop. It sends weights, or with `ef21` their changes in
    few bits. With `two_shot` and `allgather` the weights are bitwise those of the same optimizer on every rank
    with the exact mean.

    The optimizer keeps its groups, rates and schedules. A leaf has no gradient, and so no state, on ranks that do not
    own it. `torch.nn.utils.clip_grad_norm_` of the model's parameters works unchanged. All ranks must call the same
    steps, clips and checkpoints. Optimizers that mix leaves (a norm over all of them, blocks of several leaves) give
    wrong results, because each rank has only its own leaves; L-BFGS is refused. Those that take norms of single leaves
    (LAMB, LARS, Adafactor, Muon) are correct: their leaves are never cut.

    The wrong choice for a small state on a fast link, because a step waits for two hops. If FSDP2 shards the model, its
    optimizer holds shards already: use `fnddp.integrations.fsdp.own_matrices`.

    Args:
        model: Not wrapped in DDP.
        optimizer: One, or several for different parameters, such as `torch.optim.Muon` for matrices and AdamW for the
            rest. Together they have all parameters that require a gradient. An existing state is divided among owners.
        gradients: `two_shot` with codecs around it, and `error_feedback` around these, or its text.
        weights: `allgather` with codecs around it, and `ef21` around these, to send changes instead of weights. With
            codecs the owner keeps the exact weights of its leaves in separate memory, and a copy of the model's values
            after the last step, to notice when someone else writes to the model.
        process_group: The ranks; None for the default group.
        master_dtype: The dtype of owners' real weights, such as float32 for a model in bfloat16; None for the model's.
        cost: Function of a leaf's name and parameter that returns its cost for the owner. None for its number of
            elements; for Muon, rows x columns x the smaller of both. Balanced per optimizer, costliest leaf first.
        cut: Let several ranks own rows of a leaf of 16,384 elements or more, if the optimizer is one of torch's that
            update each element by itself.
        bucket_cap_mb: See `DistributedDataParallel`; for both hops. None for 25 MiB, or 12.5 MiB times the number of
            ranks if that is more: owners' rows are padded to a bucket's longest.
        **options: Further arguments of `DistributedDataParallel`.

    Raises:
        RankMismatchError: On all ranks, if they disagree about optimizers, parameters or pipelines.
        TypeError: The model is wrapped or sharded; a pipeline does not fit its hop; L-BFGS; `step` gets a closure.
        ValueError: A parameter is in no optimizer, or in two, or is not the model's; a cost is negative or not finite;
            an optimizer has loaded the state of another rank's leaves, or a state of other shapes.

    Source: optimizer state by rank as in ZeRO (Rajbhandari et al., SC 2020); distributed Muon (Liu et al., "Muon is
    scalable", 2025); both hops compressed as in SDP4Bit (Jia et al., NeurIPS 2024).

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> net = nn.Linear(8, 8, bias=False)
    >>> optimizer = torch.optim.Muon(net.parameters(), lr=0.02)
    >>> model = own(net, optimizer, "quantize(two_shot, bits=4)", "ef21(quantize(allgather, bits=4))")
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> optimizer.step()
    >>> dist.destroy_process_group()
    """
    group = group_name(process_group)
    optimizers = several(optimizer)
    made: list[tuple[list[dict[str, nn.Parameter]], list[Owners], Sync, Sync]] = []

    def set_up() -> dict[str, str]:
        if not (master_dtype is None or (isinstance(master_dtype, torch.dtype) and master_dtype.is_floating_point)):
            raise TypeError(f"own: master_dtype must be a floating-point dtype, got {master_dtype!r}")
        pipelines = first_hop("own", gradients), second_hop("own", weights)
        named = parameters_of("own", model, optimizers)
        n, rank = collectives.world_size(group), collectives.rank(group)
        owners = [owners_of(each, of, n, cost, cut) for each, of in zip(named, optimizers, strict=True)]
        made.append((named, owners, *pipelines))
        lines = {"gradients": repr(pipelines[0].over(None)), "weights": repr(pipelines[1].over(None))}
        for i, (each, of) in enumerate(zip(named, optimizers, strict=True)):
            which = f"optimizer {i}, {type(of).__name__}"
            theirs = owned_in(of.param_groups)
            require_own_state("own", of, theirs, owners[i], rank)
            for name, p in each.items() if theirs is None else ():
                require_shapes("own", of, name, [p.shape], of.state.get(p, {}))
            lines |= options_of(which, of)
            lines |= {f"{name!r} of {which}": describe(p) for name, p in each.items()}
            lines[f"owners of {which}"] = str(owners[i].whole)
        return {**lines, "dtype of owners' weights": str(master_dtype)}

    agree(set_up, group, call="own")
    named, owners, first, second = made[-1]
    return OwnerDataParallel(
        model,
        optimizers,
        named,
        owners,
        first,
        second,
        master_dtype,
        process_group=None if group is None else live_group(group),
        bucket_cap_mb=default_cap_mb(owners[0].n) if bucket_cap_mb is None else bucket_cap_mb,
        **options,
    )

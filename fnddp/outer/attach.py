"""Outer steps in a training script: they follow the optimizer's."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from fnddp.agreement import agree, description
from fnddp.group import Group, group_name
from fnddp.outer.contract import Outer
from fnddp.outer.des_loc import des_loc
from fnddp.outer.overlap import Overlapped
from fnddp.outer.trees import leaves_of
from fnddp.run.vote import StepFailedError
from fnddp.state import load_state_dict, parts, require_like, state_dict
from fnddp.sync import REPLICATED, State, Sync
from fnddp.torch_private import without_autocast
from fnddp.tree import Leaves
from fnddp.wire import control
from fnddp.wire.c10d import C10D
from fnddp.wire.protocol import CollectiveError, Wire

OWNER = "outer.attach"


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    outer: Outer,
    *,
    wire: Wire = C10D,
    group: Group = None,
    init_sync: bool = True,
    prepare: Callable[[], object] | None = None,
    commit: Callable[[], bool] | None = None,
) -> "Attached":
    """Has `outer` follow each step of `optimizer`, on the parameters of `model`. All ranks call it.

    Exchanges that end in a later call than they begin in go on meanwhile. If one fails, it fails on all ranks, out of
    `optimizer.step()`: parameters and state are then what the local step left, and the next step exchanges again.

    Ranks count their own steps: each takes as many, or the last exchanges wait for ranks that do not come. Where a step
    of the optimizer is left out now and then, as by a `GradScaler`, give no optimizer, and call `Attached.step` in
    every iteration.

    Args:
        model: Its parameters that require gradients are what is exchanged. Not one that averages gradients over the
            same ranks.
        optimizer: After its steps the outer step runs; None if the caller runs it, `Attached.step`.
        outer: The outer step. One with several trees, `des_loc`, finds those that are not "params" in the optimizer's
            state by their names.
        wire: Who moves bytes; torch.distributed by default.
        group: The ranks that train together, where the pipelines of `outer` name none; None for the default group.
        init_sync: Whether to check that ranks agree, and to make parameters and buffers equal to the first rank's, now.
            If not, they must be.
        prepare: Called before a step in which an exchange starts, and before anything is read: it may load parameters
            and state. Such as `start_quorum` of a torchft manager.
        commit: Asked when an exchange has ended or failed, before anything is written. Such as `should_commit`. If it
            says no, parameters and state stay what they are, nothing is raised but what this rank itself has failed
            with, and the next step exchanges again.

    Raises:
        ValueError, TypeError: No parameter requires gradients, or `outer` does not fit them.
        RankMismatchError: On all ranks, if they disagree about `outer` or the parameters.

    >>> from fnddp import allreduce, outer
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> attached = attach(model, optimizer, outer.diloco(allreduce, every=30))
    >>> model(torch.ones(2)).sum().backward()
    >>> optimizer.step()
    >>> attached.state.step
    1
    """
    return Attached(
        model, optimizer, outer, wire=wire, group=group, init_sync=init_sync, prepare=prepare, commit=commit
    )


class Attached:
    """An outer step on a model: see `attach`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        outer: Outer,
        *,
        wire: Wire,
        group: Group,
        init_sync: bool,
        prepare: Callable[[], object] | None,
        commit: Callable[[], bool] | None,
    ) -> None:
        self.outer = outer if group is None else outer.over(group, unnamed_only=True)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._optimizer = optimizer
        name = group_name(group)
        if init_sync:
            agree(self._described, name, wire)
            tensors = [t.detach() for t in [*model.parameters(), *model.buffers()]]
            control.broadcast(tensors, name, wire=wire)
        else:
            self._described()
        self._state = self.outer.init(leaves_of(self.outer, self._detached(), None))
        self._exchanges = Overlapped(wire)
        self._prepare, self._commit = prepare, commit
        self._handle = None if optimizer is None else optimizer.register_step_post_hook(self._after)

    @property
    def state(self) -> State:
        """The outer step's state. It can be kept: later steps do not write over it.

        Set it to go on from another one, on all ranks.

        Raises:
            ValueError: It is of another outer step or other parameters.
        """
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = require_like(repr(self.outer), state, self._state)

    @property
    def under_way(self) -> tuple[str, ...]:
        """The names of the exchanges that have been started and not finished."""
        return self._exchanges.under_way

    def step(self) -> None:
        """The outer step: what follows a local one. Called by the optimizer, if there is one.

        Raises:
            StepFailedError: Another rank has failed in the exchange of this call.
        """
        rehearsed = self._rehearsed()
        if self._prepare is not None and rehearsed.starts:
            self._prepare()
            rehearsed = self._rehearsed()  # of what it may have loaded
        leaves = self._leaves()
        with torch.no_grad(), without_autocast():
            self._exchanges.poll()
            try:
                stepped, state = self.outer.step(leaves, self._state, self._exchanges)
            except Exception as error:
                if not (rehearsed.ends and self._is_given_up(error)):
                    raise
                return
            if self._commit is not None and rehearsed.ends and not self._commit():
                return
            for path, leaf in leaves.items():
                if stepped[path] is not leaf:
                    leaf.copy_(stepped[path])
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """The state as a flat dict, as `fnddp.state_dict` makes it: every rank saves its own, also by itself.

        What is under way is saved as what it was given: who loads it exchanges that again.
        """
        return state_dict(self._state)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes on from a saved state, on all ranks; load the model and the optimizer, too.

        Raises:
            ValueError: It is of another outer step or other parameters.
        """
        self._state = load_state_dict(self._state, saved)

    def replicated_state_dict(self) -> dict[str, Any]:
        """The part of it that is the same on all ranks: what a rank that joins gets from another one."""
        return {part.key: part.value for part in parts(self._state) if part.kind == REPLICATED}

    def load_replicated_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes on from another rank's `replicated_state_dict`; what is this rank's own, such as residuals, begins anew.

        Raises:
            ValueError: It is of another outer step or other parameters.
        """
        fresh = self.outer.init(leaves_of(self.outer, self._detached(), None))
        self._state = load_state_dict(fresh, {**state_dict(fresh), **saved})

    def detach(self) -> None:
        """Ends it: the optimizer's steps are followed by nothing. What is under way is finished, on all ranks."""
        self._exchanges.discard()
        if self._handle is not None:
            self._handle.remove()

    def _described(self) -> dict[str, str]:
        """What ranks must agree on, if this rank can do it."""
        if not self._parameters:
            raise ValueError(f"{OWNER}: no parameter of the model requires gradients")
        if self._optimizer is None and isinstance(self.outer, des_loc):
            raise ValueError(f"{OWNER}: {self.outer!r} exchanges the moments of an optimizer; give it")
        like = {name: torch.empty_like(p, device="meta") for name, p in self._detached().items()}
        self.outer.init(leaves_of(self.outer, like, None))
        return description(self.outer, self._parameters, None)

    def _after(self, *_: Any) -> None:
        self.step()

    def _is_given_up(self, error: Exception) -> bool:
        """Whether a step that failed with `error` is one that is not committed, and no more than that."""
        is_committed = self._commit is None or self._commit()
        return not is_committed and isinstance(error, CollectiveError | StepFailedError)

    def _rehearsed(self) -> "_Rehearsal":
        """What the next step is going to do."""
        rehearsal = _Rehearsal(self._exchanges.under_way)
        if self._prepare is not None or self._commit is not None:
            with torch.no_grad():
                self.outer.step(self._leaves(), self._state, rehearsal)
        return rehearsal

    def _leaves(self) -> Leaves:
        moments = self._moments() if isinstance(self.outer, des_loc) else None
        return leaves_of(self.outer, self._detached(), moments)

    def _detached(self) -> Leaves:
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def _moments(self) -> dict[str, Any]:
        state: Mapping[Any, Any] = {} if self._optimizer is None else self._optimizer.state
        return {name: state.get(parameter, {}) for name, parameter in self._parameters.items()}


class _Rehearsal:
    """Exchanges that do not take place: whether one starts, and whether one ends."""

    def __init__(self, under_way: Collection[str]) -> None:
        self._under_way = set(under_way)
        self.starts = self.ends = False

    def begin(self, name: str, sync: Sync, leaves: Leaves, state: State) -> None:
        self._under_way.add(name)
        self.starts = True

    def end(self, name: str, sync: Sync, leaves: Leaves, state: State) -> tuple[Leaves, State]:
        self.starts = self.starts or name not in self._under_way
        self.ends = True
        return leaves, state

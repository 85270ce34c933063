"""Outer steps in a training script: each runs after `optimizer.step()`, and exchanges overlap with training."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import InitVar, dataclass
from typing import Any, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn

from fnddp.adapters.backward import require_synchronized
from fnddp.core.agreement import agree_over, agreed_state, description
from fnddp.core.group import Group, group_name
from fnddp.core.options import checked_int
from fnddp.core.state import load_state_dict, parts, state_dict
from fnddp.core.sync import REPLICATED, State
from fnddp.core.tree import Leaves
from fnddp.device import device_of
from fnddp.outer.checkpoint import OuterCheckpoint
from fnddp.outer.contract import Outer, outer_of
from fnddp.outer.overlapped import Overlapped
from fnddp.outer.plan import OuterPlan, Recorded, lower
from fnddp.outer.shards import WorkerShards, local, locals_of, shards_of
from fnddp.run.step import applying
from fnddp.run.vote import StepFailedError
from fnddp.torch_private import untraced, without_autocast
from fnddp.wire import control
from fnddp.wire.c10d import C10D, C10d
from fnddp.wire.groups import Membership, live_group, live_rank
from fnddp.wire.protocol import CollectiveError, Elastic, Wire
from fnddp.wire.weights import NoMeanError, Weight

_TOKENS, _TOKENS_SENT, _TOKENS_OPEN = "tokens", "tokens sent", "tokens of open exchanges"


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    outer: Outer | str,
    *,
    wire: Wire = C10D,
    group: Group = None,
    init_sync: bool = True,
    prepare: Callable[[], object] | None = None,
    commit: Callable[[], bool] | None = None,
) -> "Attached":
    """Run `outer` after each step of `optimizer`, on the parameters of `model`. All ranks of `group` call this.

    If an exchange fails, `optimizer.step()` raises on all ranks (`StepFailedError` on ranks that did not fail
    themselves). Parameters and state are then those after the local step, and the next step exchanges again.

    All ranks must take the same number of steps. If steps are sometimes skipped, as by a `GradScaler`, pass no
    optimizer, and call `Attached.step` each time. Call `Attached.detach` on all ranks before you drop it, or destroy
    process groups: ranks of an abandoned exchange have sent different numbers of messages, and some wait for the rest.

    Args:
        model: Parameters that require gradients are exchanged. It must not average gradients over the same ranks.
        optimizer: The outer step runs after its steps; None if the caller runs `Attached.step`.
        outer: The outer step, or its text.
        wire: The transport of messages; torch.distributed by default.
        group: The ranks that exchange, if the pipelines of `outer` name no group; None for the default group. Its
            ranks call this; if it is a dimension of a mesh, all ranks of the mesh. For a model sharded by FSDP2 pass
            `mesh["worker"]` of a mesh of workers and shards: the ranks with the same shard.
        init_sync: Check that ranks agree, and make parameters and buffers equal to the first rank's.
        prepare: A function that is called before a step that starts an exchange, and may load parameters and state,
            such as `start_quorum` of a torchft manager.
        commit: A function that is called before the result of an exchange is written, or after it failed, such as
            `should_commit`. If it returns False, parameters and state are unchanged, only an error of this rank itself
            is raised, and the next step exchanges again.

    Raises:
        ValueError, TypeError: No parameter requires gradients, or `outer`, or on all ranks `group`, does not fit them.
        RankMismatchError: On all ranks, if they disagree about `outer` or the parameters.

    >>> from fnddp import allreduce, outer
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> attached = attach(model, optimizer, outer.diloco(allreduce, every=30))
    >>> optimizer.step()
    >>> attached.state.step
    1
    """
    shards = shards_of(model, group, wire, commit, init_sync=init_sync)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def fitted() -> Outer:
        over = outer_of("outer.attach: outer", outer)
        over = over if group is None else over.over(group, unnamed_only=True)
        return over.sized(shards.sizes) if shards.sizes else over

    def described() -> dict[str, str]:
        outer = fitted()
        if not parameters:
            raise ValueError("outer.attach: no parameter of the model requires gradients")
        if not isinstance(optimizer, torch.optim.Optimizer | None):
            raise TypeError(f"outer.attach: optimizer is a {type(optimizer).__name__}; pass the one that steps last")
        if optimizer is None and outer.wants_moments:
            raise ValueError(f"outer.attach: {outer!r} exchanges the moments of an optimizer; pass the optimizer")
        like = {name: torch.empty_like(local(p), device="meta") for name, p in parameters.items()}
        outer.init(outer.leaves_of(like, None))
        about = {"shard": shards.place} if shards.place else {}
        return about | description(outer, {name: local(p) for name, p in parameters.items()}, None)

    if init_sync:
        agree_over(described, [group_name(group)], shards.groups, wire=wire, call="outer.attach")
        tensors = [local(t) for t in [*model.parameters(), *model.buffers()]]
        control.broadcast(tensors, group_name(group), wire=wire)
    else:
        described()
    return Attached(fitted(), model, parameters, optimizer, wire, prepare, commit, shards, connects=init_sync)


@dataclass(eq=False, repr=False)
class Attached:
    """An outer step on a model: see `attach`."""

    outer: Outer
    _model: nn.Module
    _parameters: Mapping[str, nn.Parameter]
    _optimizer: torch.optim.Optimizer | None
    _wire: Wire
    _prepare: Callable[[], object] | None
    _commit: Callable[[], bool] | None
    _shards: WorkerShards
    connects: InitVar[bool]

    def __post_init__(self, connects: bool) -> None:
        self._state = self._fresh()
        self._world = Membership(None, "outer.attach: the model was attached", "attach it again")
        self._exchanges = Overlapped(self._wire, self._require_known, self._shards.voters, self._weight)
        if connects:  # else in the first exchange: other ranks may have connected long ago
            device = local(next(iter(self._parameters.values()))).device
            self._exchanges.connect([*(self.outer.groups or (None,)), *self._shards.voters], device)
        self._tokens: int | None = None  # that this rank has counted
        self._tokens_at: dict[str, int] = {}  # at the beginning of the open or last exchange, by its name
        self._tokens_sent: dict[str, int] = {}  # with the last exchange that was committed
        self._tokens_resumed: dict[str, int] = {}  # at the beginning of an exchange that was open in the loaded state
        self._handle = self._optimizer and self._optimizer.register_step_post_hook(self._after)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an attached outer step belongs to one model and cannot be copied or pickled, and copies of optimizers "
            "lose its hooks; save its state_dict(), and attach the outer step to the copy of the model"
        )

    @property
    def state(self) -> State:
        """The outer step's state; later steps do not overwrite it. Set it on all ranks, to continue from it.

        Raises:
            CollectiveError: On an accelerator: another rank failed in the last exchange; or, when setting it, another
                rank did not set its own.
            RankMismatchError: On all ranks: they set states with different anchors or counters.
        """
        self._exchanges.require_noticed()
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self.prepare_state(lambda: state)()

    def prepare_state(self, read: Callable[[], State]) -> Callable[[], None]:
        """Return a function that sets the state that `read` returns: see `HasPipeline.prepare_state`.

        Ranks compare the parts that must be equal on all of them, such as the anchor and the counter.
        """
        state = agreed_state(self.outer, self._state, read, self._live_groups, self._wire)
        return lambda: setattr(self, "_state", state)

    @property
    def _live_groups(self) -> Collection[str | None]:
        """The process groups of torch.distributed that exchanges use, if any."""
        return (self.outer.groups or (None,)) if isinstance(self._wire, C10d) and dist.is_initialized() else ()

    @property
    def under_way(self) -> tuple[str, ...]:
        """Names of the open exchanges: started and not ended yet."""
        return self._exchanges.under_way

    @untraced
    def step(self) -> None:
        """Run the outer step after a local one: called by the optimizer, if there is one. See `attach` for failures.

        Raises:
            RuntimeError: In an exchange: a parameter requires a gradient, but did not when `attach` was called.
        """
        self._world.require_same()
        self._exchanges.lane.require_whole()
        self._shards.reshard()
        ahead = self._ahead()
        if self._prepare is not None and ahead.starts:
            self._prepare()
            ahead = self._ahead()  # of the state that it may have loaded
        leaves, before, open_at = self._leaves(), self._state, self._tokens_open()
        try:
            with applying(self._exchanges):
                self._run(leaves, ahead)
        except NoMeanError:  # exchanges with a weight of 0 are repeated with the tokens counted until then
            open_at = {name: at for name, at in open_at.items() if at != self._tokens_sent.get(name, 0)}
            raise
        finally:
            if self._state is before:  # exchanges that ended here are repeated, with their tokens
                self._tokens_resumed = {name: at for name, at in open_at.items() if name not in self.under_way}
                self._tokens_at = {name: at for name, at in self._tokens_at.items() if name in self.under_way}

    def _run(self, leaves: Leaves, ahead: Recorded) -> None:
        with torch.inference_mode(False), torch.no_grad(), without_autocast():  # plans keep memory
            self._exchanges.poll()
            try:
                stepped, state = self.outer.step(leaves, self._state, self._exchanges)
            except Exception as error:
                if ahead.done and isinstance(self._wire, Elastic):
                    self._wire.report(error)  # to this worker's other ranks, because they may have succeeded
                if not ahead.done or self._commits() or not isinstance(error, CollectiveError | StepFailedError):
                    raise
                return
            if ahead.done and not self._commits():
                return
            for name in self._tokens_at.keys() - set(self.under_way):
                self._tokens_sent[name] = self._tokens_at.pop(name)
            for path, leaf in leaves.items():
                if stepped[path] is not leaf:
                    leaf.copy_(stepped[path])
        self._state = state

    def count(self, tokens: SupportsIndex) -> None:
        """Add to the number of tokens, or samples, of this rank: its weight in the next exchange.

        Required for a `weighted` pipeline, such as `outer.diloco(weighted(allreduce), every=30)`: each rank calls it
        before an exchange, if need be with 0. The weight of a rank is the number counted since its last exchange; the
        weight of a sharded worker is the sum over its ranks.

        Args:
            tokens: An int, or an integer tensor of one element. The host waits for a tensor on an accelerator.

        Raises:
            TypeError: No pipeline of the outer step is `weighted`, or `tokens` is not an integer.
            ValueError: `tokens` is negative.
        """
        if not self.outer.takes_weight:
            raise TypeError(
                f"count: {self.outer!r} takes no weight; put weighted(...) around its pipeline, as in "
                "outer.diloco(weighted(allreduce), every=30)"
            )
        number = checked_int("count: tokens", tokens)
        if number < 0:
            raise ValueError(f"count: tokens must be at least 0, got {number}")
        self._tokens = (self._tokens or 0) + number

    def _weight(self, name: str) -> Weight:
        counting = self._shards.total(int(self._tokens is not None))
        at = self._tokens_resumed.pop(name, self._tokens or 0)
        total = self._shards.total(at - self._tokens_sent.get(name, 0))
        if counting < self._shards.ranks:
            return Weight(math.nan, f"none: {counting} of the {self._shards.ranks} ranks of its worker called count()")
        self._tokens_at[name] = at
        return Weight.of(total)

    @property
    def unsent(self) -> Mapping[str, Mapping[str, int]] | None:
        """The tokens of a worker's ranks since each exchange, at the beginning of open exchanges and now.

        None if no pipeline is `weighted`. All ranks of the worker must read or set it together. After setting it, the
        first of them continues from these numbers.
        """
        if not self.outer.takes_weight:
            return None
        open_at, now = self._tokens_open(), dict.fromkeys(["", *self._tokens_sent], self._tokens or 0)
        return {
            when: {name: self._shards.total(at - self._tokens_sent.get(name, 0)) for name, at in sorted(tokens.items())}
            for when, tokens in (("open", open_at), ("now", now))
        }

    @unsent.setter
    def unsent(self, unsent: Mapping[str, Mapping[str, int]] | None) -> None:
        def own(when: str) -> dict[str, int]:
            return {name: left if self._shards.is_first else 0 for name, left in (unsent or {}).get(when, {}).items()}

        left = own("now")
        tokens = left.pop("", 0)
        sent = {name: tokens - each for name, each in left.items()}
        opened = {name: sent.get(name, 0) + each for name, each in own("open").items()}
        self._count_from(None if unsent is None else tokens, sent, opened)

    def _tokens_open(self) -> dict[str, int]:
        begun = {name: at for name, at in self._tokens_at.items() if name in self.under_way}
        return {**self._tokens_resumed, **begun}

    def _count_from(self, tokens: int | None, sent: Mapping[str, int], open_at: Mapping[str, int]) -> None:
        self._tokens, self._tokens_sent = tokens, dict(sent)
        self._tokens_at, self._tokens_resumed = {}, dict(open_at)

    def join(self, saved: Mapping[str, Any]) -> None:
        """Load another rank's `replicated_state_dict`, and continue from its anchor without tokens.

        Use it on a new rank. This rank's local state, such as residuals, is reset.
        """
        self.load_replicated_state_dict(saved)
        leaves = self._leaves()
        for path, anchor in self.outer.anchors(self._state).items():
            leaves[path].copy_(anchor)
        self._count_from(None if self._tokens is None else 0, {}, {})

    def rejoin(self, saved: Mapping[str, Any]) -> None:
        """Load another rank's `replicated_state_dict`, and keep this rank's training since its last exchange.

        Use it on a rank that the others did not wait for. Its parameters move as far as the anchor has moved. So the
        difference to the anchor stays, and the next exchange sends it with the tokens counted for it. Parameters that
        are exchanged themselves, without an anchor, do not change, nor does local state, such as residuals.
        """
        before, leaves = self.outer.anchors(self._state), self._leaves()
        self._state = load_state_dict(self._state, {**state_dict(self._state), **saved})
        for path, anchor in self.outer.anchors(self._state).items():
            leaves[path].add_(anchor - before[path])

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a flat dict, like `fnddp.state_dict`. Every rank saves its own, at any time.

        It holds the input of each open exchange, to repeat the exchange after loading, and the counted tokens.
        """
        counted = {_TOKENS: self._tokens, _TOKENS_SENT: dict(self._tokens_sent), _TOKENS_OPEN: self._tokens_open()}
        return {**state_dict(self.state), **(counted if self._tokens is not None else {})}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a `state_dict` of the same outer step, on all ranks; load the model and the optimizer too."""
        counted = (_TOKENS, _TOKENS_SENT, _TOKENS_OPEN)
        self.prepare_state(lambda: load_state_dict(self._state, {k: x for k, x in saved.items() if k not in counted}))()
        self._count_from(saved.get(_TOKENS), saved.get(_TOKENS_SENT, {}), saved.get(_TOKENS_OPEN, {}))

    def replicated_state_dict(self) -> dict[str, Any]:
        """Return the part of `state_dict` that is equal on all ranks, for a rank that joins them."""
        return {part.key: part.value for part in parts(self.state) if part.kind == REPLICATED}

    def load_replicated_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load another rank's `replicated_state_dict`; reset this rank's local state, such as residuals."""
        fresh = self._fresh()
        self._state = load_state_dict(fresh, {**state_dict(fresh), **saved})

    def refuse(self, error: BaseException | None) -> None:
        """See `HasCheckpoint.refuse`."""
        self._exchanges.lane.refused = error

    def reset_sync(self) -> None:
        """Set the initial state: anchors at the first rank's present parameters, and no tokens.

        All ranks call it, between steps. Parameters do not change: the next exchange sends each rank's difference to
        the first rank's. (Over another wire than torch.distributed, anchors are at each rank's own parameters.)
        """
        state = self._fresh()
        for group in self._live_groups:
            control.broadcast([*self.outer.anchors(state).values()], group, wire=self._wire)
        self.state = state
        self._count_from(None if self._tokens is None else 0, {}, {})

    def sync_checkpoint(self, saved_world_size: int | None = None) -> OuterCheckpoint:
        """Return the state for torch.distributed.checkpoint: see `fnddp.integrations.checkpoint.save`.

        Each worker saves its own checkpoint in its own folder, with the group of its shards as `group`. Any number of
        shards can load it, except for state that is not shaped like a parameter, such as PowerSGD's queries.
        """
        workers = {rank for group in self._live_groups for rank in dist.get_process_group_ranks(live_group(group))}
        workers -= {live_rank(None)}
        return OuterCheckpoint(self, self._parameters, self._shards.place, workers)

    @property
    def plan(self) -> OuterPlan:
        """The exchanges of a period on this rank's leaves, and the bytes between workers: see `fnddp.outer.lower`."""
        groups = self.outer.groups or (None,)
        sizes = {group: self._wire.size(group) for group in groups}
        world_size = sizes[next(iter(groups))] if len(groups) == 1 else sizes
        return lower(self.outer, self._leaves(), world_size=world_size)

    def detach(self) -> None:
        """Stop following the optimizer's steps, and finish open exchanges, on all ranks."""
        self._exchanges.discard(self.under_way)
        if self._handle is not None:
            self._handle.remove()

    def _require_known(self) -> None:
        known, fix = set(self._parameters.values()), "detach(), and call outer.attach again"
        require_synchronized("outer.attach", self._model.named_parameters(), known, fix)

    def _fresh(self) -> State:
        return self.outer.init(self.outer.leaves_of(self._detached(), None))

    def _ahead(self) -> Recorded:
        """Return the exchanges that the next step starts and ends; empty without `prepare` and `commit`."""
        recorded = Recorded(self.under_way)
        if self._prepare is not None or self._commit is not None:
            with torch.no_grad():
                self.outer.step(self._leaves(), self._state, recorded)
        return recorded

    def _after(self, *_: Any) -> None:
        device_of(local(next(iter(self._parameters.values()))).device).refuse_capture(
            "an outer step counts on the host"
        )
        self.step()

    def _commits(self) -> bool:
        return self._commit is None or self._commit()

    def _leaves(self) -> Leaves:
        state: Mapping[Any, Any] = {} if self._optimizer is None else self._optimizer.state
        moments = {name: locals_of(state.get(p, {})) for name, p in self._parameters.items()}
        return self.outer.leaves_of(self._detached(), moments)

    def _detached(self) -> Leaves:
        return {name: local(parameter) for name, parameter in self._parameters.items()}

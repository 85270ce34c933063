"""Optimizers whose leaves have owners: steps, checks and checkpoints, for every layout of the weights."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fnddp.core import collectives
from fnddp.core.state import on_cpu
from fnddp.core.tree import Leaves, changed, without_wrappers
from fnddp.device import device_of
from fnddp.reducers.halves import Owners
from fnddp.run.hops import OWNED, mark_owner, owned_in, owned_rows, require_own_state, require_shapes, unmark
from fnddp.torch_private import between_step_hooks, cast_state, local_of, untraced, without_step_hooks
from fnddp.wire import control
from fnddp.wire.groups import live_group

Entries = dict[tuple[str, ...], Any]
"""Values of a checkpoint: `("state", leaf, key)` of an optimizer's state, and `("weights", leaf)` of its owner."""


class OwnedOptimizer(ABC):
    """One optimizer on ranks that each update only the leaves that they own.

    A derived class is a layout: `own` has the leaves of a module, and `own_matrices` the shards of FSDP2.
    """

    who: ClassVar[str]  # the function that made it, for errors
    keeps_weights: bool  # True if owners have other weights than the model, so that a checkpoint needs them
    codecs: Any  # the state of the codecs of its hops
    failure: BaseException | None = None  # the error of a step that only some owners took
    is_over = True  # no other rank waits for this rank's step

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, Any],
        owners: Owners,
        group: str | None,
    ) -> None:
        self._model, self.optimizer, self.owners = model, optimizer, owners
        self.parameters = dict(parameters)  # the model's, by name: in the optimizer's groups between steps
        self.group, self.rank = group, collectives.rank(group)
        self.own: dict[str, nn.Parameter] = {}  # this rank's weights, by name: in these groups during a step
        self._loaded: dict[str, Mapping[str, Any]] = {}  # a state of own leaves that the optimizer does not have yet

    # The layout

    @abstractmethod
    def update(self, step: Callable[[], Any]) -> Any:
        """Update this rank's weights by `step`, send them, and set `is_over`; return the result of `step`."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Report the error of a step to the ranks that wait for this one."""

    @abstractmethod
    def held(self) -> Leaves:
        """Return this rank's part of the model's weights, if owners keep other weights."""

    @abstractmethod
    def of_model(self, name: str) -> Tensor:
        """Return the model's weights of a leaf as its owner keeps them. All ranks call it, for the same leaves."""

    def whole(self, name: str, value: Any) -> Any:
        """Return a whole value of a state that this rank loads; all ranks call it."""
        return value

    # Weights

    @torch.no_grad()
    def note(self) -> None:
        """Remember the model's weights: the values of these that someone else writes are recognized later."""
        self._noted = {name: value.clone() for name, value in self.held().items()}

    def written(self) -> list[str]:
        """Return the leaves that someone has written to in the model since the last step. All ranks call it.

        Values are compared, because an evaluation may swap averaged weights in, and then the training weights again.
        """
        return changed(self.held(), self._noted)

    def weights(self) -> Leaves:
        """Return this rank's weights, or what was written to the model's instead. All ranks call it."""
        return {**self.own, **{name: self.of_model(name) for name in self.written()}}

    def follow(self, *, everything: bool = False) -> None:
        """Copy to this rank's weights what was written to the model's; `everything` copies all. All ranks call it."""
        names = self.held() if everything else self.written()
        for name in names:
            self.take(name, self.of_model(name))
        if names:
            self.note()

    @torch.no_grad()
    def take(self, name: str, value: Tensor) -> None:
        """Set this rank's weights of a leaf, if it owns any."""
        if name in self.own:
            self.own[name].copy_(value)

    # Steps

    def begin(self) -> None:
        """Run checks that all ranks pass, or none."""
        if self.failure is not None:
            raise RuntimeError(f"{self.who}: an earlier step failed; restart from a checkpoint") from self.failure

    def take_over(self) -> None:
        """Wrap the optimizer's step, and let its state have an owner: call it last in `__init__`."""
        optimizer = self.optimizer
        step = optimizer.step

        @functools.wraps(step)
        def stepped(_: Any, *args: Any, **kwargs: Any) -> Any:
            return self._step(step, args, kwargs)

        optimizer.step = MethodType(stepped, optimizer)  # a bound method, because schedulers wrap it in turn
        cast("Any", optimizer).__reduce_ex__ = self._refuse_copy
        mark_owner(optimizer, self.who)
        self._end_load(optimizer)  # the state that it had
        optimizer.register_state_dict_post_hook(self._mark)
        optimizer.register_load_state_dict_pre_hook(self._begin_load)
        optimizer.register_load_state_dict_post_hook(self._end_load)

    def _refuse_copy(self, _: int) -> NoReturn:
        """Refuse `copy.deepcopy` and pickle: a copy would have the state of this rank's leaves, but torch's `step`."""
        raise TypeError(
            f"{self.who}: {type(self.optimizer).__name__} cannot be copied or pickled, because each rank has only the "
            f"state of its own leaves; make another optimizer, call {self.who} on it, and load optimizer_state_dict()"
        )

    @untraced
    def _step(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.begin()
        self.is_over = False

        def run(*args: Any, **kwargs: Any) -> Any:
            if any(each is not None for each in (*args, kwargs.get("closure"))):  # Accelerate passes None
                raise TypeError(
                    f"{self.who}: {type(self.optimizer).__name__}.step got a closure, which may evaluate the model "
                    "between updates that other ranks do not have yet; call backward(), then step()"
                )
            self.require_same_parameters()
            return self.update(functools.partial(step, **kwargs))

        try:
            return between_step_hooks(self.optimizer, run, args, kwargs)
        except BaseException as error:
            device = device_of(next(iter(self.parameters.values())).device)
            if not self.is_over and not device.is_capturing():  # else nothing has run
                self.fail(error)
            raise

    @contextmanager
    def alone(self, names: Collection[str] | None = None) -> Generator[None]:
        """Leave only this rank's own weights of `names` in the optimizer's groups in the block; None for all.

        Empty groups are left out, so that an optimizer can stack the gradients of a group.
        """
        own_of = {self.parameters[name]: own for name, own in self.own.items() if names is None or name in names}
        state, groups = self.optimizer.state, [*self.optimizer.param_groups]
        held = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [own_of[p] for p in group["params"] if p in own_of]
        self.optimizer.param_groups[:] = [group for group in groups if group["params"]]
        for p, own in own_of.items():
            if p in state:
                state[own] = state.pop(p)
        try:
            yield
        finally:
            self.optimizer.param_groups[:] = groups
            for group, params in zip(groups, held, strict=True):
                group["params"] = params
            for p, own in own_of.items():
                own.grad = None
                if own in state:
                    state[p] = state.pop(own)

    def require_same_parameters(self) -> None:
        """Raise a RuntimeError if the optimizer has a parameter without an owner."""
        ids = {*map(id, self.parameters.values())}
        for p in (p for group in self.optimizer.param_groups for p in group["params"]):
            if p.requires_grad and id(p) not in ids:
                raise RuntimeError(
                    f"{self.who}: a parameter of shape {tuple(p.shape)} was added to {type(self.optimizer).__name__} "
                    f"after {self.who} was called, so it has no owner; add it before"
                )

    def require_consistent(self) -> None:
        """Raise a RuntimeError if the optimizer's state belongs in no checkpoint: a parameter has no owner, or a step
        failed after some owners had updated their leaves."""
        self.require_same_parameters()
        if (error := self.failure) is not None:
            raise RuntimeError(
                f"{self.who}: a step failed ({type(error).__name__}: {error}) after some owners had updated "
                "their leaves, so there is no consistent checkpoint; restart from an earlier one"
            ) from error

    # States by index, as torch's own methods save and load them

    def _names_in(self, groups: Iterable[Mapping[str, Any]]) -> list[str | None]:
        name_of = {id(p): name for name, p in self.parameters.items()}
        return [name_of.get(id(p)) for group in groups for p in group["params"]]

    def _mark(self, of: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        """Record this rank's rows in a `state_dict`: indices are equal on all ranks, and would reveal no mix-up.

        Leaves of other ranks get tensors without elements: an optimizer without owners that loads them then fails in
        its first step. It would otherwise continue to train with a part of the state missing.
        """
        mine, like = owned_rows(self.owners, self.rank), next(iter(saved["state"].values()), {})
        empty = {key: v.new_empty(0) if isinstance(v, Tensor) and v.ndim else v for key, v in like.items()}
        for i, name in enumerate(self._names_in(of.param_groups)):
            if empty and name is not None and name not in mine:
                saved["state"][i] = empty
        for group in saved["param_groups"]:
            group[OWNED] = mine

    def _begin_load(self, of: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Check a state that is loaded, and keep it: torch would cast it to the dtype of the model's weights."""
        theirs = owned_in([*saved["param_groups"], saved])  # older files have it next to the groups
        require_own_state(self.who, of, theirs, self.owners, self.rank)
        indices = [i for group in saved["param_groups"] for i in group["params"]]
        name_of = dict(zip(indices, self._names_in(of.param_groups), strict=False))  # torch checks the lengths
        self._loaded = {name: saved["state"].get(i, {}) for i, name in name_of.items() if name in self.own}
        for name, state in self._loaded.items():
            self.require_shapes(self.who, name, state)
        return {**saved, "state": {i: x for i, x in saved["state"].items() if name_of.get(i) is None}}

    def _end_load(self, of: torch.optim.Optimizer) -> None:
        """Keep this rank's part of a loaded state, for example of a complete one."""
        unmark(of)
        group_of = {id(p): group for group in of.param_groups for p in group["params"]}
        for name, state in self._loaded.items():
            p, own = self.parameters[name], self.own[name]
            for key, value in state.items():
                of.state[p][key] = cast_state(own, key, self.own_part(name, value), group_of[id(p)])
        self._loaded = {}

    def require_shapes(self, who: str, name: str, state: Mapping[str, Any]) -> None:
        """Raise a ValueError if the state of a leaf has neither the shape of the leaf nor of this rank's part."""
        require_shapes(who, self.optimizer, name, [self.owners.shape(name), self.own[name].shape], state)

    def own_part(self, name: str, value: Any) -> Any:
        """Return a copy of this rank's part of a value in the optimizer's state: its rows of a value like the leaf."""
        if not isinstance(value, Tensor):
            return value
        is_whole = value.shape == self.owners.shape(name)
        return (self.owners.own(name, value, self.rank) if is_whole else value).clone()

    # States by name

    def entries(self) -> Entries:
        """Return this rank's state and weights. All ranks call it."""
        weights, found = self.weights() if self.keeps_weights else {}, Entries()
        for name in self.own:
            for key, value in self.optimizer.state.get(self.parameters[name], {}).items():
                found["state", without_wrappers(name), key] = value
            if self.keeps_weights:
                found["weights", without_wrappers(name)] = weights[name]
        return found

    def named_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups as torch saves them, on the CPU, with names of parameters."""
        named = *self._model.named_parameters(), *self.parameters.items()  # frozen ones, too
        name_of = {id(p): without_wrappers(name) for name, p in named}
        groups: list[dict[str, Any]] = []
        for group in self.optimizer.param_groups:
            names = [name_of[id(p)] for p in group["params"] if id(p) in name_of]
            groups.append({**on_cpu({key: value for key, value in group.items() if key != "params"}), "params": names})
        return groups

    def dtensor(self, name: str, value: Any) -> Any:
        """Return a value of a checkpoint; as a DTensor if other ranks own further rows of its leaf."""
        if not isinstance(value, Tensor):
            return value
        if self.owners.owner(name) is not None or value.shape != self.own[name].shape:
            return value.detach()
        mesh, shape = DeviceMesh.from_group(live_group(self.group), value.device.type), self.owners.shape(name)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(value.detach(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    @contextmanager
    def filled(self) -> Generator[None]:
        """Let the optimizer have a state to load into in the block, if there is none.

        That state comes from a step with learning rate 0, and is removed: Adam's next step would be its second.
        """
        if self.optimizer.state or not self.own:
            yield
            return
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            for group in groups:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
            for p in self.own.values():
                p.grad = torch.zeros_like(p)
            with self.alone(), without_step_hooks([self.optimizer]):
                type(self.optimizer).step(self.optimizer)
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            self.optimizer.state.clear()


class OwnedStates:
    """Checkpoints of optimizers whose leaves have owners."""

    owned: Sequence[Any]  # the optimizers, in the order of the checkpoint

    def require_consistent(self) -> None:
        """Raise a RuntimeError, on all ranks, if the state of an optimizer belongs in no checkpoint."""
        for each in self.owned:
            each.require_consistent()

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the complete state of all optimizers by parameter name, on the CPU. All ranks call it.

        It has the form of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, so it loads on any number
        of ranks, and into the same optimizers without owners. If owners keep weights of their own, these are included
        under "weights". Use `optimizer_checkpoint` instead if the state does not fit into a rank's memory.
        """
        self.require_consistent()
        mine: Any = {entry: value for each in self.owned for entry, value in each.entries().items()}
        parts: dict[tuple[str, ...], list[Any]] = {}
        for held in control.all_gather_object(on_cpu(mine), self.owned[0].group):
            for entry, value in held.items():
                parts.setdefault(entry, []).append(value)
        ndims = {without_wrappers(name): p.ndim for each in self.owned for name, p in each.parameters.items()}
        whole: Entries = {}
        for entry, (first, *others) in parts.items():
            is_cut = others and isinstance(first, Tensor) and first.ndim == ndims[entry[1]]  # else the same on all
            whole[entry] = torch.cat([first, *others]) if is_cut else first
        return self._named(whole)

    def local_state(self, stepped: Collection[torch.optim.Optimizer] = ()) -> dict[str, Any]:
        """Return the same with the state of this rank's leaves only; those that are cut are DTensors.

        Optimizers not in `stepped` that have no state get one to load into: see `optimizer_checkpoint`.
        """
        self.require_consistent()
        mine: Entries = {}
        for each in self.owned:
            name_of = {without_wrappers(name): name for name in each.own}
            with nullcontext() if each.optimizer in stepped else each.filled():
                found = each.entries()
            mine |= {entry: each.dtensor(name_of[entry[1]], value) for entry, value in found.items()}
        return self._named(mine)

    def _named(self, entries: Entries) -> dict[str, Any]:
        saved: dict[str, Any] = {"state": {}, "param_groups": self.groups(), "weights": {}}
        for (kind, *leaf, key), value in entries.items():
            of_leaf = saved[kind].setdefault(leaf[0], {}) if leaf else saved[kind]
            of_leaf[key] = value
        codecs = [each.codecs for each in self.owned]
        return saved | ({"codecs": codecs} if any(codecs) else {})

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of all optimizers, with names of parameters, as torch saves them."""
        return [group for each in self.owned for group in each.named_groups()]

    def load_optimizer_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the result of `optimizer_state_dict`, or torch's, from any number of ranks: each keeps its own leaves.

        All ranks call it. Load the model's weights first. State that is missing because another second hop saved it
        starts anew: owners' weights are then the model's, and random numbers continue from this run's generator.

        Raises:
            ValueError: The state is of other optimizers or parameters.
        """
        groups, mine = list(saved["param_groups"]), self.groups()
        if [set(group["params"]) for group in groups] != [set(group["params"]) for group in mine]:
            raise ValueError(
                f"load_optimizer_state_dict: the saved groups have {[len(g['params']) for g in groups]} "
                f"parameters and those here {[len(g['params']) for g in mine]}, or their names differ; load it "
                "with the same optimizers, in the same order"
            )
        states: list[dict[str, Any]] = [{} for _ in self.owned]
        for each, state in zip(self.owned, states, strict=True):
            for name in each.parameters:
                of_leaf = saved["state"].get(without_wrappers(name), {})
                of_leaf = {key: each.whole(name, value) for key, value in of_leaf.items()}
                if name in each.own and of_leaf:
                    each.require_shapes("load_optimizer_state_dict", name, of_leaf)
                    state[without_wrappers(name)] = of_leaf
        weights, codecs = saved.get("weights", {}), saved.get("codecs", [])
        for i, (each, state) in enumerate(zip(self.owned, states, strict=True)):
            held = each.named_groups()
            of_optimizer, groups = groups[: len(held)], groups[len(held) :]
            for mine, group in zip(held, of_optimizer, strict=True):
                mine |= {key: group[key] for key in mine if key in group and key != "params"}
            each.optimizer.load_state_dict({"state": state, "param_groups": held})
            each.follow(everything=True)  # another second hop saved no owners' weights
            for name in each.own if each.keeps_weights else ():
                if (whole := weights.get(without_wrappers(name))) is not None:
                    each.own[name].detach().copy_(each.own_part(name, whole))
            if i < len(codecs) and codecs[i].keys() == each.codecs.keys():
                each.codecs = codecs[i]

    def load_local_state(self, saved: Mapping[str, Any]) -> None:
        """Load the result of `local_state`, with the values of a checkpoint."""
        rows = {name: {key: local_of(x) for key, x in of.items()} for name, of in saved["state"].items()}
        weights = {name: local_of(x).clone() for name, x in saved.get("weights", {}).items()}  # loaded in place
        self.load_optimizer_state_dict({**saved, "state": rows, "weights": weights})

    def optimizer_checkpoint(self) -> Any:
        """Return a `Stateful` of torch.distributed.checkpoint for the state of all optimizers. It is gathered nowhere.

        Each rank saves and loads the leaves that it owns. Those that are cut by rows are DTensors, so any number of
        ranks can load them. Before the first step it is the state after a step with learning rate 0, as torch saves it.
        Loaded, that step counts; `fnddp.integrations.checkpoint.save` records that there was none.
        """
        return SimpleNamespace(state_dict=self.local_state, load_state_dict=self.load_local_state)

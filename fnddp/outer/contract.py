"""Outer steps: ranks that train independently combine their parameters, once in several local steps.

A pipeline (`fnddp.Sync`) is called with gradients, before the optimizer; an outer step is called with parameters, after
the optimizer. In some calls it exchanges parameters, or differences of them, over a pipeline.
"""

import abc
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

import torch

from fnddp.core import tree
from fnddp.core.expression import Expression
from fnddp.core.parse import pipeline_of, read
from fnddp.core.sync import Registry, State, Sync, groups_of, registry, require_subclass
from fnddp.core.tree import Leaves, Tree
from fnddp.torch_private import without_autocast

T = TypeVar("T")


class Exchanges:
    """Run the named exchanges of an outer step. This class runs each one entirely in `end`."""

    def begin(self, name: str, sync: Sync, leaves: Leaves, state: State) -> None:
        """Announce an exchange of `leaves`: it may start now. Call `end` later with the same arguments."""

    def end(self, name: str, sync: Sync, leaves: Leaves, state: State) -> tuple[Leaves, State]:
        """Return the mean of `leaves` over ranks and the pipeline's next state; raise on all ranks or on none."""
        done = sync.exchange(leaves, state)
        return done.mean, done.state


class Outer(Expression, abc.ABC):
    """An outer step: a value that can be printed, compared, planned, simulated and run.

    Running it is pure: it never writes to parameters; to roll back, keep the old parameters and the old state.
    """

    every: int

    named: ClassVar[frozenset[str]] = frozenset({"every", "start"})
    wants_moments: ClassVar[bool] = False
    """True if `leaves_of` reads the state of the local optimizer."""

    def __post_init__(self) -> None:
        for field in fields(self):  # pyright: ignore[reportArgumentType]
            given = getattr(self, field.name)
            if field.type in (Sync, "Sync") and isinstance(given, str):
                object.__setattr__(self, field.name, pipeline_of(f"{type(self).__name__}: {field.name}", given))
        super().__post_init__()

    @abc.abstractmethod
    def init(self, params: Tree) -> State:
        """Return the state before the first step, from parameters that are the same on all ranks."""

    @abc.abstractmethod
    def step(self, params: Leaves, state: State, exchanges: Exchanges) -> tuple[Leaves, State]:
        """Return the parameters after the outer step, by path, and the next state.

        It must compute element by element, so that a simulation can pass tensors with a row for each rank. Only Python
        ints of the state may decide which exchanges begin and end.
        """

    @property
    def period(self) -> int:
        """Number of local steps after which the exchanges repeat: `every`, unless a subclass overrides this."""
        return self.every

    @property
    def groups(self) -> tuple[str | None, ...] | None:
        """Names of the process groups of its pipelines, in their order in its text; None if one of them is unknown."""
        children: list[Sync | Outer] = [*self._children()]
        if any(child.groups is None for child in children):
            return None
        names = [child.groups or () if isinstance(child, Outer) else groups_of(child) for child in children]
        return tuple(dict.fromkeys(chain.from_iterable(names)))

    @property
    def takes_weight(self) -> bool:
        """True if one of its pipelines is `weighted`; weights are the tokens that `Attached.count` counts."""
        return any(child.takes_weight for child in self._children())

    @property
    def lead(self) -> int:
        """Number of local steps before the first period; in `des_loc` the largest one of its outer steps."""
        return 0

    def leaves_of(self, params: Leaves, moments: Mapping[str, Mapping[str, Any]] | None) -> Leaves:
        """Return the leaves for `step`: `params`, and in `des_loc` moments of the optimizer.

        `moments` is the optimizer's state of each parameter, by name; None before the first step means zeros.
        """
        return params

    def anchors(self, state: State) -> Leaves:
        """Return the leaves to subtract from this rank's in the next exchange; empty if leaves themselves are sent."""
        return {}

    def sized(self, sizes: Mapping[str, int]) -> Self:
        """Return this outer step for shards of leaves with `sizes` elements in total, so that all shards agree."""
        return self._map_children(lambda child: child.sized(sizes) if isinstance(child, Outer) else child)

    def __call__(self, params: Tree, state: State) -> tuple[Tree, State]:
        """Run the outer step after a local step, on all ranks.

        Args:
            params: This rank's parameters, any pytree of dense tensors.
            state: From `init` or the previous call.

        Returns:
            The parameters after the outer step, in the tree of `params`, and the next state.

        Raises:
            TypeError, ValueError: A leaf is not a dense tensor, the state is of another tree, a pipeline is `weighted`.
        """
        require_unweighted(self)
        leaves, spec = tree.flatten(params)
        with torch.no_grad(), without_autocast():
            stepped, state = self.step(leaves, state, Exchanges())
        return tree.unflatten(spec, {path: stepped[path] for path in leaves}), state


outers = Registry()
"""Names that `parse` knows in addition to those of pipelines."""


@dataclass_transform(frozen_default=True)
def outer(cls: type[T]) -> type[T]:
    """Make an `Outer` subclass a frozen dataclass and register its name (it must be new) with `parse`."""
    require_subclass("outer", cls, Outer, "fnddp.outer.Outer")
    made = dataclass(frozen=True, repr=False)(cls)
    outers.add(cls.__name__, made)
    return made


def parse(text: str) -> Outer:
    """Return the outer step that `text` describes: the inverse of `repr`. Safe on hostile text; see `fnddp.parse`.

    >>> parse("diloco(fp16(allreduce), every=30)")
    diloco(fp16(allreduce), every=30)
    """
    return read(text, ChainMap(outers, registry), Outer, "an outer step; write for example diloco(allreduce, every=30)")


def outer_of(what: str, outer: Outer | str) -> Outer:
    """Return the outer step that is given, as a value or a text; `what` begins the TypeError for another value."""
    made = parse(outer) if isinstance(outer, str) else outer
    if not isinstance(made, Outer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{what} must be an outer step, such as diloco(allreduce, every=30), got {made!r}")
    return made


def require_unweighted(step: Outer) -> None:
    """Raise a TypeError if `step` needs weights, because only `attach` passes them."""
    if step.takes_weight:
        raise TypeError(f"{step!r} needs each rank's tokens, which only outer.attach counts; remove weighted")


def require_options(step: Outer, *syncs: Sync, **least: int) -> None:
    """Raise unless each of `syncs` takes the mean of every leaf, and each option of `step` is at least its bound."""
    owner = type(step).__name__
    for name, bound in least.items():
        if getattr(step, name) < bound:
            raise ValueError(f"{owner}: {name} must be at least {bound}, got {getattr(step, name)!r}")
    for sync in syncs:
        if not sync.ops <= {"mean"}:
            raise TypeError(f"{owner}: {sync!r} takes a {', '.join(sorted(sync.ops))}; parameters need a mean")
        if sync.skips:
            raise TypeError(f"{owner}: {sync!r} skips some leaves in some steps; set the period of {owner} instead")

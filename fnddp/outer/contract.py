"""Outer steps: what ranks that train apart do with their parameters, now and then.

Where a pipeline (`fnddp.Sync`) is called with gradients, before the optimizer, an outer step is called with parameters,
after it. In most calls it does nothing; in some it exchanges what it makes of the parameters, over a pipeline.
"""

import abc
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, dataclass_transform

import torch

from fnddp import tree
from fnddp.expression import CHECKS, Expression
from fnddp.parse import read
from fnddp.sync import Registry, State, Sync, registry
from fnddp.torch_private import without_autocast
from fnddp.tree import Leaves, Tree

T = TypeVar("T")


class Exchanges(Protocol):
    """Who runs the exchanges of an outer step: at once, while training goes on, on virtual ranks, or only on paper.

    Each has a name: that of the fragment, or of the tree, that it is of.
    """

    def begin(self, name: str, sync: Sync, leaves: Leaves, state: State) -> None:
        """Tells that `leaves` will be exchanged in a later call, so that it may start: `end` is then given the same."""
        ...

    def end(self, name: str, sync: Sync, leaves: Leaves, state: State) -> tuple[Leaves, State]:
        """The mean of `leaves` over ranks, and the pipeline's next state; raises on all ranks, or on none."""
        ...


class Outer(Expression, abc.ABC):
    """An outer step: a value that can be printed, compared, planned, simulated and run.

    Running it is pure: parameters are never written to, and rolling back is keeping the old ones and the old state.

    >>> import torch
    >>> from fnddp import allreduce, outer
    >>> step = outer.diloco(allreduce, every=2, lr=0.5, momentum=0)
    >>> params = {"w": torch.tensor([4.0])}
    >>> state = step.init(params)
    >>> for i in range(2):
    ...     params = {"w": params["w"] - 1}  # a local step
    ...     params, state = step(params, state)
    ...     print(params["w"].item())
    3.0
    3.0
    """

    named: ClassVar[frozenset[str]] = frozenset({"every", "start"})

    @abc.abstractmethod
    def init(self, params: Tree) -> State:
        """The state before the first step. Start it from the same parameters on all ranks.

        Args:
            params: The parameters, of which some outer steps keep a copy.
        """

    @abc.abstractmethod
    def step(self, params: Leaves, state: State, exchanges: Exchanges) -> tuple[Leaves, State]:
        """What follows a local step: what subclasses are.

        It computes element by element, so that it may be given a row for each rank where the state has one for all.
        Which exchanges begin and end follows from Python ints of the state alone.

        Args:
            params: This rank's parameters by leaf path.
            state: From `init` or the previous step.
            exchanges: What runs the pipelines.
        """

    @property
    @abc.abstractmethod
    def period(self) -> int:
        """After how many local steps its exchanges recur."""

    @property
    def groups(self) -> frozenset[str | None] | None:
        """The names of the process groups that its pipelines reduce over; None if one of them does not say."""
        inner: list[frozenset[str | None] | None] = [child.groups for child in self._children()]
        return frozenset(name for names in inner for name in names or ()) if None not in inner else None

    @property
    def lead(self) -> int:
        """Local steps before the first period: of one with several trees, those until all of them have begun."""
        return 0

    def __call__(self, params: Tree, state: State) -> tuple[Tree, State]:
        """What follows a local step, on all ranks.

        Args:
            params: This rank's parameters, any pytree of dense tensors.
            state: From `init` or the previous call.

        Returns:
            The parameters to go on with, in the tree of `params`, and the next state.

        Raises:
            TypeError: A leaf is not a tensor.
            ValueError: The state belongs to another tree.
        """
        leaves, spec = tree.flatten(params)
        with torch.no_grad(), without_autocast():
            leaves, state = self.step(leaves, state, AtOnce())
        return tree.unflatten(spec, leaves), state


class AtOnce:
    """Exchanges that take place where they end: what an outer step that is called runs."""

    def begin(self, name: str, sync: Sync, leaves: Leaves, state: State) -> None:
        """Nothing: the exchange is run by `end`."""

    def end(self, name: str, sync: Sync, leaves: Leaves, state: State) -> tuple[Leaves, State]:
        """See `Exchanges.end`."""
        done = sync.exchange(leaves, state)
        return done.mean, done.state


outers = Registry()
"""What `parse` knows beside pipelines."""


@dataclass_transform(frozen_default=True)
def outer(cls: type[T]) -> type[T]:
    """Class decorator: makes an `Outer` subclass a frozen dataclass and registers its name with `parse`.

    Raises:
        ValueError: Another module has registered an outer step of this name.
    """
    made = dataclass(frozen=True, repr=False)(cls)
    outers.add(cls.__name__, made)
    return made


def parse(text: str) -> Outer:
    """The outer step that `text` writes: the inverse of `repr`. Safe on hostile text, as `fnddp.parse` is.

    Args:
        text: For example "diloco(error_feedback(topk(allgather, ratio=0.01)), every=30)".

    Raises:
        TypeError, ValueError: See `fnddp.parse`.

    >>> parse("diloco(fp16(allreduce), every=30)")
    diloco(fp16(allreduce), every=30)
    """
    return read(text, ChainMap(outers, registry), Outer, "an outer step; write for example diloco(allreduce, every=30)")


def require_means(owner: str, sync: Sync) -> None:
    """Raises a TypeError unless `sync` takes the mean of every leaf in every exchange."""
    if not sync.ops <= {"mean"}:
        raise TypeError(f"{owner}: {sync!r} takes a {', '.join(sorted(sync.ops))}; parameters need a mean")
    if sync.skips:
        raise TypeError(
            f"{owner}: {sync!r} has no update for some leaves in some exchanges, and {owner} needs the mean of all of "
            "them; how often it exchanges is said by its own period"
        )


def require_inexact(owner: str, leaves: Leaves) -> None:
    """Raises a TypeError that names the first leaf that holds no fractions."""
    for path, leaf in leaves.items():
        if not tree.is_inexact(leaf):
            raise TypeError(f"{owner}: leaf {path!r} is {leaf.dtype}, which has no descent; leave it out of the tree")


def require_at_least(owner: str, name: str, value: int, least: int) -> None:
    """Raises a ValueError if an option is below `least`."""
    if value < least:
        raise ValueError(f"{owner}: {name} must be at least {least}, got {value!r}")


def _checked_outer(what: str, value: Any) -> Outer:
    if isinstance(value, Outer):
        return value
    made: Callable[..., Any] | None = value if isinstance(value, type) else None
    hint = f"; call it: {made.__name__}(...)" if made is not None else ""
    raise TypeError(f"{what} must be an outer step such as diloco(allreduce, every=30), got {value!r}{hint}")


CHECKS["Outer"] = _checked_outer

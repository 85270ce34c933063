"""The core type: a pipeline is a value of type `Sync`, and running it is one pure call.

A transform is a frozen dataclass made by `@transform`; its fields are its options and the pipelines it wraps.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from types import FunctionType
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias, TypeVar, dataclass_transform, final

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.collectives import refuse_differentiation
from fnddp.core.expression import CHECKS, Expression
from fnddp.core.group import Group, group_name
from fnddp.core.tree import Leaves, Tree, ordered, require_leaves
from fnddp.torch_private import without_autocast

T = TypeVar("T")

REPLICATED = "replicated"
LOCAL = "local"
REMEMBERED = "remembered"

Replicated: TypeAlias = Annotated[T, REPLICATED]
"""Marks a field of a state as equal on all ranks: counters, PowerSGD's queries."""

Local: TypeAlias = Annotated[T, LOCAL]
"""Marks a field of a state as this rank's own: residuals."""

Remembered: TypeAlias = Annotated[T, REMEMBERED]
"""Marks a field as memory of gradients: plans keep its old value in a step that receives NaN or infinite values."""

State: TypeAlias = Any
"""A pytree of tensors and Python ints. Transforms use named tuples with fields `Replicated`, `Local` or `State`."""


class Exchange(NamedTuple):
    """The results of an exchange.

    Attributes:
        mean: The synchronized gradients, equal on every rank, with the paths, shapes, dtypes and devices of the input.
            A leaf without an update in this step has no entry on any rank (see `Sync.skips`): that is not a zero.
        sent: This rank's contribution, as the others decoded it: an entry for each leaf of the input, zeros for leaves
            that were not sent. Its mean over ranks is `mean`, up to the rounding of the wire's own sum, so the error of
            a lossy pipeline on this rank is `grads - sent`.
        state: The state for the next step.
    """

    mean: Leaves
    sent: Leaves
    state: State

    def decoded(self, decode: Callable[[Leaves], Leaves]) -> "Exchange":
        """Return this exchange with `decode` applied to `mean` and to `sent`."""
        return Exchange(decode(self.mean), decode(self.sent), self.state)


class Sync(Expression, abc.ABC):
    """A gradient synchronization: a value that can be printed, compared, nested and run.

    Running it is pure: it never writes to its inputs; to roll back a step, keep the old state. Building it raises a
    ValueError or TypeError for a wrong option, and for an inner pipeline that it cannot wrap: one that takes a max or
    min where payloads must add, or that has no update in some steps where each step needs one. `exchange` raises a
    ValueError for a state of another tree or pipeline.

    >>> import torch
    >>> from fnddp import allreduce, bf16, error_feedback, powersgd
    >>> sync = error_feedback(powersgd(bf16(allreduce), rank=4))
    >>> sync
    error_feedback(powersgd(bf16(allreduce), rank=4))
    >>> grads = {"weight": torch.ones(64, 32), "bias": torch.ones(64)}
    >>> state = sync.init(grads)
    >>> mean, state = sync(grads, state)
    >>> mean["weight"].shape
    torch.Size([64, 32])
    """

    wraps_skipping: ClassVar[bool] = False
    """True if `exchange` accepts an inner pipeline that leaves out some means: see `skips`."""
    takes_weight: ClassVar[bool] = False
    """True only for `weighted`: its steps have a weight on each rank."""
    remembers: ClassVar[bool] = False
    """True if it adds state of earlier steps to later gradients: their losses, or a momentum."""
    wants_whole_leaves: ClassVar[bool] = False
    """True if it computes a value from whole leaves that cannot be computed from a rank's shards of them."""
    nests: ClassVar[Any] = frozenset[str]()
    """Where codecs may be: "around" it, if its payloads need not add; "inside" it, to encode floating-point parts."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "exchange" in cls.__dict__:
            cls.exchange = _checked(cls.exchange)  # pyright: ignore[reportAttributeAccessIssue]

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        for inner in self.children():
            if inner.takes_weight:
                raise TypeError(f"{name}: {inner!r} must be outermost; write weighted({name}(...))")
            if inner.skips and not self.wraps_skipping:
                raise TypeError(
                    f"{name}: {inner!r} skips some leaves in some steps, but {name} needs the mean of all leaves; put "
                    f"the skipping transform outside, such as every(n, {name}(...))"
                )

    @abc.abstractmethod
    def init(self, grads: Tree) -> State:
        """Return the state before the first step, from the shapes, dtypes and devices of `grads` (not their values).

        Args:
            grads: A tree like the gradients; parameters or meta tensors will do.
        """

    @abc.abstractmethod
    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        """Synchronize `leaves`, with the same collectives in the same order on all ranks.

        Args:
            leaves: This rank's gradients by leaf path, as `fnddp.tree.flatten` names them. Implementations get them in
                the order of `fnddp.tree.ordered`, the same on all ranks.
            state: From `init` or the previous exchange.

        Raises:
            TypeError: `leaves` is not a plain dict of tensors.
            ValueError: A leaf is not dense, or `state` is not an instance of the method's annotated named tuple.
        """

    def __call__(self, grads: T, state: State, *, weight: float | Tensor | None = None) -> tuple[T, State]:
        """Synchronize `grads`.

        Inside `torch.func.grad` this raises an error: synchronize the result of `grad` instead.

        Args:
            grads: This rank's gradients, any pytree of dense tensors.
            state: From `init` or the previous call.
            weight: Only for `weighted`, and required there: the number of this rank's samples or tokens.

        Returns:
            The mean over ranks in the tree of `grads`, bitwise equal on every rank, and the next state. The mean of a
            leaf without an update in this step is None on all ranks (see `skips`).

        Raises:
            TypeError: A leaf is not a tensor; a weight is given to another pipeline than `weighted`.
            ValueError: The state belongs to another tree; on all ranks, a weight is missing or invalid, or all are 0;
                or `exchange` of a transform has lost a leaf.
        """
        require_takes_weight(self, weight)
        return self._called(grads, state, self.exchange)

    def _called(self, grads: T, state: State, exchange: Callable[[Leaves, State], Exchange]) -> tuple[T, State]:
        leaves, spec = tree.flatten(grads)
        with torch.no_grad(), without_autocast():
            mean, _, state = exchange(leaves, state)
        require_means(self, leaves, mean)
        return tree.unflatten(spec, {path: mean.get(path) for path in leaves}), state

    def over(self, group: Group, *, unnamed_only: bool = False) -> "Sync":
        """Return the same pipeline on another process group.

        Args:
            group: A process group, its name, a one-dimensional device mesh, `(mesh, dim)`, or None for the default.
            unnamed_only: Change only reducers that do not name a group, as adapters do.

        >>> from fnddp import allreduce, fp16
        >>> fp16(allreduce).over("7")
        fp16(all_reduce(group='7'))
        """
        return super().over(group, unnamed_only=unnamed_only)

    @property
    def ops(self) -> frozenset[str]:
        """The reductions over ranks ("mean", "sum", ...) of all reducers inside."""
        none: frozenset[str] = frozenset()  # Dynamo traces no call of frozenset[...]
        return none.union(*(child.ops for child in self.children()))

    @property
    def groups(self) -> frozenset[str | None] | None:
        """The names of the process groups it reduces over; None if a reducer inside, such as a hook, names none."""
        inner = [child.groups for child in self.children()]
        known = [groups for groups in inner if groups is not None]
        none: frozenset[str | None] = frozenset()
        return none.union(*known) if inner and known == inner else None

    def reduces(self, path: str) -> bool:
        """Return whether the leaf `path` is reduced over ranks; False if `none` leaves it unchanged."""
        inner = list(self.children())
        return any(child.reduces(path) for child in inner) if inner else bool(self.ops)

    @property
    def traceable(self) -> bool:
        """True if `exchange` can run on tensors without values. False if it reads values or runs foreign code.

        A pipeline that is not traceable cannot be lowered to a plan: it runs after all gradients are computed.
        """
        return all(child.traceable for child in self.children())

    @property
    def sent_is_exact(self) -> bool:
        """True if the mean of `sent` is `mean`. False with memory of the mean, a loss that no single rank has."""
        return all(child.sent_is_exact for child in self.children())

    @property
    def skips(self) -> bool:
        """True if some leaves have no update in some steps: no entry in `Exchange.mean`, None in the result.

        Only Python ints of the state decide which leaves, and when, so it is the same on all ranks.
        """
        return any(child.skips for child in self.children())

    @property
    def hides_nonfinite(self) -> bool:
        """True if the payload, and the mean on other ranks, may be finite although a gradient is NaN or infinite."""
        return any(child.hides_nonfinite for child in self.children())

    @property
    def agrees(self) -> bool:
        """True if all ranks get the same mean of every leaf. False without a reduction, and over several groups.

        It is derived from the inner pipelines; only a reducer that gives ranks different leaves (`to_owners`) sets it.
        """
        inner = list(self.children())
        if not any(child.ops for child in inner):  # if no inner pipeline reduces, it may reduce itself
            return bool(self.ops)
        return all(child.agrees for child in inner) and len({child.groups for child in inner}) == 1

    @final
    @property
    def gives_later(self) -> bool:
        """True if a mean may contain gradients of earlier steps, so also for a leaf without one in this step."""
        return not self.sent_is_exact or any(each.remembers for each in all_in(self))

    @final
    @property
    def carries(self) -> bool:
        """True if codecs may be around it: see `nests`."""
        return "around" in self.nests

    def carry(self, layers: Any, leaves: Leaves, state: State) -> Exchange:
        """Exchange `leaves`, encoded by the codecs of `layers`; only if `carries` is True."""
        raise TypeError(f"{self!r} cannot carry encoded payloads")

    def children(self) -> Iterator["Sync"]:
        """Return the pipelines this one wraps directly."""
        return self._children()


def _checked(exchange: Callable[[Any, Leaves, Any], Exchange]) -> Callable[[Any, Leaves, Any], Exchange]:
    kind: Any = exchange.__annotations__.get("state")
    is_named_tuple = isinstance(kind, type) and issubclass(kind, tuple)

    @wraps(exchange)
    def checked(self: Sync, leaves: Leaves, state: State) -> Exchange:
        require_leaves(type(self).__name__, leaves)
        refuse_differentiation(leaves.values())
        if is_named_tuple:
            require_state(type(self).__name__, state, kind)
        done = exchange(self, ordered(leaves), state)
        if not isinstance(done, Exchange):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"{type(self).__name__}: exchange must return Exchange(mean, sent, state), got {done!r:.99}"
            )
        return done

    return checked


class Reducer(Sync):
    """A pipeline that wraps no other and reduces over one process group; stateless unless a subclass has a state."""

    group: Group

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "group", group_name(self.group))

    @property
    def groups(self) -> frozenset[str | None]:
        return frozenset({group_name(self.group)})

    def over(self, group: Group, *, unnamed_only: bool = False) -> Sync:
        return self if unnamed_only and self.group is not None else replace(self, group=group)  # pyright: ignore

    def init(self, grads: Tree) -> State:
        return ()


def require_takes_weight(sync: Sync, weight: object) -> None:
    """Raise a TypeError if there is a `weight` and `sync` is not `weighted`."""
    if weight is not None and not sync.takes_weight:
        raise TypeError(f"weight: {sync!r} takes no weight; write weighted({sync!r})")


def require_sums(sync: Sync, why: str) -> None:
    """Raise a TypeError if a pipeline in `sync` takes a max or min; the error ends with `why`."""
    for inner in sync.children():
        if inner.ops & {"max", "min"}:
            raise TypeError(
                f"{type(sync).__name__}: {inner!r} takes a max or min, {why}; "
                "use a mean or sum, or give those leaves their own pipeline with partition({...})"
            )


def require_agreement(owner: str, inner: Sync) -> None:
    """Raise a TypeError, in the name of `owner`, if ranks may get different means of some leaves from `inner`."""
    if not inner.agrees:
        raise TypeError(
            f"{owner}: {inner!r} gives ranks different means of some leaves, so ranks would act differently; put "
            f"{owner} around the part that all ranks share, as in partition({{'experts.*': none, '*': {owner}(...)}})"
        )


def require_means(sync: Sync, leaves: Iterable[str], mean: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless `mean`, of an exchange of `leaves`, has an entry for each, or `sync` skips some."""
    wanted, given = set(leaves), set(mean)
    if not given.issubset(wanted) or (not sync.skips and len(given) < len(wanted)):
        raise ValueError(f"{sync!r}: exchange got leaves {list(leaves)} and returned {list(mean)}; return all")


def parts_of(sync: Sync, state: State, structure: Any) -> list[Any]:
    """Return the leaves of the next state; raise a ValueError unless its structure equals `structure`, the last one."""
    try:
        parts = structure.flatten_up_to(state)
    except ValueError as error:
        raise ValueError(f"{sync!r}: exchange returned a state of another structure: {error}") from error
    if nested := [part for part in parts if isinstance(part, dict | list | tuple)]:
        raise ValueError(f"{sync!r}: exchange returned a state of another structure: {nested[0]!r} in it was one value")
    return parts


def groups_of(sync: Sync) -> tuple[str | None, ...]:
    """Return the process groups that `sync` is known to reduce over, in the order of its expression.

    Not in the order of names: groups of a device mesh have different names on different ranks.
    """
    inner = [group for child in sync.children() for group in groups_of(child)]
    own = sorted((sync.groups or frozenset()).difference(inner), key=str)
    return tuple(dict.fromkeys([*inner, *own]))


class Registry(dict[str, Any]):
    """The names that `parse` knows: those of transforms (callables that return a `Sync`) and of ready-made values."""

    def add(self, name: str, entry: Any) -> None:
        known = self.get(name)
        if known is not None and (known.__module__, name) != (entry.__module__, name):
            raise ValueError(f"{name!r} is already registered by {known.__module__}; choose another name")
        self[name] = entry


registry = Registry()


@dataclass_transform(frozen_default=True)
def transform(cls: type[T]) -> type[T]:
    """Make a `Sync` subclass a frozen dataclass, and register its name, a new one, so that `fnddp.parse` reads it."""
    require_subclass("transform", cls, Sync, "fnddp.Sync, or of fnddp.Codec for a codec")
    made = dataclass(frozen=True, repr=False)(cls)
    registry.add(cls.__name__, made)
    return made


def require_subclass(decorator: str, cls: Any, base: type, wanted: str) -> None:
    """Raise a TypeError unless `cls`, the argument of a decorator, is a subclass of `base`."""
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise TypeError(f"{decorator}: expected a subclass of {wanted}, got {cls!r}; make it inherit from that class")


def require_state(owner: str, state: State, kind: type) -> None:
    """Raise a ValueError unless `state` has the type that the `init` of the transform `owner` returns."""
    if not isinstance(state, kind):
        raise ValueError(
            f"{owner}: the state is a {type(state).__name__}, not a {kind.__name__}: "
            "it was made for another pipeline; call init on this one"
        )


def all_in(*syncs: Sync) -> Iterator[Sync]:
    """Yield `syncs` and all pipelines in them."""
    for sync in syncs:
        yield sync
        yield from all_in(*sync.children())


def require_sync(what: str, value: Any) -> Sync:
    """Return `value` if it is a pipeline; else raise a TypeError that calls it `what`."""
    if isinstance(value, Sync):
        return value
    made = f"; call it: {value.__name__}(...)" if isinstance(value, type | FunctionType) else ""
    made = "; read its text with fnddp.parse" if isinstance(value, str) else made
    raise TypeError(f"{what} must be a pipeline such as allreduce, got {value!r}{made}")


CHECKS["Sync"] = require_sync

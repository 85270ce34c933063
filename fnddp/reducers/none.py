"""No reduction at all."""

from typing import Any, ClassVar

from fnddp.core.group import Group
from fnddp.core.sync import Exchange, State, Sync, registry, transform
from fnddp.core.tree import Leaves, Tree


@transform
class unreduced(Sync):
    """Leave every gradient as it is on its rank, and send nothing. `none` is the ready-made value.

    For leaves that differ between ranks on purpose (experts, adapters of one rank), as a rule of `partition`; and to
    measure what synchronization costs. The wrong choice for anything else: parameters drift apart, silently.

    >>> import torch
    >>> none({"w": torch.ones(2)}, ())
    ({'w': tensor([1., 1.])}, ())
    """

    ops: ClassVar[Any] = frozenset[str]()
    groups: ClassVar[Any] = frozenset[str | None]()

    def over(self, group: Group, *, unnamed_only: bool = False) -> Sync:
        return self

    def init(self, grads: Tree) -> State:
        return ()

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        return Exchange(leaves, leaves, state)

    def __repr__(self) -> str:
        return "none"


none = unreduced()
registry.add("none", none)

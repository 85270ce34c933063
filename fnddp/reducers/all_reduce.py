"""`all_reduce`: every rank gets the same reduction of all ranks' payloads. `unreduced` leaves gradients as they are."""

from typing import Any, ClassVar

from fnddp.core import collectives
from fnddp.core.group import Group, group_name
from fnddp.core.options import one_of
from fnddp.core.sync import Exchange, Reducer, State, Sync, registry, transform
from fnddp.core.tree import Leaves, Tree


@transform
class all_reduce(Reducer):
    """Reduce every leaf over the ranks of a process group, with one collective for each leaf.

    The mean divides by the world size *before* it sums, so values that fit the wire's dtype never overflow in the sum.
    `allreduce` is the ready-made `all_reduce()`. The wrong choice for many small leaves over a slow link: wrap it in
    `bucketize`. Integer and bool leaves are sent as int64; the mean of integers is rounded to the nearest (halves up),
    the mean of bools is the majority.

    Args:
        group: A process group, its name, a one-dimensional device mesh or `(mesh, dim)`; None for the adapter's group
            or the default one. It is stored by name.
        op: "mean", "sum", "max" or "min". "max" and "min" do not add, so compression and memory refuse them;
            nor do they take complex leaves. A "sum" adds the whole `.grad`: clear it before each synchronized backward.

    >>> import torch
    >>> all_reduce(op="sum")
    all_reduce(op='sum')
    >>> allreduce({"w": torch.ones(2)}, allreduce.init(None))
    ({'w': tensor([1., 1.])}, ())
    """

    group: Group = None
    op: str = "mean"

    limits: ClassVar = {"op": one_of(*collectives.OPS)}

    @property
    def ops(self) -> frozenset[str]:
        return frozenset({self.op})

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        reduced = collectives.all_reduce(leaves, self.op, group_name(self.group))
        return Exchange(mean=reduced, sent=leaves, state=state)

    def __repr__(self) -> str:
        return "allreduce" if self == allreduce else super().__repr__()


allreduce = all_reduce()
registry.add("allreduce", allreduce)


@transform
class unreduced(Sync):
    """Leave every gradient as it is on its rank, and send nothing. `none` is the ready-made value.

    Use it for leaves that differ between ranks on purpose (experts, adapters of one rank), as a rule of `partition`;
    and to measure the cost of synchronization. The wrong choice for anything else: parameters diverge silently.

    >>> import torch
    >>> none({"w": torch.ones(2)}, ())
    ({'w': tensor([1., 1.])}, ())
    """

    ops: ClassVar[Any] = frozenset[str]()
    groups: ClassVar[Any] = frozenset[str | None]()
    hides_nonfinite: ClassVar[Any] = True  # from other ranks; memory outside may send them later

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

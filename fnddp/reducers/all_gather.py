"""All-gather: every rank gets every other's payload, and decodes them all."""

from fnddp.core import collectives
from fnddp.core.codec import Carrier, Code, Key, added_up, encode, exchanged
from fnddp.core.group import Group, group_name
from fnddp.core.sync import State, registry, transform
from fnddp.core.tree import Leaves


@transform
class all_gather(Carrier):
    """Send each rank's payload to all: encoded once, decoded by each, added in float32 in rank order.

    `allgather` is the ready-made `all_gather()`. A codec has one row for each leaf, and loses something once, on the
    rank whose gradient it was. The wrong choice for many ranks: each receives n - 1 payloads, where a ring receives
    about two whatever n. A payload of s bits an element beats a ring of b bits only while n < 2 b / s.

    Args:
        group: See `all_reduce`.

    >>> import torch
    >>> allgather({"w": torch.ones(2)}, allgather.init(None))
    ({'w': tensor([1., 1.])}, ())
    """

    group: Group = None

    def carry_flat(self, code: Code, leaves: Leaves, state: State) -> tuple[Leaves, Leaves, State]:
        group = group_name(self.group)
        rank = collectives.rank(group)
        encoded = {path: encode(code, x.unsqueeze(0), Key(path, rank)) for path, x in leaves.items()}
        everyone = exchanged(encoded, lambda parts: collectives.all_gather_leaves(parts, group))
        n, ranks = collectives.world_size(group), collectives.ranks(group)
        mean = {path: added_up(encoded[path], everyone[path], n, x) / ranks for path, x in leaves.items()}
        sent = {path: each.decode(each.payload)[0] for path, each in encoded.items()} if code else leaves
        return mean, sent, state

    def __repr__(self) -> str:
        return "allgather" if self == allgather else super().__repr__()


allgather = all_gather()
registry.add("allgather", allgather)

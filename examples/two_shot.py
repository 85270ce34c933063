"""A reducer of one's own: the mean in two hops of 8 bits, added in float32 by the rank that owns the chunk.

python examples/two_shot.py
torchrun --nproc-per-node 2 examples/two_shot.py
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

import fnddp
from fnddp import Exchange, State, collectives, laws, tree
from fnddp.collectives import Group, from_wire, group_name, to_wire

BLOCK = 64  # elements that share a scale


@fnddp.transform
class int8_two_shot(fnddp.Sync):
    """A mean of int8 blocks: two bytes an element, whatever the number of ranks. Wrap it in `error_feedback`."""

    group: Group = None

    ops = frozenset({"mean"})
    groups = property(lambda self: frozenset({group_name(self.group)}))

    def over(self, group: Group, *, unnamed_only: bool = False) -> fnddp.Sync:
        return self if unnamed_only and self.group is not None else int8_two_shot(group_name(group))

    def init(self, grads: tree.Tree) -> State:
        return ()

    def exchange(self, leaves: tree.Leaves, state: State) -> Exchange:
        group = group_name(self.group)
        n, ranks = collectives.world_size(group), collectives.ranks(group)
        whole = {path: leaf for path, leaf in leaves.items() if not tree.is_inexact(leaf) or leaf.numel() == 0}
        mean, sent = collectives.all_reduce(whole, "mean", group), dict(whole)
        for path in sorted(leaves.keys() - whole.keys()):  # in the same order on all ranks
            leaf = leaves[path]
            x = to_wire(leaf).reshape(-1).float()
            first = encode(pad(x, (0, -x.numel() % (n * BLOCK))).view(n, -1, BLOCK))  # a row for each owner
            total = sum(decode(*[collectives.all_to_all(part, group) for part in first]).unbind())  # in rank order
            second = encode(total / ranks)
            lost = decode(*second) - total / ranks  # by the owner, of what all ranks have sent
            owned = (torch.arange(n, device=x.device) == collectives.rank(group)).view(n, 1, 1)
            mine = decode(*first) + torch.where(owned, ranks * lost, 0)
            everyone = decode(*[collectives.all_gather(part, group) for part in second])
            for into, value in ((mean, everyone), (sent, mine)):
                wire = value.view(-1)[: x.numel()].to(leaf.dtype.to_real()).view(to_wire(leaf).shape)
                into[path] = from_wire(wire, leaf)
        return Exchange(mean, sent, state)


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / torch.where(scale > 0, scale, 1)).round().clamp(-127, 127).to(torch.int8), scale


def decode(q: Tensor, scale: Tensor) -> Tensor:
    return q * scale


def main() -> None:
    launched = dist.is_torchelastic_launched()
    if launched:  # without a process group the world is this process
        dist.init_process_group("gloo")
    sync = fnddp.error_feedback(int8_two_shot())
    laws.check(sync, grads=laws.model, on="gloo")
    if collectives.rank(None) == 0:
        plan = fnddp.lower(sync, {"w": torch.empty(4096, 4096, device="meta")}, world_size=1024)
        print(f"world size {collectives.world_size(None)}: {sync} keeps the laws; 64 MiB are {plan.wire_bytes:,} bytes")
    if launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

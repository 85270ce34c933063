"""A codec of one's own: each rank sends the largest elements of its gradients, as indices and values.

python examples/topk.py
torchrun --nproc-per-node 2 examples/topk.py
"""

import torch
import torch.distributed as dist

import fnddp
from fnddp import Exchange, State, collectives, laws, tree
from fnddp.collectives import Group, from_wire, group_name, to_wire


@fnddp.transform
class largest(fnddp.Sync):
    """Sends the largest `ratio` of each leaf's elements, 8 bytes for each. Biased: wrap it in `error_feedback`."""

    ratio: float
    group: Group = None

    ops = frozenset({"mean"})
    groups = property(lambda self: frozenset({group_name(self.group)}))

    def over(self, group: Group, *, unnamed_only: bool = False) -> fnddp.Sync:
        return self if unnamed_only and self.group is not None else largest(self.ratio, group_name(group))

    def init(self, grads: tree.Tree) -> State:
        return ()

    def exchange(self, leaves: tree.Leaves, state: State) -> Exchange:
        group = group_name(self.group)
        whole = {path: leaf for path, leaf in leaves.items() if not tree.is_inexact(leaf) or leaf.numel() == 0}
        mean, sent = collectives.all_reduce(whole, "mean", group), dict(whole)
        for path in sorted(leaves.keys() - whole.keys()):  # in the same order on all ranks
            leaf = leaves[path]
            x = to_wire(leaf).reshape(-1).float()
            indices = x.abs().topk(max(1, round(self.ratio * x.numel()))).indices
            mine = x.new_zeros(x.numel()).scatter(0, indices, x[indices])
            at, values = [collectives.all_gather(part, group) for part in (indices.int(), x[indices])]
            # Indices of one rank are unique, and ranks add in their order, so all of them get the same bits.
            total = sum(x.new_zeros(at.shape[0], x.numel()).scatter(1, at.long(), values).unbind())
            for into, value in ((mean, total / collectives.ranks(group)), (sent, mine)):
                into[path] = from_wire(value.to(leaf.dtype.to_real()).view(to_wire(leaf).shape), leaf)
        return Exchange(mean, sent, state)


def main() -> None:
    launched = dist.is_torchelastic_launched()
    if launched:  # without a process group the world is this process
        dist.init_process_group("gloo")
    sync = fnddp.error_feedback(largest(0.05))
    laws.check(sync, grads=laws.model, on="gloo")
    if collectives.rank(None) == 0:
        plan = fnddp.lower(sync, {"w": torch.empty(4096, 4096, device="meta")}, world_size=1024)
        print(f"world size {collectives.world_size(None)}: {sync} keeps the laws; 64 MiB are {plan.wire_bytes:,} bytes")
    if launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

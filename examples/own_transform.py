"""A transform of one's own, and the laws that make it one.

python examples/own_transform.py
torchrun --nproc-per-node 2 examples/own_transform.py
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fnddp
from fnddp import laws, random, tree


class SampledState(NamedTuple):
    """`step`: exchanges done, equal on all ranks; it seeds the choice."""

    step: fnddp.Replicated[int]
    inner: fnddp.State


@fnddp.transform
class sampled(fnddp.Sync):
    """Sends a random fraction of each leaf's elements, the same ones on all ranks, and zeros for the rest.

    All ranks draw from one seed, so no indices travel and the payloads add. Biased towards zero: wrap it in
    `error_feedback`.
    """

    inner: fnddp.Sync
    fraction: float
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fraction <= 1:
            raise ValueError(f"sampled: fraction must be in (0, 1], got {self.fraction!r}")

    def init(self, grads: tree.Tree) -> fnddp.State:
        leaves, _ = tree.flatten(grads)
        payload = {path: leaf.detach().new_empty(self._count(leaf)) for path, leaf in leaves.items()}
        return SampledState(0, self.inner.init(payload))

    def exchange(self, leaves: tree.Leaves, state: SampledState) -> fnddp.Exchange:
        chosen = {path: self._choose(path, leaf, state.step) for path, leaf in leaves.items()}
        payload = {path: leaf.reshape(-1)[chosen[path]] for path, leaf in leaves.items()}
        inner = self.inner.exchange(payload, state.inner)
        done = inner.decoded(lambda of: {path: spread(of[path], chosen[path], leaf) for path, leaf in leaves.items()})
        return done._replace(state=SampledState(state.step + 1, inner.state))

    def _count(self, leaf: Tensor) -> int:
        return min(leaf.numel(), max(1, round(self.fraction * leaf.numel())))

    def _choose(self, path: str, leaf: Tensor, step: int) -> Tensor:
        like = torch.empty(0, device=leaf.device)
        lots = random.normal((leaf.numel(),), name=path, seed=self.seed, step=step, like=like)
        return lots.topk(self._count(leaf)).indices


def spread(values: Tensor, chosen: Tensor, like: Tensor) -> Tensor:
    return like.new_zeros(like.numel()).index_copy(0, chosen, values).reshape(like.shape)


def gradients(rank: int, step: int) -> tree.Tree:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {"weight": torch.randn(64, 32, generator=generator), "bias": torch.randn(64, generator=generator)}


def main() -> None:
    torch.set_num_threads(1)
    launched = dist.is_torchelastic_launched()
    if launched:  # without a process group the world is this process
        dist.init_process_group("gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if launched else (0, 1)

    for text in (
        "sampled(allreduce, 0.1)",
        "error_feedback(sampled(bucketize(allreduce), 0.1, seed=7))",
        "warmup(powersgd(sampled(allreduce, 0.5), rank=2), steps=1)",
    ):
        laws.check(fnddp.parse(text), grads=gradients, on="gloo")  # alone, on="threads" would do without torchrun
        if rank == 0:
            print(f"world size {world_size}: {text} keeps the laws")
    if launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

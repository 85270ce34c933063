"""Compare the losses of the first 200 steps with PowerSGD, with and without `warmup`, on simulated ranks.

    python benchmarks/early_steps.py

For each optimizer, seed and pipeline, prints the mean loss of steps 15 to 20 and of steps 180 to 200. Takes a minute.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import fnddp
from fnddp.cli import digits

RANKS, STEPS, BATCH = 4, 200, 16
LOW_RANK = "error_feedback(powersgd(allreduce, rank=4))"
PIPELINES = ["allreduce", LOW_RANK, f"warmup({LOW_RANK}, steps=10)", f"warmup({LOW_RANK}, steps=30)"]
OPTIMIZERS = {"AdamW": partial(torch.optim.AdamW, lr=3e-3), "SGD": partial(torch.optim.SGD, lr=0.1)}


def batches(shards: list[digits.Digits], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        drawn = [shard.batch(BATCH, generator) for shard in shards]
        yield torch.stack([each.x for each in drawn]), torch.stack([each.y for each in drawn])


def main() -> None:
    torch.set_num_threads(1)
    train, _ = digits.load()
    shards = [train.shard(rank, RANKS) for rank in range(RANKS)]
    for name, optimizer in OPTIMIZERS.items():
        for seed in range(3):
            model = digits.make_model(seed=seed)
            params = {path: p.detach() for path, p in model.named_parameters()}
            for text in PIPELINES:
                done = fnddp.simulate_training(
                    partial(digits.loss, model),
                    params,
                    batches(shards, seed),
                    fnddp.parse(text),
                    world_size=RANKS,
                    optimizer=optimizer,
                )
                early, late = (float(done.losses[begin:end].mean()) for begin, end in ((15, 20), (180, 200)))
                print(f"{name}, seed {seed}: {early:.3f} then {late:.3f}  {text}", flush=True)


if __name__ == "__main__":
    main()

"""A functional training loop: parameters, optimizer and synchronization are values that go in and come out.

python examples/functional.py
torchrun --nproc-per-node 2 examples/functional.py
"""

from functools import partial

import torch
import torch.distributed as dist

import fnddp
from fnddp.cli import digits  # real handwritten digits and a small MLP; needs pip install 'fnddp[demo]'

STEPS, BATCH_SIZE, LEARNING_RATE, MOMENTUM = 200, 32, 0.1, 0.9


def main() -> None:
    torch.set_num_threads(1)
    launched = dist.is_torchelastic_launched()
    if launched:  # without a process group the world is this process
        dist.init_process_group("gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if launched else (0, 1)

    train_set, test_set = digits.load()
    shard = train_set.shard(rank, world_size)
    generator = torch.Generator().manual_seed(rank)
    model = digits.make_model(seed=0)

    # A pipeline is a value: print it, compare it, pass it on. Read it inside out: two hops, 8 bits, long rows.
    sync = fnddp.bucketize(fnddp.quantize(fnddp.two_shot))

    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    velocity = {name: torch.zeros_like(p) for name, p in params.items()}
    state = sync.init(params)
    fnddp.verify(sync, params, state)  # once: do all ranks agree?

    step = fnddp.value_and_grad(partial(digits.loss, model), sync)
    for i in range(STEPS):
        x, y = shard.batch(BATCH_SIZE, generator)
        loss, grads, state = step(params, state, x, y)  # grads: the mean over ranks

        learning_rate = LEARNING_RATE * (1 - i / STEPS)
        velocity = {name: MOMENTUM * v + grads[name] for name, v in velocity.items()}
        params = {name: p - learning_rate * velocity[name] for name, p in params.items()}
        if rank == 0 and i % 100 == 99:
            print(f"step {i + 1}: loss {loss.item():.4f} on rank 0")

    if rank == 0:
        print(f"{sync}, world size {world_size}: {digits.accuracy(model, params, test_set):.2%} of the test set")
    if launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

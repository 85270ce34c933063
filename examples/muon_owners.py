"""Muon and AdamW, each leaf updated by the rank that owns it, with 4 bits on both hops, resumed from a checkpoint.

python examples/muon_owners.py
torchrun --nproc-per-node 2 examples/muon_owners.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fnddp

STEPS = 30


def start() -> tuple[nn.Module, list[torch.optim.Optimizer], fnddp.OwnerDataParallel]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    muon = torch.optim.Muon([p for p in net.parameters() if p.ndim == 2], lr=0.02)
    adamw = torch.optim.AdamW([p for p in net.parameters() if p.ndim < 2], lr=3e-3)
    gradients, weights = "quantize(two_shot, bits=4)", "ef21(quantize(allgather, bits=4))"
    return net, [muon, adamw], fnddp.own(net, [muon, adamw], gradients, weights)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1000 * rank + step))
    return x, torch.tanh(x @ torch.linspace(-1, 1, 128).view(16, 8))


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range, rank: int) -> float:
    loss = torch.zeros(())
    for step in steps:
        x, y = batch(step, rank)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


def main() -> None:
    launched = dist.is_torchelastic_launched()
    if launched:
        dist.init_process_group("gloo")
    rank, n = (dist.get_rank(), dist.get_world_size()) if launched else (0, 1)

    net, optimizers, model = start()
    first = train(model, optimizers, range(1), rank)
    train(model, optimizers, range(1, STEPS // 2), rank)
    weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    saved = model.optimizer_state_dict()
    last = train(model, optimizers, range(STEPS // 2, STEPS), rank)

    again, resumed, wrapped = start()
    again.load_state_dict(weights)
    wrapped.load_optimizer_state_dict(saved)  # after the weights: owners have exact ones of their own
    train(wrapped, resumed, range(STEPS // 2, STEPS), rank)
    same = all(torch.equal(p, q) for p, q in zip(net.parameters(), again.parameters(), strict=True))
    state = sum(v.numel() for o in optimizers for s in o.state.values() for v in s.values())
    if rank == 0:
        print(model.show_owners())
        print(f"world size {n}: loss {first:.3f} -> {last:.3f}, {state:,} numbers of optimizer state on this rank")
        print(f"the resumed run has the same weights to the bit: {'yes' if same else 'no'}")
    if launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A training script for torch's DistributedDataParallel, with one line changed: the import.

python examples/drop_in.py
torchrun --nproc-per-node 2 examples/drop_in.py

At the end it trains once more with torch's class, and compares.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# The line was:
#   from torch.nn.parallel import DistributedDataParallel
from fnddp import DistributedDataParallel
from fnddp.cli import digits  # real handwritten digits; needs pip install 'fnddp[demo]'

EPOCHS, BATCH_SIZE = 5, 32


def make_model() -> nn.Module:
    """With batch norm, whose buffers are made equal before each forward."""
    torch.manual_seed(dist.get_rank())  # wrapping makes parameters equal to the first rank's
    return nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))


def train(train_set: TensorDataset, wrapper: type[nn.Module] = DistributedDataParallel) -> dict[str, Tensor]:
    model = wrapper(make_model(), bucket_cap_mb=1, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(train_set)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(train_set, BATCH_SIZE, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.state_dict()


def main() -> None:
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    train_set, test_set = digits.load()
    trained = train(TensorDataset(*train_set))
    as_torch = train(TensorDataset(*train_set), torch.nn.parallel.DistributedDataParallel)

    model = make_model().eval()
    nn.modules.utils.consume_prefix_in_state_dict_if_present(trained, "module.")
    model.load_state_dict(trained)
    accuracy = digits.accuracy(model, {}, test_set)
    same = all(torch.equal(trained[name], as_torch[f"module.{name}"]) for name in trained)
    if dist.get_rank() == 0:
        print(f"world size {dist.get_world_size()}: {accuracy:.2%} of the test set")
        print(f"torch's class gives the same parameters and buffers to the bit: {'yes' if same else 'no'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

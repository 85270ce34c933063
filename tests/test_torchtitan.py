"""torchtitan's own function that shards a decoder, on four gloo ranks, and codecs on what it set up."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fnddp.integrations.fsdp import compress
from tests.peers import everyones
from tests.ranks import on_ranks
from tests.test_parallel_axes import Block, local

pytestmark = pytest.mark.thorough
torchtitan = pytest.importorskip("torchtitan.distributed.fsdp", reason="needs torchtitan, spmd_types and tyro")


class Decoder(nn.Module):
    """The parts that torchtitan's decoders have."""

    enable_weight_tying = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.lm_head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))


def sharded(mesh: DeviceMesh) -> Any:
    model = Decoder()
    torchtitan.apply_fsdp_to_decoder(model, mesh, torch.float32, torch.float32, pp_enabled=False)
    return model


def train(model: Any, rank: int) -> None:
    """As its trainer does: sums of losses, divided by the tokens of all ranks, so that gradients are sums."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        tokens = torch.randint(11, (2, 6), generator=generator)
        y = model(tokens[:, :-1]).flatten(0, 1)
        (nn.functional.cross_entropy(y, tokens[:, 1:].flatten(), reduction="sum") / (4 * 2 * 5)).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(4)
def test_all_axes_of_a_decoder(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
    native = sharded(mesh)
    for module in native.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):  # gloo has no other operation
            module.set_force_sum_reduction_for_comms(True)
    ours, lossy = sharded(mesh["fsdp"]), sharded(mesh["fsdp"])
    compress(ours, mesh, shards="two_shot", weights="allgather", replicas="all_reduce(op='sum')")
    compress(
        lossy,
        mesh,
        shards="quantize(two_shot, bits=4)",
        weights="quantize(allgather)",
        replicas="error_feedback(powersgd(all_reduce(op='sum'), rank=1))",
    )
    for model in (native, ours, lossy):
        train(model, rank)
    assert torch.equal(local(ours), local(native))
    everyone = everyones(local(lossy))
    assert torch.equal(everyone[rank], everyone[(rank + 2) % 4])
    assert (local(lossy) - local(native)).norm() < 0.2 * local(native).norm()

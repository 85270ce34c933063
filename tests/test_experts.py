"""Experts: parameters that are reduced over another group than the rest, against one process on the pooled batch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import fnddp
from fnddp import all_reduce, none, partition
from fnddp.integrations.fsdp import compress_shards
from tests.peers import everyones
from tests.ranks import on_ranks

pytestmark = pytest.mark.thorough

WIDTH = 8


class Mixture(nn.Module):
    """Tokens go to the expert that their router chooses: to the rank that has it, by an all_to_all, and back.

    Args:
        count: The number of experts.
        mesh: Whose ranks have one each, under one name; None for all of them here.
    """

    def __init__(self, count: int, mesh: DeviceMesh | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.out = nn.Linear(WIDTH, count), nn.Linear(WIDTH, WIDTH)
        every = [nn.Linear(WIDTH, WIDTH) for _ in range(count)]
        self.expert = nn.ModuleList(every if mesh is None else [every[mesh.get_local_rank()]])
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        score, choice = self.router(x).softmax(-1).max(-1)
        order = choice.argsort(stable=True)
        sorted_x, sizes = x[order], choice.bincount(minlength=self.router.out_features)
        if self.mesh is None:
            parts = zip(self.expert, sorted_x.split(sizes.tolist()), strict=True)
            y = torch.cat([expert(part).tanh() for expert, part in parts])
        else:
            group: Any = self.mesh.get_group()
            arriving = torch.empty_like(sizes)
            dist.all_to_all_single(arriving, sizes, group=group)
            there, here = sizes.tolist(), arriving.tolist()
            computed = self.expert[0](all_to_all_single_autograd(sorted_x, here, there, group)).tanh()
            y = all_to_all_single_autograd(computed, there, here, group)
        return self.out(torch.empty_like(y).index_copy(0, order, y) * score.unsqueeze(-1))


def trained_alike(rank: int, model: nn.Module, plain: nn.Module) -> dict[str, Tensor]:
    """Train `model` on this rank's tokens and `plain` on those of all; the parameters of `plain`."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain)]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = torch.randn(3 + 2 * rank, WIDTH, generator=generator)
        pooled = torch.cat(everyones(x))
        (model(x).square().sum() / (len(pooled) * WIDTH)).backward()
        plain(pooled).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return plain.state_dict()


@pytest.mark.parametrize("copies", [1, 2])
@on_ranks(4)
def test_experts_and_the_rest_are_those_of_one_process(rank: int, copies: int) -> None:
    """Four experts on four ranks, and two on two replicas of two. Losses are divided once, by the tokens of all ranks.

    So all gradients are sums: of an expert, of what the tokens that it saw gave it; its own rank has them from all
    ranks that sent it some. No divisor is left that could be another for experts.
    """
    mesh = init_device_mesh("cpu", (copies, 4 // copies), mesh_dim_names=("replicate", "expert"))
    own = mesh.get_local_rank("expert")
    module = Mixture(4 // copies, mesh["expert"])
    of_experts = none if copies == 1 else all_reduce(mesh["replicate"], op="sum")
    sync = partition({"expert.*": of_experts, "*": all_reduce(op="sum")})
    # Without a broadcast, which would give all ranks the first one's expert.
    model = fnddp.DistributedDataParallel(module, sync=sync, init_sync=False)
    plain = Mixture(4 // copies, None)
    want = trained_alike(rank, model, plain)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, want[name.replace("expert.0", f"expert.{own}")], rtol=1e-4, atol=1e-6)
    assert not torch.equal(*everyones(module.expert[0].weight.detach())[:2])


@pytest.mark.parametrize("text", ["two_shot", "error_feedback(quantize(two_shot))"])
@on_ranks(4)
def test_experts_of_fsdp_have_shards_of_their_own(rank: int, text: str) -> None:
    """Two experts, each sharded over two ranks, and the rest over four; losses are divided by all ranks' tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert_shard", "expert"))
    own = mesh.get_local_rank("expert")
    model: Any = Mixture(2, mesh["expert"])
    fully_shard(model.expert[0], mesh=mesh["expert_shard"])
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    handle = compress_shards(model, text, "allgather")
    assert {n for each in handle.traffic.values() for _, _, n in each.gradients} == {2, 4}
    plain = Mixture(2, None)
    want, lossy = trained_alike(rank, model, plain), text != "two_shot"
    for name, p in model.named_parameters():
        expected = want[name.replace("expert.0", f"expert.{own}")]
        torch.testing.assert_close(p.full_tensor(), expected, rtol=1e-4, atol=5e-3 if lossy else 1e-6)
    with pytest.raises(TypeError, match=r"divide the loss by the tokens of all ranks"), handle.weight(3):
        pass

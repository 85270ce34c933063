"""Shards and replicas beside the other parallelisms of torch, on four gloo ranks, against FSDP2 and HSDP themselves."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import debug
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fnddp.integrations.fsdp import compress, compress_replicas, compress_shards
from tests.peers import everyones
from tests.ranks import on_ranks

pytestmark = pytest.mark.thorough

LOSSY = "error_feedback(powersgd(allreduce, rank=1))"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


def meshes(*shape: int, names: str) -> DeviceMesh:
    """A mesh. DTensor remembers equal ones of earlier tests in this process, whose groups are gone."""
    debug._clear_sharding_prop_cache()
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(names.split()))


def blocks(count: int = 2, seed: int = 0) -> list[Block]:
    torch.manual_seed(seed)
    return [Block() for _ in range(count)]


def tensor_parallel(over: DeviceMesh, tp: DeviceMesh) -> Any:
    made = blocks()
    for block in made:
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=over)
    return fully_shard(nn.Sequential(*made), mesh=over)


def inputs(steps: int, source: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(source)
    return [torch.randn(4, 8, generator=generator) for _ in range(steps)]


def train(model: Any, steps: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in steps:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def local(model: Any) -> Tensor:
    return torch.cat([p.to_local().detach().flatten() for p in model.parameters()])


@on_ranks(4)
def test_replicas_of_one_shard_beside_tensor_parallel(rank: int) -> None:
    """What `replicate` does, 2 replicas x 1 shard x 2 tensor-parallel ranks: HSDP's to the bit."""
    mesh = meshes(2, 1, 2, names="replicate shard tp")
    steps = inputs(3, rank // 2)
    native = tensor_parallel(mesh["replicate", "shard"], mesh["tp"])
    ours = tensor_parallel(mesh["shard"], mesh["tp"])
    compress_replicas(ours, "allreduce", mesh["replicate"])
    both = tensor_parallel(mesh["shard"], mesh["tp"])
    handle = compress(both, mesh["replicate", "shard"], shards="two_shot", replicas="allreduce")
    for model in (native, ours, both):
        train(model, steps)
    assert torch.equal(local(ours), local(native))
    assert torch.equal(local(both), local(native))
    with handle.weight(3):
        both(steps[0]).sum().backward()
    lossy = tensor_parallel(mesh["shard"], mesh["tp"])
    compress_replicas(lossy, LOSSY, mesh["replicate"])
    train(lossy, steps)
    everyone = everyones(local(lossy))
    assert torch.equal(everyone[0], everyone[2])
    assert torch.equal(everyone[1], everyone[3])
    assert not torch.equal(local(lossy), local(native))


@on_ranks(4)
def test_shards_beside_tensor_parallel(rank: int) -> None:
    """2 shards x 2 tensor-parallel ranks: FSDP2's to the bit; lossy, what tensor parallelism replicates is equal."""
    mesh = meshes(2, 2, names="shard tp")
    steps = inputs(3, rank // 2)
    native, ours, lossy = (tensor_parallel(mesh["shard"], mesh["tp"]) for _ in range(3))
    compress_shards(ours, "two_shot", "allgather")
    compress_shards(lossy, "error_feedback(quantize(two_shot, bits=4))", "quantize(allgather)")
    for model in (native, ours, lossy):
        train(model, steps)
    assert torch.equal(local(ours), local(native))
    assert not torch.equal(local(lossy), local(native))
    # Blocks of a codec must not hold both what tensor parallelism divides and what it replicates, which would drift.
    replicated = [
        p.to_local().detach() for name, p in lossy.named_parameters() if "norm" in name or "down.bias" in name
    ]
    everyone = everyones(torch.cat([*replicated, *(gathered(lossy, name) for name in ("norm", "down.bias"))]))
    assert torch.equal(everyone[0], everyone[1])
    assert torch.equal(everyone[2], everyone[3])


def gathered(model: Any, name: str) -> Tensor:
    for block in model:
        block.unshard()
    seen = [getattr(p, "_local_tensor", p).detach().clone() for of, p in model.named_parameters() if name in of]
    for block in model:
        block.reshard()
    return torch.cat(seen)


class _Gathered(torch.autograd.Function):
    """The parts of a sequence of all ranks: `[*, rank, part, width]`."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, over: DeviceMesh) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.over = over
        return torch.stack(everyones_in(part, over), 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return sum(everyones_in(grad, ctx.over))[:, :, ctx.over.get_local_rank()], None


def everyones_in(x: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(mesh.size())]
    dist.all_gather(parts, x.contiguous(), group=mesh.get_group())
    return parts


class Attention(nn.Module):
    """Attention over a sequence of which each rank of `over` has a part, as context parallelism divides it."""

    def __init__(self, over: DeviceMesh | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.over = nn.Linear(8, 24), nn.Linear(8, 8), over

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.over is not None:
            everyones_parts = _Gathered.apply(torch.stack((k, v)), self.over)
            k, v = everyones_parts.flatten(2, 3)
        return x + self.out((q @ k.mT).softmax(-1) @ v)


@on_ranks(4)
def test_shards_over_the_ranks_of_context_parallel_too(rank: int) -> None:
    """2 shards x 2 parts of a sequence, which FSDP shards over as one dimension: one process with whole sequences."""
    mesh = meshes(2, 2, names="shard cp")
    both = mesh._flatten("shard_cp")
    x = torch.cat([inputs(1, source)[0].view(1, 4, 8) for source in range(2)])
    plain = Attention(None)
    plain(x).square().mean().backward()
    for text, tolerance in (("two_shot", 1e-6), ("quantize(two_shot)", 5e-3)):
        ours: Any = fully_shard(Attention(mesh["cp"]), mesh=both)
        handle = compress(ours, both, shards=text, weights="allgather")
        assert {axis.ranks for axis in handle.plan.axes} == {4}
        ours(x[rank // 2].view(1, 4, 8).chunk(2, 1)[rank % 2]).square().mean().backward()
        for p, want in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), want.grad, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@on_ranks(4)
def test_stages_of_a_pipeline_synchronize_once(rank: int, schedule: Any) -> None:
    """Two stages of two data-parallel ranks, three microbatches: one process on the pooled batch, in one step."""
    x = {source: (1 + source) * inputs(3, source)[0].repeat(3, 1) for source in range(2)}
    plain = nn.Sequential(*blocks())
    plain(torch.cat(list(x.values()))).square().mean().backward()
    for axis, shape in (("replicate", (2, 2, 1)), ("shard", (2, 1, 2))):
        mesh = meshes(*shape, names="pp replicate shard")
        stage = mesh.get_local_rank("pp")
        module: Any = fully_shard(blocks()[stage], mesh=mesh["shard"])
        handle = compress(module, mesh["replicate", "shard"], shards="two_shot", replicas="allreduce")
        like = torch.empty(4, 8)  # with its shapes; to find them it would run a backward of its own first
        given: Any = {
            "input_args": (like.requires_grad_(stage == 1),),
            "output_args": (like.detach().requires_grad_(),),
        }
        part = PipelineStage(module, stage, 2, torch.device("cpu"), group=mesh["pp"].get_group(), **given)
        run = schedule(part, 3, loss_fn=lambda y, _: y.square().mean())
        for step in (1, 2):
            module.zero_grad()
            if stage == 0:
                run.step(x[mesh.get_local_rank(axis)])
            else:
                run.step(target=torch.zeros(12, 8))
            assert handle.sync_stats()["steps"] == step
            for (name, p), want in zip(module.named_parameters(), plain[stage].parameters(), strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), want.grad, rtol=1e-4, atol=1e-6, msg=f"{axis} {name}")

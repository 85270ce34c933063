"""Shards and replicas beside the other parallelisms of torch, on four gloo ranks, against FSDP2 and HSDP themselves.

Pipelines, contexts and experts have no such peer: against one process on the pooled batch.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fnddp
from fnddp import StepFailedError, all_reduce, none, partition
from fnddp.integrations.checkpoint import load, save
from fnddp.integrations.fsdp import compress, compress_replicas, compress_shards
from fnddp.laws import bits
from tests.peers import everyones
from tests.ranks import on_ranks
from tests.sharded import gathered, local, loss, meshes, train

pytestmark = pytest.mark.thorough


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


def blocks() -> list[Block]:
    torch.manual_seed(0)
    return [Block() for _ in range(2)]


def tensor_parallel(over: DeviceMesh, tp: DeviceMesh) -> Any:
    made = blocks()
    for block in made:
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=over)
    return fully_shard(nn.Sequential(*made), mesh=over)


def inputs(steps: int, source: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(source)
    return [torch.randn(4, 8, generator=generator) for _ in range(steps)]


@on_ranks(4)
def test_replicas_of_one_shard_beside_tensor_parallel(rank: int) -> None:
    """What `replicate` does, 2 replicas x 1 shard x 2 tensor-parallel ranks: HSDP's to the bit."""
    mesh = meshes(2, 1, 2, names="replicate shard tp")
    steps = inputs(3, rank // 2)
    native = tensor_parallel(mesh["replicate", "shard"], mesh["tp"])
    ours = tensor_parallel(mesh["shard"], mesh["tp"])
    compress_replicas(ours, "allreduce", mesh["replicate"])
    both = tensor_parallel(mesh["shard"], mesh["tp"])
    compress(both, mesh["replicate", "shard"], gradients="two_shot", replicas="allreduce")
    for model in (native, ours, both):
        train(model, steps)
    assert torch.equal(local(ours), local(native))
    assert torch.equal(local(both), local(native))
    weighted = tensor_parallel(mesh["shard"], mesh["tp"])
    handle = compress_replicas(weighted, "weighted(allreduce)", mesh["replicate"])
    with handle.weight(1 + rank // 2):
        loss(weighted, steps[0]).backward()
    lossy = tensor_parallel(mesh["shard"], mesh["tp"])
    compress_replicas(lossy, "error_feedback(powersgd(allreduce, rank=1))", mesh["replicate"])
    train(lossy, steps)
    everyone = everyones(local(lossy))
    assert torch.equal(everyone[0], everyone[2])
    assert torch.equal(everyone[1], everyone[3])
    assert not torch.equal(local(lossy), local(native))


@on_ranks(2)
def test_a_dtensor_is_refused_where_no_mesh_makes_it_local(rank: int) -> None:
    mesh = meshes(2, 1, names="data tensor")
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tensor"], {"0": ColwiseParallel()})
    for refused in (fnddp.DistributedDataParallel, lambda model: fnddp.allreduce(dict(model.named_parameters()), ())):
        with pytest.raises(TypeError, match=r"leaf '0.weight' is a DTensor, .* device_mesh=mesh\['dp'\]"):
            refused(model)
    fnddp.DistributedDataParallel(model, device_mesh=mesh["data"])


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
    shards = {name: p.to_local().detach() for name, p in lossy.named_parameters()}
    both = (shards, gathered(lossy))
    replicated = [each for of in both for name, each in of.items() if "norm" in name or "down.bias" in name]
    everyone = everyones(torch.cat(replicated))
    assert torch.equal(everyone[0], everyone[1])
    assert torch.equal(everyone[2], everyone[3])


class Attention(nn.Module):
    """Attention over a sequence of which each rank of `over` has a part, as context parallelism divides it."""

    def __init__(self, over: DeviceMesh | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.over = nn.Linear(8, 24), nn.Linear(8, 8), over

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.over is not None:
            k, v = all_gather_tensor_autograd(torch.stack((k, v)), 2, self.over)  # [2, *, sequence, width]
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
        handle = compress(ours, both, gradients=text, weights="allgather")
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
        handle = compress(module, mesh["replicate", "shard"], gradients="two_shot", replicas="allreduce")
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


class Mixture(nn.Module):
    """Tokens go to the expert that their router chooses: to the rank that has it, by an all_to_all, and back.

    Args:
        count: The number of experts.
        mesh: Whose ranks have one each, under one name; None for all of them here.
    """

    def __init__(self, count: int, mesh: DeviceMesh | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.out = nn.Linear(8, count), nn.Linear(8, 8)
        every = [nn.Linear(8, 8) for _ in range(count)]
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
        x = torch.randn(3 + 2 * rank, 8, generator=generator)
        pooled = torch.cat(everyones(x))
        (model(x).square().sum() / (len(pooled) * 8)).backward()
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
    mesh = meshes(copies, 4 // copies, names="replicate expert")
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


def in_one_module(mesh: DeviceMesh, divisor: float) -> Any:
    """Two experts that are sharded over two ranks each, and the rest of their module over all four, by one call."""
    block = Mixture(2, mesh["expert"])
    of_experts = _fsdp_common.ShardPlacementResult(None, _fsdp_common.FSDPMeshInfo(mesh["expert_shard"], 0))
    experts = {*block.expert.parameters()}
    whole = mesh._flatten("all")
    fully_shard(block, mesh=whole, shard_placement_fn=lambda p: of_experts if p in experts else None)
    torch.manual_seed(1)
    model: Any = fully_shard(nn.Sequential(nn.Linear(8, 8), block), mesh=whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(divisor)
    return model


def in_one_process() -> nn.Module:
    block = Mixture(2, None)
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), block)


has_groups = pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"), reason="in torch 2.11 parameters of a module have one mesh"
)
TWO_SHOT, LOSSY = "two_shot", "error_feedback(quantize(two_shot))"


@has_groups
@pytest.mark.parametrize(
    ("gradients", "weights"),
    [
        (TWO_SHOT, "allgather"),
        ({"*.expert.*": LOSSY, "*": TWO_SHOT}, {"*.expert.*": "ef21(quantize(allgather))", "*": "allgather"}),
        ({"*.expert.*": TWO_SHOT, "*": LOSSY}, None),
    ],
    ids=["plain", "experts", "rest"],
)
@on_ranks(4)
def test_meshes_of_one_module_have_pipelines_of_their_own(rank: int, gradients: Any, weights: Any) -> None:
    """2 expert-parallel x 2 shards, the rest over four: one process on the pooled batch, and the bytes of the plan."""
    mesh = meshes(2, 2, names="expert_shard expert")
    model, plain = in_one_module(mesh, 1.0), in_one_process()
    handle = compress_shards(model, gradients, weights)
    want = trained_alike(rank, model, plain)
    own, tolerance = f"expert.{mesh.get_local_rank('expert')}", 1e-6 if gradients == TWO_SHOT else 5e-3
    for name, p in model.named_parameters():
        expected = want[name.replace("expert.0", own)]
        torch.testing.assert_close(p.full_tensor(), expected, rtol=1e-4, atol=tolerance, msg=name)
    assert [*handle.traffic] == ["", "1[0]", "1[1]"]
    assert [(axis.name, axis.ranks) for axis in handle.plan.axes] == [
        *(("gradients", 4), ("gradients", 2), ("weights", 4), ("weights", 2))
    ]
    by_mesh = [axis.pipeline for axis in handle.plan.axes[:2]]
    assert (by_mesh[0] == by_mesh[1]) == (gradients == TWO_SHOT)
    bare = nn.Sequential(nn.Linear(8, 8), Mixture(2, mesh["expert"]))
    with torch.no_grad():
        for p, other in zip(model.parameters(), bare.parameters(), strict=True):
            p.to_local().add_(1e-4)  # so that differences of weights are sent
            other.copy_(p.full_tensor())
    counted: list[int] = []
    for each in (model, bare):
        with fnddp.WireCounter() as counter:
            loss(each, torch.ones(3, 8)).backward()
        counted.append(counter.wire_bytes)
    assert counted[0] == counted[1] + sum(axis.wire_bytes for axis in handle.plan.axes)  # tokens travel in both


@has_groups
@on_ranks(4)
def test_one_call_over_all_axes_names_the_one_that_knows_several_meshes(rank: int) -> None:
    """Refused on all ranks before anything is set, so that the other call goes on."""
    mesh = meshes(2, 2, names="expert_shard expert")
    model = in_one_module(mesh, 1.0)
    whole = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("shard",))
    with pytest.raises(TypeError, match=r"'1' is sharded over .*call compress_shards instead of compress"):
        compress(model, whole, gradients={"*.expert.*": "quantize(two_shot)", "*": "two_shot"})
    compress_shards(model, gradients={"*.expert.*": "quantize(two_shot)", "*": "two_shot"})
    loss(model, torch.ones(3, 8)).backward()


@on_ranks(2)
def test_one_call_takes_pipelines_by_pattern(rank: int) -> None:
    mesh = meshes(1, 2, names="replicate shard")
    model: Any = nn.Sequential(*blocks())
    for part in (*model, model):
        fully_shard(part, mesh=mesh["shard"])
    handle = compress(model, mesh, gradients={"0.*": "quantize(two_shot)", "*": "two_shot"}, replicas="allreduce")
    loss(model, torch.ones(3, 8)).backward()
    pipelines = [axis.pipeline for axis in handle.plan.axes if axis.name == "gradients"]
    assert sorted(pipelines) == ["quantize(two_shot)", "two_shot"]


@has_groups
@on_ranks(4)
def test_weights_of_tokens_on_two_meshes(rank: int) -> None:
    """Ranks whose tokens go to the same experts give one weight, the number of these; others are named errors."""
    mesh = meshes(2, 2, names="expert_shard expert")
    model, plain = in_one_module(mesh, 4.0), in_one_process()
    handle = compress_shards(model, f"weighted(partition({{'*.expert.*': {LOSSY}, '*': {TWO_SHOT}}}))")
    sizes = [3, 4, 5, 8]
    x = torch.randn(sizes[rank], 8, generator=torch.Generator().manual_seed(rank))
    plain(torch.cat(everyones(x))).square().mean().backward()
    tokens = sum(sizes[:2] if rank < 2 else sizes[2:])
    with handle.weight(tokens):
        (model(x).square().sum() / (tokens / 2 * 8)).backward()
    own, grads = f"expert.{mesh.get_local_rank('expert')}", {name: p.grad for name, p in plain.named_parameters()}
    for name, p in model.named_parameters():
        want, tolerance = grads[name.replace("expert.0", own)], 5e-3 if "expert" in name else 1e-6
        torch.testing.assert_close(p.grad.full_tensor(), want, rtol=1e-4, atol=tolerance)
    state = handle.sync_state
    with (
        pytest.raises((ValueError, StepFailedError), match=r"must all give one weight|failed"),
        handle.weight(1 + rank),
    ):
        model(x).square().mean().backward()
    assert bits(handle.sync_state) == bits(state)


@has_groups
@on_ranks(4)
def test_a_checkpoint_keeps_what_experts_of_each_mesh_have_lost(rank: int, tmp_path: Path) -> None:
    mesh = meshes(2, 2, names="expert_shard expert")
    made = [in_one_module(mesh, 1.0) for _ in range(2)]
    first, other = (compress_shards(model, {"*.expert.*": LOSSY, "*": LOSSY}) for model in made)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))
    loss(made[0], x).backward()
    save(tmp_path, made[0], sync=first)
    load(tmp_path, made[1], sync=other)
    assert bits(other.sync_state) == bits(first.sync_state)
    everyone = everyones(first.sync_state["1[1]"].residual["1.expert.0.weight"])
    assert not torch.equal(everyone[0], everyone[1])


@has_groups
@on_ranks(4)
def test_parameters_that_travel_together_have_one_pipeline(rank: int) -> None:
    mesh = meshes(2, 2, names="expert_shard expert")
    together = r"sends '1.router.weight' and '1.out.weight' together, and they match '\*router\*' and '\*'"
    for pattern, text, error, says in (
        ("*router*", TWO_SHOT, TypeError, together),
        ("*.bert.*", TWO_SHOT, ValueError, r"pattern '\*.bert.\*' gets none"),
        ("*.expert.*", "allreduce", TypeError, "all_reduce does not fit the flat buffers that FSDP sends"),
    ):
        with pytest.raises(error, match=says):
            compress_shards(in_one_module(mesh, 1.0), {pattern: text, "*": LOSSY})


class Decoder(nn.Module):
    """The parts that torchtitan's decoders have."""

    enable_weight_tying = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(zip("01", blocks(), strict=True))
        self.tok_embeddings, self.norm, self.lm_head = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))


def by_torchtitan(mesh: DeviceMesh) -> Any:
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

    model = Decoder()
    apply_fsdp_to_decoder(model, mesh, torch.float32, torch.float32, pp_enabled=False)
    return model


@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("torchtitan", "spmd_types", "tyro")),
    reason="needs torchtitan, spmd_types and tyro",
)
@on_ranks(4)
def test_all_axes_of_a_decoder_that_torchtitan_shards(rank: int) -> None:
    """Gradients are sums: its trainer divides losses by the tokens of all ranks."""
    mesh = meshes(2, 2, names="dp_replicate fsdp")
    native, ours, lossy = by_torchtitan(mesh), by_torchtitan(mesh["fsdp"]), by_torchtitan(mesh["fsdp"])
    for module in native.modules():
        if isinstance(module, FSDPModule):  # gloo has no other operation
            module.set_force_sum_reduction_for_comms(True)
    compress(ours, mesh, gradients="two_shot", weights="allgather", replicas="all_reduce(op='sum')")
    of_replicas = "error_feedback(powersgd(all_reduce(op='sum'), rank=1))"
    compress(lossy, mesh, gradients="quantize(two_shot, bits=4)", weights="quantize(allgather)", replicas=of_replicas)
    generator = torch.Generator().manual_seed(rank)
    steps = [torch.randint(11, (2, 6), generator=generator) for _ in range(3)]
    for model in (native, ours, lossy):
        train(model, steps)
    assert torch.equal(local(ours), local(native))
    everyone = everyones(local(lossy))
    assert torch.equal(everyone[rank], everyone[(rank + 2) % 4])
    assert (local(lossy) - local(native)).norm() < 0.2 * local(native).norm()

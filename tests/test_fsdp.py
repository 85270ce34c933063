"""FSDP2 itself, on four gloo ranks: 2 replicas of 2 shards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fnddp import Link, StepFailedError, allreduce, error_feedback, fp16, powersgd
from fnddp.integrations.checkpoint import load, save
from fnddp.integrations.fsdp import compress_replicas
from fnddp.run import choose as choosing
from fnddp.run.step import Step
from tests.peers import everyones, residual
from tests.ranks import on_ranks

pytestmark = pytest.mark.thorough

SYNC = error_feedback(powersgd(fp16(allreduce), rank=1))


class Net(nn.Module):
    """Shapes that do not divide by the shards, a bias of one element, and a layer that some steps leave out."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 9), nn.Linear(9, 5), nn.Linear(5, 1)])
        self.extra = nn.Linear(5, 5)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, extra: bool = True) -> dict[str, Tensor]:
        first, second, last = self.layers
        x = first(x).tanh()
        x = checkpoint(second, x, use_reentrant=False) if self.checkpointed else second(x)
        return {"out": last(x.tanh() + self.extra(x) if extra else x)}


def meshes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def sharded(mesh: DeviceMesh, seed: int = 0, **options: Any) -> nn.Module:
    checkpointed = options.pop("checkpointed", False)
    torch.manual_seed(seed)
    model = Net(checkpointed)
    for part in [*model.layers, model.extra]:
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batches(steps: int, seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    return [torch.randn(4, 6, generator=generator) for _ in range(steps)]


def train(
    model: nn.Module, steps: list[Tensor], no_sync: Callable[[], Any] = nullcontext, optimizer: Any = None
) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in steps:
        first, second = x.chunk(2)
        with no_sync():
            model(first)["out"].square().mean().backward()
        model(second)["out"].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def shards(model: nn.Module) -> Tensor:
    parameters: Any = model.parameters()
    return torch.cat([p.to_local().detach().flatten() for p in parameters])


@pytest.mark.parametrize("way", ["plain", "checkpointed", "mixed"])
@on_ranks(4)
def test_the_plain_mean_is_that_of_hsdp(rank: int, way: str) -> None:
    """To the bit. The second microbatch is sent together with the first, or in a step of its own."""
    mesh = meshes()
    options: dict[str, Any] = {"plain": {}, "checkpointed": {"checkpointed": True}}.get(way) or {}
    sync: Any = "allreduce"
    if way == "mixed":
        options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}
        sync = "bf16(allreduce)"
    native: Any = sharded(mesh, **options)
    ours: Any = sharded(mesh["shard"], seed=rank, **options)  # replicas begin with the first one's parameters
    replicas = compress_replicas(ours, sync, mesh["replicate"])
    for parameter, mine in zip(native.parameters(), ours.parameters(), strict=True):
        parameter.to_local().detach().copy_(mine.to_local())
    steps = batches(5)
    train(native, steps)
    train(ours, steps)
    assert torch.equal(shards(ours), shards(native))

    @contextmanager
    def at_last() -> Iterator[None]:
        native.set_requires_all_reduce(False)
        yield
        native.set_requires_all_reduce(True)

    train(native, steps, at_last)
    train(ours, steps, replicas.no_sync)
    assert torch.equal(shards(ours), shards(native))


@pytest.mark.parametrize(
    "sync", [repr(SYNC), "error_feedback(quantize(two_shot, bits=4))", "shared_momentum(topk(allgather, ratio=0.2))"]
)
@on_ranks(4)
def test_replicas_stay_equal_with_any_pipeline(rank: int, sync: str) -> None:
    mesh = meshes()
    model = sharded(mesh["shard"])
    replicas = compress_replicas(model, sync, mesh["replicate"])
    train(model, batches(4))
    everyone = everyones(shards(model))
    assert torch.equal(everyone[0], everyone[2])
    assert torch.equal(everyone[1], everyone[3])
    plain = sharded(mesh["shard"])
    compress_replicas(plain, allreduce, mesh["replicate"])
    train(plain, batches(4))
    assert not torch.equal(shards(plain), shards(model))
    plan = replicas.plan
    assert plan is not None
    assert plan.wire_bytes < 4 * sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    assert {c.group for c in plan.collectives} == {mesh["replicate"].get_group().group_name}


@on_ranks(4)
def test_a_failure_on_one_rank_is_one_on_all(rank: int) -> None:
    mesh = meshes()
    model = sharded(mesh["shard"])
    replicas = compress_replicas(model, SYNC, mesh["replicate"])
    train(model, batches(1))
    before, state = shards(model), residual(replicas.state)
    feed, calls = Step.feed, []

    def failing(step: Step, name: str, grad: Tensor) -> None:
        calls.append(name)
        if rank == 3 and len(calls) == 2:
            raise ValueError("the second gradient is odd")
        feed(step, name, grad)

    kind, text = (ValueError, "is odd") if rank == 3 else (StepFailedError, "rank 3 failed with ValueError: the second")
    output = model(batches(1)[0])["out"].sum()
    with mock.patch.object(Step, "feed", failing), pytest.raises(kind, match=text):
        output.backward()
    assert torch.equal(residual(replicas.state), state)
    assert torch.equal(shards(model), before)
    model.zero_grad()
    train(model, batches(2))
    everyone = everyones(shards(model))
    assert torch.equal(everyone[1], everyone[3])


@on_ranks(4)
def test_unused_and_kept_gradients(rank: int) -> None:
    """As torch's DDP: unused on one replica counts as zero, on both it stays None; kept gradients add up."""
    mesh, (x,) = meshes(), batches(1)
    model = sharded(mesh["shard"])
    replicas = compress_replicas(model, SYNC, mesh["replicate"])
    parameters: Any = dict(model.named_parameters())
    model(x, extra=rank < 2)["out"].sum().backward()
    assert parameters["extra.weight"].grad is not None
    model.zero_grad()
    model(x, extra=False)["out"].sum().backward()
    assert parameters["extra.weight"].grad is None

    # What is there is not sent again: of the two backwards each sends its own gradient.
    first = parameters["layers.0.weight"].grad.to_local().clone()
    state = replicas.state
    model(x, extra=False)["out"].sum().backward()
    both = parameters["layers.0.weight"].grad.to_local().clone()
    replicas.state = state
    model.zero_grad()
    model(x, extra=False)["out"].sum().backward()
    assert torch.equal(parameters["layers.0.weight"].grad.to_local() + first, both)
    with (
        pytest.raises(RuntimeError, match=r"no_sync: .* call optimizer.zero_grad\(\) first"),
        replicas.no_sync(),
    ):
        model(x)["out"].sum().backward()


@on_ranks(4)
def test_what_a_last_backward_leaves_out_is_sent_with_it(rank: int) -> None:
    mesh, (x,) = meshes(), batches(1)
    in_two, in_one = sharded(mesh["shard"]), sharded(mesh["shard"])
    replicas = compress_replicas(in_two, allreduce, mesh["replicate"])
    compress_replicas(in_one, allreduce, mesh["replicate"])
    with replicas.no_sync():
        in_two(x)["out"].sum().backward()
    in_two(x, extra=False)["out"].sum().backward()
    (in_one(x)["out"].sum() + in_one(x, extra=False)["out"].sum()).backward()
    for one, other in zip(in_two.parameters(), in_one.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad.to_local(), other.grad.to_local())  # type: ignore[attr-defined]


@on_ranks(4)
def test_what_fsdp_would_do_as_well_raises(rank: int) -> None:
    mesh = meshes()
    with pytest.raises(TypeError, match="'layers.0.weight' is not sharded, .* call fully_shard"):
        compress_replicas(Net(), SYNC, mesh["replicate"])
    with pytest.raises(TypeError, match=r"'layers.0.weight' is on .* FSDP reduces between them already"):
        compress_replicas(sharded(mesh), SYNC, mesh["replicate"])


@on_ranks(4)
def test_a_parameter_that_is_unfrozen_later_raises(rank: int) -> None:
    mesh, (x,) = meshes(), batches(1)
    torch.manual_seed(0)
    model = Net()
    model.extra.requires_grad_(False)
    model = fully_shard(model, mesh=mesh["shard"])
    replicas = compress_replicas(model, allreduce, mesh["replicate"])
    model(x)["out"].sum().backward()
    model.extra.bias.requires_grad_(True)
    with torch.no_grad():
        model(x)
    with pytest.raises(RuntimeError, match=r"extra.bias did not require .* unfreeze parameters before compress_repl"):
        model(x)
    with pytest.raises(AttributeError):
        replicas.sync = SYNC  # type: ignore[misc]


@on_ranks(4)
def test_replicas_of_all_shards_take_one_measured_pipeline(rank: int, tmp_path: Path) -> None:
    """One link is fast, and the other slow; the checkpoint of a run that has found slow ones keeps their pipeline."""
    measured, shard = choosing.measure_link, rank % 2
    try:
        taken: list[Any] = []
        for fast in (shard == 0, False, True):
            choosing.measure_link = lambda *_, fast=fast, **__: Link(1e12 if fast else 1e2)
            mesh = meshes()
            model = sharded(mesh["shard"])
            taken.append((model, compress_replicas(model, "auto", mesh["replicate"])))
        first, slow, last = taken
        chosen = everyones([repr(each.sync.over(None)) for _, each in (first, slow, last)])
        assert chosen == [[repr(slow[1].sync.over(None))] * 2 + ["allreduce"]] * 4
        assert slow[1].sync.over(None) != allreduce
        save(tmp_path, slow[0], sync=slow[1])
        load(tmp_path, last[0], sync=last[1])
        assert last[1].sync.over(None) == slow[1].sync.over(None)
        train(last[0], batches(1))
    finally:
        choosing.measure_link = measured

"""Outer steps between workers that FSDP2 has sharded: as between workers of one process, to the bit."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fnddp
from fnddp import outer
from fnddp.integrations.checkpoint import load, save
from fnddp.integrations.fsdp import plan_axes
from fnddp.laws import bits, gather
from fnddp.run.vote import StepFailedError
from fnddp.wire.c10d import C10d
from fnddp.wire.counter import WireCounter
from tests.models import assert_equal_on_ranks
from tests.ranks import on_ranks
from tests.rings import one_of
from tests.sharded import Net, loss, meshes, sharded, whole
from tests.ways import Trap, failing

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01, foreach=False)
STEPS = {
    "diloco": ("diloco(allreduce, every=3)", SGD),
    "local_sgd": ("local_sgd(every=2, sync=two_shot)", SGD),
    "post_local_sgd": ("post_local_sgd(start=3, every=2, sync=allgather)", SGD),
    "streaming_diloco": ("streaming_diloco(two_shot, every=4, fragments=3, delay=2, alpha=0.5)", SGD),
    "hierarchical_local_sgd": ("hierarchical_local_sgd({2: allgather, 4: allreduce})", SGD),
    "des_loc": (
        "des_loc({'params': diloco(allgather, every=2), 'exp_avg': local_sgd(every=3), 'exp_avg_sq': "
        "local_sgd(every=4)})",
        ADAMW,
    ),
}
CODECS = {
    "4 bits": "diloco(error_feedback(quantize(two_shot, bits=4, block=16)), every=2)",
    "sparse_loco": "sparse_loco(every=2, k=4, chunk=16)",
    "muloco": "muloco(every=2)",
    "powersgd": "diloco(error_feedback(powersgd(allreduce, rank=1)), every=2)",
}


def workers() -> Any:
    return meshes(2, 2, names="worker shard")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, steps: range) -> list[float]:
    """Both shards of a worker see its batches, so that their mean is the gradient of a worker of one process."""
    losses: list[float] = []
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * worker + step))
        optimizer.zero_grad()
        value = loss(model, x)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def attached_model(text: str, mesh: Any = None, seed: int = 0) -> tuple[Any, torch.optim.Optimizer, outer.Attached]:
    mesh = mesh or workers()
    model = sharded(mesh["shard"], seed=seed)
    optimizer = SGD(model.parameters())
    return model, optimizer, outer.attach(model, optimizer, outer.parse(text), group=mesh["worker"])


@pytest.mark.parametrize("name", one_of(3, STEPS))
@on_ranks(4)
def test_workers_that_are_sharded_are_workers_of_one_process_to_the_bit(rank: int, name: str):
    mesh, (text, make), worker = workers(), STEPS[name], rank // 2
    model = sharded(mesh["shard"], seed=worker)
    torch.manual_seed(worker)
    one = Net()
    optimizers = make(model.parameters()), make(one.parameters())
    attached, reference = (
        outer.attach(each, optimizer, outer.parse(text), group=mesh["worker"])
        for each, optimizer in zip((model, one), optimizers, strict=True)
    )
    for step in range(9):
        losses = [
            train(each, o, worker, range(step, step + 1)) for each, o in zip((model, one), optimizers, strict=True)
        ]
        assert losses[0] == losses[1], step
        assert bits(whole(model)) == bits(whole(one)), step
        assert attached.under_way == reference.under_way
    assert [p.to_local().shape for p in model.parameters()] != [p.shape for p in one.parameters()]
    for each in (attached, reference):
        each.detach()


@pytest.mark.parametrize("name", one_of(4, CODECS))
@on_ranks(4)
def test_codecs_and_their_memory_are_those_of_a_shard(rank: int, name: str):
    """What is exchanged is equal on all workers to the bit, and what a rank has not sent stays in its residual."""
    model, optimizer, attached = attached_model(CODECS[name])
    for step in range(6):
        train(model, optimizer, rank // 2, range(step, step + 1))
        everyone = gather(bits(attached.state.anchor))
        assert everyone[rank] == everyone[(rank + 2) % 4]
    shapes = {name: p.to_local().shape for name, p in model.named_parameters()}
    assert {name: each.shape for name, each in attached.state.inner.residual.items()} == shapes
    assert any(each.count_nonzero() for each in attached.state.inner.residual.values())


@pytest.mark.parametrize("delay", [0, 1])
@on_ranks(4)
def test_an_exchange_that_fails_on_one_rank_fails_on_all_of_all_workers_and_writes_on_none(rank: int, delay: int):
    worker = rank // 2
    model, optimizer, attached = attached_model(f"streaming_diloco(allreduce, every=3, fragments=1, delay={delay})")
    train(model, optimizer, worker, range(2))
    with failing(C10d, "start") if rank == 2 else nullcontext():
        train(model, optimizer, worker, range(2, 2 + delay))
        state = bits(attached.state)
        with pytest.raises(Trap if rank == 2 else StepFailedError, match="at start"):
            train(model, optimizer, worker, range(2 + delay, 3 + delay))
    assert bits(attached.state) == state
    train(model, optimizer, worker, range(3 + delay, 4 + delay))
    assert_equal_on_ranks(whole(model))


@on_ranks(4)
def test_a_worker_of_which_some_ranks_count_no_tokens_is_told_of_on_all_ranks(rank: int):
    _, _, attached = attached_model("local_sgd(every=1, sync=weighted(allreduce))")
    if rank != 1:
        attached.count(3)
    error = ValueError if rank < 2 else StepFailedError
    with pytest.raises(error, match="this rank gave none: 1 of the 2 ranks of its worker called count"):
        attached.step()
    attached.count(0)
    attached.step()


@on_ranks(4)
def test_a_forward_that_leaves_weights_whole_hides_nothing_of_what_is_exchanged(rank: int):
    mesh, worker = workers(), rank // 2
    model = sharded(mesh["shard"])
    loss(model, torch.ones(4, 6))  # the last group of parameters stays whole
    attached = outer.attach(model, None, outer.local_sgd(every=1), group=mesh["worker"])
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().fill_(worker)
    loss(model, torch.ones(4, 6))
    attached.step()
    averages = {name: torch.full_like(p, 0.5) for name, p in whole(model).items()}
    assert bits(whole(model)) == bits(averages)
    net = Net()
    net.load_state_dict(averages)
    assert loss(model, torch.ones(4, 6)).item() == loss(net, torch.ones(4, 6)).item()


OTHERS = {
    "none": (lambda mesh: None, "hold different shards of one worker.*; make mesh = init_device_mesh"),
    "two dimensions": (lambda mesh: mesh, "has 2 dimensions"),
    "the shards": (lambda mesh: mesh["shard"], "hold different shards of one worker"),
    "one for all": (lambda mesh: mesh._flatten("all"), "hold different shards of one worker"),
}


@pytest.mark.parametrize("how", OTHERS)
@pytest.mark.parametrize("whose", one_of(2, ["one", "all"]))
@on_ranks(4)
def test_a_group_that_is_not_that_of_the_workers_is_an_error_on_all_ranks(rank: int, how: str, whose: str):
    mesh, (make, says) = workers(), OTHERS[how]
    model, wrong = sharded(mesh["shard"]), make(mesh)
    is_mine = whose == "all" or rank == 3
    with pytest.raises(TypeError if is_mine else fnddp.RankMismatchError, match=says):
        outer.attach(model, None, outer.local_sgd(every=1), group=wrong if is_mine else mesh["worker"])


@on_ranks(4)
def test_what_workers_disagree_about_is_an_error_on_all_ranks(rank: int):
    mesh = workers()
    model = sharded(mesh["shard"])
    with pytest.raises(fnddp.RankMismatchError, match="disagree about pipeline"):
        outer.attach(model, None, outer.local_sgd(every=1 + (rank == 1)), group=mesh["worker"])
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])][rank in (1, 2)]
    with pytest.raises(fnddp.RankMismatchError, match=r"disagree about shard: rank .: .* of \[2\]; rank ."):
        outer.attach(model, None, outer.local_sgd(every=1), group=crossed)
    in_part = sharded(mesh["shard"]) if rank in (0, 2) else Net()
    with pytest.raises(fnddp.RankMismatchError, match="rank [02]: sharded by fully_shard; rank [13]: whole on each"):
        outer.attach(in_part, None, outer.local_sgd(every=1), group=mesh["worker"])
    model = sharded(mesh, seed=1)  # HSDP, which reduces between workers in each step
    with pytest.raises(TypeError, match="hold different shards of one worker"):
        outer.attach(model, None, outer.local_sgd(every=1), group=mesh["worker"])
    part = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(part[0], mesh=mesh["shard"])
    with pytest.raises(TypeError, match=r"'1.weight' is not sharded"):
        outer.attach(part, None, outer.local_sgd(every=1), group=mesh["worker"])


RESUMED = (
    "streaming_diloco(weighted(error_feedback(quantize(two_shot, bits=4, block=16))), every=4, fragments=2, delay=2, "
    "alpha=0.5)"
)


@on_ranks(4)
def test_a_workers_checkpoint_resumes_to_the_bit_and_is_loaded_by_another_number_of_shards(rank: int, tmp_path: Path):
    mesh, worker = workers(), rank // 2

    def loaded(mesh: Any, seed: int) -> Any:
        made = attached_model(RESUMED, mesh, seed)
        own = tmp_path / f"worker{mesh.get_local_rank('worker')}"
        load(own, *made[:2], sync=made[2], group=mesh["shard"].get_group())
        return made

    model, optimizer, attached = attached_model(RESUMED, mesh)
    attached.count(1)
    train(model, optimizer, worker, range(5))
    assert attached.under_way
    attached.count(3 + 4 * rank)
    save(tmp_path / f"worker{worker}", model, optimizer, sync=attached, group=mesh["shard"].get_group())
    residuals = {name: p.residual for name, p in attached.state.inner.items()}

    def unsent_of(worker: int) -> dict[str, dict[str, int]]:
        return {"open": {"1": 2}, "now": {"": 12 + 16 * worker, "0": 10 + 16 * worker}}

    assert attached.unsent == unsent_of(worker)
    train(model, optimizer, worker, range(5, 11))

    again, resumed, other = loaded(mesh, 1)
    train(again, resumed, worker, range(5, 11))
    assert bits(whole(again)) == bits(whole(model))
    assert bits(other.state) == bits(attached.state)
    assert other.unsent == attached.unsent
    for each in (attached, other):
        each.detach()

    fewer = init_device_mesh("cpu", (4, 1), mesh_dim_names=("worker", "shard"))
    if worker == 0:  # two workers of one shard each load what two shards have saved
        (tmp_path / "worker2").symlink_to(tmp_path / "worker0") if rank == 0 else None
        (tmp_path / "worker3").symlink_to(tmp_path / "worker1") if rank == 0 else None
    dist.barrier()
    single, _, one = loaded(fewer, 2)
    saved = {name: p for fragment in one.state.inner.values() for name, p in fragment.residual.items()}
    assert saved.keys() == dict(single.named_parameters()).keys()
    if rank == 0:  # which has loaded what this rank and rank 1 had
        for fragment in residuals.values():
            for name, mine in fragment.items():
                assert bits(saved[name][: len(mine)]) == bits(mine)
    assert all(each.shape == dict(single.named_parameters())[name].shape for name, each in saved.items())
    assert one.unsent == unsent_of(rank % 2)
    one.detach()


@on_ranks(4)
def test_a_checkpoint_of_another_outer_step_is_refused(rank: int, tmp_path: Path):
    mesh = workers()
    folder, group = tmp_path / f"{rank // 2}", mesh["shard"].get_group()
    model, _, attached = attached_model("local_sgd(every=2)", mesh)
    save(folder, model, sync=attached, group=group)
    model, _, other = attached_model("diloco(allreduce, every=2)", mesh)
    with pytest.raises(ValueError, match=r"has the state of local_sgd\(every=2\), which does not fit diloco"):
        load(folder, model, sync=other, group=group)


@on_ranks(4)
def test_the_plan_has_the_bytes_of_a_shard_between_workers(rank: int):
    text = "diloco(bf16(allreduce), every=2)"
    model, _, attached = attached_model(text)
    sent = 2 * sum(p.to_local().numel() for p in model.parameters())
    assert attached.plan.wire_bytes == sent
    with WireCounter() as counter:
        for _ in range(2):
            attached.step()
    assert counter.wire_bytes == sent
    if rank == 0:  # planned without ranks, for the first shard, which is the largest
        leaves = {name: torch.empty(p.shape, device="meta") for name, p in model.named_parameters()}
        for planned, trees in ((text, 1), (f"des_loc({{'params': {text}, 'exp_avg': {text}}})", 2)):
            between = plan_axes({"": leaves}, world_size={"shards": 2, "workers": 2}, outer=planned).axes[-1]
            assert (between.name, between.ranks, between.steps, between.wire_bytes) == ("workers", 2, 2, trees * sent)

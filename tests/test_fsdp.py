"""FSDP2 itself, on four gloo ranks: 2 replicas of 2 shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fnddp import Link, allreduce, error_feedback, fp16, powersgd
from fnddp.integrations.checkpoint import load, save
from fnddp.integrations.fsdp import compress_replicas
from fnddp.run import choose as choosing
from tests.peers import everyones
from tests.ranks import on_ranks
from tests.sharded import Net, batches, local, loss, meshes, sharded, switched_off, train

pytestmark = pytest.mark.thorough

SYNC = error_feedback(powersgd(fp16(allreduce), rank=1))
IN_16_BITS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def replicated(sync: Any, *shape: int, **options: Any) -> tuple[Any, Any]:
    mesh = meshes(*(shape or (2, 2)))
    model = sharded(mesh["shard"], **options)
    return model, compress_replicas(model, sync, mesh["replicate"])


@pytest.mark.parametrize(
    ("sync", "options"),
    [("allreduce", {}), ("allreduce", {"checkpointed": True}), ("bf16(allreduce)", {"mp_policy": IN_16_BITS})],
    ids=["plain", "checkpointed", "mixed"],
)
@on_ranks(4)
def test_the_plain_mean_is_that_of_hsdp(rank: int, sync: str, options: dict[str, Any]) -> None:
    """To the bit. The second microbatch is sent together with the first, or in a step of its own."""
    native = sharded(meshes(2, 2), **options)
    ours, replicas = replicated(sync, seed=rank, **options)  # replicas begin with the first one's parameters
    for parameter, mine in zip(native.parameters(), ours.parameters(), strict=True):
        parameter.to_local().detach().copy_(mine.to_local())
    steps = batches(5)
    train(native, steps)
    train(ours, steps)
    assert torch.equal(local(ours), local(native))
    train(native, steps, lambda: switched_off(native.set_requires_all_reduce))
    train(ours, steps, replicas.no_sync)
    assert torch.equal(local(ours), local(native))


@on_ranks(4)
def test_unused_and_kept_gradients(rank: int) -> None:
    """As torch's DDP: unused on one replica counts as zero, on both it stays None; kept gradients add up."""
    (model, replicas), (x,) = replicated(SYNC), batches(1)
    parameters = dict(model.named_parameters())
    loss(model, x, extra=False).backward()
    assert parameters["extra.weight"].grad is None
    loss(model, x, extra=rank < 2).backward()
    assert parameters["extra.weight"].grad is not None
    model.zero_grad()
    loss(model, x, extra=False).backward()

    # What is there is not sent again: of the two backwards each sends its own gradient.
    first = parameters["layers.0.weight"].grad.to_local().clone()
    state = replicas.sync_state
    loss(model, x, extra=False).backward()
    both = parameters["layers.0.weight"].grad.to_local().clone()
    replicas.sync_state = state
    model.zero_grad()
    loss(model, x, extra=False).backward()
    assert torch.equal(parameters["layers.0.weight"].grad.to_local() + first, both)
    with (
        pytest.raises(RuntimeError, match=r"no_sync: .* call optimizer.zero_grad\(\) first"),
        replicas.no_sync(),
    ):
        loss(model, x).backward()


@on_ranks(4)
def test_what_a_residual_sends_of_an_unused_leaf_is_its_gradient(rank: int) -> None:
    """On all shards, also on those that have nothing of it: the norm of all shards is a collective."""
    (model, replicas), (x,) = replicated("error_feedback(topk(allgather, k=1))"), batches(1)
    parameters = dict(model.named_parameters())
    state = replicas.sync_state
    before = torch.full_like(state.residual["extra.weight"], 0.0 if rank % 2 else 2.0)
    state.residual["extra.weight"] = before.clone()
    replicas.sync_state = state
    loss(model, x, extra=False).backward()
    grad, left = parameters["extra.weight"].grad.to_local(), replicas.sync_state.residual["extra.weight"]
    assert torch.equal(grad + left, before)
    assert grad.count_nonzero() == 1 - rank % 2
    assert parameters["extra.bias"].grad is None
    assert torch.nn.utils.get_total_norm([parameters["extra.weight"].grad]).full_tensor() == 2

    # Not where it has been frozen meanwhile.
    model.zero_grad()
    parameters["extra.weight"].requires_grad_(False)
    loss(model, x, extra=False).backward()
    assert parameters["extra.weight"].grad is None


@on_ranks(4)
def test_what_needs_whole_leaves_is_refused_between_replicas_of_several_shards(rank: int) -> None:
    """Each shard would be scaled by a norm of its own."""
    sync = "clip_by_global_norm(allreduce, 1.0)"
    with pytest.raises(
        TypeError, match=r"needs whole leaves, but here each rank has only a shard of each leaf; .*clip_grad_norm_"
    ):
        replicated(sync)
    replicated(sync, 4, 1)


@on_ranks(4)
def test_what_a_last_backward_leaves_out_is_sent_with_it(rank: int) -> None:
    (in_two, replicas), (in_one, _), (x,) = replicated(allreduce), replicated(allreduce), batches(1)
    with replicas.no_sync():
        loss(in_two, x).backward()
    loss(in_two, x, extra=False).backward()
    (loss(in_one, x) + loss(in_one, x, extra=False)).backward()
    for one, other in zip(in_two.parameters(), in_one.parameters(), strict=True):
        torch.testing.assert_close(one.grad.to_local(), other.grad.to_local())


@on_ranks(4)
def test_what_would_not_be_synchronized_raises(rank: int) -> None:
    mesh, (x,) = meshes(2, 2), batches(1)
    with pytest.raises(TypeError, match="'layers.0.weight' is not sharded, .* call fully_shard"):
        compress_replicas(Net(), SYNC, mesh["replicate"])
    with pytest.raises(TypeError, match=r"'layers.0.weight' is on .* FSDP reduces between them already"):
        compress_replicas(sharded(mesh), SYNC, mesh["replicate"])
    model, replicas = replicated(allreduce, frozen=True)
    loss(model, x).backward()
    model.layers[1].weight.requires_grad_(True)
    with torch.no_grad():
        model(x)
    with pytest.raises(
        RuntimeError, match=r"layers.1.weight required no gradient.* unfreeze parameters before compress_r"
    ):
        model(x)
    with pytest.raises(AttributeError):
        replicas.sync = SYNC  # type: ignore[misc]


@on_ranks(4)
def test_a_hook_that_takes_gradients_in_backward_is_an_error(rank: int) -> None:
    """As an optimizer does that steps there: replicas would train apart."""
    mesh, (x,) = meshes(2, 2), batches(1)
    for is_first in (True, False):
        model = sharded(mesh["shard"])
        if not is_first:
            compress_replicas(model, allreduce, mesh["replicate"])
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        if is_first:
            compress_replicas(model, allreduce, mesh["replicate"])
        with pytest.raises(RuntimeError, match="a hook took the gradient of .* step optimizers after backward"):
            loss(model, x).backward()


@on_ranks(4)
def test_replicas_of_all_shards_take_one_measured_pipeline(rank: int, tmp_path: Path) -> None:
    """One link is fast, and the other slow; the checkpoint of a run that has found slow ones keeps their pipeline."""
    with pytest.MonkeyPatch.context() as patch:
        taken: list[Any] = []
        for fast in (rank % 2 == 0, False, True):
            patch.setattr(choosing, "measure_link", lambda *_, fast=fast, **__: Link(1e12 if fast else 1e2))
            taken.append(replicated("auto"))
        first, slow, last = taken
        chosen = everyones([repr(each.sync.over(None)) for _, each in (first, slow, last)])
        assert chosen == [[repr(slow[1].sync.over(None))] * 2 + ["allreduce"]] * 4
        assert slow[1].sync.over(None) != allreduce
        save(tmp_path, slow[0], sync=slow[1])
        load(tmp_path, last[0], sync=last[1])
        assert last[1].sync.over(None) == slow[1].sync.over(None)
        train(last[0], batches(1))


@on_ranks(2)
def test_gradients_of_inputs_on_one_replica_are_no_step(rank: int) -> None:
    """An evaluation of the first replica alone, as it would be without replicas."""
    model, replicas = replicated(SYNC, 2, 1)
    for x in batches(3):
        if rank == 0:
            inputs = x.clone().requires_grad_()
            assert torch.autograd.grad(loss(model, inputs), inputs)[0].any()
        model.zero_grad()
        loss(model, x).backward()
        grads = torch.cat([p.grad.to_local().flatten() for p in model.parameters()])
        assert torch.equal(*everyones(grads))
    assert replicas.sync_stats()["steps"] == 3

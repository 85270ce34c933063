"""What torch may move in any release, and where: each is a failing test with a sentence before it is a user's crash."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fnddp.integrations.fsdp import compress_replicas, compress_shards
from fnddp.torch_private import after_reductions, fsdp_groups
from fnddp.wire.counter import COUNTED
from tests.ranks import on_ranks
from tests.sharded import batches, local, loss, meshes, sharded, switched_off, train

VERSION = f"torch {torch.__version__}"
BF16 = torch.bfloat16
BY_PARAMETER = "param_dtype_override_fn" in inspect.signature(MixedPrecisionPolicy).parameters
by_parameter = pytest.mark.skipif(not BY_PARAMETER, reason="from torch 2.15 precision is by parameter")


class Gained(nn.Module):
    """Parameters of which some may have another dtype than others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain, self.weight, self.offset = (nn.Parameter(torch.randn(*size)) for size in ((2,), (5, 2), (2,)))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).float() * self.gain.float() + self.offset.float()


class Spy:
    """A reduce-scatter and an all-gather of FSDP's that note their calls, and give ones."""

    def __init__(self, name: str, called: list[Any]) -> None:
        self.name, self.called = name, called

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        self.called.append((self.name, input_tensor.dtype))
        output_tensor.fill_(1)


def policy(*dtypes: Any, **more: Any) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(*dtypes, **more)}


def norms_stay(p: nn.Parameter) -> torch.dtype | None:
    return p.dtype if p.ndim == 1 else None


@pytest.mark.parametrize(
    "options",
    [
        *({}, policy(BF16), policy(BF16, BF16), policy(BF16, torch.float32)),
        pytest.param(policy(BF16, param_dtype_override_fn=norms_stay) if BY_PARAMETER else {}, marks=by_parameter),
    ],
)
@on_ranks(2)
def test_fsdp_calls_what_codecs_are_plugged_into(rank: int, options: dict[str, Any]) -> None:
    model: Any = fully_shard(Gained(), **options)
    ((_, (group,)),) = fsdp_groups(model).values()
    called: list[Any] = []
    group.reduce_with(Spy("reduces", called), 4.0)
    group.gather_with(Spy("gathers", called))
    group.before_reduction(lambda positions: called.append(("notes", positions)))
    after_reductions(model, lambda: called.append(("ends", None)))
    model(torch.ones(3, 5)).sum().backward()
    dtypes = group.gathered_dtype, group.reduced_dtype
    wanted = [("gathers", dtypes[0]), ("notes", [0, 1, 2]), ("reduces", dtypes[1]), ("ends", None)]
    assert called == wanted, f"{VERSION}: FSDP2 no longer calls what FSDPGroup in torch_private.py replaces, or differs"
    factor = {p.grad.to_local().unique().item() for p in model.parameters()}
    assert factor == {0.25}, f"{VERSION}: FSDP2 does not divide a sum by its gradient_divide_factor alone"


@on_ranks(2)
def test_fsdp_has_what_is_read_of_it(rank: int) -> None:
    model: Any = fully_shard(nn.Linear(4, 2), reshard_after_forward=True)
    ((module, (group,)),) = fsdp_groups(model).values()
    assert (module, group.module) == (model, model)
    assert (group.shapes, group.dims) == ([torch.Size([2, 4]), torch.Size([2])], [0, 0])
    assert [group.shards.size(), group.regathering and group.regathering.size(), group.replicas] == [2, 2, None]
    assert (group.reduces, group.all_reduces, group.divide_factor) == (True, True, None)
    assert (group.custom_comms, group.is_extended, group.device.type) == ([], False, "cpu")
    model.set_requires_gradient_sync(False)
    assert not group.reduces


def test_collectives_are_those_that_are_counted():
    """Point-to-point messages and barriers are none."""
    schemas = torch._C._jit_get_all_schemas()
    names = {s.name for s in schemas if s.name.startswith(("c10d::", "_c10d_functional::"))}
    others = "barrier check_for_nan monitored_barrier_ recv_ recv_any_source_ send scatter_ allgather_coalesced_ " + (
        "allgather_into_tensor_coalesced_ reduce_scatter_tensor_coalesced_"
    )
    functional = "wait_tensor wait_tensors isend irecv batch_p2p_ops _wrap_tensor_autograd"
    known = {
        *(f"c10d::{name}" for name in others.split()),
        *(f"_c10d_functional::{name}" for name in functional.split()),
    }
    new = sorted(names - known - COUNTED)
    assert not new, f"{VERSION} has the collectives {new}; let WireCounter count them, or say here that they are none"


@by_parameter
@pytest.mark.parametrize("codec", ["two_shot", "quantize(two_shot)"])
@on_ranks(2)
def test_gradients_of_several_dtypes_travel_in_fsdps_order(rank: int, codec: str) -> None:
    """FSDP sorts them by dtype: what goes to one parameter must not go to another."""
    made: list[Any] = []
    for _ in range(2):
        module = Gained()
        module.weight.grad_dtype = BF16
        made.append(fully_shard(module, **policy(BF16, param_dtype_override_fn=norms_stay)))
    native, ours = made
    compress_shards(ours, codec, None)
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
    for model in made:
        model(x).square().mean().backward()
    for (name, p), q in zip(native.named_parameters(), ours.parameters(), strict=True):
        assert p.grad.dtype == q.grad.dtype == (BF16 if name == "weight" else torch.float32)
        tolerance = 0.0 if codec == "two_shot" else 0.1  # of gradients of 1 and more
        torch.testing.assert_close(q.grad.to_local(), p.grad.to_local(), rtol=0.0, atol=tolerance, msg=name)


@pytest.mark.skipif(not hasattr(FSDPModule, "finalize_backward"), reason="from torch 2.15 users end backwards")
@pytest.mark.parametrize("axis", ["shards", "replicas"])
@on_ranks(2)
def test_backwards_that_users_end(rank: int, axis: str) -> None:
    """All gradients are reduced behind the last backward, outside of any."""
    mesh = meshes(*((1, 2) if axis == "shards" else (2, 1)))
    native = sharded(mesh if axis == "replicas" else mesh["shard"])
    ours = sharded(mesh["shard"])
    if axis == "shards":
        handle: Any = compress_shards(ours, "two_shot", "allgather")
    else:
        handle = compress_replicas(ours, "allreduce", mesh["replicate"])
    for model in (native, ours):
        model.set_manual_backward_finalization(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in batches(2):
            model.set_requires_gradient_sync(False)
            loss(model, x[:2]).backward()
            loss(model, x[2:]).backward()
            model.set_requires_gradient_sync(True)
            model.finalize_backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(local(ours), local(native))
    assert handle.steps == 2 if axis == "shards" else handle.sync_stats()["steps"] == 2


@pytest.mark.skipif(not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="from torch 2.13")
@on_ranks(2)
def test_a_group_of_its_own_for_gradients(rank: int) -> None:
    native, ours = sharded(), sharded()
    ours.set_separate_reduce_scatter_group(True)
    handle: Any = compress_shards(ours, "two_shot", "allgather")
    train(native, batches(2), lambda: switched_off(native.set_requires_gradient_sync))
    train(ours, batches(2), handle.no_sync)
    assert torch.equal(local(ours), local(native))
    *_, (_, (group,)) = fsdp_groups(ours).values()
    ours_of_it = handle._reductions.units[-1]._pipeline()[0].group
    assert ours_of_it == group.reducing.group_name != group.shards.group_name


@by_parameter
@pytest.mark.thorough
@on_ranks(4)
def test_sums_that_wait_for_replicas_keep_what_a_later_backward_leaves_out(rank: int) -> None:
    """FSDP fills in zeros for what it has a sum of: gradients of a reduction are not those of that backward."""
    mesh = meshes(2, 2)
    native, ours = sharded(mesh, grouped=True), sharded(mesh, grouped=True)
    compress_shards(ours, "two_shot", "allgather")
    for model in (native, ours):
        for x in batches(2):
            with switched_off(model.set_requires_all_reduce):
                loss(model, x[:2]).backward()
            loss(model, x[2:], extra=False).backward()
    for (name, p), q in zip(native.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad.to_local(), p.grad.to_local(), rtol=1e-6, atol=1e-7, msg=name)

"""Muon on FSDP2's shards: the weights of torch's Muon on whole matrices, on shards of any number, and of HSDP."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import fnddp
from fnddp import StepFailedError
from fnddp.core import collectives
from fnddp.core.codec import encode
from fnddp.integrations.checkpoint import async_save, load, save
from fnddp.integrations.fsdp import Matrices, compress_replicas, compress_shards, matrices, own_matrices
from fnddp.laws import bits, gather
from tests.ranks import on_ranks
from tests.sharded import meshes

APART = 1e-5  # MiB: each owner's matrices travel in messages of their own
FEW_BITS = "quantize(allgather, bits=4)", "ef21(quantize(allgather, bits=4))"


def net() -> nn.Sequential:
    """Rows that do not divide by the shards."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 13), nn.Tanh(), nn.Linear(13, 21), nn.Tanh(), nn.Linear(21, 7))


def muon_of(model: nn.Module) -> torch.optim.Muon:
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 9, generator=torch.Generator().manual_seed(10 * rank + step))


class Sharded:
    def __init__(
        self,
        *hops: str,
        shape: tuple[int, ...] = (),
        wraps: bool = True,
        replicas: bool = False,
        muon: Callable[[nn.Module], Any] = muon_of,
        **options: Any,
    ) -> None:
        mesh = meshes(*(shape or (dist.get_world_size(),)), names="replicate shard" if len(shape) > 1 else "shard")
        self.net: Any = net()
        of_shards = mesh["shard"] if replicas else mesh
        for part in self.net:
            if isinstance(part, nn.Linear):
                fully_shard(part, mesh=of_shards)
        fully_shard(self.net, mesh=of_shards)
        if replicas:
            compress_replicas(self.net, "allreduce", mesh["replicate"])
        self.muon = muon(self.net)
        if wraps:
            self.matrices: Matrices = own_matrices(self.net, self.muon, *hops, **options)

    def backward(self, rank: int, step: int) -> None:
        (self.net(batch(rank, step)) - 1).square().mean().backward()

    def step(self, rank: int, step: int) -> None:
        self.backward(rank, step)
        self.muon.step()
        self.net.zero_grad()

    def weights(self) -> list[Tensor]:
        return [p.full_tensor().detach() for p in self.net.parameters()]


def with_momentum(model: nn.Module) -> torch.optim.Muon:
    muon = muon_of(model)
    for p in muon.param_groups[0]["params"]:
        muon.state[p]["momentum_buffer"] = p.detach().clone()
    return muon


def reference(rank: int, steps: int, muon_of: Callable[[nn.Module], Any] = muon_of, clip: float = 0.0) -> list[Tensor]:
    model = net()
    muon, wrapped = muon_of(model), fnddp.DistributedDataParallel(model, sync="two_shot")
    for step in range(steps):
        (wrapped(batch(rank, step)) - 1).square().mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        muon.step()
        model.zero_grad()
    return list(model.parameters())


@on_ranks(3)
def test_checkpoints_of_shards_do_not_take_matrices_of_owners(rank: int, tmp_path: Path):
    sharded = Sharded()
    compressed = compress_shards(sharded.net, "two_shot")
    for run in (save, async_save, load):
        with pytest.raises(TypeError, match=r"Muon keeps its state at the owners.*call optimizer_state_dict"):
            run(tmp_path, sharded.net, sharded.muon, sync=compressed)
    dist.barrier()  # no rank leaves while another is still connecting


@pytest.mark.parametrize("cap", [None, APART], ids=["one message", "a message each"])
@pytest.mark.parametrize("shape", [(), (2, 2)], ids=["shards", "HSDP"])
@on_ranks(2, 3, 4)
def test_weights_are_those_of_muon_on_whole_matrices(rank: int, shape: tuple[int, ...], cap: float | None):
    if shape and dist.get_world_size() != 4:
        return
    sharded = Sharded(shape=shape, bucket_cap_mb=cap)
    for step in range(4):
        sharded.step(rank, step)
    for got, want in zip(sharded.weights(), reference(rank, 4), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0 if dist.get_world_size() < 4 else 1e-4)
    sizes = gather(sum(v.numel() for s in sharded.muon.state.values() for v in s.values()))
    whole = sum(p.numel() for p in net().parameters() if p.ndim == 2)
    assert sum(sizes) == whole * (2 if shape else 1)  # a replica has all of it


@on_ranks(2)
def test_few_bits_both_ways(rank: int):
    sharded, apart = Sharded(*FEW_BITS), Sharded(*FEW_BITS, bucket_cap_mb=APART)
    for step in range(3):
        sharded.step(rank, step)
        apart.step(rank, step)
    assert all(map(torch.equal, apart.weights(), sharded.weights()))
    for got, want in zip(sharded.weights(), reference(rank, 3), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0.06)  # three steps of 0.02, whose signs may differ


@on_ranks(2)
def test_gradients_that_are_clipped_count(rank: int):
    sharded = Sharded()
    sharded.backward(rank, 0)
    assert torch.nn.utils.clip_grad_norm_(sharded.net.parameters(), 0.01) > 0.01
    sharded.muon.step()
    for got, want in zip(sharded.weights(), reference(rank, 1, clip=0.01), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-3)  # Muon computes in bfloat16


class Noted(torch.optim.Muon):
    """Notes in `events` which matrices it computes, and fails at one of `fails_at` elements."""

    def __init__(self, model: nn.Module, events: list[Any], fails_at: int = 0) -> None:
        super().__init__([p for p in model.parameters() if p.ndim == 2], lr=0.02)
        self.events, self.fails_at = events, fails_at

    def step(self, closure: Any = None) -> Any:
        sizes = [p.numel() for group in self.param_groups for p in group["params"]]
        self.events.append(sizes)
        if self.fails_at in sizes:
            raise ZeroDivisionError("of a matrix")
        return super().step(closure)


@on_ranks(2)
def test_messages_of_other_matrices_are_under_way_while_one_is_computed(rank: int):
    """Order, not time: those of the next matrices have begun, and none of it or of the last one is awaited before."""
    events: list[Any] = []
    start, count = collectives.start_all_to_all, 0

    def noted(*args: Any) -> Any:
        nonlocal count
        wait, number, count = start(*args), count, count + 1
        events.append(f"start {number}")
        return lambda: (events.append(f"wait {number}"), wait())[1]

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(6)])  # three matrices each
    mesh = meshes(2, names="shard")
    fully_shard(model, mesh=mesh)
    muon = Noted(model, events)
    own_matrices(model, muon, bucket_cap_mb=APART)
    model(torch.ones(4, 8)).square().mean().backward()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(collectives, "start_all_to_all", noted)
        muon.step()
    computed = [64]
    to_owners, back = ("start 0", "start 1", "start 3"), ("start 2", "start 4", "start 5")
    assert events == [
        *(to_owners[0], to_owners[1], "wait 0", computed, back[0]),
        *(to_owners[2], "wait 1", computed, "wait 2", back[1]),
        *("wait 3", computed, "wait 4", back[2], "wait 5"),
    ]


@pytest.mark.parametrize("fails_at", [9 * 13, 13 * 21, 21 * 7], ids=["first", "second", "third"])
@on_ranks(2)
def test_an_error_of_an_owner_is_one_on_all_ranks(rank: int, fails_at: int):
    sharded = Sharded(muon=lambda model: Noted(model, []), bucket_cap_mb=APART)
    sharded.step(rank, 0)
    before = sharded.weights()
    sharded.backward(rank, 1)
    with pytest.raises((TypeError, StepFailedError), match="closure|nothing has changed"):
        sharded.muon.step((lambda: torch.ones(())) if rank else None) if rank else sharded.muon.step()
    hook = sharded.muon.register_step_pre_hook(lambda *_: 1 / 0 if rank else None)
    with pytest.raises((ZeroDivisionError, StepFailedError), match="division|nothing has changed"):
        sharded.muon.step()
    hook.remove()
    sharded.muon.fails_at = fails_at
    with pytest.raises((ZeroDivisionError, StepFailedError), match="of a matrix|restart from a checkpoint"):
        sharded.muon.step()
    assert all(map(torch.equal, sharded.weights(), before))
    assert all(p.grad is not None for p in sharded.muon.param_groups[0]["params"])  # shards again


@on_ranks(2, 4)
def test_gradients_that_a_rank_lacks_are_an_error_on_all_ranks(rank: int):
    """Also on the other replica, of `compress_replicas`: with HSDP it is on the mesh of the parameters."""
    replicas: Any = {"replicas": True, "shape": (2, 2)} if dist.get_world_size() == 4 else {}
    sharded = Sharded(wraps=False, **replicas)
    with pytest.raises((ValueError, fnddp.RankMismatchError), match="nosuch|set-up"):
        own_matrices(sharded.net, sharded.muon, "nosuch" if rank == 1 else "allgather")
    with pytest.raises((TypeError, fnddp.RankMismatchError), match="expected an optimizer|set-up"):
        own_matrices(sharded.net, None if rank == 1 else sharded.muon)  # type: ignore[arg-type]
    own_matrices(sharded.net, sharded.muon)
    sharded.step(rank, 0)
    sharded.backward(rank, 1)
    grad = sharded.net[0].weight.grad
    if rank == 1:
        sharded.net[0].weight.grad = None
    with pytest.raises(RuntimeError, match="have gradients of different matrices"):
        sharded.muon.step()
    sharded.net[0].weight.grad = grad
    sharded.muon.step()
    for got, want in zip(sharded.weights(), reference(rank, 2), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 if replicas else 0)  # they add in another order


@on_ranks(2)
def test_a_state_of_shards_goes_to_the_owners(rank: int):
    sharded = Sharded(muon=with_momentum)
    for step in range(2):
        sharded.step(rank, step)
    assert all(map(torch.equal, sharded.weights(), reference(rank, 2, with_momentum)))
    other = Sharded(wraps=False)
    if rank == 1:
        other.muon.state[other.net[0].weight]["momentum_buffer"] = torch.zeros(6, 9)
    with pytest.raises((TypeError, StepFailedError, fnddp.RankMismatchError), match="cannot be put together"):
        own_matrices(other.net, other.muon)


@on_ranks(2)
def test_parameters_that_are_replaced_are_an_error_on_all_ranks(rank: int):
    """The optimizer has those of before, which no backward reaches any more."""
    sharded = Sharded()
    sharded.step(rank, 0)
    if rank == 1:
        sharded.net.load_state_dict(sharded.net.state_dict(), assign=True)
    with pytest.raises((RuntimeError, StepFailedError), match="'0.weight' was replaced in the model|on another rank"):
        sharded.muon.step()


@on_ranks(2)
def test_a_write_to_one_matrix_leaves_owners_the_exact_weights_of_the_others(rank: int):
    """Which codecs round on their way to shards: an update below that would be lost for good."""
    sharded = Sharded("allgather", "quantize(allgather, bits=4)")
    sharded.step(rank, 0)
    before = sharded.matrices.optimizer_state_dict()["weights"]
    with torch.no_grad():
        sharded.net[0].weight.mul_(0.5)
    after = sharded.matrices.optimizer_state_dict()["weights"]
    assert torch.equal(after["2.weight"], before["2.weight"])
    assert not torch.equal(after["0.weight"], before["0.weight"])


@pytest.mark.parametrize("hop", ["gradients", "weights"])
@on_ranks(2)
def test_an_error_of_a_codec_is_one_on_all_ranks(rank: int, hop: str):
    sharded = Sharded("quantize(allgather)", "quantize(allgather, bits=4)", bucket_cap_mb=APART)
    sharded.step(rank, 0)
    before = sharded.weights()
    sharded.backward(rank, 1)

    def failing(layers: Any, x: Tensor, key: Any) -> Any:
        if rank == 1 and not x.is_meta and key.name.endswith("again") == (hop == "weights"):
            raise ZeroDivisionError("of a codec")
        return encode(layers, x, key)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(matrices, "encode", failing)
        with pytest.raises(ZeroDivisionError if rank == 1 else StepFailedError, match="of a codec|restart"):
            sharded.muon.step()
    assert all(map(torch.equal, sharded.weights(), before))
    with pytest.raises(RuntimeError, match="an earlier step failed"):
        sharded.muon.step()


@on_ranks(2)
def test_what_does_not_fit_is_refused_on_all_ranks(rank: int):
    plain, sharded, fits = net(), Sharded(), fully_shard(net(), mesh=meshes(2, names="shard"))
    averages = "ef21(quantize(allgather), eta=0.5)"
    bad: list[tuple[Any, Any, tuple[str, ...], type[Exception], str]] = [
        (plain, muon_of(plain), (), TypeError, "'0.weight' is float32.*call fully_shard first"),
        (fits, torch.optim.SGD(fits.parameters()), (), TypeError, "not a matrix that FSDP2 shards"),
        (fits, muon_of(plain), (), ValueError, "not the model's"),
        (fits, muon_of(fits), ("ef21(quantize(allgather))",), TypeError, "ef21"),
        (fits, muon_of(fits), ("allgather", averages), TypeError, "own_matrices: weights=.*without an average"),
        (fits, muon_of(fits), ("allgather" if rank else "bf16(allgather)",), fnddp.RankMismatchError, "gradients"),
        (sharded.net, sharded.muon, (), TypeError, "is already used by"),
        (fits, torch.optim.LBFGS([fits[0].weight]), (), TypeError, "LBFGS evaluates a closure"),
        (fits, torch.optim.Muon, (), TypeError, "expected an optimizer"),
        (fits, torch.optim.Muon([fits[2].weight], lr=0.1 + rank), (), fnddp.RankMismatchError, "rates of Muon"),
    ]
    for wrong, optimizer, hops, error, text in bad:
        with pytest.raises(error, match=text):
            own_matrices(wrong, optimizer, *hops)
    for cap in (0, -1, float("nan"), float("inf"), "x", True):
        with pytest.raises(ValueError, match=r"bucket_cap_mb: .* size .*in MiB" if rank else "set-up"):
            own_matrices(fits, muon_of(fits), bucket_cap_mb=cap if rank else None)  # type: ignore[arg-type]
    saved = sharded.matrices.optimizer_state_dict()
    saved["param_groups"][0]["params"] = ["0.weight"]
    with pytest.raises(ValueError, match="names differ"):
        sharded.matrices.load_optimizer_state_dict(saved)
    sharded.step(rank, 0)
    added = fully_shard(nn.Linear(3, 3, bias=False), mesh=meshes(2, names="shard"))
    sharded.muon.add_param_group({"params": list(added.parameters())})
    sharded.backward(rank, 1)
    before = sharded.weights()
    for use in (sharded.muon.step, sharded.matrices.optimizer_state_dict):
        with pytest.raises(RuntimeError, match=r"own_matrices: a parameter of shape \(3, 3\) was added to Muon"):
            use()
    assert all(map(torch.equal, sharded.weights(), before))


@pytest.mark.parametrize("hops", [("two_shot", "allgather"), ("two_shot", FEW_BITS[1])], ids=["exact", "4 bits"])
@on_ranks(2)
def test_owners_of_shards_and_of_leaves_load_each_others_checkpoints(rank: int, hops: tuple[str, str], tmp_path: Path):
    model = net()
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("weight"))
    muon = muon_of(model)
    owned = fnddp.own(model, muon, *hops)
    sharded, again = Sharded("allgather", hops[1]), Sharded("allgather", hops[1])
    for step in range(2):
        (owned(batch(rank, step)) - 1).square().mean().backward()
        muon.step()
        owned.zero_grad()
    saved = owned.optimizer_state_dict()
    sharded.matrices.load_optimizer_state_dict(saved)
    assert bits(sharded.matrices.optimizer_state_dict()["state"]) == bits(saved["state"])
    assert bits(sharded.matrices.optimizer_state_dict()["weights"]) == bits(saved["weights"])
    sharded.step(rank, 0)
    saved = sharded.matrices.optimizer_state_dict()
    for each in (owned, again.matrices):
        each.load_optimizer_state_dict(saved)
        found = each.optimizer_state_dict()
        assert bits([found["state"], found["weights"]]) == bits([saved["state"], saved["weights"]])
    fresh = Sharded("allgather", hops[1])
    dcp.save({"optimizer": owned.optimizer_checkpoint()}, checkpoint_id=tmp_path)
    dcp.load({"optimizer": fresh.matrices.optimizer_checkpoint()}, checkpoint_id=tmp_path)
    assert bits(fresh.matrices.optimizer_state_dict()["state"]) == bits(saved["state"])


@on_ranks(2)
def test_a_state_of_shards_loads_by_name(rank: int):
    """That of torch, of a run without owners. The optimizer's own method would give an owner its shard."""

    class Momentum(torch.optim.SGD):
        def __init__(self, model: nn.Module) -> None:
            super().__init__([p for p in model.parameters() if p.ndim == 2], lr=0.1, momentum=0.9)

    whole, owned = Sharded(muon=Momentum, wraps=False), Sharded(muon=Momentum)
    for step in range(2):
        whole.step(rank, step)
    owned.net.load_state_dict({name: p.clone() for name, p in whole.net.state_dict().items()})
    owned.matrices.load_optimizer_state_dict(get_optimizer_state_dict(whole.net, whole.muon))
    for each in (whole, owned):
        each.step(rank, 2)
    assert all(map(torch.equal, owned.weights(), whole.weights()))
    torchs = Sharded()
    saved = copy.deepcopy(muon_of(torchs.net).state_dict())
    saved["state"] = {i: {"momentum_buffer": p.detach()} for i, p in enumerate(torchs.muon.param_groups[0]["params"])}
    with pytest.raises(ValueError, match=r"own_matrices: 'momentum_buffer' of '.*load_optimizer_state_dict"):
        torchs.muon.load_state_dict(saved)


@on_ranks(2)
def test_ranks_that_step_optimizers_in_another_order_are_told_before_anything_changes(rank: int):
    """Whatever the numbers of their matrices."""
    sharded = Sharded(wraps=False)
    first, second = (torch.optim.Muon([sharded.net[i].weight for i in of], lr=0.02) for of in ((0, 2), (4,)))
    for each in (first, second):
        own_matrices(sharded.net, each)
    sharded.backward(rank, 0)
    before = sharded.weights()
    with pytest.raises(RuntimeError, match="step different optimizers"):
        (second if rank else first).step()
    assert all(map(torch.equal, sharded.weights(), before))
    for each in (first, second):
        each.step()
    assert all(map(torch.equal, sharded.weights(), reference(rank, 1)))

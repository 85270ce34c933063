"""State dicts, copies and checkpoints: torch's keys, and the pipeline's state, to the bit."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import DistributedDataParallel as DDP
from fnddp import allreduce, fp16
from fnddp.adapters.checkpoint import shares
from fnddp.laws import bits, gather
from tests.drop_in.models import SMALL, assert_equal_on_ranks, assert_same_grads, normed, step
from tests.ranks import on_ranks
from tests.test_register import COMPRESSED, batch

SYNC = fnddp.parse(f"warmup({COMPRESSED}, steps=1)")


class Named(nn.Module):
    """A module whose own names begin with `module.`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module, self.head = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.module(x))


@pytest.mark.parametrize("make", [normed, Named])
@on_ranks(1)
def test_state_dicts_of_torch_and_of_the_bare_module_are_interchangeable(
    rank: int, make: Callable[[], nn.Module]
) -> None:
    ours, theirs = DDP(make(), sync=SYNC), TorchDDP(make())
    holder = nn.ModuleDict({"net": ours})
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert list(ours.state_dict(prefix="x.")) == list(theirs.state_dict(prefix="x."))
    assert list(holder.state_dict()) == [f"net.{key}" for key in theirs.state_dict()]
    step(theirs, batch(rank, 0))
    for saved in (theirs.state_dict(), theirs.module.state_dict(), dict(theirs.state_dict())):
        fresh = DDP(make(), sync=SYNC)
        assert str(fresh.load_state_dict(saved)) == "<All keys matched successfully>"
        assert bits(fresh.state_dict()) == bits(theirs.state_dict())
    holder.load_state_dict({f"net.{key}": value for key, value in theirs.state_dict().items()})
    assert bits(ours.state_dict()) == bits(theirs.state_dict())
    fewer = dict(list(theirs.state_dict().items())[1:])
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict(fewer)
    assert ours.load_state_dict(fewer, strict=False).missing_keys == [next(iter(theirs.state_dict()))]
    theirs.load_state_dict(ours.state_dict())  # and back


def through_state_dict(model: DDP) -> DDP:
    saved = copy.deepcopy(model.state_dict(sync_state=True))
    assert set(saved) > set(model.state_dict())
    again = DDP(normed(), sync=SYNC, static_graph=True, **SMALL)
    assert str(again.load_state_dict(saved)) == "<All keys matched successfully>"
    with pytest.raises(ValueError, match="saved from another pipeline"):
        DDP(normed(), sync=fp16(allreduce)).load_state_dict(saved)
    return again


def through_pickle(model: DDP) -> DDP:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("way", [through_state_dict, through_pickle, copy.deepcopy])
@on_ranks(2)
def test_copies_and_state_dicts_keep_the_pipeline_and_its_state(rank: int, way: Callable[[DDP], DDP]) -> None:
    model = DDP(normed(), sync=SYNC, static_graph=True, **SMALL)
    for i in range(3):
        step(model, batch(rank, i))
    again = way(model)
    assert (again.sync, again.static_graph) == (model.sync, True)
    assert bits(again.sync_state) == bits(model.sync_state)
    for i in range(3, 6):
        for each in (model, again):
            step(each, batch(rank, i))
        assert_same_grads(again, model)
        assert bits(again.state_dict(sync_state=True)) == bits(model.state_dict(sync_state=True))
    assert_equal_on_ranks(list(again.parameters()))
    before = bits(model.state_dict(sync_state=True))
    step(again, batch(rank, 9))  # nothing is shared
    assert bits(model.state_dict(sync_state=True)) == before


@on_ranks(2)
def test_ignored_parameters_and_buffers(rank: int) -> None:
    models = []
    for cls in (DDP, TorchDDP):
        module = normed()
        with torch.no_grad():
            module[2].weight += rank
            module[1].running_mean += rank
        cls._set_params_and_buffers_to_ignore_for_model(module, ["2.weight", "1.running_mean"])
        models.append(cls(module))
        for i in range(3):
            step(models[-1], batch(rank, i))
    ours, theirs = models
    assert_same_grads(ours, theirs)
    assert bits(ours.state_dict()) == bits(theirs.state_dict())
    everyone = gather(bits([ours.module[2].weight, ours.module[1].running_mean]))
    assert everyone[0][0] != everyone[1][0]
    assert everyone[0][1] != everyone[1][1]


SIZES = st.integers(1, 64)


@given(size=SIZES, saved_size=SIZES)
def test_shares_keep_the_mean(size, saved_size):
    each = [shares(rank, size, saved_size) for rank in range(size)]
    for mine in each:
        assert sum(mine.values()) == pytest.approx(1)
        assert all(share > 0 for share in mine.values())
        assert set(mine) <= set(range(saved_size))
    for saved in range(saved_size):
        assert sum(mine.get(saved, 0) for mine in each) == pytest.approx(size / saved_size)
    if size == saved_size:
        assert each == [{rank: 1.0} for rank in range(size)]

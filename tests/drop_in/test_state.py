"""State dicts, copies and logging data are torch's."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import DistributedDataParallel as DDP
from fnddp import allreduce, fp16
from fnddp.laws import bits, gather
from tests.drop_in.models import SMALL, assert_equal_on_ranks, assert_same_grads, normed, step
from tests.ranks import on_ranks
from tests.test_register import COMPRESSED, batch, make_model


class Named(nn.Module):
    """A module whose own names begin with `module.`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module, self.head = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.module(x))


@pytest.mark.parametrize("make", [normed, make_model, Named])
@on_ranks(1)
def test_state_dicts_of_torch_and_of_the_bare_module_are_interchangeable(
    rank: int, make: Callable[[], nn.Module]
) -> None:
    ours, theirs = DDP(make(), sync=fnddp.parse(COMPRESSED)), TorchDDP(make())
    holder = nn.ModuleDict({"net": ours})
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert list(ours.state_dict(prefix="x.")) == list(theirs.state_dict(prefix="x."))
    assert list(holder.state_dict()) == [f"net.{key}" for key in theirs.state_dict()]
    step(theirs, batch(rank, 0))
    for saved in (theirs.state_dict(), theirs.module.state_dict(), dict(theirs.state_dict())):
        fresh = DDP(make(), sync=fnddp.parse(COMPRESSED))
        assert str(fresh.load_state_dict(saved)) == "<All keys matched successfully>"
        assert bits(fresh.state_dict()) == bits(theirs.state_dict())
    holder.load_state_dict({f"net.{key}": value for key, value in theirs.state_dict().items()})
    assert bits(ours.state_dict()) == bits(theirs.state_dict())
    fewer = dict(list(theirs.state_dict().items())[1:])
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict(fewer)
    assert ours.load_state_dict(fewer, strict=False).missing_keys == [next(iter(theirs.state_dict()))]
    theirs.load_state_dict(ours.state_dict())  # and back


@on_ranks(2)
def test_a_state_dict_with_the_pipelines_state_resumes_to_the_bit(rank: int) -> None:
    sync = fnddp.parse(f"warmup({COMPRESSED}, steps=1)")
    model = DDP(normed(), sync=sync, **SMALL)
    for i in range(3):
        step(model, batch(rank, i))
    saved = copy.deepcopy(model.state_dict(sync_state=True))
    assert set(saved) > set(model.state_dict())
    again = DDP(normed(), sync=sync, **SMALL)
    assert str(again.load_state_dict(saved)) == "<All keys matched successfully>"
    for i in range(3, 6):
        for each in (model, again):
            step(each, batch(rank, i))
    assert bits(again.state_dict(sync_state=True)) == bits(model.state_dict(sync_state=True))
    with pytest.raises(ValueError, match="saved from another pipeline"):
        DDP(normed(), sync=fp16(allreduce)).load_state_dict(saved)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@on_ranks(2)
def test_copies_keep_the_pipeline_and_its_state(rank: int, how: str) -> None:
    model = DDP(normed(), sync=fnddp.parse(COMPRESSED), static_graph=True, **SMALL)
    for i in range(2):
        step(model, batch(rank, i))
    again = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert (again.sync, again.static_graph) == (model.sync, True)
    assert bits(again.sync_state) == bits(model.sync_state)
    for i in range(2, 5):
        for each in (model, again):
            step(each, batch(rank, i))
        assert_same_grads(again, model)
        assert bits(again.sync_state) == bits(model.sync_state)
    assert_equal_on_ranks(list(again.parameters()))
    before = bits(model.state_dict()), bits(model.sync_state)
    step(again, batch(rank, 9))  # nothing is shared
    assert (bits(model.state_dict()), bits(model.sync_state)) == before


@on_ranks(2)
def test_logging_data_has_torchs_keys(rank: int) -> None:
    ours, theirs = DDP(normed()), TorchDDP(normed())
    first = [dict(model._get_ddp_logging_data()) for model in (ours, theirs)]
    for model in (ours, theirs):
        for i in range(3):
            step(model, batch(rank, i))
    for mine, torchs in (first, [dict(model._get_ddp_logging_data()) for model in (ours, theirs)]):
        assert sorted(set(torchs) - set(mine)) == []
        assert {key: mine[key] for key in torchs if "_time" not in key} == {
            key: value for key, value in torchs.items() if "_time" not in key
        }
        assert all(mine[key] > 0 for key in torchs if key.endswith("_time"))


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


@on_ranks(2)
def test_static_graph_by_method(rank: int) -> None:
    for cls in (DDP, TorchDDP):
        model = cls(make_model())
        model._set_static_graph()
        assert model.static_graph
        late = cls(make_model())
        for i in range(3):
            step(model, batch(rank, i))
            step(late, batch(rank, i))
        assert_same_grads(model, late)
        with pytest.raises(RuntimeError, match="before training loop starts"):
            late._set_static_graph()

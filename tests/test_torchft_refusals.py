"""What torchft's classes over pipelines refuse, and what they are before a quorum: without any process."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fnddp
from fnddp import error_feedback, fp16, powersgd, two_shot
from fnddp.integrations.torchft import DistributedDataParallel, ManagerWire, attach
from fnddp.laws import bits
from fnddp.reducers.all_reduce import all_reduce, allreduce
from fnddp.wire.kinds import REDUCE_SCATTER
from tests.replicas import Network


class StandIn(SimpleNamespace):
    """As much of a manager as is asked for before a quorum."""

    def __init__(self, **other: Any) -> None:
        super().__init__(
            **{
                "_use_async_quorum": False,
                "_replica_world_size_mode": SimpleNamespace(name="DYNAMIC"),
                "_min_replica_size": 2,
                "_quorum_id": -1,
                "_pg": SimpleNamespace(getBackendName=lambda: "torchft-gloo"),
                "_user_state_dicts": {},
                "_load_state_dict_fns": {},
                "num_participants": lambda: 0,
                "participating_rank": lambda: None,
                "errored": lambda: None,
                "start_quorum": lambda: None,
                "should_commit": lambda: True,
                **other,
            }
        )

    def register_state_dict_fn(self, key: str, load: Any, give: Any) -> None:
        self._user_state_dicts[key], self._load_state_dict_fns[key] = give, load


def wrapped(sync: fnddp.Sync | str = allreduce, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(StandIn(), Network(0), sync=sync, **options)


SCATTERED = (REDUCE_SCATTER, torch.zeros(2, 1), torch.zeros(1), "sum", None)


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (lambda: ManagerWire(StandIn(_use_async_quorum=True)), "pass use_async_quorum=False to Manager"),
        (
            lambda: ManagerWire(StandIn(_replica_world_size_mode=SimpleNamespace(name="FIXED_WITH_SPARES"))),
            "remove world_size_mode",
        ),
        (lambda: ManagerWire(StandIn()).start(*SCATTERED), "'torchft-gloo' has no reduce_scatter"),
        (lambda: ManagerWire(StandIn()).size("island"), "remove group"),
        (
            lambda: wrapped(fp16(all_reduce(group="island"))),
            "process group 'island', but a manager only has the group of the replicas",
        ),
        (lambda: wrapped(fnddp.ef21(fnddp.topk(fnddp.allgather, k=1))), "use error_feedback"),
        (lambda: wrapped("auto"), 'sync="auto" can only measure torch.distributed'),
        (
            lambda: fnddp.DistributedDataParallel(Network(0), sync="auto", wire=ManagerWire(StandIn())),
            "name a pipeline",
        ),
        (
            lambda: wrapped(fnddp.sign(two_shot(server_memory=True))),
            r"'residual.0.bias' of its state is float32\[8\] for two",
        ),
    ],
)
def test_what_does_not_fit(does, says):
    with pytest.raises(ValueError, match=says):
        does()


def test_arguments_that_a_manager_decides():
    with pytest.raises(TypeError, match="decides init_sync, wire; remove that argument"):
        wrapped(init_sync=True, wire=None)
    wrapped(broadcast_buffers=True, find_unused_parameters=True, gradient_as_bucket_view=True)  # as torchft's users do


def test_a_manager_without_a_state_dict():
    manager = StandIn()
    model = DistributedDataParallel(manager, Network(0))
    with pytest.raises(ValueError, match="a replica that joins would get no parameters"):
        manager.start_quorum()
    assert list(model.state_dict()) == [f"module.{name}" for name in Network(0).state_dict()]


def test_what_is_local_begins_at_zero_in_a_replica_that_joins():
    sync = error_feedback(powersgd(fp16(allreduce), rank=2))
    healed, other = wrapped(sync), wrapped(sync)
    other.sync_state = fnddp.load_state_dict(
        other.sync_state, {key: value + 1 for key, value in fnddp.state_dict(other.sync_state).items()}
    )
    healed._heal(other._shared())
    for key, value in fnddp.state_dict(healed.sync_state).items():
        theirs = fnddp.state_dict(other.sync_state)[key]
        assert bits(value) == bits(theirs if key.startswith("replicated/") else torch.zeros_like(theirs))


def test_a_manager_has_one_outer_step():
    manager: Any = StandIn()
    attach(manager, Network(0), None, "local_sgd(every=2)")
    with pytest.raises(ValueError, match="this manager already has an outer step"):
        attach(manager, Network(0), None, "local_sgd(every=2)")


@pytest.mark.parametrize("params", ["local_sgd(every=2)", "diloco(allreduce, every=2)"])
def test_a_replica_that_joins_gets_parameters_also_where_only_moments_have_anchors(params: str):
    nets, managers = [Network(seed) for seed in range(2)], [StandIn() for _ in range(2)]
    for net, manager in zip(nets, managers, strict=True):
        adam: Any = torch.optim.Adam(net.parameters())
        net(torch.ones(1, 8)).sum().backward()
        adam.step()
        attach(manager, net, adam, f"des_loc({{'params': {params}, 'exp_avg': diloco(allreduce, every=2)}})")
    key = "fnddp.sync_state.outer"
    managers[1]._load_state_dict_fns[key](managers[0]._user_state_dicts[key]())
    assert bits(nets[1].state_dict()) == bits(nets[0].state_dict())

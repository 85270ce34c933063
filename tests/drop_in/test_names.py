"""What tools read and call by torch's names: it gives what torch's class gives, whatever the options."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fnddp import DistributedDataParallel as DDP
from fnddp import allreduce
from fnddp.adapters.torch_compat import log
from fnddp.adapters.torch_compat.arguments import BucketSizes
from fnddp.ir.program import LeafSpec
from tests.drop_in.models import Parts, normed, since_213, step
from tests.ranks import on_ranks
from tests.test_register import batch, make_model

ATTRIBUTES = {
    *("device", "device_ids", "output_device", "dim", "device_type", "is_multi_device_module", "static_graph"),
    *("find_unused_parameters", "gradient_as_bucket_view", "batched_grad_copy", "mixed_precision"),
    *("require_backward_grad_sync", "require_forward_param_sync", "forward_sync_buffers", "parameters_to_ignore"),
    *("bucket_bytes_cap", "bucket_bytes_cap_list", "broadcast_bucket_size", "skip_all_reduce_unused_params"),
}
OPTIONS: list[dict[str, Any]] = [
    *({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"static_graph": True}),
    *({"bucket_cap_mb": 0.0005}, {"bucket_cap_mb_list": [0.0001, 0.001]}, {"forward_sync_buffers": False}),
    *({"dim": 1}, {"batched_grad_copy": True}),
    {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
]
OF_BUCKETS = {  # which are a plan's: dtypes share one, and it is never made anew
    *("bucket_sizes", "rebuilt_bucket_sizes", "has_rebuilt_buckets", "num_buckets_reduced"),
    *("rebuilt_per_bucket_param_indices", "prev_iteration_grad_ready_order_indices"),
}


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.wider, self.narrow = nn.Linear(16, 8), nn.Linear(8, 4).double(), nn.Linear(4, 4).half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wider(self.wide(x).double()).half())


def facts(model: Any) -> dict[str, Any]:
    logged = model._get_ddp_logging_data()
    return {key: value for key, value in logged.items() if "_time" not in key and key not in OF_BUCKETS}


@since_213
@on_ranks(2)
def test_attributes_and_logging_data(rank: int) -> None:
    some_unused = [(Parts, options) for options in OPTIONS if options.get("find_unused_parameters")]
    for make, options in [*((normed, options) for options in OPTIONS), *some_unused, (Mixed, {})]:
        uses = ["ab"] if make is Parts else []
        ours, theirs = DDP(make(), **options), TorchDDP(make(), **options)
        for name in ATTRIBUTES:
            assert getattr(ours, name) == getattr(theirs, name), (name, options)
        for steps in (0, 3):
            for i in range(steps):
                for model in (ours, theirs):
                    step(model, batch(rank, i), *uses)
            mine, torchs = facts(ours), facts(theirs)
            assert {key: mine.get(key) for key in torchs} == torchs, options


@on_ranks(2)
def test_logged_buckets_are_the_plans(rank: int) -> None:
    model = DDP(make_model(), bucket_cap_mb=0.0005)
    assert model._get_ddp_logging_data()["bucket_sizes"] == "1040, 16640, 4352"
    for i in range(3):
        step(model, batch(rank, i))
    logged = model._get_ddp_logging_data()
    names = [name for name, _ in model.module.named_parameters()]
    arrived = [names.index(name) for name in model.plan.buckets]
    buckets = [[i for i in arrived if model.plan.buckets[names[i]] == b] for b in range(3)]
    sizes = [sum(model.module.get_parameter(names[i]).nbytes for i in bucket) for bucket in buckets]
    assert logged["prev_iteration_grad_ready_order_indices"] == ", ".join(map(str, arrived))
    assert logged["rebuilt_per_bucket_param_indices"] == ", ".join(" ".join(map(str, each)) for each in buckets)
    assert logged["rebuilt_bucket_sizes"] == ", ".join(map(str, sizes))
    assert (logged["has_rebuilt_buckets"], logged["num_buckets_reduced"]) == (1, 3)


@pytest.mark.parametrize("backend", ["gloo", "nccl", "mpi"])
def test_the_environment_is_logged_by_torchs_names(monkeypatch, backend):
    settings = {"MASTER_PORT": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "INFO"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(log.dist, "get_backend", lambda group: backend)
    found = log.environment(SimpleNamespace(size=lambda: 4, rank=lambda: 3))  # type: ignore[arg-type]
    assert (found["world_size"], found["rank"], found["backend_name"]) == (4, 3, backend)
    assert (found["master_port"], found["master_addr"]) == ("1", "N/A")
    assert found.get("gloo_socket_ifname") == ("lo" if backend == "gloo" else None)
    assert found.get("gloo_num_threads") == (2 if backend == "gloo" else None)
    assert found.get("nccl_debug") == ("INFO" if backend == "nccl" else None)
    assert log.environment(None) == {"world_size": 1, "rank": 0}


class Fed:
    """What a log asks of an engine."""

    plan, has_sent = None, False

    def __init__(self) -> None:
        self.leaves = {"a": LeafSpec.of(torch.empty(3)), "b": LeafSpec.of(torch.empty(5))}


def log_a_step(patch: pytest.MonkeyPatch, record: log.Log, engine: Fed, clock: list[int]) -> None:
    """At these times: forward begins, backward begins, the first collective is issued, backward ends, all is over."""
    times = iter(clock)
    patch.setattr(log, "time", SimpleNamespace(time_ns=lambda: next(times)))
    record.forward_starts()
    record.backward_starts()
    engine.has_sent = False
    record.fed(engine)  # type: ignore[arg-type]
    engine.has_sent = True
    record.fed(engine)  # type: ignore[arg-type]
    record.fed(engine)  # type: ignore[arg-type]
    record.backward_ends()
    record.step_ends(engine, ["b"])  # type: ignore[arg-type]


def test_times_are_those_of_the_last_sampled_step_and_their_means(monkeypatch):
    record, engine = log.Log({"world_size": 2}), Fed()
    assert record.data() == {"iteration": 0, "world_size": 2}
    assert not record.has_stepped
    log_a_step(monkeypatch, record, engine, [100, 110, 115, 130, 170])
    assert record.has_stepped
    first = record.data()
    assert (
        first.items()
        >= {
            "forward_compute_time": 10,
            "backward_compute_time": 20,
            "backward_comm_time": 55,
            "backward_compute_comm_overlap_time": 15,
            "avg_forward_compute_time": 10,
            "avg_backward_comm_time": 55,
            "forward_compute_time_start": 100,
            "backward_compute_time_start": 110,
            "backward_compute_time_end": 130,
            "backward_comm_time_start": 115,
            "backward_comm_time_end": 170,
            "unused_parameter_size": 20,
            "iteration": 0,
        }.items()
    )
    log_a_step(monkeypatch, record, engine, [200, 230, 231, 232, 233])
    second = record.data()
    assert (second["iteration"], second["forward_compute_time"], second["avg_forward_compute_time"]) == (1, 30, 20)
    assert (second["backward_compute_time"], second["avg_backward_compute_time"]) == (2, 11)


def test_of_later_steps_some_are_sampled(monkeypatch):
    record, engine = log.Log({}), Fed()
    record.sample_rate = 7
    sampled = []
    for i in range(30):
        log_a_step(monkeypatch, record, engine, [i * 10 + k for k in range(5)])
        if record.data()["iteration"] == i:
            sampled.append(i)
    assert sampled == [*range(11), 14, 21, 28]
    assert log.Log({}).sample_rate == 100


def test_a_backward_without_a_forward_has_no_times():
    record = log.Log({})
    record.backward_starts()
    record.fed(Fed())  # type: ignore[arg-type]
    record.backward_ends()
    record.step_ends(Fed(), [])  # type: ignore[arg-type]
    assert record.data() == {"iteration": 0}
    assert record.has_stepped


def test_the_last_error_is_logged():
    record = log.Log({})
    with pytest.raises(KeyError), record.errors():
        raise KeyError("x")
    assert record.data() == {"iteration": 0, "has_error": 1, "error": "<class 'KeyError'>: 'x'"}


def test_how_often_steps_are_sampled_is_a_positive_number():
    model = DDP(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="equal or greater than 1, got 0"):
        model._set_ddp_runtime_logging_sample_rate(0)
    model._set_ddp_runtime_logging_sample_rate(1)
    assert model._log.sample_rate == 1


def test_sizes_of_buckets_are_the_lists_or_the_cap():
    mib = 2**20
    assert BucketSizes.of(None, None) == BucketSizes((mib, 25 * mib))
    assert BucketSizes.of(0.5, None) == BucketSizes((mib // 2,))
    assert BucketSizes.of(9, [1, 2]) == BucketSizes((mib, 2 * mib), (mib, 2 * mib))


@on_ranks(2)
def test_buffers_are_made_equal_when_they_are_due(rank: int) -> None:
    model = DDP(normed())
    assert model.broadcast_buffers
    assert model.will_sync_module_buffers()
    assert [name for name, _ in model.named_module_buffers.items()] == [
        name for name, _ in model.module.named_buffers()
    ]
    assert len(model.modules_buffers) == 3
    mean = model.module[1].running_mean
    model.require_forward_param_sync = False
    assert not model.will_sync_module_buffers()
    mean += rank
    with torch.no_grad():
        model.eval()(batch(rank, 0))
    assert mean[0] == rank
    model.require_forward_param_sync = True
    model.forward_sync_buffers = False
    assert not model.will_sync_module_buffers()
    model.broadcast_buffers = True
    assert model.will_sync_module_buffers()
    assert not DDP(nn.Linear(2, 2)).will_sync_module_buffers()
    model._default_broadcast_coalesced(authoritative_rank=1)
    assert mean[0] == 1
    own = torch.tensor([float(rank)])
    model._distributed_broadcast_coalesced([own], 100, 1)
    assert own == 1
    model._default_broadcast_coalesced([own.fill_(rank)])
    assert own == 0


@on_ranks(2)
def test_what_tools_call_of_a_reducer(rank: int) -> None:
    model = DDP(Parts())
    step(model, batch(rank, 0), "ab")
    assert model.reducer._get_local_used_map().tolist() == [1, 1, 1, 1, 0, 0]
    assert model.reducer._get_local_used_map().dtype == torch.int32
    assert model.reducer._ddp_graph_static()
    assert model.reducer._rebuild_buckets() is False
    step(model, batch(rank, 1), "abc")
    assert not model.reducer._ddp_graph_static()
    with model.no_sync():
        output = model(batch(rank, 2))
    model.reducer.prepare_for_backward([])
    model.zero_grad()
    output.sum().backward()
    other = model.module.a.bias.grad.clone()
    dist.all_reduce(other)
    assert torch.equal(other, 2 * model.module.a.bias.grad)


def test_names_of_parameters_by_index():
    model = DDP(nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True), nn.Embedding(3, 2)))
    parameters, sparse = model._build_params_for_reducer()
    names = [name for name, _ in model.module.named_parameters()]
    assert [a is b for a, b in zip(parameters, model.module.parameters(), strict=True)] == [True] * 4
    assert sparse == [False, False, True, False]
    assert model._build_debug_param_to_name_mapping(parameters) == dict(enumerate(names))
    with pytest.raises(ValueError, match="Param with name 2.weight found in module parameters, but not DDP parameters"):
        model._build_debug_param_to_name_mapping(parameters[:-1])
    with pytest.raises(ValueError, match="conflicting lengths: 5 vs 4"):
        model._build_debug_param_to_name_mapping([*parameters, nn.Parameter(torch.ones(1))])


@on_ranks(1)
def test_a_static_graph_is_set_once(rank: int) -> None:
    for cls in (DDP, TorchDDP):
        model = cls(nn.Linear(16, 2))
        model._set_static_graph()
        with pytest.warns(UserWarning, match="static_graph to be True, no need to set it again"):
            model._set_static_graph()
    assert model.static_graph


def test_join_is_over_the_modules_group():
    model = DDP(nn.Linear(2, 2))
    assert (model.join_device, model.process_group) == (torch.device("cpu"), None)
    assert model.sync == allreduce
    with pytest.raises(TypeError, match="Accelerate would wrap"):
        _ = model._is_accelerate_prepared

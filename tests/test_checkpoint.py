"""torch.distributed.checkpoint of model, optimizer and pipeline in one call, on gloo ranks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import fnddp
from fnddp import allreduce, error_feedback, fp16, powersgd
from fnddp.integrations.checkpoint import async_save, load, save
from fnddp.integrations.fsdp import compress_shards
from fnddp.laws import bits
from fnddp.transforms.memory import widened
from tests.peers import everyones, parameters_of, residual
from tests.ranks import on_ranks
from tests.test_ways import go_on, two
from tests.ways import WAYS, Way, failing

SYNC = error_feedback(powersgd(fp16(allreduce), rank=1))
SMALL = "error_feedback(quantize(two_shot, bits=4), residual='int8')"


def net(norms: int = 0) -> nn.Module:
    return nn.Sequential(*(nn.BatchNorm1d(6) for _ in range(norms)), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


class Reordered(nn.Module):
    """Gradients come in another order than that of parameters reversed, which a first step expects."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(16, 4), nn.Linear(6, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Run:
    def __init__(
        self, kind: str, sync: Any = SYNC, seed: int = 0, make: Callable[[], nn.Module] = net, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        module = make()
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
        if kind == "register":
            self.model: Any = nn.parallel.DistributedDataParallel(module)
            self.keeper: Any = fnddp.register(self.model, sync)
        else:
            if kind == "own":
                self.model = fnddp.own(module, self.optimizer, sync, "ef21(quantize(allgather))")
            else:
                self.model = fnddp.DistributedDataParallel(module, sync=sync, **options)
            self.keeper = self.model

    def backward(self, step: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 6, generator=generator)).square().mean().backward()

    def train(self, begin: int, end: int) -> "Run":
        for step in range(begin, end):
            self.backward(step)
            self.optimizer.step()
        return self

    @property
    def parts(self) -> tuple[Any, Any]:
        return self.model, self.optimizer


def require_equal(*runs: Run) -> None:
    held = [bits([parameters_of(run.model), fnddp.state_dict(run.keeper.sync_state)]) for run in runs]
    assert held == held[:1] * len(runs)


@pytest.mark.parametrize("kind", ["module", "register"])
@on_ranks(2)
def test_what_is_written_in_the_background_is_of_the_moment(rank: int, kind: str, tmp_path: Path) -> None:
    """And does not meet the collectives of training."""
    whole, resumed = Run(kind).train(0, 3), Run(kind, seed=1).train(0, 1)
    written = async_save(tmp_path, *whole.parts, sync=whole.keeper, more={"step": 3})
    whole.train(3, 6)
    written.result()
    assert load(tmp_path, *resumed.parts, sync=resumed.keeper, more={"step": 0}) == {"step": 3}
    require_equal(whole, resumed.train(3, 6))
    assert not torch.equal(*everyones(residual(whole.keeper.sync_state)))


@pytest.mark.parametrize("kind", ["module", "register", "own"])
@pytest.mark.parametrize("has_gradients", [False, True])
@on_ranks(2)
def test_a_checkpoint_before_the_first_step_changes_nothing(
    rank: int, kind: str, has_gradients: bool, tmp_path: Path
) -> None:
    """torch fills an optimizer's state by a step of length zero, which would count: Adam's next would be its second."""
    sync = "error_feedback(quantize(two_shot, bits=4))" if kind == "own" else SYNC
    undisturbed, saving = Run(kind, sync).train(0, 3), Run(kind, sync)
    new, resumed = Run(kind, sync, seed=2), Run(kind, sync, seed=1).train(0, 1)
    steps: list[Any] = []
    for run in (saving, new, resumed):
        run.optimizer.register_step_post_hook(lambda *given: steps.append(given))
    if has_gradients:  # for which torch fills nothing
        for run in (saving, new):
            run.backward(7)
            run.keeper.sync_state = run.keeper.sync.init(dict(run.model.module.named_parameters()))
    before = [p.grad for p in saving.model.parameters()]
    save(tmp_path, *saving.parts, sync=saving.keeper)
    assert all(p.grad is grad for p, grad in zip(saving.model.parameters(), before, strict=True))
    for run in (new, resumed):
        load(tmp_path, *run.parts, sync=run.keeper)
    assert not steps
    require_equal(undisturbed, *(run.train(0, 3) for run in (saving, new, resumed)))


@pytest.mark.parametrize(
    ("sync", "begin"), [("allreduce", 2), ("error_feedback(powersgd(bf16(allreduce), rank=2))", 2), ("allreduce", 0)]
)
@on_ranks(3)
def test_buckets_are_laid_out_as_in_the_run_that_is_resumed(rank: int, sync: str, begin: int, tmp_path: Path) -> None:
    """Also before its first step. A ring of three adds up in an order that depends on where a gradient lies."""
    whole, resumed, again = [Run("module", sync, seed, make=Reordered, bucket_cap_mb=0.001) for seed in range(3)]
    save(tmp_path, *whole.train(0, begin).parts)
    again.train(7, 9)  # and has learnt the order
    for run in (resumed, again):
        load(tmp_path, *run.parts)
    require_equal(*(run.train(begin, begin + 3) for run in (whole, resumed, again)))
    buckets = [list(run.model.plan.buckets) for run in (whole, resumed, again)]
    assert buckets == buckets[:1] * 3
    assert buckets[0] != list(reversed(dict(whole.model.module.named_parameters())))


class OfWeights(WAYS["compress_shards"]):
    """Without a pipeline of gradients."""

    def make(self) -> None:
        self.model = self.sharded(self.mesh(1, dist.get_world_size())["shard"])
        self.keeper, self.optimizer = compress_shards(self.model, weights=self.text), self.sgd(self.model)


FAILING: dict[str, tuple[type[Way], str]] = {
    **{name: (WAYS[name], "") for name in ("module", "register", "compress_shards", "compress")},
    "weights": (OfWeights, "quantize(allgather)"),
    "outer": (WAYS["diloco"], "local_sgd(every=2)"),
}


def check_failing_load(rank: int, name: str, folder: str) -> None:
    """A rank has read other tensors than another one by then: parameters differ."""
    way, text = FAILING[name]
    disturbed, straight = two(way, text=text)
    disturbed.save(Path(folder))
    with pytest.raises(CheckpointException, match="Missing key"):  # before anything is read
        disturbed.load(Path(folder), more={"step": 0})
    for each in (disturbed, straight):
        each.step(each.batch(rank, 1))
    assert disturbed.all == straight.all
    disturbed.save(Path(folder))
    reads = DefaultLoadPlanner, "commit_tensor", 1 if rank == 1 or name == "outer" else -1
    resets = type(disturbed.keeper), "reset_sync", 0
    for point, error, options in ((reads, CheckpointException, {}), (resets, OSError, {"reset_sync": True})):
        with pytest.raises(error, match="of a disk"), failing(*point, OSError("of a disk")):
            disturbed.load(Path(folder), **options)
        with pytest.raises(RuntimeError, match="load failed while reading"):
            disturbed.step(disturbed.batch(rank, 2))
        disturbed.load(Path(folder))
    go_on(rank, disturbed, straight)


@pytest.mark.parametrize("name", FAILING)
def test_no_step_begins_after_a_load_that_fails_on_the_way(gloo: Any, name: str, tmp_path: Path) -> None:
    gloo(FAILING[name][0].ranks, check_failing_load, name, str(tmp_path))


@pytest.mark.parametrize(
    "text", ["none", "switch({0: allreduce, 1: none})", "partition({'0.*': none, '*': allreduce})"]
)
@on_ranks(2)
def test_ranks_that_train_alone_do_not_save_together(rank: int, text: str, tmp_path: Path) -> None:
    """Some tensors would be of one rank, and some of another."""
    run = Run("module", text).train(0, 2)
    assert not torch.equal(*everyones(parameters_of(run.model)))
    for run_save in (save, async_save):
        with pytest.raises(ValueError, match="does not average gradients in every step, so 0.weight, 0.bias"):
            run_save(tmp_path, *run.parts)
    group, _ = dist.new_subgroups(1)
    save(tmp_path / str(rank), *run.parts, group=group)
    resumed = Run("module", text, seed=1)
    load(tmp_path / str(rank), *resumed.parts, group=group)
    require_equal(run, resumed)


@on_ranks(2)
def test_an_optimizer_whose_parameters_have_gradients_is_loaded(rank: int, tmp_path: Path) -> None:
    whole, resumed = Run("module").train(0, 2), Run("module", seed=1)
    save(tmp_path, *whole.parts)
    resumed.backward(7)  # and a scaler that has skipped the step
    load(tmp_path, *resumed.parts)
    require_equal(whole.train(2, 4), resumed.train(2, 4))


@on_ranks(2)
def test_an_optimizer_that_has_not_stepped_stays_so(rank: int, tmp_path: Path) -> None:
    """Beside one that has. What fails on the way to it leaves no state behind, either."""
    saving, resumed = Run("module").train(0, 1), Run("module", seed=1)
    optimizers = [(each.optimizer, torch.optim.Adam(each.model.parameters())) for each in (saving, resumed)]
    save(tmp_path, saving.model, optimizers[0])
    assert not optimizers[0][1].state
    with pytest.raises(CheckpointException):
        load(tmp_path, resumed.model, optimizers[1], more={"step": 0})
    assert not any(each.state for each in optimizers[1])
    load(tmp_path, resumed.model, optimizers[1])
    assert [bool(each.state) for each in optimizers[1]] == [True, False]


@pytest.mark.parametrize("kind", ["module", "register"])
@pytest.mark.parametrize("is_behind", [False, True])
@on_ranks(2)
def test_buffers_are_those_of_the_first_rank(rank: int, kind: str, is_behind: bool, tmp_path: Path) -> None:
    """Each rank has its own between two forwards; DCP divides what looks replicated between ranks that write."""
    whole = Run(kind, make=partial(net, 6)).train(0, 3)
    buffers = {name: buffer.clone() for name, buffer in whole.model.module.named_buffers()}
    assert not all(torch.equal(*everyones(buffer)) for buffer in buffers.values())
    if is_behind:
        async_save(tmp_path, *whole.parts, sync=whole.keeper).result()
    else:
        save(tmp_path, *whole.parts, sync=whole.keeper)
    resumed = Run(kind, seed=1, make=partial(net, 6))
    load(tmp_path, *resumed.parts, sync=resumed.keeper)
    for name, buffer in resumed.model.module.named_buffers():
        assert torch.equal(buffer, everyones(buffers[name])[0]), name
    require_equal(whole.train(3, 5), resumed.train(3, 5))
    assert bits([*resumed.model.module.buffers()]) == bits([*whole.model.module.buffers()])


COUNTED = fnddp.warmup(SYNC, steps=1)


def _save(rank: int, folder: str, sync: Any) -> Any:
    run = Run("module", sync).train(0, 2)
    save(folder, *run.parts)
    return run.model.sync_state


def _load(rank: int, folder: str, sync: Any) -> Any:
    run = Run("module", sync, seed=1)
    if dist.get_world_size() == 1:
        with pytest.raises(ValueError, match=r"2 ranks saved .* loaded as one of 1, .*saved_world_size=2"):
            dcp.load({"sync": run.model.sync_checkpoint()}, checkpoint_id=folder)
    load(folder, *run.parts)
    return run.model.sync_state


def test_other_numbers_of_ranks_lose_nothing(gloo: Any, tmp_path: Path) -> None:
    one, other = map(fnddp.state_dict, gloo(2, _save, str(tmp_path), COUNTED))
    (alone,), four = ([*map(fnddp.state_dict, gloo(n, _load, str(tmp_path), COUNTED))] for n in (1, 4))
    for key, value in one.items():
        assert [bits(each[key]) for each in four] == [bits(each[key]) for each in (one, one, other, other)]
        if key.startswith("replicated/"):
            assert bits(alone[key]) == bits(value) == bits(other[key])
        else:
            assert value.any()
            torch.testing.assert_close(alone[key], (value + other[key]) / 2)


def test_fewer_ranks_take_the_mean_of_small_residuals(gloo: Any, tmp_path: Path) -> None:
    saved = gloo(2, _save, str(tmp_path), SMALL)
    (alone,), four = (gloo(n, _load, str(tmp_path), SMALL) for n in (1, 4))
    assert [bits(each) for each in four] == [bits(saved[i]) for i in (0, 0, 1, 1)]
    one, other = (widened(each).residual for each in saved)
    for name, x in widened(alone).residual.items():
        assert not torch.equal(one[name], other[name])
        half = float(alone.scale[name].max()) / 2
        torch.testing.assert_close(x, (one[name] + other[name]) / 2, rtol=0, atol=1.001 * half)


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def _of_parts(make: Callable[[], nn.Module] = net) -> nn.Module:
    return nn.Sequential(*map(_compiled, make()))  # type: ignore[call-overload]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["module", "register", "own"])
@on_ranks(2)
def test_a_compiled_run_continues_one_that_is_not_and_back(rank: int, kind: str, tmp_path: Path) -> None:
    """A leaf is the same under each of its names: in states, in orders of gradients, in patterns, in random numbers."""
    text = "partition({'0.*': error_feedback(random_k(allreduce, ratio=0.5)), '*': " + repr(SYNC) + "})"
    text = "error_feedback(quantize(two_shot, rounding='stochastic'))" if kind == "own" else text
    made: list[Callable[[], nn.Module]] = [net, lambda: _compiled(net()), _of_parts]
    plain, inside, parts, around = [Run(kind, text, make=make) for make in (*made, net)]
    around.model = _compiled(around.model)
    for saving, loading in ((plain, inside), (inside, parts), (parts, around), (around, plain)):
        saving.train(0, 3)
        save(tmp_path / "all", *saving.parts, sync=saving.keeper)
        load(tmp_path / "all", *loading.parts, sync=loading.keeper)
        state = fnddp.state_dict(saving.keeper.sync_state)
        if kind != "register":
            assert {*loading.keeper.learnt_order} == {name for name, _ in loading.keeper.module.named_parameters()}
        assert state.keys() == fnddp.state_dict(loading.keeper.sync_state).keys()
        loading.keeper.sync_state = fnddp.load_state_dict(loading.keeper.sync_state, state)
        require_equal(saving.train(3, 5), loading.train(3, 5))


@on_ranks(2)
def test_what_does_not_fit_is_named(rank: int, tmp_path: Path) -> None:
    run = Run("module").train(0, 1)
    save(tmp_path / "ours", *run.parts)
    text = "has the state of error_feedback(powersgd(fp16(allreduce))), which does not fit "
    for other in (error_feedback(powersgd(allreduce, rank=2)), error_feedback(fp16(allreduce)), allreduce):
        with pytest.raises(ValueError, match="does not fit") as raised:
            load(tmp_path / "ours", *Run("module", other).parts)
        assert f"{text}{other} for this model: " in str(raised.value)
    dcp.save({"model": run.model.state_dict()}, checkpoint_id=tmp_path / "weights")
    with pytest.raises(ValueError, match="has no pipeline state for this rank"):
        load(tmp_path / "weights", *run.parts)
    with pytest.raises(CheckpointException, match="nowhere is missing"):
        load(tmp_path / "nowhere", *run.parts)
    with pytest.raises(TypeError, match="a DistributedDataParallel has no pipeline; pass the result of fnddp.register"):
        save(tmp_path, *Run("register").parts)


@pytest.mark.parametrize("kind", ["module", "register"])
@on_ranks(2)
def test_another_pipeline_begins_anew_where_it_is_asked_for(rank: int, kind: str, tmp_path: Path) -> None:
    """Also from a checkpoint without a pipeline; model and optimizer are what was saved."""
    whole = Run(kind).train(0, 3)
    save(tmp_path / "ours", *whole.parts, sync=whole.keeper, more={"step": 3})
    bare = {"model": get_model_state_dict(whole.model), "optimizer": get_optimizer_state_dict(*whole.parts)}
    dcp.save(bare, checkpoint_id=tmp_path / "bare")
    for sync, folder in ((error_feedback(powersgd(allreduce, rank=2)), "ours"), (SYNC, "ours"), (SYNC, "bare")):
        resumed, fresh = Run(kind, sync, seed=1).train(0, 1), Run(kind, sync, seed=1)
        if sync != SYNC or folder == "bare":
            with pytest.raises(ValueError, match="reset_sync=True"):
                load(tmp_path / folder, *resumed.parts, sync=resumed.keeper)
        more = {"more": {"step": 0}} if folder == "ours" else {}
        assert load(tmp_path / folder, *resumed.parts, sync=resumed.keeper, reset_sync=True, **more) == (
            {"step": 3} if more else {}
        )
        assert torch.equal(parameters_of(resumed.model), parameters_of(whole.model))
        assert resumed.optimizer.state_dict()["state"][0]["step"] == 3
        state, initial = (fnddp.state_dict(run.keeper.sync_state) for run in (resumed, fresh))
        assert [bits(value) for value in state.values()] == [bits(value) for value in initial.values()]
        resumed.train(3, 4)


@pytest.mark.thorough
@on_ranks(3)
def test_some_ranks_save_on_their_own(rank: int, tmp_path: Path) -> None:
    group = dist.new_group([0, 1])
    if rank == 2:
        return
    run = Run("module", process_group=group).train(0, 1)
    async_save(tmp_path / "one", *run.parts, group=group, more={"step": 7}).result(timeout=60)
    save(tmp_path / "two", *run.parts, group=group, more={"step": 7})
    for folder in ("one", "two"):
        resumed = Run("module", seed=1, process_group=group)
        assert load(tmp_path / folder, *resumed.parts, group=group, more={"step": 0}) == {"step": 7}
        require_equal(run, resumed)


@on_ranks(2)
def test_a_scheduler_in_more_is_written_to(rank: int, tmp_path: Path):
    saving, loading = Run("module", allreduce).train(0, 1), Run("module", allreduce)
    first, second = (torch.optim.lr_scheduler.StepLR(run.optimizer, 1) for run in (saving, loading))
    first.step()
    save(tmp_path, *saving.parts, more={"scheduler": first, "step": 7})
    more = load(tmp_path, *loading.parts, more={"scheduler": second, "step": 0})
    assert (second.last_epoch, second.get_last_lr(), more["step"]) == (1, first.get_last_lr(), 7)


@on_ranks(2)
def test_workers_of_an_outer_step_do_not_save_together(rank: int, tmp_path: Path) -> None:
    """Their parameters differ, of which one checkpoint of all would have some of one and some of another."""
    training = WAYS["diloco"]()
    training.step(training.batch(rank, 0))
    for use in (save, async_save, load):
        with pytest.raises(ValueError, match=rf"ranks \[{1 - rank}\] belong to other workers of diloco"):
            use(tmp_path, training.model, training.optimizer, sync=training.keeper)
    training.end()


@on_ranks(2)
def test_a_save_in_the_background_waits_for_the_one_before(rank: int, tmp_path: Path) -> None:
    """Their messages would meet, and wait for each other."""
    model = fnddp.DistributedDataParallel(nn.Sequential(*(nn.Linear(20, 20) for _ in range(60))))
    written = [async_save(tmp_path / str(i), model, more={"step": i}) for i in range(3)]
    for each in reversed(written):
        each.result(timeout=20)
    for i in range(3):
        assert load(tmp_path / str(i), model, more={"step": -1}) == {"step": i}

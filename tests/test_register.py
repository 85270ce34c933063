"""`register` on torch's DDP: the numbers of the pipeline, whatever DDP's options and buckets."""

import copy
import gc
import io
import re
import weakref
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fnddp
from fnddp import CollectiveError, RankMismatchError, StepFailedError, allreduce, error_feedback
from fnddp.laws import bits
from fnddp.wire.c10d import C10d
from tests.models import COMPRESSED, WITH_RESIDUAL, Hooked, average, batch, dense, grads_of, loss_of, make_model
from tests.ranks import on_ranks
from tests.ways import failing

OPTIONS = [  # more are in the contract of adapters (test_adapters)
    {},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01},
    {"static_graph": True, "bucket_cap_mb": 0.01},
]


@pytest.mark.parametrize("options", [*OPTIONS, {"find_unused_parameters": True}], ids=str)
@on_ranks(2)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_a_step_that_fails_is_no_step_and_frozen_parameters_are_left_alone(rank: int, options: dict[str, Any]) -> None:
    for text in ("allreduce", "bucketize(fp16(allreduce))"):
        sync, plain = fnddp.parse(text), make_model()
        plain[0].bias.requires_grad_(False)
        model = DistributedDataParallel(copy.deepcopy(plain), **options)
        handle = fnddp.register(model, sync)
        for step in range(6):
            is_bad = step == 4  # on one rank, behind the last gradient
            model.module[0].bias.requires_grad_(is_bad and rank == 1)
            for net in (model, plain):
                net.zero_grad()
            several = range(1 if "static_graph" in options else 2)  # forwards
            sum(loss_of(plain(batch(rank, step + 20 * i))) for i in several).backward()
            with pytest.raises(RuntimeError if rank else StepFailedError) if is_bad else nullcontext():
                sum(loss_of(model(batch(rank, step + 20 * i))) for i in several).backward()
            if not is_bad:
                average(sync, [(name, p) for name, p in plain.named_parameters() if p.requires_grad], ())
            model.module[0].bias.grad = None
            assert bits(grads_of(model)) == bits(grads_of(plain))
        assert (handle.sync_stats()["steps"], handle.sync_stats()["failed_steps"]) == (5, 1)


SHAPES = {"image": (6, 4, 3, 3), "volume": (3, 2, 2, 3, 2), "transposed": (24, 16), "vector": (7,)}
ORDERS = {"image": (0, 2, 3, 1), "volume": (0, 2, 3, 4, 1), "transposed": (1, 0), "vector": (0,)}


class Strided(nn.Module):
    """Parameters whose elements lie in memory in another order than the row-major one, unless `is_row_major`.

    They have two dtypes: a static graph of torch's class has two buckets in its first step then.
    """

    def __init__(self, *, is_row_major: bool = False) -> None:
        super().__init__()
        for name, order in ORDERS.items():
            leaf = torch.zeros(SHAPES[name], dtype=torch.float64 if name == "vector" else torch.float32)
            strided = leaf.permute(order).contiguous().permute([order.index(i) for i in range(leaf.ndim)])
            self.register_parameter(name, nn.Parameter(leaf if is_row_major else strided))

    def forward(self, rank: int, step: int, unused: str | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * rank + step)
        products = {name: p * torch.randn(p.shape, generator=generator) for name, p in self.named_parameters()}
        return sum((each.sum() for name, each in products.items() if name != unused), torch.zeros(()))


@pytest.mark.parametrize("options", [*OPTIONS, {"find_unused_parameters": True}], ids=str)
@on_ranks(2)
def test_leaves_that_are_not_row_major_have_the_numbers_of_the_class(rank: int, options: dict[str, Any]) -> None:
    text = f"shared_momentum({COMPRESSED})"  # a view of a residual in another layout would be an error
    unused = "image" if "find_unused_parameters" in options and rank else None
    states, models = list[Any](), list[tuple[Any, Any, Any]]()
    for is_row_major in (True, False):
        model = DistributedDataParallel(Strided(is_row_major=is_row_major), **options)
        ours = fnddp.DistributedDataParallel(Strided(is_row_major=is_row_major), sync=text)
        models.append((model, fnddp.register(model, text), ours))

    def run(steps: range) -> None:
        for model, handle, ours in models:
            for step in steps:
                for net in (model, ours):
                    net.zero_grad()
                    net(rank, step, unused).backward()
                assert bits(grads_of(model)) == bits(grads_of(ours))
                assert [p.grad.stride() for p in model.parameters()] == [p.stride() for p in model.parameters()]
            assert bits(handle.sync_state) == bits(ours.sync_state)
            states.append(ours.sync_state)
        assert bits(grads_of(models[0][0])) == bits(grads_of(models[1][0]))

    run(range(3))
    for (_, handle, ours), state in zip(models, reversed(states[:2]), strict=True):  # each goes on from the other's
        handle.sync_state = ours.sync_state = state
    run(range(3, 5))


@pytest.mark.parametrize("as_views", [False, True])
@on_ranks(2)
def test_a_memory_format_that_changes_after_ddp_has_made_its_buckets(rank: int, as_views: bool) -> None:
    model = DistributedDataParallel(Strided(is_row_major=True), gradient_as_bucket_view=as_views)
    if not as_views:
        handle = fnddp.register(model, WITH_RESIDUAL)
    model.module.image.data = model.module.image.data.contiguous(memory_format=torch.channels_last)
    if as_views:  # where gradients show it even then
        handle = fnddp.register(model, WITH_RESIDUAL)
    before = bits(handle.sync_state)
    with pytest.raises(
        RuntimeError, match=r"register: image has strides \(36, 1, 12, 4\).* before wrapping the module"
    ):
        model(rank, 0).backward()
    assert bits(handle.sync_state) == before


@on_ranks(2)
def test_a_copy_of_a_model_has_no_hook_as_with_torchs(rank: int) -> None:
    model = DistributedDataParallel(make_model())
    handle = fnddp.register(model, COMPRESSED)
    for step in range(3):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            plain = DistributedDataParallel(copy.deepcopy(twin.module))
            for net in (twin, plain):
                net.zero_grad()
                loss_of(net(batch(rank, step))).backward()
            assert bits(grads_of(twin)) == bits(grads_of(plain))
        model.zero_grad()
        loss_of(model(batch(rank, step))).backward()
    again = fnddp.register(twin, COMPRESSED)
    again.sync_state = handle.sync_state
    for net in (twin, model):
        net.zero_grad()
        loss_of(net(batch(rank, 3))).backward()
    assert bits(grads_of(twin)) == bits(grads_of(model))


@on_ranks(2)
def test_another_pipeline_does_not_forget_that_ranks_are_desynchronized(rank: int) -> None:
    model = DistributedDataParallel(make_model())
    handle = fnddp.register(model, allreduce)
    lost = failing(C10d, "start", error=CollectiveError("a rank has died"))
    with lost, pytest.raises(CollectiveError, match="a rank has died"):
        loss_of(model(batch(rank, 0))).backward()
    handle._is_measured = True  # as "auto" does
    other = fnddp.register(DistributedDataParallel(make_model()), WITH_RESIDUAL)
    handle.sync_checkpoint().load_state_dict(other.sync_checkpoint().state_dict())
    assert handle.sync == other.sync
    with pytest.raises(RuntimeError, match="an earlier step failed on this rank .*a rank has died"):
        model(batch(rank, 1))


@on_ranks(2)
def test_frozen_shared_and_sparse_parameters(rank: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        frozen, shared = nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 16)
        return nn.Sequential(nn.EmbeddingBag(10, 16, sparse=True), frozen, shared, shared)

    index, plain = torch.tensor([[rank, 3], [3, 9]]), make()
    model, sync = DistributedDataParallel(make()), fnddp.parse(WITH_RESIDUAL)
    handle = fnddp.register(model, sync)
    for net in (model, plain):
        loss_of(net(index)).backward()
    assert set(handle.sync_state.residual) == {"0.weight", "2.weight", "2.bias"}
    trained = [(name, p) for name, p in plain.named_parameters() if p.requires_grad]
    average(sync, trained, sync.init(dict(trained)))
    assert model.module[0].weight.grad.is_sparse
    torch.testing.assert_close([dense(grad) for grad in grads_of(model)], grads_of(plain))


@pytest.mark.parametrize("when", ["before DDP", "before register"])
@on_ranks(2)
def test_parameters_that_were_frozen_at_set_up_are_not_silently_left_out(rank: int, when: str) -> None:
    model = make_model()
    model[2].weight.requires_grad_(when != "before DDP")
    ddp = DistributedDataParallel(model)
    model[2].weight.requires_grad_(when == "before DDP")
    fnddp.register(ddp, allreduce)
    model[2].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="register: 2.weight required no gradient.* wrap the module and register"):
        loss_of(ddp(batch(rank, 0))).backward()


@on_ranks(2)
def test_a_backward_that_breaks_off_fails_the_step_on_all(rank: int) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=8))
    model, plain = DistributedDataParallel(Hooked(), bucket_cap_mb=0.01, process_group=group), Hooked()
    handle = fnddp.register(model, fnddp.parse(COMPRESSED))
    loss_of(model(batch(rank, 0))).backward()
    before, own = bits(handle.sync_state), [p.grad.clone() for p in model.parameters()]
    loss_of(plain(batch(rank, 1))).backward()
    if rank == 1:
        with pytest.raises(ZeroDivisionError):
            loss_of(model(batch(rank, 1), lambda _: 1 / 0)).backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
            model(batch(rank, 2))  # DDP's own word
    else:
        with pytest.raises(StepFailedError, match="rank 1 failed with .*its backward did not finish"):
            loss_of(model(batch(rank, 1))).backward()
        own = [was + p.grad for was, p in zip(own, plain.parameters(), strict=True)]
        assert bits(grads_of(model)) == bits(own)
    assert bits(handle.sync_state) == before


@on_ranks(2)
def test_a_rank_without_inputs_has_the_parameters_of_torchs_class(rank: int) -> None:
    models = [DistributedDataParallel(make_model()) for _ in range(2)]
    fnddp.register(models[0], allreduce)
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(2 + 3 * rank):
                optimizer.zero_grad()
                loss_of(model(batch(rank, step))).backward()
                optimizer.step()
    assert bits([*models[0].parameters()]) == bits([*models[1].parameters()])


@on_ranks(1)
def test_a_handle_keeps_its_pipeline_and_not_its_model_alive(rank: int) -> None:
    model = DistributedDataParallel(make_model())
    handle = fnddp.register(model, error_feedback(allreduce))
    loss_of(model(batch(rank, 0))).backward()
    assert repr(handle) == "<Handle of error_feedback(allreduce), after 1 step>"
    for runs in (handle, fnddp.jit(handle.sync)):
        with pytest.raises(AttributeError, match="sync"):
            runs.sync = fnddp.none
        assert runs.sync == error_feedback(allreduce)
    alive = weakref.ref(model), weakref.ref(model.module)
    del model, handle, runs
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


@on_ranks(3, threads=True)
def test_disagreement_at_set_up_raises_on_all_ranks(rank: int):
    ddp = DistributedDataParallel(make_model())
    ddp.module[0].weight.requires_grad_(rank != 1)
    message = "leaf '0.weight': ranks 0, 2: float32[64, 16] on cpu; rank 1: leaf '0.bias'"
    with pytest.raises(RankMismatchError, match=re.escape(f"ranks disagree about {message}")):
        fnddp.register(ddp, fnddp.parse(COMPRESSED))
    with pytest.raises(RankMismatchError, match="disagree about the backend: ranks 0, 2: None; rank 1: inductor"):
        fnddp.register(DistributedDataParallel(make_model()), allreduce, backend="inductor" if rank == 1 else None)


@on_ranks(1)
def test_models_that_do_not_fit_are_refused(rank: int) -> None:
    with_hook, in_backward = (DistributedDataParallel(make_model()) for _ in range(2))
    fnddp.register(with_hook, allreduce)
    in_backward.module[0].bias._in_backward_optimizers = [torch.optim.SGD(in_backward.parameters())]  # as torch does
    skipping = DistributedDataParallel(make_model(), skip_all_reduce_unused_params=True)
    for model, error, says in (
        (make_model(), TypeError, "expected a torch.nn.parallel.DistributedDataParallel, got .*Sequential"),
        (fnddp.DistributedDataParallel(make_model()), TypeError, "fnddp.*DistributedDataParallel.*sync"),
        (with_hook, RuntimeError, "DDP accepts one hook, and fnddp_hook is already set"),
        (skipping, ValueError, "skip_all_reduce_unused_params.*remove that argument"),
        (in_backward, TypeError, "optimizer that runs in backward.*use fnddp.DistributedDataParallel"),
    ):
        with pytest.raises(error, match=says):
            fnddp.register(model, allreduce)

"""Accelerate and the Trainer of transformers themselves, on two gloo ranks."""

import unittest
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

import fnddp
from fnddp import allreduce, error_feedback, fp16, powersgd
from fnddp.run import choose as choosing
from tests.peers import everyones, launched, parameters_of, residual
from tests.ranks import on_ranks

# Imported where they are used: that takes seconds, and this file is collected by all workers.
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        find_spec("accelerate") is None or find_spec("transformers") is None,
        reason="needs pip install 'fnddp[huggingface]'",
    ),
]

SYNC = error_feedback(powersgd(fp16(allreduce), rank=1))
BATCH, ACCUMULATED, MAX_NORM, RATE = 4, 2, 0.5, 0.05


@contextmanager
def accelerated(rank: int) -> Iterator[None]:
    """As `accelerate launch --cpu` starts a rank. Accelerate keeps its state in the process: it begins anew."""
    from accelerate.state import AcceleratorState, GradientState

    with launched(rank, ACCELERATE_USE_CPU="true", FORK_LAUNCHED="0"):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(x) - y).square().mean()}


class Blocks(Regression):
    """Of which Accelerate compiles each block, in a copy of what holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)])  # type: ignore[assignment]

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for block in self.net:
            x = block(x)
        return {"loss": (x - y).square().mean()}


def data(samples: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, x @ torch.randn(6, 5, generator=generator))


def in_a_loop(rank: int, sync: Any) -> Tensor:
    """Two epochs without either: what the others must give, to the bit."""
    module = Regression()
    model = fnddp.DistributedDataParallel(module, sync=sync)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    batches = list(DataLoader(data(), BATCH))[rank::2]
    for _ in range(2):
        for i, (x, y) in enumerate(batches):
            model.require_backward_grad_sync = i % ACCUMULATED == ACCUMULATED - 1
            (model(x, y)["loss"] / ACCUMULATED).backward()
            if model.require_backward_grad_sync:
                nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
    return parameters_of(module)


def with_accelerate(
    sync: Any, epochs: int = 2, load: str = "", save: str = "", *, saves_alone: bool = False, **given: Any
) -> tuple[Tensor, Any]:
    from accelerate import Accelerator

    from fnddp.integrations.huggingface import prepare

    compiled, module = given.pop("compiled", None), given.pop("module", Regression)()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, dynamo_plugin=compiled)
    pipelines = prepare(accelerator, sync, **given)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    model, optimizer, batches = accelerator.prepare(module, optimizer, DataLoader(data(), BATCH))
    if load:
        accelerator.load_state(load)
    for _ in range(epochs):
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(x, y)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
    if save and (accelerator.is_main_process or not saves_alone):
        accelerator.save_state(save)
    accelerator.wait_for_everyone()
    return parameters_of(module), pipelines.handle(model).sync_state


def with_trainer(sync: Any, folder: Path, resume: bool = False, evaluates_first: bool = False, **given: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from fnddp.integrations.huggingface import FnddpTrainerMixin

    class StockTrainer(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(train_dataset or self.train_dataset)

    class OurTrainer(FnddpTrainerMixin, StockTrainer):
        pass

    options: Any = {"use_cpu": True, "ddp_backend": "gloo", "report_to": [], "disable_tqdm": True}
    options |= {"lr_scheduler_type": "constant", "optim": "sgd", "learning_rate": RATE}
    options["save_strategy"] = "epoch" if resume or "num_train_epochs" in given else "no"
    options |= {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATED}
    more: dict[str, Any] = {} if sync is None else {"sync": sync, "reset_sync": given.pop("reset_sync", False)}
    arguments = TrainingArguments(str(folder), **{"max_grad_norm": MAX_NORM, "num_train_epochs": 2, **options, **given})
    made = StockTrainer if sync is None else OurTrainer
    rows: Any = [{"x": x, "y": y} for x, y in data()]
    trainer = made(model=Regression(), args=arguments, train_dataset=rows, eval_dataset=rows, **more)
    if evaluates_first:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=resume)
    return parameters_of(trainer.model)


@on_ranks(2)
def test_each_way_ends_with_the_same_parameters(rank: int, tmp_path: Path) -> None:
    """To the bit, with accumulation and clipping."""
    with accelerated(rank):
        expected = in_a_loop(rank, SYNC)
        assert torch.equal(with_accelerate(repr(SYNC))[0], expected)
        assert torch.equal(with_trainer(SYNC, tmp_path), expected)
        assert torch.equal(with_trainer("allreduce", tmp_path), with_trainer(None, tmp_path))
        assert not torch.equal(with_trainer(None, tmp_path), expected)


@on_ranks(2)
def test_a_pipeline_runs_also_after_an_evaluation_before_training(rank: int, tmp_path: Path) -> None:
    """The stock Trainer leaves the model unwrapped then: each rank trains alone, and parameters differ."""
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}, {"bf16": True}):
        with accelerated(rank):
            expected = with_trainer(SYNC, tmp_path, **options)
        with accelerated(rank):
            assert torch.equal(with_trainer(SYNC, tmp_path, evaluates_first=True, **options), expected)
    with accelerated(rank), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Regression, "is_distributed_loading_by_transformers", True, raising=False)
        with pytest.raises(TypeError, match=r"OurTrainer: .* so no pipeline would run.*distributed_config"):
            with_trainer(SYNC, tmp_path)


@on_ranks(2)
def test_accelerate_takes_a_measured_pipeline_and_its_checkpoints_keep_it(rank: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    with accelerated(rank), pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "measure_link", lambda *_, **__: fnddp.Link(1e2))
        saved, _ = with_accelerate("auto", 1, save=folder)
        patch.setattr(choosing, "measure_link", lambda *_, **__: fnddp.Link(1e12))
        assert torch.equal(with_accelerate("auto", 1)[0], with_accelerate("allreduce", 1)[0])
        assert torch.equal(with_accelerate("auto", 0, load=folder)[0], saved)


@on_ranks(2)
def test_accelerate_resumes_with_the_residual_of_each_rank(rank: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    with accelerated(rank):
        whole, state = with_accelerate(SYNC, 2)
        with_accelerate(SYNC, 1, save=folder)
        resumed, after = with_accelerate(SYNC, 1, load=folder)
        assert torch.equal(resumed, whole)
        assert torch.equal(residual(after), residual(state))
        mine, other = everyones(residual(after))
        assert not torch.equal(mine, other)


def _residual(rank: int, *given: Any) -> Tensor:
    with accelerated(rank):
        return residual(with_accelerate(SYNC, *given)[1])


def test_another_number_of_ranks_takes_shares(gloo: Any, tmp_path: Path) -> None:
    one, other = gloo(2, _residual, 1, "", str(tmp_path))
    for rank, loaded in enumerate(gloo(4, _residual, 0, str(tmp_path))):
        assert torch.equal(loaded, one if rank < 2 else other)


@on_ranks(2)
def test_the_main_process_alone_may_save_what_is_equal_on_all_ranks(rank: int, tmp_path: Path) -> None:
    """A residual is not: it warns then, and resuming says on both ranks what is missing and how to begin anew."""
    case, name = unittest.TestCase(), "fnddp.integrations.huggingface"
    with accelerated(rank):
        for sync in (powersgd(fp16(allreduce), rank=1), fp16(allreduce)):
            folder = str(tmp_path / type(sync).__name__)
            with case.assertNoLogs(name):
                with_accelerate(sync, 1, save=folder, saves_alone=True)
            assert torch.equal(with_accelerate(sync, 1, load=folder)[0], with_accelerate(sync, 2)[0])
        with case.assertNoLogs(name):
            with_accelerate(SYNC, 1, save=str(tmp_path / "both"))
        folder = str(tmp_path / "one")
        with case.assertLogs(name) if rank == 0 else case.assertNoLogs(name) as logged:
            with_accelerate(SYNC, 1, save=folder, saves_alone=True)
        assert logged is None or ["rank 1 has not saved its part" in line for line in logged.output] == [True]
        wrong, missing = fnddp.RankMismatchError, "no fnddp-rank1.pt in .*save_state on all ranks.*reset_sync=True"
        with pytest.raises(FileNotFoundError if rank else wrong, match=missing):
            with_accelerate(SYNC, 1, load=folder)
        _, anew = with_accelerate(SYNC, 0, load=folder, reset_sync=True)
        assert not residual(anew).any()
        with_accelerate(SYNC, 1, load=folder, reset_sync=True)


@on_ranks(2)
def test_a_run_resumes_with_another_pipeline_from_its_initial_state(rank: int, tmp_path: Path) -> None:
    other, folder = error_feedback(powersgd(allreduce, rank=2)), str(tmp_path / "state")
    says = r"does not fit .*rank=2\)\) for this model: .*unexpected .*net.0.weight.*reset_sync=True"
    with accelerated(rank):
        before, _ = with_accelerate(SYNC, 1, save=folder)
        with pytest.raises(ValueError, match=says):
            with_accelerate(other, 1, load=folder)
        after, anew = with_accelerate(other, 0, load=folder, reset_sync=True)
        assert torch.equal(after, before)
        assert not residual(anew).any()
    for reset_sync in (False, True):
        with accelerated(rank):
            with_trainer(SYNC, tmp_path, num_train_epochs=1)
            with nullcontext() if reset_sync else pytest.raises(ValueError, match="reset_sync=True"):
                with_trainer(other, tmp_path, resume=True, reset_sync=reset_sync)


@on_ranks(2)
def test_a_compiled_run_continues_one_that_is_not(rank: int, tmp_path: Path) -> None:
    from accelerate.utils import TorchDynamoPlugin

    folder = str(tmp_path / "state")
    one: dict[str, Any] = {"module": Blocks}
    other = dict(one)
    with accelerated(rank):
        whole, state = with_accelerate(SYNC, 2, **one)
        other["compiled"] = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)  # type: ignore[arg-type]
    for saving, loading in ((one, other), (other, one)):
        with accelerated(rank):
            with_accelerate(SYNC, 1, save=folder, **saving)
        with accelerated(rank):
            resumed, after = with_accelerate(SYNC, 1, load=folder, **loading)
            assert torch.equal(resumed, whole)
            assert torch.equal(residual(after), residual(state))
    with accelerated(rank):
        whole = with_trainer(SYNC, tmp_path)
        with_trainer(SYNC, tmp_path, num_train_epochs=1, torch_compile=True, torch_compile_backend="eager")
        assert torch.equal(with_trainer(SYNC, tmp_path, resume=True), whole)


@on_ranks(2)
def test_a_folder_without_any_file_is_told_of(rank: int, tmp_path: Path) -> None:
    with accelerated(rank):
        with_accelerate(SYNC, 1, save=str(tmp_path))
        (tmp_path / f"fnddp-rank{rank}.pt").unlink()
        torch.distributed.barrier()
        case, name = unittest.TestCase(), "fnddp.integrations.huggingface"
        with case.assertLogs(name) if rank == 0 else case.assertNoLogs(name) as logged:
            state = with_accelerate(SYNC, 0, load=str(tmp_path))[1]
        assert not residual(state).any()
        assert logged is None or ["has no fnddp state" in line for line in logged.output] == [True]


@on_ranks(2)
def test_a_file_of_another_pipeline_on_one_rank_is_an_error_on_both(rank: int, tmp_path: Path) -> None:
    """Before the state of any is set."""
    folder, other = tmp_path / "ours", tmp_path / "other"
    with accelerated(rank):
        with_accelerate(SYNC, 1, save=str(folder))
        with_accelerate(error_feedback(fp16(allreduce)), 1, save=str(other))
        if rank == 1:
            (other / "fnddp-rank1.pt").rename(folder / "fnddp-rank1.pt")
        torch.distributed.barrier()
        with pytest.raises(ValueError if rank else fnddp.RankMismatchError, match="does not fit"):
            with_accelerate(SYNC, 1, load=str(folder))


@on_ranks(2)
def test_what_would_be_ignored_raises(rank: int) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, DistributedType
    from transformers import Trainer

    from fnddp.integrations.huggingface import FnddpTrainerMixin, prepare

    with accelerated(rank):
        hooked: Any = DistributedDataParallelKwargs(comm_hook=SYNC)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="has comm_hook=error_feedback.*pass the pipeline as `sync`"):
            prepare(Accelerator(cpu=True, kwargs_handlers=[hooked]), SYNC)
        sharding = Accelerator(cpu=True)
        sharding.state.distributed_type = DistributedType.FSDP  # as it sets on accelerators: on the CPU it wraps in DDP
        with pytest.raises(TypeError, match=r"prepare: Accelerate runs FSDP, which .*fsdp.compress yourself"):
            prepare(sharding, SYNC)
    with accelerated(rank):
        accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=3)])
        with pytest.raises(TypeError, match="synchronize twice; call fnddp.integrations.huggingface.prepare"):
            accelerator.prepare(fnddp.DistributedDataParallel(Regression(), sync=SYNC))
        accelerator.free_memory()
        pipelines = prepare(accelerator, SYNC)
        assert pipelines.to_kwargs() == {"bucket_cap_mb": 3}
        with pytest.raises(RuntimeError, match="already has error_feedback"):
            prepare(accelerator, SYNC)
        with pytest.raises(ValueError, match="no pipeline runs in this Regression"):
            pipelines.handle(Regression())
        late = Accelerator(cpu=True)
        late.prepare(Regression())
        with pytest.raises(RuntimeError, match="call it before accelerator.prepare"):
            prepare(late, SYNC)
    with pytest.raises(TypeError, match="put FnddpTrainerMixin before a Trainer"):

        class Wrong(Trainer, FnddpTrainerMixin):
            pass


@on_ranks(2)
def test_accelerate_steps_an_optimizer_with_owners(rank: int, tmp_path: Path) -> None:
    """With the closure None. Its `save_state` writes the optimizer of the first rank alone, which no other loads."""
    from accelerate import Accelerator

    ends: list[list[Tensor]] = []
    with accelerated(rank):
        accelerator = Accelerator(cpu=True)
        for wrap in (accelerator.prepare, lambda optimizer: optimizer):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))
            adamw = torch.optim.AdamW(net.parameters(), lr=1e-2)
            model, optimizer = fnddp.own(net, adamw), wrap(adamw)
            for step in range(3):
                model(torch.full((2, 8), 1.0 + rank + step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            ends.append([p.detach().clone() for p in net.parameters()])
        assert all(map(torch.equal, *ends))
        folder = str(tmp_path / "state")
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        if rank:
            with pytest.raises(ValueError, match="owned by the rank that saved it"):
                accelerator.load_state(folder)
        accelerator.wait_for_everyone()

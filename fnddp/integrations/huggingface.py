"""Accelerate, and the `Trainer` of transformers. Needs `pip install 'fnddp[huggingface]'`."""

import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fnddp.adapters.checkpoint import BEGIN_ANEW, shares
from fnddp.adapters.ddp import Handle, register
from fnddp.core.agreement import agree
from fnddp.core.state import parts
from fnddp.core.sync import LOCAL, State, Sync
from fnddp.run.choose import Auto, resolved
from fnddp.wire.groups import live_rank, rank, world_size

_NAME = "fnddp"
_SAVES_WITHIN = 2.0  # seconds between the files of ranks that save together
_ADVICE = (
    "but each rank must have saved its own part of the pipeline's state there: call accelerator.save_state on all "
    "ranks, not only on the main process, with a folder that all ranks see; to continue without that state, "
    f"{BEGIN_ANEW}"
)
_log = get_logger(__name__)
_TRAINER_METHODS = (
    "create_accelerator_and_postprocess",
    "_prepare_for_training",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
)


class Pipelines:
    """Pipelines of an accelerator; they replace its `DistributedDataParallelKwargs`: see `prepare`."""

    def __init__(self, sync: Sync | Auto, wrapping: DistributedDataParallelKwargs | None, *, reset_sync: bool) -> None:
        self.sync: Sync | Auto = sync
        self._wrapping, self._resets = wrapping, reset_sync
        self._looks_for_files = True  # until it has warned, or found no need to
        self._handles: weakref.WeakKeyDictionary[DistributedDataParallel, Handle] = weakref.WeakKeyDictionary()

    def handle(self, model: nn.Module) -> Handle:
        """Return the pipeline and its state for a model from `accelerator.prepare`; raise a ValueError without one."""
        found = self.find(model)
        if found is None:
            raise ValueError(
                f"no pipeline runs in this {type(model).__name__}: either accelerator.prepare did not return it, or "
                "there is only one process, for which Accelerate wraps nothing"
            )
        return found

    def to_kwargs(self) -> dict[str, Any]:
        return {} if self._wrapping is None else self._wrapping.to_kwargs()

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        self._handles[model] = register(model, self.sync)

    def save(self, models: Sequence[nn.Module], _: Any, folder: str) -> None:
        """Write a file for each rank and each model, in `accelerator.save_state`.

        All ranks must call it if the pipeline has local state; else one rank may. Otherwise rank 0 warns, once.
        """
        for name, handle in self._named(models):
            checkpoint = handle.sync_checkpoint()
            Path(folder).mkdir(parents=True, exist_ok=True)
            torch.save(checkpoint.state_dict(), _file(folder, name, rank(handle.group)))
            if self._looks_for_files and checkpoint.has_local_parts and live_rank(handle.group) == 0:
                self._looks_for_files = False
                if not _comes(_file(folder, name, 1)):
                    _log.warning(
                        f"rank 1 has not saved its part of the state of {handle.sync} in {folder}, and load_state "
                        "will refuse to resume without it: call accelerator.save_state on all ranks, not only on the "
                        "main process"
                    )

    def load(self, models: Sequence[nn.Module], folder: str) -> None:
        """Read the files of `save`, in `accelerator.load_state`; divide local state among the current ranks."""
        for name, handle in self._named(models):
            if self._resets:
                handle.reset_sync()
            elif not _load(handle, folder, name) and list(parts(handle.sync_state)):
                _log.warning(f"{folder} has no fnddp state: {handle.sync} starts from its initial state")

        if not self._handles and any(Path(folder).glob(f"{_NAME}-rank*.pt")):
            _log.warning(
                f"the pipeline state in {folder} is not used: with only one process Accelerate does not wrap the "
                "model, so no pipeline runs"
            )

    def _named(self, models: Sequence[nn.Module]) -> Iterator[tuple[str, Handle]]:
        for index, model in enumerate(models):
            found = self.find(model)
            if found is not None:
                yield f"{_NAME}-{index}" if index else _NAME, found

    def find(self, model: nn.Module) -> Handle | None:
        """Return the handle of a model from `accelerator.prepare` or of its inner module, compiled or not, or None."""
        mine = {*model.parameters()}  # Accelerate's `compile_regions` copied their modules
        found = [handle for wrapped, handle in self._handles.items() if mine.issuperset(wrapped.parameters())]
        return found[-1] if found else None


def _file(folder: str, name: str, rank: int) -> Path:
    return Path(folder) / f"{name}-rank{rank}.pt"


def _load(handle: Handle, folder: str, name: str) -> bool:
    """Set the state of `handle` from the files of `save`; return False if there is none. All ranks call this.

    If the number of ranks is unchanged, each rank reads only its own file; otherwise also the files it takes shares of.
    """
    handle.sync_checkpoint()  # ends a step that failed on this rank while others wait in it
    group, saved = handle.group, dict[str, Any]()

    def read() -> dict[str, str]:
        first = _file(folder, name, rank(group))
        found = sorted(Path(folder).glob(f"{name}-rank*.pt"), key=lambda path: path != first)
        if found:
            saved.update(_read(found[0]))
            if any(key.startswith(f"{LOCAL}/") for key in saved["parts"]):
                of_ranks = shares(rank(group), world_size(group), saved["world_size"])
                for path in {_file(folder, name, r) for r in of_ranks} - {found[0]}:
                    saved.update(_read(path))
            handle.sync_checkpoint(saved["world_size"]).require_fitting(saved)
        of = f"{saved['pipeline']} of {saved['world_size']} ranks" if saved else f"none in {folder}, {_ADVICE}"
        return {"files of the pipeline's state": of}

    agree(read, group, call="load_state")  # before any state is set
    if saved:
        handle.sync_checkpoint(saved["world_size"]).load_state_dict(saved)
    return bool(saved)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"there is no {path.name} in {path.parent}, {_ADVICE}")
    return torch.load(path, map_location="cpu", weights_only=True)


def _comes(path: Path) -> bool:
    """Return whether another rank writes `path` at about this time, as ranks that save together do."""
    end = time.monotonic() + _SAVES_WITHIN
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.02)
    return path.exists()


def prepare(accelerator: Accelerator, sync: str | Sync, *, reset_sync: bool = False) -> Pipelines:
    """Synchronize the gradients of all models of `accelerator` with `sync`. Call this before `accelerator.prepare`.

    Accelerate wraps models in torch's class, and the pipeline is registered there. `save_state` writes the pipeline's
    state, a file for each rank, and `load_state` reads it, so a resumed run is bitwise equal. If the pipeline has local
    state, such as a residual, all ranks must call `save_state`. The wrong choice where Accelerate wraps models in
    another class, as with FSDP, and for its `LocalSGD`, because that sends no gradients. With one process Accelerate
    does not wrap models, and no pipeline runs.

    Args:
        accelerator: An accelerator that has not prepared a model yet.
        sync: The pipeline, or its text. "auto" measures pipelines and chooses one for each model: see `fnddp.register`.
        reset_sync: Let `load_state` begin with the pipeline's initial state instead of a saved one: to resume with
            another pipeline, or from a checkpoint that lacks files.

    Returns:
        An object with a method `handle(model)` that returns the pipeline and the state of each model.

    Raises:
        TypeError: Accelerate wraps models in something else, or has a communication hook for them.
        RuntimeError: The accelerator has prepared a model already.

    Source: `accelerate/accelerator.py` of Accelerate 1.15, `prepare_model`.

    >>> from fnddp import fp16, allreduce
    >>> prepare(Accelerator(cpu=True), "fp16(allreduce)").sync == fp16(allreduce)
    True
    """
    kind, wrapping = accelerator.distributed_type, accelerator.ddp_handler
    parallelism = getattr(accelerator, "parallelism_config", None)
    if kind != DistributedType.NO and not kind.value.startswith("MULTI_"):
        raise TypeError(
            f"prepare: Accelerate runs {kind.value}, which does not wrap models in torch's DistributedDataParallel, "
            "so no pipeline would run; for FSDP2, call fully_shard and fnddp.integrations.fsdp.compress yourself"
        )
    if parallelism is not None and parallelism.tp_enabled:
        raise TypeError("prepare: with tensor parallelism Accelerate does not wrap models, so no pipeline would run")
    if isinstance(wrapping, Pipelines):
        raise RuntimeError(f"prepare: this accelerator already has {wrapping.sync}; make another Accelerator")
    if wrapping is not None and wrapping.comm_hook != DDPCommunicationHookType.NO:
        raise TypeError(
            f"prepare: DistributedDataParallelKwargs has comm_hook={wrapping.comm_hook!r}, and torch's class accepts "
            "only one hook; remove it, and pass the pipeline as `sync`"
        )
    if accelerator._models:  # pyright: ignore[reportPrivateUsage]
        raise RuntimeError(
            "prepare: call it before accelerator.prepare, which has already wrapped a model without the pipeline"
        )
    pipelines = Pipelines(resolved(sync), wrapping, reset_sync=reset_sync)
    accelerator.ddp_handler = pipelines  # pyright: ignore[reportAttributeAccessIssue]
    accelerator.register_save_state_pre_hook(pipelines.save)
    accelerator.register_load_state_pre_hook(pipelines.load)
    return pipelines


class FnddpTrainerMixin:
    """A mixin for a Trainer of transformers: `class OurTrainer(FnddpTrainerMixin, Trainer)`.

    `OurTrainer(model, args, ..., sync=...)` synchronizes gradients with the pipeline `sync`, or its text. Checkpoints
    have the pipeline's state, a file for each rank, and `train(resume_from_checkpoint=...)` continues bit for bit; with
    `reset_sync=True` it begins with the pipeline's initial state, see `prepare`. The wrong choice for several GPUs in
    one process and for models from `from_pretrained(distributed_config=...)` (a TypeError), and where `prepare` raises.

    Attributes:
        pipelines: The result of `prepare`.

    Source: `transformers/trainer.py` of transformers 5.23.
    """

    args: Any
    accelerator: Accelerator
    model: Any
    model_wrapped: nn.Module
    pipelines: Pipelines

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        missing = [name for name in _TRAINER_METHODS if not hasattr(super(FnddpTrainerMixin, cls), name)]
        if missing:
            raise TypeError(
                f"{cls.__name__}: put FnddpTrainerMixin before a Trainer of transformers 5, as in class "
                f"{cls.__name__}(FnddpTrainerMixin, Trainer); the class after it has no {', '.join(missing)}"
            )

    def __init__(self, *args: Any, sync: str | Sync = "allreduce", reset_sync: bool = False, **kwargs: Any) -> None:
        self._sync, self._resets_sync = sync, reset_sync
        super().__init__(*args, **kwargs)

    @property
    def sync_state(self) -> State:
        """State of the pipeline; raises a ValueError before training, and with only one process."""
        return self.pipelines.handle(self.model_wrapped).sync_state

    def create_accelerator_and_postprocess(self) -> None:
        """Prepare the Trainer's accelerator before it wraps anything."""
        super().create_accelerator_and_postprocess()  # pyright: ignore[reportAttributeAccessIssue]
        if self.args.n_gpu > 1:
            raise TypeError(f"{type(self).__name__}: {self.args.n_gpu} GPUs in one process; use one each (torchrun)")
        self.pipelines = prepare(self.accelerator, self._sync, reset_sync=self._resets_sync)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        is_alone = self.accelerator.num_processes == 1
        if not is_alone and self.pipelines.find(self.model_wrapped) is None:
            # `evaluate` and `predict` before training mark the model as prepared without wrapping it. Accelerate would
            # then return it as it is (`Accelerator.prepare_model`).
            self.model._is_accelerate_prepared, self.model_wrapped = False, self.model
        prepared = super()._prepare_for_training(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if not is_alone and self.pipelines.find(self.model_wrapped) is None:
            raise TypeError(
                f"{type(self).__name__}: the Trainer has not wrapped the model in DistributedDataParallel, so no "
                "pipeline would run. It does not wrap models from from_pretrained(distributed_config=...): load the "
                "model without that argument"
            )
        return prepared

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # pyright: ignore[reportAttributeAccessIssue]
        self.pipelines.save([self.model_wrapped], (), output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # pyright: ignore[reportAttributeAccessIssue]
        if checkpoint is not None:
            self.pipelines.load([self.model_wrapped], checkpoint)

"""Lightning: strategies for its `Trainer` and for `Fabric`. Needs `pip install 'fnddp[lightning]'`."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, cast

from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.strategies.ddp import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from fnddp.adapters.checkpoint import Checkpoint
from fnddp.adapters.module.wrapper import DistributedDataParallel
from fnddp.core import tree
from fnddp.core.state import load_state_dict, parts, state_dict
from fnddp.core.sync import State, Sync
from fnddp.device import device_of
from fnddp.run.choose import AUTO, Auto, resolved
from fnddp.wire import control

KEY = "fnddp"
"""Key of the pipeline's state in a checkpoint of Lightning."""


class FnddpStrategy(DDPStrategy):
    """Lightning's "ddp" with gradients synchronized by a pipeline: `Trainer(strategy=FnddpStrategy(sync=...))`.

    A checkpoint holds the pipeline states of all ranks under "fnddp". `fit(ckpt_path=...)` resumes bit for bit; another
    number of ranks divides the residuals with `fnddp.adapters.checkpoint.shares`. Lightning's own strategies can read
    it. To write it, the first rank gathers the residuals of all ranks: the wrong choice where they do not fit into its
    memory. With `start_method="spawn"` or "fork", only a checkpoint keeps the state after `fit`.

    Args:
        sync: The pipeline, or its text. "auto" measures pipelines when `fit` begins, and keeps the chosen one: see
            `fnddp.DistributedDataParallel`.
        reset_sync: Let `fit(ckpt_path=...)` begin with the pipeline's initial state instead of a saved one: to resume
            with another pipeline.
        **kwargs: Arguments of Lightning's `DDPStrategy`, including those for `fnddp.DistributedDataParallel`.

    Raises:
        TypeError: A communication hook or model averaging is given; the pipeline replaces both.

    Source: `lightning/pytorch/strategies/ddp.py` of Lightning 2.6.

    >>> from fnddp import allreduce, fp16
    >>> FnddpStrategy("fp16(allreduce)").sync == fp16(allreduce)
    True
    """

    def __init__(self, sync: str | Sync = "allreduce", *, reset_sync: bool = False, **kwargs: Any) -> None:
        pipeline = _pipeline(sync, kwargs)
        super().__init__(**kwargs)
        self.sync: Any = pipeline  # "auto" until it is measured
        self._resets = reset_sync
        self._kept: tuple[nn.Module, State, list[str]] | None = None
        self._loaded: Mapping[str, Any] | None = None

    @property
    def sync_state(self) -> State:
        """State of the pipeline, also after `fit`; None before the first `fit`."""
        if isinstance(self.model, DistributedDataParallel):
            return self.model.sync_state
        return None if self._kept is None else self._kept[1]

    @property
    def learnt_order(self) -> list[str]:
        """The order in which backward produces gradients, as measured by the module; also after `fit`."""
        if isinstance(self.model, DistributedDataParallel):
            return self.model.learnt_order
        return [] if self._kept is None else self._kept[2]

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:  # pyright: ignore[reportIncompatibleMethodOverride]
        wrapped = _wrapped(model, self.sync, self.determine_ddp_device_ids(), self._ddp_kwargs)
        if self._loaded is not None:
            _restore(wrapped, self._loaded)
        elif self._kept is not None and self._kept[0] is model:
            wrapped.sync_state = load_state_dict(wrapped.sync_state, state_dict(self._kept[1]))
            wrapped.learnt_order = self._kept[2]
        self.sync = wrapped.sync if self.sync == AUTO else self.sync
        return wrapped

    def _register_ddp_hooks(self) -> None:
        """Register no hook: the wrapped module has its pipeline."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write `checkpoint` on the first rank, with the pipeline's state unless it holds only weights."""
        if "optimizer_states" in checkpoint and self.sync_state is not None:
            owner: Any = self  # read-only
            checkpoint = {**checkpoint, KEY: _gathered(Checkpoint(owner, None, has_order=True))}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights and the pipeline's state; if `fit` has yet to wrap the module, keep the state until then."""
        super().load_model_state_dict(checkpoint, strict=strict)
        assert self.lightning_module is not None
        if isinstance(self.model, DistributedDataParallel):
            _restore(self.model, checkpoint.get(KEY, {}))
        elif self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._kept, self._loaded = None, None if self._resets else checkpoint.get(KEY, {})

    def teardown(self) -> None:
        """Unwrap the module, and keep the state on the CPU for the next `fit` of the same module."""
        if isinstance(self.model, DistributedDataParallel):
            state = tree.map_tensors(Tensor.cpu, self.model.sync_state)
            self._kept = self.model.module, state, self.model.learnt_order
            self.model = self.lightning_module
        self._loaded = None
        super().teardown()


class FnddpFabricStrategy(FabricDDPStrategy):
    """`FnddpStrategy` for `lightning.Fabric(strategy=...)`; `fabric.save` and `fabric.load` include the state.

    With `reset_sync=True`, `fabric.load` does not read a state, but sets the initial one.

    Source: `lightning/fabric/strategies/ddp.py` of Lightning 2.6.

    >>> from fnddp import allreduce
    >>> FnddpFabricStrategy().sync == allreduce
    True
    """

    def __init__(self, sync: str | Sync = "allreduce", *, reset_sync: bool = False, **kwargs: Any) -> None:
        pipeline = _pipeline(sync, kwargs)
        super().__init__(**kwargs)
        self.sync: Sync | Auto = pipeline
        self._resets = reset_sync

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _wrapped(module, self.sync, self._determine_ddp_device_ids(), self._ddp_kwargs)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write `state` on the first rank, with the pipeline state of each module in it."""
        ours = {name: model for name, model in state.items() if isinstance(model, DistributedDataParallel)}
        saved = {name: _gathered(model.sync_checkpoint()) for name, model in ours.items()}
        super().save_checkpoint(path, {**state, KEY: saved} if saved else state, storage_options, filter)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load `state` and the pipeline states of its modules; return the other entries of the checkpoint."""
        rest = super().load_checkpoint(path, state, strict, weights_only)
        if isinstance(state, dict):
            saved, loaded = rest.pop(KEY, {}), cast("dict[str, Any]", state)
            for name, model in loaded.items():
                if isinstance(model, DistributedDataParallel) and self._resets:
                    model.reset_sync()
                elif isinstance(model, DistributedDataParallel):
                    _restore(model, saved.get(name, {}))
        return rest


def wrapped_in(model: nn.Module) -> DistributedDataParallel:
    """Return the `fnddp.DistributedDataParallel` in the result of `fabric.setup`."""
    return next(part for part in model.modules() if isinstance(part, DistributedDataParallel))


def _wrapped(
    module: nn.Module, sync: Sync | Auto, device_ids: list[int] | None, kwargs: Mapping[str, Any]
) -> DistributedDataParallel:
    # On a side stream, as Lightning does: https://pytorch.org/docs/stable/notes/cuda.html#id5
    device = device_of(next(module.parameters()).device)
    with nullcontext() if device_ids is None else device.on(device.stream()):
        return DistributedDataParallel(module, device_ids=device_ids, sync=sync, **kwargs)


def _pipeline(sync: str | Sync, kwargs: Mapping[str, Any]) -> Sync | Auto:
    hooks = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")
    given = [name for name in hooks if kwargs.get(name) is not None]
    if given:
        raise TypeError(
            f"the strategy takes no {given[0]}: its pipeline `sync` replaces it. To use a communication hook of "
            "torch, pass sync=fnddp.from_hook(hook, state)"
        )
    return resolved(sync)


def _gathered(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return, on the first rank, the state of all ranks as one flat dict on the CPU. All ranks call this."""
    mine = {key: v.cpu() if isinstance(v, Tensor) else v for key, v in checkpoint.state_dict().items()}
    everyone = control.gather_object(mine, None) if checkpoint.has_local_parts else [mine]
    return {key: value for each in everyone for key, value in each.items()}


def _restore(model: DistributedDataParallel, saved: Mapping[str, Any]) -> None:
    if saved:
        model.sync_checkpoint(saved["world_size"]).load_state_dict(saved)
    elif list(parts(model.sync_state)):
        rank_zero_warn(f"the checkpoint has no fnddp pipeline state, so {model.sync} starts from its initial state")

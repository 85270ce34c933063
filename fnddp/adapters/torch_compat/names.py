"""Names of torch's class that tools read and call, public and private."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fnddp import torch_private
from fnddp.adapters.handle import HasPipeline
from fnddp.adapters.hook import from_hook
from fnddp.adapters.module.slots import OWNER, Slots, WrappedParameters, sparse_parameters
from fnddp.adapters.module.steps import Steps
from fnddp.core.sync import Sync
from fnddp.device import device_of
from fnddp.reducers.all_reduce import allreduce
from fnddp.run.engine import delegated
from fnddp.run.vote import StepFailedError
from fnddp.transforms.cast import fp16
from fnddp.wire import control, groups
from fnddp.wire.protocol import CollectiveError

HookLocation = torch_private.BufferCommHookLocation

_BUILTIN_HOOKS: dict[Any, Sync] = {
    dist.BuiltinCommHookType.ALLREDUCE: allreduce,
    dist.BuiltinCommHookType.FP16_COMPRESS: fp16(allreduce),
}


def reducer(steps: Steps) -> SimpleNamespace:
    """Return a replacement for torch's reducer, with the methods that tools call. It reduces nothing."""

    def prepare_for_backward(_: Sequence[Tensor]) -> None:
        steps.is_armed = True

    return SimpleNamespace(
        prepare_for_backward=prepare_for_backward,
        _delay_all_reduce=lambda: None,  # lightning calls it after a static graph's first backward; nothing to do
        _rebuild_buckets=lambda: False,
        _ddp_graph_static=lambda: steps.promises.is_static,
    )


class TorchNames(HasPipeline, nn.Module, Joinable):
    """Attributes and methods of torch's class that do not involve pipelines."""

    broadcast_bucket_size = control.BROADCAST_BYTES
    use_side_stream_for_tensor_copies = True  # in `to_kwargs`
    should_finalize_after_backward = False

    # torch's own. They read the other names of this class.
    join_device = TorchDDP.join_device  # pyright: ignore[reportIncompatibleMethodOverride]
    join_process_group = TorchDDP.join_process_group  # pyright: ignore[reportIncompatibleMethodOverride]
    will_sync_module_buffers = TorchDDP.will_sync_module_buffers
    scatter, to_kwargs, gather = TorchDDP.scatter, TorchDDP.to_kwargs, TorchDDP.gather
    _set_params_and_buffers_to_ignore_for_model = staticmethod(torch_private.set_params_and_buffers_to_ignore)
    _build_debug_param_to_name_mapping = torch_private.debug_names

    static_graph = delegated("_promises.static_graph")
    skip_all_reduce_unused_params = delegated("_promises.skips_unused")
    broadcast_buffers = delegated("forward_sync_buffers")
    _engine: Any = delegated("_steps.engine")

    module: nn.Module
    device: torch.device
    parameters_to_ignore: set[str]
    forward_sync_buffers: bool
    sync: Any  # a property of the subclass
    _trained: WrappedParameters
    _slots: Slots
    _steps: Steps
    _buffer_hook: Callable[[dict[str, Tensor]], Any] | None = None  # replaces the broadcast
    _buffer_location = HookLocation.PRE_FORWARD
    _divides_by_initial_world_size = True  # within join, a mean is over all ranks, even those without inputs
    require_backward_grad_sync: bool
    require_forward_param_sync: bool  # True if the next forward broadcasts buffers: after a synchronizing one

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group; None without torch.distributed."""
        return groups.live_group(self._group) if dist.is_initialized() else None

    @property
    def _is_accelerate_prepared(self) -> bool:
        raise TypeError(
            "Accelerate would wrap a fnddp.DistributedDataParallel again, in torch's class, and synchronize twice; "
            "call fnddp.integrations.huggingface.prepare(accelerator, sync), and pass it the plain module"
        )

    # End of a backward (torch 2.15 and later)

    @property
    def require_manual_backward_finalization(self) -> bool:
        """False, because a step ends with its backward."""
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            self.finalize_backward()

    def finalize_backward(self) -> None:
        """Raise a RuntimeError, as torch's class does if the caller is not required to end backwards."""
        raise RuntimeError(
            f"{OWNER}: each step ends with its backward, where all ranks agree on its result, so the caller has "
            "nothing to finalize; remove finalize_backward() and require_manual_backward_finalization"
        )

    # Uneven inputs

    def join(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        """See `torch.nn.parallel.DistributedDataParallel.join`.

        If a backward fails and the error is caught, all ranks continue, including those without inputs.
        """
        block = ExitStack()
        block.enter_context(TorchDDP.join(self, *args, **kwargs))  # pyright: ignore[reportArgumentType]
        block.callback(self._settle)  # notifies the others, before this rank follows them
        return block

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """See `torch.distributed.algorithms.Joinable`.

        Ranks without inputs take part in the others' steps with zeros. Their pipeline's state continues: a residual of
        error feedback is still sent, so nothing is lost, and replicated parts stay equal.
        """
        self._divides_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        hook = JoinHook()
        hook.main_hook, hook.post_hook = self._follow_others, self._copy_last_joiner
        return hook

    def _follow_others(self) -> None:
        """Take part in one forward and backward of the ranks that still have inputs."""
        with device_of(self.device).selected():
            self._sync_buffers(HookLocation.PRE_FORWARD, has_inputs=False)
            synchronizes = control.total(0, self._group) > 0
            if synchronizes and self._compares:
                self._require_one_choice()
            self._sync_buffers(HookLocation.POST_FORWARD, has_inputs=False)
            self.require_forward_param_sync = synchronizes
            if synchronizes:
                with suppress(StepFailedError):  # the failed rank may continue with its next inputs
                    self._steps.participate_with_zeros()

    def _copy_last_joiner(self, is_last_joiner: bool) -> None:
        """Copy parameters and buffers from a rank that had the last inputs."""
        with device_of(self.device).selected():
            self._steps.wait_for_futures()
            kept = [p.detach() for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore]
            kept += self.modules_buffers if self.forward_sync_buffers else []
            control.broadcast(kept, self._group, source=self._source_of_buffers(is_last_joiner))
        self._join_config = torch_private.JoinConfig.construct_disabled_join_config()

    def _source_of_buffers(self, has_inputs: bool) -> int:
        """Return the highest rank that has inputs, within join. Its buffers are current."""
        return control.highest(groups.rank(self._group) if has_inputs else -1, self._group)

    def _share_of_inputs(self) -> float:
        """Return the factor for this rank's gradients within join."""
        left = control.total(int(torch.is_grad_enabled() and self.require_backward_grad_sync), self._group)
        return 1.0 if self._divides_by_initial_world_size or not left else groups.world_size(self._group) / left

    def _sync_buffers(self, location: HookLocation, *, has_inputs: bool = True) -> None:
        """Broadcast buffers, or run the hook that replaces this, if due at `location` (before or after forward)."""
        if location != self._buffer_location or not any(self._slots.buffers) or not self.will_sync_module_buffers():
            return
        named = self.named_module_buffers
        if dist.is_initialized():
            self._steps.require_same_world()
        try:
            # Autograd has saved some of them for backward, and must not notice that they changed.
            with torch.no_grad(), torch_private.keeping_versions(tuple(named.values())):
                if self._buffer_hook is not None:
                    self._steps.futures += self._buffer_hook(named) or ()
                else:
                    source = self._source_of_buffers(has_inputs) if self._join_config.enable else 0
                    control.broadcast(list(named.values()), self._group, source=source)
        except RuntimeError as error:
            self._engine.broken = error
            raise CollectiveError(
                f"buffers could not be made equal in forward: {error}. Another rank has failed, has left, or is in "
                "another step; see its own error"
            ) from error

    # Hooks

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Set `sync` to `fnddp.from_hook(hook, state)`. All ranks must call it, as with torch's class.

        The hook runs when all gradients are complete. It is called once for each dtype, not for each bucket.

        Args:
            state: The hook's first argument.
            hook: `hook(state, bucket) -> Future[Tensor]`.

        Raises:
            RuntimeError: The module has a pipeline or a hook already.
            TypeError: `hook` is not callable.
        """
        if not callable(hook):
            raise TypeError(f"Communication hook must be callable, got {hook!r}")
        name = getattr(hook, "__qualname__", repr(hook))
        self._replace_plain(from_hook(hook, state, parameters=self._trained.parameters), name)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._replace_plain(_BUILTIN_HOOKS[comm_hook_type], str(comm_hook_type))

    def _replace_plain(self, sync: Sync, hook: str) -> None:
        if self.sync.over(None) != allreduce:
            raise RuntimeError(
                f"gradients are synchronized by {self.sync!r}, which the hook {hook} would replace; remove sync= when "
                "wrapping the module, or put fnddp.from_hook(hook, state) into the pipeline"
            )
        self.sync = sync

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: HookLocation = HookLocation.POST_FORWARD
    ) -> None:
        if not callable(hook):
            raise TypeError(f"_register_buffer_comm_hook: expected hook(state, named_buffers), got {hook!r}")
        self._buffer_hook, self._buffer_location = partial(hook, state), comm_hook_location

    # Buffers and parameters

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers by name, looked up at each access because modules may assign new ones."""
        return {name: b for name, b in self.module.named_buffers() if name not in self.parameters_to_ignore}

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The module's buffers."""
        return list(self.named_module_buffers.values())

    def _default_broadcast_coalesced(
        self, bufs: Sequence[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        control.broadcast(list(self.modules_buffers if bufs is None else bufs), self._group, source=authoritative_rank)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        sparse = sparse_parameters(self.module)
        parameters = list(self._trained.parameters.values())
        return parameters, [parameter in sparse for parameter in parameters]

    # For callers

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return no data: for Lightning's strategies, which look for one key at the end."""
        return {}

    @staticmethod
    def _log_and_throw(err_type: type[Exception], err_msg: str) -> None:
        """Raise the error, for `_build_debug_param_to_name_mapping`."""
        raise err_type(err_msg)

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self._engine.steps:
            raise RuntimeError("_set_static_graph() should be called before training loop starts")
        self.static_graph = True

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing, because outputs are not copied."""

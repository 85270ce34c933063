"""Names of torch's class that tools read and call, public and private."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fnddp import torch_private
from fnddp.adapters.hook import from_hook
from fnddp.adapters.module.promises import Promises
from fnddp.adapters.module.slots import Trained
from fnddp.adapters.torch_compat.arguments import Arguments
from fnddp.adapters.torch_compat.buffers import Buffers, HookLocation
from fnddp.adapters.torch_compat.join import UnevenInputs
from fnddp.adapters.torch_compat.log import Log, environment, parameter_facts
from fnddp.adapters.torch_compat.parameters import sparse_parameters
from fnddp.core.sync import Sync
from fnddp.device import device_of
from fnddp.reducers.all_reduce import allreduce
from fnddp.transforms.cast import fp16
from fnddp.wire import control, groups

_BUILTIN_HOOKS: dict[Any, Sync] = {
    dist.BuiltinCommHookType.ALLREDUCE: allreduce,
    dist.BuiltinCommHookType.FP16_COMPRESS: fp16(allreduce),
}


def _delegated(owner: str, name: str) -> Any:
    """Return a property that reads and writes the attribute `name` of the attribute `owner`."""
    return property(attrgetter(f"{owner}.{name}"), lambda self, value: setattr(getattr(self, owner), name, value))


class TorchNames(nn.Module, Joinable):
    """Attributes and methods of torch's class that are not about synchronizing with a pipeline.

    Args:
        module: The wrapped module.
        trained: Its parameters.
        given: The constructor's arguments.
    """

    broadcast_bucket_size = control.BROADCAST_BYTES
    use_side_stream_for_tensor_copies = True  # in `to_kwargs`

    # Torch's own, which read the other names here.
    join = TorchDDP.join
    join_device = TorchDDP.join_device  # pyright: ignore[reportIncompatibleMethodOverride]
    join_process_group = TorchDDP.join_process_group  # pyright: ignore[reportIncompatibleMethodOverride]
    will_sync_module_buffers = TorchDDP.will_sync_module_buffers
    scatter, to_kwargs, gather = TorchDDP.scatter, TorchDDP.to_kwargs, TorchDDP.gather
    _set_params_and_buffers_to_ignore_for_model = staticmethod(torch_private.set_params_and_buffers_to_ignore)
    _build_debug_param_to_name_mapping = torch_private.debug_names

    static_graph = _delegated("_promises", "static_graph")
    skip_all_reduce_unused_params = _delegated("_promises", "skips_unused")
    forward_sync_buffers = broadcast_buffers = _delegated("_buffers_of_module", "is_synced")
    require_forward_param_sync = _delegated("_buffers_of_module", "is_due")

    sync: Any  # a property of the subclass
    _take_part: Callable[[], None]  # in a step, without gradients

    def __init__(self, module: nn.Module, trained: Trained, given: Arguments) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self.module = module
        self._trained = trained
        self._group = given.group
        if given.device_mesh is not None:
            self.device_mesh = given.device_mesh
        self.parameters_to_ignore = given.ignored
        self.device, self.is_multi_device_module = given.device, given.is_multi_device
        self.device_type = self.device.type
        self.device_ids, self.output_device, self.dim = given.device_ids, given.output_device, given.dim
        self._bucket_caps = given.sizes.caps
        self.bucket_bytes_cap, self.bucket_bytes_cap_list = max(given.sizes.caps), list(given.sizes.listed)
        self.find_unused_parameters = given.find_unused_parameters
        self.gradient_as_bucket_view = given.gradient_as_bucket_view
        self.batched_grad_copy = given.batched_grad_copy
        self.mixed_precision = given.mixed_precision
        self.require_backward_grad_sync = True
        self._buffers_of_module = Buffers(module, given.ignored, given.group, given.forward_sync_buffers)
        self._inputs = UnevenInputs(given.group)
        self._promises = Promises(
            list(trained.parameters), static_graph=given.static_graph, skips_unused=given.skip_all_reduce_unused_params
        )

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group; None without torch.distributed."""
        return groups.live_group(self._group) if dist.is_initialized() else None

    @property
    def _is_accelerate_prepared(self) -> bool:
        raise TypeError(
            "Accelerate would wrap a fnddp.DistributedDataParallel once more, in torch's class, and synchronize twice; "
            "call fnddp.integrations.huggingface.prepare(accelerator, sync), and give it the module itself"
        )

    # Uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """See `torch.distributed.algorithms.Joinable`.

        Ranks without inputs take part in the others' steps with zeros. A pipeline's own state goes on: an error
        feedback residual of theirs is still sent, nothing is lost, and what is replicated stays equal.
        """
        self._inputs.divides_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        hook = JoinHook()
        hook.main_hook, hook.post_hook = self._follow_others, self._copy_last_joiner
        return hook

    def _follow_others(self) -> None:
        """Take part in one forward and backward of the ranks that have inputs."""
        buffers = self._buffers_of_module
        with device_of(self.device).selected():
            if buffers.runs_at(HookLocation.PRE_FORWARD):
                buffers.sync(self._inputs.source_of_buffers(has_inputs=False))
            synchronizes = control.total(0, self._group) > 0
            if buffers.runs_at(HookLocation.POST_FORWARD):
                buffers.sync(self._inputs.source_of_buffers(has_inputs=False))
            buffers.is_due = synchronizes
            if synchronizes:
                self._take_part()

    def _copy_last_joiner(self, is_last_joiner: bool) -> None:
        """Copy parameters and buffers from a rank that has seen the last input."""
        buffers = self._buffers_of_module
        with device_of(self.device).selected():
            buffers.futures.wait()
            source = self._inputs.source_of_buffers(has_inputs=is_last_joiner)
            named = dict(self.module.named_parameters())
            named |= buffers.named() if buffers.is_synced else {}
            kept = [tensor.detach() for name, tensor in named.items() if name not in self.parameters_to_ignore]
            control.broadcast(kept, self._group, source=source)
        self._join_config = torch_private.JoinConfig.construct_disabled_join_config()

    # Hooks

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Set `sync` to `fnddp.from_hook(hook, state)`, on all ranks: torch's way to a pipeline.

        The hook runs when all gradients are there. It is called once for each dtype, not for each bucket.

        Args:
            state: The hook's first argument.
            hook: `hook(state, bucket) -> Future[Tensor]`.

        Raises:
            RuntimeError: There is a pipeline or a hook already.
            TypeError: `hook` is not callable.
        """
        if not callable(hook):
            self._log_and_throw(TypeError, f"Communication hook must be callable, got {hook!r}")
        name = getattr(hook, "__qualname__", repr(hook))
        self._replace_plain(from_hook(hook, state, parameters=self._trained.parameters), name)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._replace_plain(_BUILTIN_HOOKS[comm_hook_type], str(comm_hook_type))

    def _replace_plain(self, sync: Sync, hook: str) -> None:
        logged = self._log.facts.get("comm_hook")
        if logged is not None:
            self._log_and_throw(RuntimeError, f"the hook {logged} is registered already; set `sync` to change it")
        if self.sync.over(None) != allreduce:
            self._log_and_throw(
                RuntimeError,
                f"gradients are synchronized by {self.sync!r}, which the hook {hook} would replace; leave out sync= "
                "when you wrap the module, or write fnddp.from_hook(hook, state) into the pipeline",
            )
        self.sync = sync
        self._log.facts["comm_hook"] = hook

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: HookLocation = HookLocation.POST_FORWARD
    ) -> None:
        if not callable(hook):
            raise TypeError(f"_register_buffer_comm_hook: expected hook(state, named_buffers), got {hook!r}")
        self._buffers_of_module.hook, self._buffers_of_module.location = partial(hook, state), comm_hook_location

    # Buffers and parameters

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers by name."""
        return self._buffers_of_module.named()

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers."""
        return list(self.named_module_buffers.values())

    def _default_broadcast_coalesced(
        self, bufs: Sequence[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        control.broadcast(list(self.modules_buffers if bufs is None else bufs), self._group, source=authoritative_rank)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        sparse = sparse_parameters(self.module)
        parameters = list(self._trained.parameters.values())
        return parameters, [parameter in sparse for parameter in parameters]

    # Logs

    def _begin_records(self) -> None:
        """Forget all steps so far."""
        self._promises.begin()
        flags = ("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
        self._log = Log(
            {
                "module_name": type(self.module).__name__,
                "device_ids": ", ".join(map(str, self.device_ids or ())),
                "output_device": -1 if self.output_device is None else self.output_device,
                "bucket_cap_bytes": self.bucket_bytes_cap,
                "has_sync_bn": int(any(isinstance(part, nn.SyncBatchNorm) for part in self.module.modules())),
                **{flag: int(getattr(self, flag)) for flag in (*flags, "is_multi_device_module")},
                **environment(self.process_group),
                **parameter_facts(self._trained, self._bucket_caps),
            }
        )

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return dict(self._log.facts)

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> None:
        with self._log.errors():
            raise err_type(err_msg)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError(f"DDP runtime logging sample rate should be equal or greater than 1, got {sample_rate}")
        self._log.sample_rate = sample_rate

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self._log.has_stepped:
            self._log_and_throw(RuntimeError, "_set_static_graph() should be called before training loop starts")
        self.static_graph = True

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing: outputs are not copied."""

"""What tools read and call on torch's class, by public and by private names."""

import abc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from fnddp import torch_private
from fnddp.adapters.hook import from_hook
from fnddp.adapters.module.promises import Promises
from fnddp.adapters.module.slots import Trained
from fnddp.adapters.torch_compat.arguments import Arguments
from fnddp.adapters.torch_compat.buffers import BufferHook, Buffers, HookLocation
from fnddp.adapters.torch_compat.hooks import BUILTIN, check_hook
from fnddp.adapters.torch_compat.join import Shadow, UnevenInputs
from fnddp.adapters.torch_compat.log import Log, environment, parameter_facts
from fnddp.adapters.torch_compat.parameters import debug_names, sparse_parameters
from fnddp.core.sync import Sync
from fnddp.reducers.all_reduce import allreduce
from fnddp.wire import control, groups


class TorchNames(nn.Module, Joinable):
    """Attributes and methods of torch's class that are not about synchronizing with a pipeline.

    Everything that they need is set here, but for what is abstract.

    Args:
        module: The wrapped module.
        trained: Its parameters.
        given: The constructor's arguments.
    """

    broadcast_bucket_size = control.BROADCAST_BYTES

    # Marks on the wrapped module and its tensors that torch's class reads as well.
    _set_params_and_buffers_to_ignore_for_model = staticmethod(torch_private.set_params_and_buffers_to_ignore)
    _get_data_parallel_params = staticmethod(torch_private.data_parallel_params)

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
        self._inputs = UnevenInputs(module, given.ignored, self._buffers_of_module, given.group)
        self._promises = Promises(
            list(trained.parameters),
            given.group,
            static_graph=given.static_graph,
            skips_unused=given.skip_all_reduce_unused_params,
        )
        self._log = Log({})

    @property
    @abc.abstractmethod
    def sync(self) -> Sync:
        """The pipeline that runs."""

    @sync.setter
    @abc.abstractmethod
    def sync(self, sync: Sync) -> None: ...

    @abc.abstractmethod
    def _take_part(self) -> None:
        """Takes part in a step without gradients."""

    @abc.abstractmethod
    def _remove_autograd_hooks(self) -> None: ...

    @abc.abstractmethod
    def _check_reducer_finalized(self) -> None: ...

    def _begin_records(self) -> None:
        """Forgets all steps so far."""
        self._promises.begin()
        group = self.process_group
        self._log = Log({**self._facts(), **environment(group), **parameter_facts(self._trained, self._bucket_caps)})

    def _facts(self) -> dict[str, Any]:
        return {
            "module_name": type(self.module).__name__,
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "is_multi_device_module": int(self.is_multi_device_module),
            "has_sync_bn": int(any(isinstance(part, nn.SyncBatchNorm) for part in self.module.modules())),
        }

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group; None without torch.distributed."""
        return groups.live_group(self._group) if dist.is_initialized() else None

    @property
    def static_graph(self) -> bool:
        """Whether every step is promised to use the same parameters."""
        return self._promises.static_graph

    @property
    def skip_all_reduce_unused_params(self) -> bool:
        """Whether what the first step does not use is promised never to be used."""
        return self._promises.skips_unused

    @property
    def _is_accelerate_prepared(self) -> bool:
        raise TypeError(
            "Accelerate would wrap a fnddp.DistributedDataParallel once more, in torch's class, and synchronize twice; "
            "call fnddp.integrations.huggingface.prepare(accelerator, sync), and give it the module itself"
        )

    # Uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context for uneven inputs: ranks that have run out of them take part in the others' steps with zeros.

        At the end all ranks have the parameters of one that has seen the last input. Every forward within it must be
        followed by one backward, in all of it or in none.

        Args:
            divide_by_initial_world_size: Take the mean over all ranks, so that every input has the same weight;
                otherwise over the ranks that are left. Works with any pipeline (torch ignores it under a hook).
            enable: If not, nothing is done, and inputs must be even.
            throw_on_early_termination: Raise on all ranks when the first one runs out. Needed where forward has
                collectives of its own.

        Raises:
            RuntimeError: With `throw_on_early_termination`.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """See `torch.distributed.algorithms.Joinable`."""
        self._inputs.divides_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return Shadow(self._inputs, self._take_part, self._leave_join, self.device)

    @property
    def join_device(self) -> torch.device:
        """See `torch.distributed.algorithms.Joinable`."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """See `torch.distributed.algorithms.Joinable`."""
        return groups.live_group(self._group)

    @property
    def _joins(self) -> bool:
        return self._join_config.enable

    def _leave_join(self) -> None:
        self._join_config = torch_private.JoinConfig.construct_disabled_join_config()

    # Hooks

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """torch's way to a pipeline: sets `sync` to `fnddp.from_hook(hook, state)`, on all ranks.

        The hook runs when all gradients are there. It is called once for each dtype, not for each bucket.

        Args:
            state: The hook's first argument.
            hook: `hook(state, bucket) -> Future[Tensor]`.

        Raises:
            RuntimeError: There is a pipeline or a hook already.
            TypeError: `hook` is not callable.
            ValueError: It is annotated to take or return something else.
        """
        with self._log.errors():
            check_hook(hook)
            self._require_plain("register_comm_hook")
            self.sync = from_hook(hook, state, parameters=self._trained.parameters)
            self._log.set(comm_hook=getattr(hook, "__qualname__", repr(hook)))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._require_plain("_register_builtin_comm_hook")
        self.sync = BUILTIN[comm_hook_type]
        self._log.set(comm_hook=str(comm_hook_type))

    def _require_plain(self, method: str) -> None:
        logged = self._log.data().get("comm_hook")
        if logged is not None:
            raise RuntimeError(f"{method}: the hook {logged} is registered already; set `sync` to change it")
        if self.sync.over(None) != allreduce:
            raise RuntimeError(
                f"{method}: gradients are synchronized by {self.sync!r}, which a hook would replace; leave out "
                "sync= when you wrap the module, or write fnddp.from_hook(hook, state) into the pipeline"
            )

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: HookLocation = HookLocation.POST_FORWARD
    ) -> None:
        if not callable(hook):
            raise TypeError(f"_register_buffer_comm_hook: expected hook(state, named_buffers), got {hook!r}")
        self._buffers_of_module.hook = BufferHook(hook, state, comm_hook_location)

    # Buffers

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether forward makes buffers equal."""
        return self._buffers_of_module.is_synced

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self._buffers_of_module.is_synced = value

    broadcast_buffers = forward_sync_buffers

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next forward makes buffers equal."""
        return self._buffers_of_module.is_due

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self._buffers_of_module.is_due = value

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers."""
        return list(self.named_module_buffers.values())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers by name."""
        return self._buffers_of_module.named()

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward makes buffers equal, and there are some."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.modules_buffers)

    def _default_broadcast_coalesced(
        self, bufs: Sequence[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        self._distributed_broadcast_coalesced(
            self.modules_buffers if bufs is None else bufs, bucket_size, authoritative_rank
        )

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        control.broadcast(list(tensors), self._group, source=authoritative_rank)

    # The rest

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return self._log.data()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError(f"DDP runtime logging sample rate should be equal or greater than 1, got {sample_rate}")
        self._log.sample_rate = sample_rate

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        with self._log.errors():
            if self._log.has_stepped:
                raise RuntimeError("_set_static_graph() should be called before training loop starts")
        self._promises.static_graph = True

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Needless: outputs are not copied."""

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        sparse = sparse_parameters(self.module)
        parameters = list(self._trained.parameters.values())
        return parameters, [parameter in sparse for parameter in parameters]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[nn.Parameter]) -> dict[int, str]:
        return debug_names(parameters, self._trained.parameters)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """As torch's."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """As torch's."""
        return torch_private.to_kwargs(inputs, kwargs, torch.device(self.device_type, device_id))

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """As torch's."""
        return gather(outputs, output_device, dim=self.dim)  # pyright: ignore[reportUnknownVariableType]

"""What tools call on torch's class by private names."""

import abc
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.utils import _to_kwargs  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from fnddp.adapters.hook import from_hook
from fnddp.adapters.module.buffers import BufferHook, Buffers, HookLocation
from fnddp.adapters.module.log import Log
from fnddp.adapters.module.reducer import Reducer
from fnddp.adapters.module.steps import Steps
from fnddp.reducers.all_reduce import allreduce
from fnddp.run.engine import Engine
from fnddp.sync import Sync
from fnddp.transforms.cast import fp16
from fnddp.wire import control

_BUILTIN: dict[Any, Sync] = {
    dist.BuiltinCommHookType.ALLREDUCE: allreduce,
    dist.BuiltinCommHookType.FP16_COMPRESS: fp16(allreduce),
}


class TorchNames:
    """Methods and attributes of torch's class that are not about synchronizing with a pipeline."""

    module: nn.Module
    dim: int
    device_type: str
    static_graph: bool
    reducer: Reducer
    _log: Log
    _steps: Steps
    _engine: Engine
    _buffers_of_module: Buffers
    _parameters_by_name: dict[str, nn.Parameter]
    _group: str | None

    broadcast_bucket_size = control.BROADCAST_BYTES

    # Marks on the wrapped module and its tensors that torch's class reads as well.
    _set_params_and_buffers_to_ignore_for_model = staticmethod(TorchDDP._set_params_and_buffers_to_ignore_for_model)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    _get_data_parallel_params = staticmethod(TorchDDP._get_data_parallel_params)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]

    @property
    @abc.abstractmethod
    def sync(self) -> Sync:
        """The pipeline that runs."""

    @sync.setter
    @abc.abstractmethod
    def sync(self, sync: Sync) -> None: ...

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
            _check_hook(hook)
            self._require_plain("register_comm_hook")
            self.sync = from_hook(hook, state, parameters=self._parameters_by_name)
            self._log.set(comm_hook=getattr(hook, "__qualname__", repr(hook)))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._require_plain("_register_builtin_comm_hook")
        self.sync = _BUILTIN[comm_hook_type]
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
        self.static_graph = self.reducer.static_graph = True

    def _remove_autograd_hooks(self) -> None:
        self._steps.detach()

    def _check_reducer_finalized(self) -> None:
        if self._engine.is_open:
            raise RuntimeError("a backward of this module has not finished")

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Needless: outputs are not copied."""

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        sparse = sparse_parameters(self.module)
        parameters = list(self._parameters_by_name.values())
        return parameters, [parameter in sparse for parameter in parameters]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[nn.Parameter]) -> dict[int, str]:
        return debug_names(parameters, self._parameters_by_name)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """As torch's."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """As torch's."""
        return _to_kwargs(inputs, kwargs, torch.device(self.device_type, device_id), True)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """As torch's."""
        return gather(outputs, output_device, dim=self.dim)  # pyright: ignore[reportUnknownVariableType]


def sparse_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The parameters whose gradients are sparse."""
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse]
    return {parameter for part in embeddings for parameter in part.parameters(recurse=False)}


def debug_names(parameters: Sequence[nn.Parameter], managed: Mapping[str, nn.Parameter]) -> dict[int, str]:
    """The name of each of `parameters` by its index.

    Raises:
        ValueError: They are not the managed ones.
    """
    indices: dict[Any, int] = {parameter: i for i, parameter in enumerate(parameters)}
    for name, parameter in managed.items():
        if parameter not in indices:
            raise ValueError(f"Param with name {name} found in module parameters, but not DDP parameters.")
    if len(indices) != len(managed):
        raise ValueError(
            "Expected param to name mapping to cover all parameters, but got conflicting lengths: "
            f"{len(indices)} vs {len(managed)}."
        )
    return {indices[parameter]: name for name, parameter in managed.items()}


def _check_hook(hook: Any) -> None:
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is not None and bucket.annotation not in (inspect.Parameter.empty, dist.GradBucket, "dist.GradBucket"):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    returns = signature.return_annotation
    if returns not in (inspect.Signature.empty, torch.futures.Future[Tensor]) and not isinstance(returns, str):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")

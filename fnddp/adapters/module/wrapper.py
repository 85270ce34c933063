"""`DistributedDataParallel`: a wrapped module whose gradients are synchronized by a pipeline during backward."""

import functools
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fnddp import state
from fnddp.adapters.checkpoint import Checkpoint
from fnddp.adapters.module import arguments
from fnddp.adapters.module.arguments import OWNER, BucketSizes
from fnddp.adapters.module.buffers import Buffers, HookLocation
from fnddp.adapters.module.gate import gated, is_differentiated
from fnddp.adapters.module.join import UnevenInputs
from fnddp.adapters.module.log import Log, environment, parameter_facts
from fnddp.adapters.module.reducer import Reducer
from fnddp.adapters.module.slots import Slots
from fnddp.adapters.module.steps import Steps, take_over_optimizers
from fnddp.adapters.module.torch_names import TorchNames, sparse_parameters
from fnddp.group import group_name
from fnddp.plan.draft import Donation
from fnddp.plan.ir import LeafSpec
from fnddp.plan.passes.combine import MB, assign_buckets
from fnddp.plan.plan import Plan
from fnddp.reducers.all_reduce import allreduce
from fnddp.run.engine import Engine
from fnddp.sync import State, Sync
from fnddp.torch_private import is_transforming
from fnddp.wire import control, groups
from fnddp.wire.agreement import agree, description, fails_alike
from fnddp.wire.protocol import CollectiveError

_PREFIX, _SYNC_PREFIX = "module.", "sync_state."


class DistributedDataParallel(TorchNames, UnevenInputs, nn.Module):
    """Wraps a module so that gradients are synchronized, with any pipeline: torch's class, and what it cannot do.

    Gradients are handed over as backward makes them, and the pipeline's collectives run behind the rest of it.
    `torch.autograd.grad` and `torch.func.grad` give synchronized gradients too. Nothing can hang because a parameter
    is unused: what does not arrive on a rank counts as zero there, and what arrives on no rank keeps its gradient,
    usually None. The wrong choice in a functional loop: there is `value_and_grad`.

    It passes for torch's class (`isinstance` says so) and takes its arguments, by position too. All ranks must
    construct it. An error in one rank's backward ends the step on all: the others raise `StepFailedError` when that
    rank uses the module again, or `CollectiveError` when it ends or times out. An error before a gradient has reached
    what the module returned, in forward or in the loss, is not noticed: the step has not begun there.

    Args:
        module: What to wrap. Its parameters and buffers are made equal to the first rank's.
        device_ids: At most one GPU, which inputs are moved to; None to leave them where they are.
        output_device: Accepted as torch does; outputs stay where the module makes them.
        dim: Of `scatter` and `gather`.
        broadcast_buffers: torch's old name of `forward_sync_buffers`, which if False skips the first time as well.
        init_sync: Whether to verify and broadcast parameters and buffers now. If not, they must be equal.
        process_group: The group of reducers that name none; None for the default one.
        bucket_cap_mb: Size of a bucket of gradients in MiB; None for 25, and 1 for the first one.
        find_unused_parameters: Needless: unused parameters are always found, at no cost.
        check_reduction: Does nothing, as in torch.
        gradient_as_bucket_view: Needless: no gradient is copied that need not be.
        static_graph: A promise that every step uses the same parameters. It is checked, and needless.
        delay_all_reduce_named_params, param_to_hook_all_reduce: Needless: the plan orders collectives, and these
            parameters are synchronized as all others.
        mixed_precision: torch's `_MixedPrecision`: forward and backward run in `param_dtype` and gradients are those
            of the full-precision parameters. A plain mean travels in `reduce_dtype`; a pipeline says so itself.
            Activation checkpointing within it fails; use torch.autocast.
        device_mesh: Instead of `process_group`: a mesh of one dimension.
        skip_all_reduce_unused_params: A promise that the parameters that no rank uses in the first step are never used.
            They are not sent any more; a broken promise is an error on all ranks.
        bucket_cap_mb_list: Sizes of the first buckets in the order of arrival, the last one that of all others too.
        batched_grad_copy: Needless: copies are part of the plan.
        forward_sync_buffers: Make buffers equal to the first rank's before forward; None for True.
        sync: The pipeline.

    Attributes:
        module: The wrapped module.

    Raises:
        RankMismatchError: On all ranks, if they disagree about the pipeline or the parameters.
        RuntimeError: No parameter requires a gradient, or one has no shape yet; a group and a mesh are given.
        ValueError: Devices do not fit the module; `mixed_precision` contradicts the pipeline.

    >>> from fnddp import fp16
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> model = DistributedDataParallel(nn.Linear(2, 1), sync=fp16(allreduce))
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> model.module.weight.grad
    tensor([[1., 1.]])
    >>> torch.autograd.grad(model(torch.ones(1, 2)).sum(), model.module.bias)
    (tensor([1.]),)
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: list[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        sync: Sync = allreduce,
    ) -> None:
        super().__init__()
        UnevenInputs.__init__(self)
        arguments.check_delay(delay_all_reduce_named_params, param_to_hook_all_reduce)
        if check_reduction:
            arguments.warn_of_check_reduction()
        self.module = module
        self._group = group_name(arguments.checked_group(process_group, device_mesh, module))
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.parameters_to_ignore: set[str] = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        with fails_alike(self._group, enabled=init_sync):
            self._parameters_by_name = self._trained_parameters()
            parameters = [p for name, p in module.named_parameters() if name not in self.parameters_to_ignore]
            self.device_ids, self.output_device = arguments.checked_devices(parameters, device_ids, output_device)
            arguments.require_no_sync_batch_norm_on_cpu(module, parameters[0].device.type)
            sizes = BucketSizes.of(bucket_cap_mb, bucket_cap_mb_list)
        self.device = parameters[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({p.device for p in parameters}) > 1
        self.bucket_bytes_cap, self.bucket_bytes_cap_list = max(sizes.caps), list(sizes.listed)
        self._bucket_caps = sizes.caps
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self.require_backward_grad_sync = True
        sync_in_forward, sync_now = arguments.checked_buffer_flags(broadcast_buffers, forward_sync_buffers)
        self._buffers_of_module = Buffers(module, self.parameters_to_ignore, self._group, sync_in_forward)
        self._install(*self._agreed(sync, verify=init_sync))
        if init_sync:
            buffers = self._buffers_of_module.named().values() if sync_now else ()
            control.broadcast([t.detach() for t in [*parameters, *buffers]], self._group)
        if mixed_precision is not None:
            arguments.set_up_mixed_precision(mixed_precision, module)

    # What users call

    @property
    def sync(self) -> Sync:
        """The pipeline that runs: it names the process group where it named none, unless that is the default one.

        Set it between steps, on all ranks, to go on with another one, whose state begins anew.

        Raises:
            RankMismatchError: On all ranks, if they disagree about the new pipeline.
            RuntimeError: A step is under way.
        """
        return self._engine.sync

    @sync.setter
    def sync(self, sync: Sync) -> None:
        if self._engine.is_open and _is_within_backward():
            raise RuntimeError(f"{OWNER}: the pipeline cannot change while a backward is running")
        if self._engine.is_open:
            self._steps.fail(RuntimeError("its backward did not finish"))
        self._engine.refuse_after_failure()
        self._exchange(*self._agreed(sync, verify=True))

    @property
    def sync_state(self) -> State:
        """The pipeline's state after the last step: a pytree keyed by the names of `module`'s parameters.

        It can be kept: later steps do not write over it. Set it to go on from a saved one, on all ranks.
        """
        return self._engine.state

    @sync_state.setter
    def sync_state(self, saved: State) -> None:
        self._engine.state = saved

    def sync_checkpoint(self, saved_world_size: int | None = None) -> Checkpoint:
        """The pipeline's state for torch.distributed.checkpoint.

        Args:
            saved_world_size: To load what another number of ranks has saved.
        """
        return Checkpoint(self, self._group, saved_world_size)

    @property
    def plan(self) -> Plan | None:
        """What the last backward ran; None before the first, and for a pipeline that cannot be lowered."""
        return self._engine.plan

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group; None without torch.distributed."""
        return groups.live_group(self._group) if dist.is_initialized() else None

    @torch._disable_dynamo(recursive=False)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUntypedFunctionDecorator]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; the backward of what it returns synchronizes."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            if self._engine.is_open and _is_within_backward():  # activation checkpointing computes it again
                return self.module(*inputs, **kwargs)
            if self._engine.is_open:
                self._steps.fail(RuntimeError("its backward did not finish"))
            self._engine.refuse_after_failure()
            inputs, kwargs = self._before_forward(inputs, kwargs)
            tensors = self._tensors_to_run_with()
            if tensors:
                output = torch.func.functional_call(self.module, tensors, inputs, kwargs)
            else:
                output = self.module(*inputs, **kwargs)
            self._after_forward(output)
            return output

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Within it forward passes do not synchronize: gradients add up until a backward outside of it."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def state_dict(self, *args: Any, sync_state: bool = False, **kwargs: Any) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The module's state under `module.`, as torch's class gives it.

        Args:
            *args, **kwargs: As of `torch.nn.Module.state_dict`.
            sync_state: Add the pipeline's state, under `sync_state.`. What is local in it is this rank's own, so each
                rank must save its own then.
        """
        saved = super().state_dict(*args, **kwargs)
        if sync_state:
            prefix = kwargs.get("prefix", "") + _SYNC_PREFIX
            saved.update({prefix + key: value for key, value in state.state_dict(self.sync_state).items()})
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads what `state_dict` gave, of this class, of torch's, or of the module itself, without `module.`.

        Raises:
            RuntimeError: See `torch.nn.Module.load_state_dict`.
            ValueError: The state of the pipeline in it, if any, is of another pipeline.
        """
        synced = {key.removeprefix(_SYNC_PREFIX): v for key, v in state_dict.items() if key.startswith(_SYNC_PREFIX)}
        rest = {key: value for key, value in state_dict.items() if not key.startswith(_SYNC_PREFIX)}
        if not set(rest) & set(super().state_dict()):
            rest = {_PREFIX + key: value for key, value in rest.items()}
        loaded = super().load_state_dict(rest, strict, assign)
        if assign:  # the parameters are others now
            self._parameters_by_name = self._trained_parameters()
            self._exchange(self.sync, self.sync_state)
        if synced:
            self.sync_state = state.load_state_dict(self.sync_state, synced)
        return loaded

    # Forward

    @torch._disable_dynamo  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUntypedFunctionDecorator]
    def _before_forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not self._log.has_stepped:
            take_over_optimizers(self._parameters_by_name.values())
        if self._synchronizes:
            self._log.forward_starts()
        with self._on_device():
            self._tell_joined_ranks()
            self._sync_buffers(HookLocation.PRE_FORWARD)
            self._steps.scale = self._scale_of_joins(self._synchronizes)
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            (inputs,), (kwargs,) = _to_kwargs(inputs, kwargs, device, True)  # pyright: ignore[reportUnknownVariableType, reportAssignmentType]
        if self.mixed_precision is not None:
            inputs, kwargs = _cast_forward_inputs(self.mixed_precision.param_dtype, *inputs, **kwargs)  # pyright: ignore[reportUnknownVariableType, reportAssignmentType]
        return inputs, kwargs

    @torch._disable_dynamo  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUntypedFunctionDecorator]
    def _after_forward(self, output: Any) -> None:
        with self._on_device():
            self._sync_buffers(HookLocation.POST_FORWARD)
        self._buffers_of_module.is_due = self._synchronizes
        if torch.is_grad_enabled():
            self._steps.is_armed = self._synchronizes and not self._is_gated
        if self._steps.is_armed and torch.is_grad_enabled() and not is_transforming():
            # What is returned is the first to have a gradient: with it a step begins even if no parameter is used.
            for tensor in _tensors_in(output):
                if tensor.requires_grad and not tensor.is_leaf:  # whose hooks would stay
                    tensor.register_hook(self._steps.start)

    def _sync_buffers(self, location: HookLocation) -> None:
        if not self._buffers_of_module.runs_at(location):
            return
        try:
            self._buffers_of_module.sync(self._source_of_buffers())
        except RuntimeError as error:
            self._engine.refuse_from_now_on(error)
            raise CollectiveError(
                f"buffers could not be made equal in forward: {error}. Another rank has failed or left, or is in "
                "another step; see its own error"
            ) from error

    @property
    def _synchronizes(self) -> bool:
        return torch.is_grad_enabled() and self.require_backward_grad_sync

    @torch._disable_dynamo  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUntypedFunctionDecorator]
    def _tensors_to_run_with(self) -> dict[str, Tensor]:
        """What to run the module with instead of what it has."""
        self._slots.require_known(self.module)
        swapped = self._slots.swapped()
        self._is_gated = self._synchronizes and any(t.requires_grad or is_differentiated(t) for t in swapped.values())
        tensors: dict[str, Tensor] = {}
        if not self._is_gated and torch.is_grad_enabled():
            self._require_no_replaced(swapped)
        if self._is_gated and self._joins:
            raise RuntimeError(
                f"{OWNER}: within join, ranks that have run out of inputs cannot follow torch.func or parameters that "
                f"are not those it was wrapped with: {', '.join(swapped)}"
            )
        if self._is_gated:  # by torch.func.functional_call, or for good
            self._slots.require_alike(swapped)
            now = self._slots.tensors().items()
            tensors = {name: t for name, t in now if t.requires_grad or is_differentiated(t)}
            tensors = gated(tensors, functools.partial(self._synchronize, tuple(tensors)))
        if self.mixed_precision is not None and self.mixed_precision.param_dtype is not None:
            all_now = {n: p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore}
            dtype = self.mixed_precision.param_dtype
            tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in (all_now | tensors).items()}
        return tensors

    def _require_no_replaced(self, swapped: Mapping[str, Tensor]) -> None:
        """What accumulates in a replaced parameter within no_sync would stay there unsynchronized."""
        replaced = [name for name, t in swapped.items() if isinstance(t, nn.Parameter) and t.requires_grad]
        if replaced:
            raise RuntimeError(
                f"{OWNER}: {', '.join(replaced)} were replaced after the module was wrapped, so no_sync cannot "
                "accumulate their gradients; wrap the module again"
            )

    def _synchronize(self, names: tuple[str, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The means of gradients that are all there."""
        given = dict(zip(names, grads, strict=True))
        leaves = {n: given[n] if n in given else torch.zeros_like(p) for n, p in self._parameters_by_name.items()}
        if self._steps.scale != 1:
            leaves = {name: leaf * self._steps.scale for name, leaf in leaves.items()}
        self._engine.start()
        mean = self._engine.run(leaves, keep=True).mean
        return tuple(mean[name] for name in names)

    # Set-up

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        """What to synchronize. Parameters of a wrapped part of the module are synchronized by that part."""
        parts = [part for part in self.module.modules() if isinstance(part, DistributedDataParallel)]
        theirs = {parameter for part in parts for parameter in part._parameters_by_name.values()}
        named = {n: p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore}
        self._frozen = {name: p for name, p in named.items() if not p.requires_grad}
        if not any(p.requires_grad for p in named.values()):
            raise RuntimeError(f"{OWNER}: no parameter of the module requires a gradient; use it unwrapped")
        self._not_ours = {*self.parameters_to_ignore, *(name for name, p in named.items() if p in theirs)}
        return {name: p for name, p in named.items() if p.requires_grad and p not in theirs}

    def _agreed(self, sync: Sync, *, verify: bool) -> tuple[Sync, State]:
        """The pipeline as it will run, and its first state."""
        made: list[tuple[Sync, State]] = []

        def begin() -> dict[str, str]:
            pipeline = arguments.with_wire_dtype(sync, self.mixed_precision).over(self._group, unnamed_only=True)
            made.append((pipeline, pipeline.init(self._parameters_by_name)))
            return {"options": self._options(), **description(pipeline, self._parameters_by_name, made[-1][1])}

        if verify:
            with self._on_device():
                agree(begin, self._group)
        else:
            begin()
        return made[-1]

    def _options(self) -> str:
        """What ranks must agree on, since plans and errors follow from it."""
        caps = ", ".join(f"{cap / MB:.3g}" for cap in self._bucket_caps)
        return (
            f"buckets of {caps} MiB, static_graph={self.static_graph}, "
            f"skip_all_reduce_unused_params={self.skip_all_reduce_unused_params}"
        )

    def _install(self, pipeline: Sync, initial: State) -> None:
        """Makes the engine for `pipeline`, which begins with the state `initial`."""
        parameters = self._parameters_by_name
        self._slots = Slots(self.module, parameters, self._frozen, self._not_ours)
        self._is_gated = False
        self.reducer = Reducer(
            list(parameters),
            self._group,
            static_graph=self.static_graph,
            skips_unused=self.skip_all_reduce_unused_params,
        )
        leaves = {name: LeafSpec.of(parameter) for name, parameter in parameters.items()}
        self._engine = Engine(
            pipeline,
            leaves,
            state=initial,
            donation=Donation(gradients="yes", state=True),
            bucket_caps=self._bucket_caps,
            learns_order=True,
            skips_unused=True,
            drops_unused=self.skip_all_reduce_unused_params,
            check_unused=self.reducer.check,
            groups=[self._group],
        )
        buckets = assign_buckets({name: leaves[name].nbytes for name in reversed(leaves)}, self._bucket_caps)
        self._log = Log({**self._facts(), **environment(self.process_group), **parameter_facts(leaves, buckets)})
        have_sparse = sparse_parameters(self.module)
        sparse = [name for name, parameter in parameters.items() if parameter in have_sparse]
        futures = self._buffers_of_module.futures
        self._steps = Steps(parameters, self._engine, self._log, sparse, futures.wait)
        self.reducer.arm = self._steps.arm

    def _exchange(self, pipeline: Sync, initial: State) -> None:
        """Goes on with `pipeline` instead of the one that is there."""
        before = self._steps
        self._install(pipeline, initial)
        before.detach(self._steps)

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

    def __getstate__(self) -> dict[str, Any]:
        # With the pipeline and its state, which torch's class loses with its hook. Hooks and plans are made again.
        made_again = ("_engine", "_steps", "_jit", "_log", "reducer", "_slots")
        attributes = {key: value for key, value in self.__dict__.items() if key not in made_again}
        return {**attributes, "_saved": (self.sync, self.sync_state)}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        attributes = dict(attributes)
        saved = attributes.pop("_saved")
        super().__setstate__(attributes)
        self._install(*saved)


# So that isinstance and issubclass take it for torch's class, as accelerate, lightning and DCP do to find `module`.
TorchDDP.register(DistributedDataParallel)


def _is_within_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


def _tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors in what a module returns, whatever it is made of."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors_in(list(output.values()))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    elif isinstance(output, list | tuple | set):
        for part in output:  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors_in(part)
    elif is_dataclass(output):
        yield from _tensors_in([getattr(output, field.name, None) for field in fields(output)])

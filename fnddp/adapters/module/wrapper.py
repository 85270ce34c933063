"""`DistributedDataParallel`: a wrapped module, with a pipeline that synchronizes its gradients during backward."""

import warnings
from collections import OrderedDict
from collections.abc import Collection, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fnddp import torch_private
from fnddp.adapters.backward import Backward
from fnddp.adapters.handle import log_adopted, warn_without_memory
from fnddp.adapters.module.promises import Promises
from fnddp.adapters.module.slots import OWNER, Slots, WrappedParameters, sparse_parameters
from fnddp.adapters.module.steps import Steps
from fnddp.adapters.reentrant import refuse_reentrant_checkpoints
from fnddp.adapters.torch_compat import arguments
from fnddp.adapters.torch_compat.names import HookLocation, TorchNames, reducer
from fnddp.core import state
from fnddp.core.agreement import agree, agreed_state, description, fails_alike
from fnddp.core.buckets import MB
from fnddp.core.group import group_name
from fnddp.core.parse import parse, pipeline_of
from fnddp.core.sync import State, Sync
from fnddp.core.tree import without_wrappers
from fnddp.device import device_of
from fnddp.plan.draft import Donation
from fnddp.reducers.all_reduce import allreduce
from fnddp.run.choose import AUTO, automatic
from fnddp.run.engine import Engine
from fnddp.run.lane import Lane, has_lanes
from fnddp.wire import control
from fnddp.wire.c10d import C10D, over
from fnddp.wire.groups import Membership
from fnddp.wire.protocol import Elastic, Wire

_PREFIX, _SYNC_PREFIX, _PIPELINE = "module.", "sync_state.", "pipeline"


class DistributedDataParallel(TorchNames):
    """Wrap a module to synchronize its gradients with any pipeline, in place of torch's class of this name.

    Collectives run during backward, as gradients arrive. An unused parameter never makes a step hang. If only some
    ranks have a gradient for it, it counts as zero on the others. Without a gradient on any rank, `.grad` is unchanged.
    In a step without an update (`every`), `.grad` is None.

    As with torch's class, only gradients that a backward accumulates in the wrapped parameters are synchronized.
    `torch.autograd.grad` and `torch.func` return this rank's own gradients; use `value_and_grad` in functional loops.

    `isinstance` checks for torch's class pass. `static_graph` is checked; torch's arguments not listed below have no
    effect. All ranks must construct it. If backward raises on one rank, the step fails on all (on GPUs: docs/gpu.md):
    the others raise `StepFailedError` when that rank uses the module again, or `CollectiveError` when it exits or times
    out. They do not notice an error in forward or loss that the rank catches.

    Args:
        module: The module. Its parameters and buffers are made equal to the first rank's.
        device_ids, output_device, dim, process_group, device_mesh: As in torch's class, except that outputs are not
            moved to another device, and a mesh has one dimension.
        init_sync: True to verify and broadcast parameters and buffers now. Otherwise they must be equal already.
        forward_sync_buffers: Copy the first rank's buffers to all ranks before forward; None for True. torch's old name
            is `broadcast_buffers`; False under that name also skips the copy at construction.
        bucket_cap_mb, bucket_cap_mb_list: Size of a bucket of gradients in MiB, or sizes of the first buckets, in order
            of arrival; the last size holds for all later buckets. None for 25, and 1 for the first.
        skip_all_reduce_unused_params: Promise that parameters that no rank uses in the first step are never used. They
            are not sent again; a broken promise is an error on all ranks.
        mixed_precision: torch's `_MixedPrecision`: forward and backward run in `param_dtype`, and gradients accumulate
            in the full-precision parameters. The plain mean is sent in `reduce_dtype`; other pipelines choose the dtype
            themselves. Activation checkpointing fails with it; use torch.autocast instead.
        sync: The pipeline, or its text. "auto" measures the link between these ranks and the cost of encoding, for
            about a second, chooses the same pipeline as `fnddp.choose`, and logs it. A run that continues from a
            checkpoint keeps the checkpoint's pipeline. See docs/which-pipeline.md.
        wire: Moves gradients between ranks; torch.distributed by default. It must know the pipeline's group. Buffers
            and `join` always use torch.distributed.
        backend: Runs the computation between collectives: None for Python, or "inductor" (docs/functional.md). With a
            backend, a pipeline that cannot be lowered is an error.

    Raises:
        RankMismatchError: On all ranks, if they disagree about the pipeline or the parameters.
        RuntimeError: No parameter requires a gradient, or one is uninitialized; both a group and a mesh are given.
        ValueError: Devices do not fit the module; `mixed_precision` contradicts the pipeline.

    >>> from fnddp import fp16
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> model = DistributedDataParallel(nn.Linear(2, 1), sync=fp16(allreduce))
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> model.module.weight.grad
    tensor([[1., 1.]])
    >>> dist.destroy_process_group()
    """

    _steps_class: ClassVar[type[Steps]] = Steps
    """The class that turns its backwards into steps."""

    _takes_in_thawed: ClassVar[bool] = True
    _measures: ClassVar[bool] = True  # "auto" may choose the pipeline
    _is_copy = False  # True if copied or unpickled where models synchronize on the group already

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
        lazy_bucket_allocation: bool = False,
        *,
        sync: Sync | str = allreduce,
        wire: Wire = C10D,
        backend: str | None = None,
    ) -> None:
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time"
            )
        if check_reduction:
            warnings.warn("`check_reduction` is deprecated, and does nothing", FutureWarning, stacklevel=2)
        sync_in_forward, sync_now = arguments.checked_buffer_flags(broadcast_buffers, forward_sync_buffers)
        group = group_name(arguments.checked_group(process_group, device_mesh, module))
        ignored = torch_private.params_and_buffers_to_ignore(module)
        with fails_alike(group, enabled=init_sync):
            trained = _trained(module, ignored)
            copied = {name: p for name, p in module.named_parameters() if name not in ignored}
            parameters = [*copied.values()]
            devices = arguments.checked_devices(module, parameters, device_ids, output_device)
            caps = arguments.bucket_caps(bucket_cap_mb, bucket_cap_mb_list)
            arguments.with_wire_dtype(sync, mixed_precision)  # before anything is measured
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self.module, self.parameters_to_ignore, self._trained = module, ignored, trained
        self._group, self._wire, self._backend = group, wire, backend
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.device, self.is_multi_device_module = parameters[0].device, len({p.device for p in parameters}) > 1
        self.device_type = self.device.type
        (self.device_ids, self.output_device), self.dim = devices, dim
        self._bucket_caps, self.bucket_bytes_cap = caps, max(caps)
        self.bucket_bytes_cap_list = list(caps) if bucket_cap_mb_list else []
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view, self.batched_grad_copy = gradient_as_bucket_view, batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.mixed_precision = mixed_precision
        self.forward_sync_buffers = sync_in_forward
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._promises = Promises(
            list(trained.parameters), static_graph=static_graph, skips_unused=skip_all_reduce_unused_params
        )
        self._is_measured = self._compares = sync == AUTO
        copied |= self.named_module_buffers if sync_now else {}
        self._set_up(*self._agreed(sync, verify=init_sync, copied=copied if init_sync else {}))
        self._engine.connect()
        if init_sync:
            control.broadcast([t.detach() for t in copied.values()], group, wire=wire)
        if mixed_precision is not None:
            torch_private.set_up_mixed_precision(mixed_precision, module)

    # Public methods

    @property
    def sync(self) -> Sync:
        """The pipeline that runs. Reducers that name no process group name the module's here, unless it is the default.

        Set it between steps, on all ranks, to replace the pipeline. The new one starts from its initial state.

        Raises:
            RankMismatchError: On all ranks, if they disagree about the new pipeline.
            RuntimeError: A step is under way.
        """
        return self._engine.sync

    @sync.setter
    def sync(self, sync: Sync | str) -> None:
        if self._engine.is_open and torch_private.is_within_backward():
            raise RuntimeError(f"{OWNER}: the pipeline cannot change while a backward is running")
        before = self.sync
        self._replace(sync, verify=True)
        if self._is_measured and sync != AUTO:
            log_adopted(before, self.sync)
        self._is_measured = sync == AUTO

    def _adopt(self, sync: Sync) -> None:
        before = self.sync
        self._replace(sync, verify=False)
        log_adopted(before, self.sync)
        self._compares = True

    def _replace(self, sync: Sync | str, *, verify: bool) -> None:
        self._steps.settle()
        self._steps.require_same_world()
        self._use(*self._agreed(sync, verify=verify), self._trained, self._engine.lane)

    @property
    def _backward(self) -> Backward:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._steps.backward

    @torch_private.untraced_itself
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. A backward from its output synchronizes gradients."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            if self._engine.is_open and torch_private.is_within_backward():
                return self.module(*inputs, **kwargs)  # activation checkpointing recomputes it
            if torch.is_grad_enabled() or self._backward.has_raised:  # other threads may evaluate while one trains
                self._steps.settle()
            inputs, kwargs = self._before_forward(inputs, kwargs)
            if cast := self._cast_parameters():
                with refuse_reentrant_checkpoints(OWNER):
                    output = torch.func.functional_call(self.module, cast, inputs, kwargs)
            else:
                output = self.module(*inputs, **kwargs)
            self._after_forward(output)
            return output

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Accumulate gradients of forward passes in the block; the next backward outside it synchronizes the sum.

        This includes submodules that are wrapped themselves.
        """
        before = [(each, each.require_backward_grad_sync) for each in (self, *_parts(self.module))]
        for each, _ in before:
            each.require_backward_grad_sync = False
        try:
            yield
        finally:
            for each, was in before:
                each.require_backward_grad_sync = was

    def weight(self, count: float | Tensor) -> AbstractContextManager[None]:
        """Weight this rank's gradients by `count`, in backwards that begin in the block. For `weighted` pipelines.

        If the loss is a mean over this many tokens, `with model.weight(tokens): loss.backward()` gives the gradient of
        the mean over the tokens of all ranks. After `no_sync` the weight holds for all accumulated gradients. A
        submodule that is wrapped itself has its own `weight`.

        Args:
            count: Number of samples or tokens. With 0 the gradient is left out, even if NaN; not 0 on all ranks. In a
                captured step it must be a tensor on the device, and is not checked.

        Raises:
            TypeError: The pipeline is not `weighted`.
            ValueError: In backward: this rank's weight is missing or invalid (the others raise StepFailedError); or all
                weights are 0 (on all ranks).
        """
        return self._steps.weight.block(self.sync, count)

    def state_dict(self, *args: Any, sync_state: bool = False, **kwargs: Any) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the module's state under `module.`, as torch's class does.

        Args:
            *args, **kwargs: Arguments of `torch.nn.Module.state_dict`.
            sync_state: Add the pipeline's state, under `sync_state.`. Local parts of it differ between ranks, so each
                rank must save its own `state_dict`. If "auto" chose the pipeline, the pipeline's text is added too.
        """
        saved = super().state_dict(*args, **kwargs)
        if sync_state:
            prefix = kwargs.get("prefix", "") + _SYNC_PREFIX
            saved.update({prefix + key: value for key, value in state.state_dict(self.sync_state).items()})
            if self._is_measured:
                saved[prefix + _PIPELINE] = repr(self.sync.over(None))
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the `state_dict` of this class, of torch's class, or of the module itself (keys without `module.`).

        All ranks must call it if it contains the pipeline's state: see `sync_state`.

        Raises:
            RankMismatchError: On all ranks, before anything is loaded: they disagree about the pipeline's state.
            RuntimeError: See `torch.nn.Module.load_state_dict`. The pipeline's state is then not loaded.
            ValueError: It contains the state of another pipeline. Nothing is loaded.
        """
        self._settle()
        if assign:
            self._steps.require_same_world()
        synced = {key.removeprefix(_SYNC_PREFIX): v for key, v in state_dict.items() if key.startswith(_SYNC_PREFIX)}
        rest: Any = OrderedDict((key, v) for key, v in state_dict.items() if not key.startswith(_SYNC_PREFIX))
        rest._metadata = getattr(state_dict, "_metadata", OrderedDict())  # the versions of modules
        text, sync, loaded_state = synced.pop(_PIPELINE, None), self.sync, None
        if self._is_measured and text is not None:
            sync = parse(text).over(self._group, unnamed_only=True)
        if synced:
            like = self.sync_state if sync is self.sync else over(self._wire, sync.init)(self._trained.gradients())
            with device_of(self.device).selected():
                read = partial(state.load_state_dict, like, synced)
                loaded_state = agreed_state(sync, like, read, [self._group], self._wire)
        known = super().state_dict().keys()
        is_modules = any(_PREFIX + key in known for key in rest) or not all(key.startswith(_PREFIX) for key in rest)
        target = self.module if is_modules and not known & rest.keys() else self
        loaded = nn.Module.load_state_dict(target, rest, strict, assign)
        if assign:  # the parameters are new tensors
            before, promises = self._engine, dict(vars(self._promises))
            trained = _trained(self.module, self.parameters_to_ignore, self._trained.parameters)
            fresh = over(self._wire, self.sync.init)(trained.gradients())
            initial = state.continued(fresh, self.sync_state)  # dtypes may have changed
            self._use(self.sync, initial, trained, before.lane)
            if self._engine.learn_from(before):  # consistent with ranks that kept their engine
                vars(self._promises).update(promises)
        if sync is not self.sync:
            self._adopt(sync)
        if synced:
            self._engine.state = state.continued(self._engine.state, loaded_state)  # in the dtypes of new parameters
        return loaded

    # Forward

    @torch_private.untraced
    def _before_forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        active = torch_private.active_ddp()
        if active is not None and self in active.modules():
            raise _shared_with_torch("it, or a module that contains it,")
        self._take_in_thawed()
        self._slots.require_known(self.module, has_gradients=torch.is_grad_enabled())
        if self._synchronizes:
            self._require_no_placeholders()
        if not self._engine.steps:
            # `Steps` runs the optimizers of torch.distributed.optim._apply_optimizer_in_backward on synchronized
            # gradients, and then sets these gradients to None, as torch does.
            theirs = [p for p in self._trained.parameters.values() if torch_private.optimizers_in_backward(p)]
            if theirs:
                torch_private.take_over_optimizers_in_backward(theirs)
        if self._synchronizes:
            self._steps.require_same_world()
            if not self._is_copy:  # one rank may run a copy alone; the first step connects
                self._engine.connect()  # again, if unpickled or given a new pipeline
        with device_of(self.device).selected():
            Join.notify_join_context(self)
            self._sync_buffers(HookLocation.PRE_FORWARD)
            self._steps.scale = self._share_of_inputs() if self._join_config.enable else 1.0
            if self._compares and self._synchronizes:
                self._require_one_choice()
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            (inputs,), (kwargs,) = torch_private.to_kwargs(inputs, kwargs, device)
        if self.mixed_precision is not None:
            inputs, kwargs = torch_private.cast_forward_inputs(self.mixed_precision.param_dtype, *inputs, **kwargs)
        return inputs, kwargs

    @torch_private.untraced
    def _after_forward(self, output: Any) -> None:
        with device_of(self.device).selected():
            self._sync_buffers(HookLocation.POST_FORWARD)
        self.require_forward_param_sync = self._synchronizes
        if torch.is_grad_enabled():
            self._steps.expect_backward(output, synchronizes=self._synchronizes)

    @property
    def _synchronizes(self) -> bool:
        return torch.is_grad_enabled() and self.require_backward_grad_sync

    def _require_no_placeholders(self) -> None:
        """Raise a RuntimeError if gradients would accumulate in other tensors than the wrapped parameters."""
        known, tensors = self._trained.parameters, self._slots.tensors()
        others = {name: t for name, t in tensors.items() if t is not known[name]}
        if differentiated := [name for name, t in others.items() if torch_private.is_differentiated(t)]:
            raise RuntimeError(
                f"{OWNER}: torch.func differentiates with respect to {', '.join(differentiated)}, and such gradients "
                "cannot be synchronized; use fnddp.value_and_grad, or differentiate model.module and synchronize the "
                "result: grads, state = sync(grads, state). For this rank's gradients, use model.no_sync()"
            )
        if replaced := [name for name, t in others.items() if isinstance(t, nn.Parameter) and t.requires_grad]:
            raise RuntimeError(
                f"{OWNER}: {', '.join(replaced)} were replaced after the module was wrapped; gradients of the new "
                "parameters would not be synchronized; wrap the module again, or call model.module with them"
            )

    @torch_private.untraced
    def _cast_parameters(self) -> dict[str, Tensor]:
        """Return the low-precision tensors that replace the module's parameters under mixed precision."""
        if self.mixed_precision is None or self.mixed_precision.param_dtype is None:
            return {}
        held = {n: p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore}
        dtype = self.mixed_precision.param_dtype
        return {n: t.to(dtype) if t.is_floating_point() else t for n, t in held.items()}

    # Set-up

    def _take_in_thawed(self) -> None:
        """Synchronize parameters that were frozen when the module was wrapped, but require a gradient now.

        All ranks do so in the next forward with gradients, and compare these parameters there.
        """
        names = self._trained.thawed if torch.is_grad_enabled() else []
        if not (names and self._takes_in_thawed) or isinstance(self._wire, Elastic) or self._join_config.enable:
            return
        self._steps.require_same_world()
        trained = _trained(self.module, self.parameters_to_ignore, self._trained.parameters)
        initial: list[State] = []

        def described() -> dict[str, str]:
            grads = trained.gradients()
            initial.append(state.continued(over(self._wire, self.sync.init)(grads), self.sync_state))
            return description(self.sync, grads, initial[0])

        with device_of(self.device).selected():
            agree(described, self._group, self._wire, call=f"the forward after {', '.join(names)} were thawed")
        self._use(self.sync, initial[0], trained, self._engine.lane)

    def _agreed(self, sync: Sync | str, *, verify: bool, copied: Mapping[str, Tensor] = {}) -> tuple[Sync, State]:
        """Return the pipeline as it will run, and its initial state. Ranks also compare shapes of `copied` tensors."""
        made: list[tuple[Sync, State]] = []
        if sync == AUTO and self._measures:
            with device_of(self.device).selected():
                sync = automatic(self._trained.gradients, self._group, self._wire)

        def begin() -> dict[str, str]:
            given = self._pipeline_of(sync)
            pipeline = arguments.with_wire_dtype(given, self.mixed_precision).over(self._group, unnamed_only=True)
            grads = self._trained.gradients()
            made.append((pipeline, over(self._wire, pipeline.init)(grads)))
            warn_without_memory(given)
            caps = ", ".join(f"{cap / MB:.3g}" for cap in self._bucket_caps)
            options = (
                f"buckets of {caps} MiB, static_graph={self.static_graph}, "
                f"skip_all_reduce_unused_params={self.skip_all_reduce_unused_params}, backend={self._backend}, "
                f"forward_sync_buffers={self.forward_sync_buffers}"
            )
            others = {f"tensor {without_wrappers(name)!r}": state.describe(t) for name, t in copied.items()}
            return {"options": options, **description(pipeline, grads, made[-1][1]), **others}

        if verify:
            with device_of(self.device).selected():
                agree(begin, self._group, self._wire, call=f"{OWNER} with sync={sync!r}")
        else:
            begin()
        return made[-1]

    def _pipeline_of(self, sync: Sync | str) -> Sync:
        return pipeline_of("DistributedDataParallel: sync", sync)

    def _set_up(self, pipeline: Sync, initial: State) -> None:
        """Create the attributes that are neither copied nor pickled, and begin with `pipeline` in state `initial`."""
        self._steps = self._steps_class(self._promises)
        self.reducer = reducer(self._steps)
        self._use(pipeline, initial, self._trained)

    def _use(self, pipeline: Sync, initial: State, trained: WrappedParameters, lane: Lane | None = None) -> None:
        """Run `pipeline` from the state `initial` on. If this raises, nothing has changed."""
        slots = Slots(self.module, trained, OWNER, "wrap the module again")
        engine = Engine(
            pipeline,
            trained.leaves(),
            state=initial,
            donation=Donation(gradients="yes", state=True),
            bucket_caps=self._bucket_caps,
            learns_order=True,
            groups=[self._group],
            wire=self._wire,
            backend=self._backend,
            lane=lane,
        )
        world = Membership(self._group, f"{OWNER}: the module was wrapped", "wrap the module again")
        self._steps.use(engine, trained, sparse_parameters(self.module), world)
        self._trained, self._slots = trained, slots

    def _remove_autograd_hooks(self) -> None:
        self._steps.detach()

    def _check_reducer_finalized(self) -> None:
        if self._engine.is_open:
            raise RuntimeError("a backward of this module has not finished")

    def __getstate__(self) -> dict[str, Any]:
        # Keep the pipeline and its state (torch's class loses them with its hook). Hooks and plans are made again.
        attributes = {key: value for key, value in vars(self).items() if key not in ("_steps", "_slots", "reducer")}
        return {**attributes, "_saved": (self.sync, self.sync_state)}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        attributes = dict(attributes)
        saved = attributes.pop("_saved")
        super().__setstate__(attributes)
        self._is_copy = has_lanes(self._group)
        self._set_up(*saved)


# Makes isinstance and issubclass treat it as torch's class: accelerate, lightning and DCP find `module` that way.
TorchDDP.register(DistributedDataParallel)


def _trained(module: nn.Module, ignored: set[str], before: Collection[str] = ()) -> WrappedParameters:
    """Return the parameters to synchronize: those that require a gradient, and those named in `before`.

    A submodule that is wrapped itself synchronizes its own parameters.
    """
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{OWNER}: expected a torch.nn.Module, got {type(module).__name__}")
    for name, part in module.named_modules():
        if TorchDDP in type(part).__mro__:  # isinstance also holds for ours
            raise _shared_with_torch(f"the part {name!r} of the module" if name else "the module")
    theirs = {parameter for part in _parts(module) for parameter in part._trained.all()}  # pyright: ignore[reportPrivateUsage]
    return WrappedParameters.of(module, ignored, theirs, before)


def _parts(module: nn.Module) -> list[DistributedDataParallel]:
    """Return the wrapped modules in `module`, including `module` itself."""
    return [part for part in module.modules() if isinstance(part, DistributedDataParallel)]


def _shared_with_torch(what: str) -> RuntimeError:
    return RuntimeError(
        f"{OWNER}: {what} is also wrapped in torch's DistributedDataParallel, and the two would interfere with each "
        "other's gradients; wrap it in only one of them"
    )

"""All private names of torch that the library uses, and why. A new release of torch may break them.

The imports at the top load only modules that `import torch` has loaded. Modules that need torch._dynamo or sympy are
imported within functions, because that takes seconds.
"""

# pyright: reportPrivateUsage=false
# ruff: noqa: E402
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache, partial, reduce
from operator import attrgetter, methodcaller, truediv
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

_TORCH = tuple(map(int, str(torch.__version__).split(".")[:2]))
if _TORCH < (2, 11):  # before imports that older versions lack
    raise ImportError(f"fnddp needs torch 2.11 or later; found {torch.__version__}", name="torch")

import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    maybe_current_level,
    maybe_get_level,
    peek_interpreter_stack,
)
from torch._library import simple_registry
from torch._library.effects import EffectType
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
)
from torch._utils import _get_device_index
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import _JoinConfig
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.fx import _symbolic_trace
from torch.fx.proxy import GraphAppendingTracer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # a mode that sees all operations
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves as tree_leaves  # leaves of an operation's arguments

if TYPE_CHECKING:
    import sympy

_C: Any = torch._C
_F = TypeVar("_F", bound=Callable[..., Any])

# Autograd's engine.


is_profiling: Callable[[], bool] = _C._autograd._profiler_enabled  # True if a profiler runs in this thread
current_backward: Callable[[], int] = _C._current_graph_task_id  # id of the backward that this thread runs; -1 if none
next_node_number: Callable[[], int] = _C._autograd._get_sequence_nr  # of autograd, in this thread

will_execute: Callable[[Any], bool] = _C._will_engine_execute_node
"""Return whether the current backward runs a node; a RuntimeError if `torch.autograd.grad` returns its gradient."""


def is_within_backward() -> bool:
    return current_backward() != -1


def at_end_of_backward(callback: Callable[[], object]) -> None:
    """Make the running backward call `callback` at its end, unless it raises."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def nodes_of_outer_backward() -> list[Any] | None:
    """Return the nodes that follow in the outermost backward, if the current backward was called within another.

    Returns:
        The nodes after the Function that called the inner backward; [] if a hook called it; None if not nested.
    """
    frame, backwards, outermost = sys._getframe(), 0, None
    while frame is not None:
        backwards += frame.f_code is _engine_run_backward.__code__
        if frame.f_code in _OF_FUNCTIONS:
            outermost = frame
        frame = frame.f_back
    if outermost is None:
        return None if backwards < 2 else []
    return [node for node, _ in outermost.f_locals["self"].next_functions if node is not None]


_OF_FUNCTIONS = {
    getattr(BackwardCFunction, name).__code__ for name in ("apply", "apply_boxed") if hasattr(BackwardCFunction, name)
}


def is_compiled_autograd() -> bool:
    """Return whether compiled autograd runs this backward, or would run a backward that begins now."""
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")  # without this module it cannot be on
    return compiled is not None and (compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region)


keeping_versions: Any = torch.autograd._unsafe_preserve_version_counter
"""Let the block write to a tuple of tensors that autograd has saved for backward, without an error."""


# Memory.


def storage_use_count(tensor: Tensor) -> int:
    """Return the number of tensors, including views, that share the memory of `tensor` (as CUDA graph trees count)."""
    if _C._storage_Use_Count(_C._storage_address(tensor)) == 1:
        return 1
    storage = tensor.untyped_storage()  # this object adds 1 to the count while it exists
    return _C._storage_Use_Count(storage._cdata) - 1


def is_foreign(tensor: Tensor) -> bool:
    """Return whether another library shares the memory (numpy, or by DLPack). torch may not resize such memory."""
    return not tensor.untyped_storage().resizable()


def is_held(tensor: Tensor) -> bool:
    """Return whether others may read the memory of `tensor`, so that it must not be written over."""
    return storage_use_count(tensor) > 1 or is_foreign(tensor)


# Modes.


def without_autocast() -> AbstractContextManager[Any]:
    """Disable autocast in the block, because it would compute factors in half precision."""
    return _without_known_autocasts() if torch.compiler.is_compiling() else _C._DisableAutocast()


WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Names that `torch.compile` and torch's `checkpoint_wrapper` give to the submodule that they wrap."""

_ACCELERATOR = (torch.accelerator.current_accelerator() or torch.device("cpu")).type


@contextmanager
def _without_known_autocasts() -> Generator[None]:
    # Replaces `_DisableAutocast` (for all devices), because Dynamo cannot trace that.
    with torch.autocast("cpu", enabled=False), torch.autocast(_ACCELERATOR, enabled=False):
        yield


modes: Callable[[], list[TorchDispatchMode]] = _get_current_dispatch_mode_stack
"""Return the TorchDispatchModes that see the operations of this thread."""

without_modes: Callable[[], AbstractContextManager[Any]] = _disable_current_modes
"""Return a context in which no TorchDispatchMode is active, such as a WireCounter or the mode of fake tensors."""


def has_modes() -> bool:
    """Return whether a TorchDispatchMode sees the operations of this thread."""
    return _C._len_torch_dispatch_stack() > 0


# Dynamo.

untraced: Any = torch._disable_dynamo
"""Make Dynamo skip a function and its callees, like torch.compiler.disable, but without importing torch._dynamo."""

untraced_itself: Any = partial(untraced, recursive=False)
"""Make Dynamo skip a function, but trace its callees."""


_frames: Any = _C._dynamo.eval_frame
_SKIPPED = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def skipped_by_dynamo(function: _F) -> _F:
    """Make Dynamo skip the frames of a function and its callees, without a cost per call. For hooks of gradients.

    If a compiled function calls `backward`, Dynamo sees everything that autograd calls.
    """
    _frames.set_code_exec_strategy(function.__code__, _SKIPPED)
    return function


def constant_for_dynamo(function: _F) -> _F:
    """Make Dynamo call `function` while tracing, like assume_constant_result, but without importing torch._dynamo."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def keep_order(operator: str) -> None:
    """Use an effect token to prevent compilers from reordering, merging or removing calls of `operator`."""
    simple_registry.singleton.find(operator).effect.register(EffectType.ORDERED)


# torch.func.


def is_transforming() -> bool:
    return peek_interpreter_stack() is not None


@constant_for_dynamo
def is_differentiating() -> bool:
    keys = (interpreter.key() for interpreter in get_interpreter_stack() or ())
    return any(key in (TransformType.Grad, TransformType.Jvp) for key in keys)


@constant_for_dynamo
def is_forward_ad() -> bool:
    """Return whether this runs within forward-mode AD, such as torch.func.linearize, outside a custom function."""
    return forward_ad._current_level >= 0 and _C._is_fwd_grad_enabled()


@constant_for_dynamo
def is_batching() -> bool:
    return any(interpreter.key() == TransformType.Vmap for interpreter in get_interpreter_stack() or ())


def is_mapped(tensor: Tensor) -> bool:
    """Return whether the innermost running vmap maps over a dimension of `tensor`."""
    return is_batchedtensor(tensor) and maybe_get_level(tensor) == maybe_current_level()


_IS_2_13 = _TORCH >= (2, 13)
DIFFERENTIATES_INFERENCE = _IS_2_13  # True if torch.func does; in torch 2.11 it returns zeros


def reinterpreted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor.view(dtype)`, also under vmap in versions of torch without a vmap rule for it."""
    return tensor.view(dtype) if _IS_2_13 or not is_batching() else _Reinterpreted.apply(tensor, dtype)


class _Reinterpreted(torch.autograd.Function):
    @staticmethod
    def forward(tensor: Tensor, dtype: torch.dtype) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tensor.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:  # noqa: ARG004
        tensor, dtype = args
        return reinterpreted(tensor.movedim(in_dims[0], 0).contiguous(), dtype), 0


def is_differentiated(tensor: Tensor) -> bool:
    """Return whether a torch.func transform or forward-mode AD differentiates with respect to `tensor`."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:  # it raises outside
        return True
    while is_functorch_wrapped_tensor(tensor):
        if is_gradtrackingtensor(tensor):
            return True
        tensor = get_unwrapped(tensor)
    return False


# Process groups.

functional_collectives: Any = torch.ops._c10d_functional  # make_fx and Dynamo can trace these
group_size: Any = c10d._get_group_size_by_name  # by name: Dynamo cannot trace the lookup of a group
broadcast_coalesced: Any = dist._broadcast_coalesced  # broadcasts tensors in messages of a given size


def live_group(name: str | None) -> dist.ProcessGroup:
    """Return the process group called `name`, None for the default group. dist has no public function for it."""
    return c10d._get_default_group() if name is None else c10d._resolve_process_group(name)  # pyright: ignore[reportArgumentType]


@constant_for_dynamo
def rank_in(group: str) -> int:
    """Return this rank in the process group called `group`. Dynamo calls this, because it cannot trace the lookup."""
    return live_group(group).rank()


def is_torchcomms(group: dist.ProcessGroup) -> bool:
    """Return whether torchcomms carries `group` (TORCH_DISTRIBUTED_USE_TORCHCOMMS=1), under any backend name.

    With torchcomms, messages between two ranks have no tags, and waiting for a work has no timeout.
    """
    wrapper: Any = getattr(c10d, "_BackendWrapper", None)  # exists from torch 2.13 on, if torchcomms is installed
    return wrapper is not None and isinstance(group._get_backend(torch.device("cpu")), wrapper)


def connect_again(
    group: dist.ProcessGroup, name: str, timeout: timedelta | None, device: torch.device
) -> dist.ProcessGroup:
    """Create another process group, called `name`, of the ranks of `group`; block until all ranks have joined.

    Ranks find each other by the name. `dist.new_group` cannot do this, because it numbers the groups of each rank.

    Args:
        group: Any group. If it has no CPU backend, a new group on the CPU needs a `timeout`.
        name: A name that no group has.
        timeout: Timeout of the new group; None for the timeout of `group`.
        device: Device of the tensors that it moves: by gloo on the CPU, by the backend of `group` on an accelerator.
    """
    is_cpu, default = device.type == "cpu", c10d._get_default_group()
    if default.bound_device_id and not is_cpu:  # the communicator exists, so NCCL can split it
        return dist.split_group(group, [list(range(group.size()))], timeout)  # pyright: ignore[reportReturnType]
    ranks = dist.get_process_group_ranks(group)
    helper: Any = c10d._new_process_group_helper
    options: Any = None if timeout else getattr(group._get_backend(device), "options", None)
    timeout = timeout or getattr(options, "_timeout", None) or dist.distributed_c10d.default_pg_timeout
    backends: Any = c10d.BackendConfig(dist.get_backend_config(group)).get_device_backend_map()  # pyright: ignore[reportArgumentType]
    store: Any = c10d._world.pg_map[group][1]
    store = store.clone()  # a thread that waits for a key blocks the store for other threads
    backend = dist.Backend("gloo" if is_cpu else backends[device.type])
    connected: Any = helper(len(ranks), group.rank(), ranks, backend, store, name, timeout=timeout)[0]
    c10d._world.pg_group_ranks[connected] = {rank: position for position, rank in enumerate(ranks)}
    return connected


# Tracing.

ReadsValue = DataDependentOutputException, DynamicOutputShapeException  # a program reads values
HasNoFake = UnsupportedOperatorException, UnsupportedFakeTensorException  # no fake kernel


def reads_values(error: RuntimeError) -> bool:
    """Return whether vmap raised `error` because a program reads values of tensors that vmap maps over."""
    texts = ".item()", "data-dependent control flow", "dynamic shape", "Tensor that doesn't have storage"
    return any(text in str(error) for text in texts)


UNSAFE_VIEWS = {torch.ops.aten._unsafe_view.default}  # views without a view annotation in the schema


class Fakes:
    """The arguments of one trace: fake tensors in `mode`, and symbolic ints with comparisons that are recorded."""

    def __init__(self) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        # Do not specialize on numbers, 0 and 1 included; a tensor's size is never a symbol.
        self._shapes = ShapeEnv(
            specialize_zero_one=False,
            duck_shape=False,
            allow_scalar_outputs=False,
            allow_dynamic_output_shape_ops=False,
        )
        self.mode = FakeTensorMode(shape_env=self._shapes, static_shapes=True, allow_non_fake_inputs=True)
        self.mode.cache_enabled = False  # the recorder has a cheaper cache
        self._symbols: list[sympy.Symbol] = []

    def tensor(self, tensor: Tensor) -> Tensor:
        return self.mode.from_tensor(tensor.detach(), static_shapes=True)

    def dense(self, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a fake tensor with memory of its own, faster than an operation such as `empty_strided` would."""
        return _dense(self.mode, shape, stride, dtype, device)

    def view(self, base: Tensor, shape: Any, stride: Any, offset: int) -> Tensor:
        """Return a view of `base` that starts `offset` elements later, faster than an operation would."""
        with _C._DisableTorchDispatch():
            memory = torch.as_strided(base, shape, stride, base.storage_offset() + offset)
        return FakeTensor(self.mode, memory, base.device)

    def made(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of `operation` on fake tensors, by its meta kernel if FakeTensorMode would add nothing."""
        devices = {arg.device for arg in args if isinstance(arg, Tensor)}
        if not _is_made_by_kernel(operation) or len(devices) != 1 or kwargs.get("device") is not None:
            return operation(*args, **kwargs)
        with in_kernel_invocation_manager(self.mode):
            made = operation(*args, **kwargs)
        if makes_one_view(operation) and made.shape == args[0].shape:  # is args[0], but a kernel changes strides
            return operation(*args, **kwargs)
        return FakeTensor(self.mode, made, devices.pop())

    def number(self, value: int) -> Any:
        """Return a symbol that compares like `value`."""
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(f"number_{len(self._symbols)}")
        self._symbols.append(self._shapes.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC))  # pyright: ignore[reportArgumentType]
        return self._shapes.create_symintnode(self._symbols[-1], hint=value, source=source)

    def holds(self) -> Callable[[Sequence[int]], bool]:
        """Return a function of the numbers, in order of creation, that is True if all comparisons of the trace hold."""
        import sympy
        from torch.utils._sympy.printers import PythonPrinter

        guards: Any = sympy.And(*(guard.expr for guard in self._shapes.guards))
        if guards is sympy.true:
            return lambda numbers: True
        # The printer that torch uses for guards: sympy's own does not know Python's // and %.
        names = ", ".join(map(str, self._symbols))
        test = eval(f"lambda {names}: {PythonPrinter().doprint(guards)}", {"math": math, "torch": torch})
        return lambda numbers: bool(test(*numbers))


def _dense(mode: FakeTensorMode, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    with _C._DisableTorchDispatch():
        memory = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, memory, device)


def fake_like(like: Any, shape: Any, row: int | None = None) -> Tensor:
    """Return a fake tensor like another, of this shape: dense, or a matrix with rows `row` elements apart."""
    stride = (row, 1) if row is not None else torch.empty(shape, device="meta").stride()
    return _dense(like.fake_mode, shape, stride, like.dtype, like.device)


@contextmanager
def refusing_compiled() -> Generator[None]:
    """Make functions compiled by torch.compile raise in the block, because their kernels are not aten operations."""
    of_thread: Any = getattr(_symbolic_trace, "_is_fx_tracing_context", None)  # torch 2.15 has it
    if of_thread is not None:
        with of_thread(True):
            yield
        return
    traces: Any = _symbolic_trace
    before = traces._is_fx_tracing_flag
    traces._is_fx_tracing_flag = True
    try:
        yield
    finally:
        traces._is_fx_tracing_flag = before


def node_of_number(graph: fx.Graph, expression: Any, symbols: Mapping[Any, fx.Node]) -> Any:
    """Return a node of `graph` that computes `expression` from its symbols' nodes; a number if it has no symbols."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    class Analysis(PythonReferenceAnalysis):
        int_truediv: Any = truediv  # sympy's asks for the values of its arguments

    tracer = GraphAppendingTracer(graph)
    known = {symbol: fx.Proxy(symbols[symbol], tracer) for symbol in expression.free_symbols}
    made = sympy_interp(Analysis, known, expression)
    return made.node if isinstance(made, fx.Proxy) else made


def is_dense_fake(made: Any) -> bool:
    """Return whether `made` is a dense fake tensor, fully described by shape, strides, dtype and device."""
    is_plain = isinstance(made, FakeTensor) and made.constant is None and made.layout == torch.strided
    return is_plain and not (made.is_conj() or made.is_neg() or made.storage_offset())


has_symbolic_size: Callable[[Tensor], bool] = attrgetter("_has_symbolic_sizes_strides")
"""Return whether a size or stride of a tensor is a symbol."""


def like_of(tensor: Tensor) -> Any:
    """Return a key that is equal for fake tensors that operations treat the same; None for other tensors."""
    if not isinstance(tensor, FakeTensor) or tensor.constant is not None or tensor.layout != torch.strided:
        return None
    bits = tensor.is_conj(), tensor.is_neg(), tensor.requires_grad
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, bits


def is_fake_view(made: Any, base: Any) -> bool:
    """Return whether shape, strides and offset determine a view of `base`."""
    fakes = isinstance(made, FakeTensor) and isinstance(base, FakeTensor)
    return fakes and made.dtype == base.dtype and not any(each.is_conj() or each.is_neg() for each in (made, base))


@cache
def makes_one_view(operation: Any) -> bool:
    """Return whether an operation returns one view, of its first argument, at any offset."""
    schema = operation._schema
    is_view = len(schema.returns) == 1 and schema.returns[0].alias_info is not None
    is_tensor = is_view and str(schema.returns[0].type) == "Tensor"
    is_of_first = [i for i, argument in enumerate(schema.arguments) if argument.alias_info is not None] == [0]
    return is_tensor and is_of_first and not schema.is_mutable and operation is not torch.ops.aten.as_strided.default


@cache
def makes_tensors(operation: Any) -> bool:
    """Return whether an operation only makes new tensors, a fixed number of them, and has no other effect."""
    schema = operation._schema
    is_new = all(each.alias_info is None and str(each.type) == "Tensor" for each in schema.returns)
    return is_new and len(schema.returns) > 0 and not schema.is_mutable and operation not in UNSAFE_VIEWS


_OF_KERNELS = {getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "_to_copy", "new_empty", "new_zeros")}


@cache
def _is_made_by_kernel(operation: Any) -> bool:
    """Return whether the kernel for the meta device determines an operation's result for tensors of one device.

    FakeTensorMode calls the same kernel, or a decomposition in Python, and takes many times longer.
    """
    is_pointwise = torch.Tag.pointwise in operation.tags and makes_tensors(operation)
    return makes_one_view(operation) or is_pointwise or operation in _OF_KERNELS


def out_of_place(operation: Any) -> Any:
    """Return the out-of-place form of the in-place operation `operation`, or None if there is none."""
    name = operation.overloadpacket.__name__
    packet = getattr(torch.ops.aten, name[:-1], None) if operation.namespace == "aten" and name.endswith("_") else None
    if torch.Tag.inplace_view in operation.tags or packet is None:
        return None
    # Not by the overload's name: `pow_.Scalar` has a scalar exponent, and `pow.Scalar` a scalar base.
    forms = [getattr(packet, overload) for overload in packet.overloads()]
    return next((form for form in forms if _arguments(form) == _arguments(operation)), None)


def _arguments(operation: Any) -> list[tuple[str, str, Any]]:
    return [(argument.name, str(argument.type), argument.default_value) for argument in operation._schema.arguments]


@cache
def elementwise_out(operation: Any) -> Any:
    """Return the `out=` form of an elementwise operation, or None if there is none."""
    if torch.Tag.pointwise not in getattr(operation, "tags", ()) or not makes_tensors(operation):
        return None
    packet, wanted = operation.overloadpacket, [*_arguments(operation), ("out", "Tensor", None)]
    for other in [getattr(packet, name) for name in packet.overloads()]:
        # Generated `out=` forms are slower: they compute into new memory, and copy.
        if _arguments(other) == wanted and torch.Tag.generated not in other.tags:
            return other
    return None


def storage_key(tensor: Tensor) -> int:
    """Return a key that is equal for tensors that share memory, valid while one of them is alive."""
    return tensor.untyped_storage()._cdata


FOREACH: dict[Any, tuple[Any, Any]] = {
    torch.ops.aten.add.Tensor: (torch._foreach_add, torch._foreach_add_),
    torch.ops.aten.sub.Tensor: (torch._foreach_sub, torch._foreach_sub_),
    torch.ops.aten.mul.Tensor: (torch._foreach_mul, torch._foreach_mul_),
    torch.ops.aten.div.Tensor: (torch._foreach_div, torch._foreach_div_),
}
"""Operations on lists of tensors, by single operation: the form that returns new tensors, and the in-place form."""
foreach_copy: Any = torch._foreach_copy_


def filled(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of numbers that are arguments of its kernels, on CUDA of about a hundred numbers each."""
    made = torch.ones(len(values), dtype=dtype, device=device)
    torch._foreach_mul_(made.unbind(), list(values))  # exact, also for -0.0
    return made


# Modules.

# Dicts of a module's own parameters, modules and buffers, because `named_parameters` is too slow for every step.
parameters_in: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
modules_in: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
buffers_in: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
forward_hooks: Callable[[nn.Module], dict[int, Any]] = attrgetter("_forward_hooks")
post_accumulate_hooks: Callable[[Tensor], dict[int, Any]] = attrgetter("_post_accumulate_grad_hooks")  # of a leaf


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype that the gradient of a leaf tensor must have. Only leaves have `grad_dtype`."""
    return parameter.grad_dtype or parameter.dtype


without_torch_function: Any = _C._disabled_torch_function_impl  # for subclasses with `__torch_dispatch__` only


def stand_in(kind: type[Tensor], like: Tensor) -> Any:
    """Return a tensor of the subclass `kind`, without memory, of the shape, strides, dtype and device of `like`."""
    make: Any = Tensor._make_wrapper_subclass
    return make(kind, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)


def optimizers_in_backward(parameter: Tensor) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers that `torch.distributed.optim._apply_optimizer_in_backward` attached to `parameter`."""
    return getattr(parameter, "_in_backward_optimizers", ())


def cast_state(parameter: Tensor, key: str, value: Any, group: Mapping[str, Any]) -> Any:
    """Return a value of an optimizer's state as its `load_state_dict` casts it for `parameter`, with these options."""
    cast: Any = torch.optim.Optimizer._process_value_according_to_param_policy
    return cast(parameter, value, 0, [{**group, "params": [0]}], key) if isinstance(value, Tensor) else value


@contextmanager
def without_step_hooks(optimizers: Iterable[torch.optim.Optimizer]) -> Generator[None]:
    """Disable the step hooks of `optimizers` in the block."""
    names = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    # Wrappers, such as Accelerate's, have no hooks of their own.
    pairs = [(each, name) for each in optimizers for name in names if hasattr(each, name)]
    hooks: list[tuple[Any, str, Any]] = [(each, name, getattr(each, name)) for each, name in pairs]
    for each, name, _ in hooks:
        setattr(each, name, OrderedDict())
    try:
        yield
    finally:
        for each, name, before in hooks:
            setattr(each, name, before)


def take_over_optimizers_in_backward(parameters: Iterable[Tensor]) -> None:
    """Stop `optimizers_in_backward` from running when a gradient is accumulated."""
    # Not at the top: the import warns, and only users of such an optimizer, who import it anyway, should see that.
    from torch.distributed.optim import apply_optimizer_in_backward

    for parameter in parameters:
        for handle in apply_optimizer_in_backward.param_to_optim_hook_handle_map.pop(parameter, []):
            handle.remove()


def between_step_hooks(
    optimizer: torch.optim.Optimizer, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call the pre-hooks of the optimizer's step, `run(*args, **kwargs)`, and the post-hooks; return `run`'s result.

    Steps that `run` calls do not run these hooks again, but they run hooks registered for all optimizers.
    """
    owner: Any = optimizer
    for hook in [*owner._optimizer_step_pre_hooks.values()]:
        changed = hook(optimizer, (optimizer, *args), kwargs)
        if changed is not None:
            args, kwargs = changed[0][1:], changed[1]
    with without_step_hooks([optimizer]):
        done = run(*args, **kwargs)
    for hook in [*owner._optimizer_step_post_hooks.values()]:
        hook(optimizer, (optimizer, *args), kwargs)
    return done


# torch's DistributedDataParallel: names that tools call, and attributes that they set.

BufferCommHookLocation = ddp._BufferCommHookLocation  # when a hook for buffers runs
JoinConfig = _JoinConfig  # a `Joinable`'s data about its join context
device_index: Callable[..., int] = _get_device_index
cast_forward_inputs: Any = _cast_forward_inputs  # casts `(inputs, kwargs)` to a dtype
# Facts of torch's DDP by name, including its hook. A copied model lists the original's hook, but has none.
ddp_facts: Any = DistributedDataParallel._get_ddp_logging_data
debug_names: Any = DistributedDataParallel._build_debug_param_to_name_mapping  # of parameters by their index
set_params_and_buffers_to_ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model


def params_and_buffers_to_ignore(module: nn.Module) -> set[str]:
    """Return the names that `set_params_and_buffers_to_ignore` has stored in `module`."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def active_ddp() -> DistributedDataParallel | None:
    """Return the module of torch's class that is running forward, in any thread."""
    return DistributedDataParallel._active_ddp_module


def to_kwargs(inputs: Any, kwargs: Any, device: torch.device) -> Any:
    """Return `([inputs], [kwargs])`, moved to `device` on a separate stream."""
    move: Any = _to_kwargs
    return move(inputs, kwargs, device, True)


def set_up_mixed_precision(mixed_precision: Any, module: nn.Module) -> None:
    """Cast buffers, and set the same attributes on parameters as torch's class."""
    # torch reads it as an attribute of a package, and that exists only after an import.
    from torch.distributed import _functional_collectives as _  # noqa: F401

    private: Any = ddp
    private._setup_mixed_precision_params(mixed_precision, module)
    if mixed_precision.buffer_dtype is not None:
        private._cast_buffers(mixed_precision, module)


root_mesh: Callable[[DeviceMesh], DeviceMesh] = methodcaller("_get_root_mesh")
"""Return the mesh that a mesh is a part of, or the mesh itself."""


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, without autograd; another tensor is returned as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def make_local_tensors_of_shards(module: nn.Module) -> None:
    """Replace parameters sharded by tensor parallelism by local tensors, as torch's class does."""
    # The import takes seconds, and only tensor parallelism needs it.
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    _pre_dp_module_transform(module)


# FSDP2.


class FSDPGroup:
    """A group of parameters that FSDP2 gathers and reduces together (an `FSDPParamGroup`)."""

    def __init__(self, group: Any, module: nn.Module, root: Any = None) -> None:
        self._group, self._root = group, root  # root: the model's FSDP state, for the model's own group
        self.module = module  # that `fully_shard` was called with, or the first of several
        # Of the gathered parameters: the complete ones, or this rank's part under tensor parallelism.
        self.shapes: list[torch.Size] = [each._orig_size for each in group.fsdp_params]
        self.dims: list[int] = [each.fsdp_placement.dim for each in group.fsdp_params]  # that are sharded
        # None for `replicate`, because it does not shard; and without HSDP's replicas.
        self.shards: dist.ProcessGroup | None = getattr(group.mesh_info, "shard_process_group", None)
        self.replicas: dist.ProcessGroup | None = getattr(group.mesh_info, "replicate_process_group", None)
        self.device: torch.device = group.device  # on which FSDP computes

    @property
    def regathering(self) -> dist.ProcessGroup | None:
        """The process group over which weights are gathered again in backward; None if they stay gathered."""
        stays_whole = self._root is not None and self._root._auto_reshard_after_forward  # set by the first forward
        again = None if stays_whole else self._group.post_forward_mesh_info
        return getattr(again, "shard_process_group", None)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters. FSDP may replace them until the first forward."""
        return [each.sharded_param for each in self._group.fsdp_params]

    @property
    def gathered(self) -> list[nn.Parameter]:
        """The gathered parameters, of those that a forward has used. Autograd accumulates gradients in them."""
        return [each._unsharded_param for each in self._group.fsdp_params if hasattr(each, "_unsharded_param")]

    @property
    def gathered_dtype(self) -> torch.dtype:
        """The dtype in which the parameters are gathered; torch.uint8 if they have several dtypes."""
        dtypes = {each.mp_policy.param_dtype or each.sharded_param.dtype for each in self._group.fsdp_params}
        return dtypes.pop() if len(dtypes) == 1 else torch.uint8

    @property
    def reduced_dtype(self) -> torch.dtype:
        """The dtype of the buffer in which gradients are reduced: the common type of all trained parameters."""
        every = self._group.fsdp_params
        trained = [each for each in every if each.sharded_param.requires_grad] or every[:1]
        return reduce(torch.promote_types, map(_reduced_dtype, trained))

    @property
    def reducing(self) -> dist.ProcessGroup | None:
        """The group that reduces gradients: `shards`, or the same ranks' `set_separate_reduce_scatter_group`."""
        return getattr(self._group.mesh_info, "reduce_scatter_process_group", None) or self.shards

    reduces = property(attrgetter("_group.reduce_grads"))  # in the next backward: see `set_requires_gradient_sync`
    all_reduces = property(attrgetter("_group.all_reduce_grads"))  # over replicas, too: see `set_requires_all_reduce`
    reduce_scatter = property(attrgetter("_group._reduce_scatter_comm"))
    divide_factor = property(attrgetter("_group.gradient_divide_factor"))  # of sums; None for FSDP's number of ranks

    def reduce_with(self, reduce_scatter: object, divisor: float) -> None:
        """Let `reduce_scatter` sum gradients, and FSDP divide the sums by `divisor`.

        This sets the attributes that a module's setters set, because those refuse a module with several groups.
        """
        self._group._reduce_scatter_comm = reduce_scatter
        self._group.gradient_divide_factor = divisor
        self._group.force_sum_reduction_for_comms = True

    def gather_with(self, all_gather: object) -> None:
        """Let `all_gather` gather the parameters, as `reduce_with` does for gradients."""
        self._group._all_gather_comm = all_gather

    @property
    def custom_comms(self) -> list[str]:
        """Names of the classes that replace FSDP's own reduce-scatter and all-gather."""
        comms = type(self.reduce_scatter), type(self._group._all_gather_comm)
        return [each.__name__ for each in comms if each.__name__ not in ("DefaultReduceScatter", "DefaultAllGather")]

    @property
    def is_extended(self) -> bool:
        """True if a parameter's class itself defines the data for an all-gather, for example a float8 class."""
        return any(hasattr(local_of(each), "fsdp_pre_all_gather") for each in self.parameters)

    def before_reduction(self, note: Callable[[list[int]], None]) -> None:
        """Call `note` with the positions of the parameters that have a gradient, before gradients are reduced.

        The reduce-scatter itself only sees a flat buffer of these gradients, in this order.
        """
        group = self._group
        if hasattr(group, "_take_unsharded_grads_to_reduce"):  # torch 2.15 and later sort by dtype
            positions = {each: position for position, each in enumerate(group.fsdp_params)}
            take = group._take_unsharded_grads_to_reduce

            def take_unsharded_grads_to_reduce() -> Any:
                taken = take()
                note([positions[each] for each in taken[0]])
                return taken

            group._take_unsharded_grads_to_reduce = take_unsharded_grads_to_reduce
            return
        reduce_all = group.post_backward

        def has_gradient(each: Any) -> bool:
            if not hasattr(each, "_unsharded_param"):
                return False
            fills_in = getattr(group, "reduce_scatter_unused_params", False) and each.unsharded_param.requires_grad
            return each.unsharded_accumulated_grad is not None or each.unsharded_param.grad is not None or fills_in

        def post_backward(*unused: Any) -> None:
            if group.reduce_grads:
                note([position for position, each in enumerate(group.fsdp_params) if has_gradient(each)])
            reduce_all(*unused)

        group.post_backward = post_backward


def _reduced_dtype(parameter: Any) -> torch.dtype:
    policy, sharded = parameter.mp_policy, parameter.sharded_param
    if hasattr(parameter, "unsharded_grad_dtype"):  # torch 2.15 and later: not the compute dtype
        return policy.reduce_dtype or grad_dtype(sharded)
    return policy.reduce_dtype or policy.param_dtype or sharded.dtype


def fsdp_groups(model: nn.Module) -> dict[str, tuple[Any, list[FSDPGroup]]]:
    """Return, by module name, each module in `model` that `fully_shard` was called with, and its parameter groups.

    In torch 2.11 a module has at most one group.
    """
    found: dict[Any, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        if hasattr(module, "_get_fsdp_state"):
            found.setdefault(cast("Any", module)._get_fsdp_state(), (name, module))
    groups: dict[str, tuple[Any, list[FSDPGroup]]] = {}
    for state, (name, module) in found.items():
        several = getattr(state, "_fsdp_param_groups", None)
        own = [state._fsdp_param_group] if several is None else several
        root = state if module is model else None
        groups[name] = module, [FSDPGroup(each, module, root) for each in own if each is not None]
    return groups


def after_reductions(model: nn.Module, callback: Callable[[], object]) -> None:
    """Call `callback` when FSDP has ended a backward of `model`, or the last microbatch of a pipeline's stage.

    A stage of torch.distributed.pipelining calls FSDP's final functions itself, outside of any backward.
    """
    for module, _ in fsdp_groups(model).values():
        state = module._get_fsdp_state()
        # The second name, from torch 2.15 on, replaces the first if users end backwards themselves.
        for ending in ("_root_post_backward_final_callback", "finalize_backward"):
            original = getattr(state, ending, None)
            if original is not None:
                setattr(state, ending, partial(_then, callback, original))


def _then(callback: Callable[[], object], original: Callable[..., object], **options: Any) -> None:
    original(**options)
    callback()

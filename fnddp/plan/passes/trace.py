"""Pass 1: trace a pipeline as one graph of aten operations and collectives.

The pipeline's own Python code runs once, on fake tensors, and a recorder records its operations. Python ints of the
state are symbols, so that no step number is baked into a graph. A comparison such as `step < steps` becomes a guard,
and the outcomes of all guards define the phase for which the graph is valid. Divisors of means are symbols too, because
a step may have fewer ranks.

make_fx would be slower: it makes proxies, and computes the shape of a result again for each leaf of the same shape.
"""

import operator
import threading
from types import NoneType
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fnddp.core import tree
from fnddp.core.opaque import for_compiler
from fnddp.core.sync import groups_of, parts_of, require_means
from fnddp.device import device_of
from fnddp.ir.plan_data import Phase
from fnddp.ir.program import Divisor, Grad, Held, LoweringError, Name, StatePart, StepWeight
from fnddp.plan.draft import Draft, Request
from fnddp.plan.graph import call, placeholders, remove_dead
from fnddp.torch_private import (
    Fakes,
    HasNoFake,
    ReadsValue,
    TorchDispatchMode,
    has_symbolic_size,
    is_dense_fake,
    is_fake_view,
    like_of,
    makes_one_view,
    makes_tensors,
    node_of_number,
    out_of_place,
    refusing_compiled,
    storage_key,
    without_autocast,
    without_modes,
)
from fnddp.wire.groups import World, is_alone, within, world_size

aten: Any = torch.ops.aten

_MANY = 10_000  # results kept for later traces
_CONSTANTS = (int, float, complex, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _NoPlan(Exception):
    """The reason for a LoweringError. Not a TypeError: torch's operators take that for a call of `__radd__` instead."""


class Recorder(TorchDispatchMode):
    """A recorder of operations on fake tensors while it is entered, within their mode.

    A node's `meta["val"]` is the fake tensor or symbolic number that it represents. `held` are the tensors with values
    that the pipeline used, by the names of their `get_attr` nodes.
    """

    _shared: ClassVar[dict[Any, Any]] = {}
    """Results of torch's own operations, by their arguments, shared by all traces. One trace runs at a time."""

    def __init__(self, fakes: Fakes, inputs: list[Any]) -> None:
        super().__init__()
        self._fakes = fakes
        self.graph = fx.Graph()
        self.held: dict[str, Tensor] = {}
        self._whole: set[Any] = set()  # operations that do not decompose into others
        self._nodes: dict[int, list[fx.Node]] = {}  # node of each tensor, by its id: nodes keep tensors alive
        self._detached: list[Tensor] = []  # tensors that share another's node
        self._numbers: dict[Any, fx.Node] = {}  # nodes of symbols, by their expression
        self._likes: dict[int, Any] = {}  # keys of tensors for cached results, by their id
        self._own: dict[Any, Any] = {}  # results valid in this trace only, by arguments
        self._owners: dict[int, int] = {}  # number of tensors by storage
        for i, value in enumerate(inputs, 1):
            node = self.graph.placeholder(f"input_{i}")
            node.meta["val"] = value
            if isinstance(value, Tensor):
                self._stands_for(node, value)
            else:
                self._numbers[value.node.expr] = node

    def finish(self, outputs: list[Any]) -> None:
        self.graph.output([self._argument(output) for output in outputs])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # reads a property of a tensor
            quick = getattr(args[0], "fake_device", None) if func is torch.ops.prim.device.default else None
            return quick or func(*args, **kwargs)
        if func not in self._whole:
            with self:
                simpler = func.decompose(*args, **kwargs)
            if simpler is not NotImplemented:
                return simpler
            self._whole.add(func)
        if func is aten.detach.default:
            return self._same(args[0], func(*args, **kwargs))
        function = aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func
        read = [self._argument(arg) for arg in args], {key: self._argument(arg) for key, arg in kwargs.items()}
        made = self._made(func, args, kwargs)
        if func._schema.is_mutable:
            function = self._pure(func, args, kwargs, made)
        if isinstance(made, Tensor):
            self._stands_for(self._called(function, *read, made), made)
        elif isinstance(made, tuple | list) and any(isinstance(each, Tensor) for each in made):
            whole = self._called(function, *read, made)
            for i, each in enumerate(made):
                if isinstance(each, Tensor):
                    self._stands_for(self._called(operator.getitem, [whole, i], {}, each), each)
        return made

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of the operation, from the cache if it makes new tensors or one view."""
        makes_view = makes_one_view(func)
        if not makes_view and not makes_tensors(func):
            return func(*args, **kwargs)
        self._is_own = func.namespace != "aten"  # other libraries' operations may depend on more than arguments
        key = func, self._like(args), self._like(tuple(sorted(kwargs.items()))), torch.get_default_dtype()
        results = self._own if self._is_own else self._shared
        known = results.get(key)
        if known is not None:
            if makes_view:
                return self._fakes.view(args[0], *known)
            dense = [self._fakes.dense(*each) for each in known]
            return dense[0] if len(dense) == 1 else tuple(dense)
        if len(self._shared) > _MANY:
            self._shared.clear()
        made: Any = func(*args, **kwargs) if self._is_own else self._fakes.made(func, args, kwargs)
        new: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)
        if makes_view and is_fake_view(made, args[0]):
            results[key] = new[0].shape, new[0].stride(), new[0].storage_offset() - args[0].storage_offset()
        elif not makes_view and all(map(is_dense_fake, new)):
            results[key] = [(each.shape, each.stride(), each.dtype, each.device) for each in new]
        return made

    def _like(self, argument: Any) -> Any:
        """Return a key for `argument`; record whether results with it are valid in this trace only."""
        if isinstance(argument, Tensor):
            like = self._likes.get(id(argument))
            self._is_own |= like is None
            return like or (id(argument),)
        if isinstance(argument, _SYMBOLS):
            self._is_own = True
            return argument.node.expr
        if isinstance(argument, tuple | list):
            return tuple(map(self._like, argument))
        if isinstance(argument, torch.device) and argument.index is None:  # the current device, and that may change
            self._is_own |= device_of(argument).is_asynchronous
        return type(argument), argument  # 1, 1.0 and True are different

    def _called(self, function: Any, args: Any, kwargs: Any, made: Any) -> fx.Node:
        packet = getattr(function, "overloadpacket", function)
        return call(self.graph, function, tuple(args), kwargs, made, packet.__name__)

    def _stands_for(self, node: fx.Node, tensor: Tensor) -> None:
        if has_symbolic_size(tensor):
            raise _NoPlan("it makes a tensor whose size depends on a number in the state")
        self._likes[id(tensor)] = like_of(tensor)
        if id(tensor) in self._nodes:  # an operation wrote to it
            self._nodes[id(tensor)][0] = node
            return
        self._nodes[id(tensor)] = [node]
        key = storage_key(tensor)
        self._owners[key] = self._owners.get(key, 0) + 1

    def _same(self, tensor: Tensor, detached: Tensor) -> Tensor:
        self._argument(tensor)
        self._nodes[id(detached)], self._likes[id(detached)] = self._nodes[id(tensor)], self._likes[id(tensor)]
        self._detached.append(detached)
        return detached

    def _pure(self, func: Any, args: Any, kwargs: Any, made: Any) -> Any:
        """Return the out-of-place form of an in-place operation. Its memory must have no other reader."""
        pure = out_of_place(func)
        if pure is None or made is not args[0] or self._owners[storage_key(made)] > 1:
            raise _NoPlan(f"it writes with {func} to memory that other tensors share")
        if (wide := pure(*args, **kwargs).dtype) != made.dtype:
            raise _NoPlan(f"it writes {wide} with {func} to memory of {made.dtype}")
        return pure

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._nodes[id(value)][0] if id(value) in self._nodes else self._hold(value)
        if isinstance(value, _SYMBOLS):
            return self._number(value)
        if isinstance(value, tuple | list):
            return type(value)(map(self._argument, value))
        if not isinstance(value, _CONSTANTS):
            raise _NoPlan(f"it captures a {type(value).__name__}, which is stateful")
        return value

    def _number(self, symbolic: Any) -> Any:
        expression = symbolic.node.expr
        if expression not in self._numbers:
            try:
                made = node_of_number(self.graph, expression, self._numbers)
            except Exception as error:  # sympy evaluates some functions at once, with various errors
                raise _NoPlan(f"it computes {expression} from numbers in the state") from error
            if not isinstance(made, fx.Node):
                return made
            for node in self.graph.nodes:  # intermediate nodes; nothing uses their numbers
                node.meta.setdefault("val", symbolic)
            self._numbers[expression] = made
        return self._numbers[expression]

    def _hold(self, tensor: Tensor) -> fx.Node:
        """Add a node for a tensor with values that belongs to the pipeline."""
        value = getattr(tensor, "constant", tensor)  # a fake tensor may hold the real one
        if value is None:
            raise _NoPlan("it uses a tensor without values that was made in another trace")
        name = f"_tensor_constant{len(self.held)}"
        self.held[name] = value
        node = self.graph.create_node("get_attr", name)
        node.meta["val"] = tensor
        self._stands_for(node, tensor)
        return node


# Messages of torch about a missing fake kernel, in errors without their own class.
_IS_FOREIGN = (
    "There was no fake impl registered",
    ".numpy() is not supported for tensor subclasses",
    "using FX to symbolically trace a dynamo-optimized function",
)

_one_at_a_time = threading.Lock()  # fake tensors change process-wide settings, and ranks may be threads


def trace(request: Request) -> Draft:
    """Trace one exchange of the pipeline, without the computation that only `sent` needs.

    Raises:
        LoweringError: The pipeline reads values of tensors, or runs foreign code. Its own errors propagate.
    """
    sync, leaves = request.sync, request.leaves
    if not sync.traceable:
        raise LoweringError(f"{sync!r} cannot be lowered: it reads values or runs foreign code (`traceable` is False)")
    parts, spec = tree.flatten_any(request.state)
    if others := [part for part in parts if type(part) is not int and not isinstance(part, Tensor)]:
        raise LoweringError(f"{sync!r} cannot be lowered: its state has {others[0]!r}, not only tensors and ints")
    fakes, sizes = Fakes(), sizes_of(request)
    grads = [fakes.dense(leaf.shape, leaf.stride, leaf.dtype, leaf.device) for leaf in leaves.values()]
    state = [fakes.tensor(part) if isinstance(part, Tensor) else fakes.number(part) for part in parts]
    divisors = [fakes.number(size) for size in sizes.values()]
    device = next((leaf.device for leaf in leaves.values()), torch.device("cpu"))
    weights = [fakes.dense((), (), torch.float64, device)] if sync.takes_weight else []
    recorder = Recorder(fakes, [*grads, *state, *divisors, *weights])
    asked: list[str] = []

    def bucket_of(path: str) -> int | None:
        asked.append(path)
        is_alone = path in request.dropped or path not in leaves or leaves[path].dtype.is_complex  # aligned
        return None if is_alone else request.buckets[path]

    ranks = dict(zip(sizes, divisors, strict=True))
    weight = weights[0] if weights else None
    world = World(request.world.wire, True, request.world.size, ranks, weight=weight, bucket_of=bucket_of)
    try:
        # Without modes: a WireCounter, for example, must not count traced collectives.
        with (
            _one_at_a_time,
            without_modes(),
            without_autocast(),
            torch.no_grad(),
            refusing_compiled(),
            for_compiler(request.backend is not None),
            fakes.mode,
            recorder,
            within(world),
        ):
            done = sync.exchange(dict(zip(leaves, grads, strict=True)), tree.unflatten_any(spec, state))
        require_means(sync, leaves, done.mean)
        # A leaf without an update in this phase has None for a mean.
        recorder.finish([*(done.mean.get(path) for path in leaves), *parts_of(sync, done.state, spec)])
    except _NoPlan as error:
        raise LoweringError(f"{sync!r} cannot be lowered: {error}") from error
    except ReadsValue as error:
        raise LoweringError(f"{sync!r} cannot be lowered: it reads the values of tensors ({error})") from error
    except RuntimeError as error:
        if isinstance(error, HasNoFake) or any(text in str(error) for text in _IS_FOREIGN):
            raise LoweringError(
                f"{sync!r} cannot be lowered: it runs code that needs tensors with values ({error})"
            ) from error
        raise
    graph = remove_dead(recorder.graph)
    numbers = *map(Divisor, sizes), *(StepWeight() for _ in weights)
    inputs: list[Name] = [*map(Grad, leaves), *map(StatePart, range(len(parts))), *numbers]
    names: dict[fx.Node, Name] = dict(zip(placeholders(graph), inputs, strict=True))
    names |= {node: Held(str(node.target)) for node in graph.find_nodes(op="get_attr")}
    counters = tuple(i for i, part in enumerate(parts) if not isinstance(part, Tensor))
    phase = Phase(counters, tuple(sizes), fakes.holds())
    return Draft(request, graph, recorder.held, names, phase, is_by_bucket=bool(asked))


def sizes_of(request: Request) -> dict[str | None, int]:
    """Return the groups over which means are taken, and their sizes. The rows of payloads depend on these."""
    with within(request.world):
        return {} if is_alone() else {group: world_size(group) for group in groups_of(request.sync)}

"""Pass 1: a pipeline as one graph of aten operations and collectives.

The pipeline's own Python runs once, on fake tensors, under make_fx. Python ints of the state enter as symbols, so no
step number is baked into a graph: a comparison such as `step < steps` becomes a guard, and the outcomes of all guards
are the phase that the graph is for. What means divide by enters as a symbol too: a step may have fewer ranks.
"""

import threading
from typing import Any

import torch
from torch import Tensor, fx

from fnddp import tree
from fnddp.plan.draft import Draft, Phase, Request
from fnddp.plan.graph import is_view, placeholders, remove_dead, tensor_nodes
from fnddp.plan.ir import Grad, Held, LoweringError, Name, Part, Ranks
from fnddp.sync import Sync, groups_of, parts_of
from fnddp.torch_private import (
    Fakes,
    HasNoFake,
    ReadsValue,
    forget_source,
    schema,
    traced,
    without_autocast,
    without_modes,
)
from fnddp.wire.groups import World, is_alone, within, world_size

# How torch says that there is no fake kernel where it has no class for it.
_IS_FOREIGN = (
    "There was no fake impl registered",
    ".numpy() is not supported for tensor subclasses",
    "using FX to symbolically trace a dynamo-optimized function",
    "argument of type: <class 'torch._C.Generator'>",
)

_one_at_a_time = threading.Lock()  # make_fx patches torch for the whole process; ranks may be threads


def trace(request: Request) -> Draft:
    """Traces one exchange of the pipeline, without what only `sent` needs.

    Raises:
        LoweringError: The pipeline reads values of tensors, or holds foreign code. Other errors are its own.
    """
    sync, leaves = request.sync, request.leaves
    if not sync.traceable:
        raise LoweringError(f"{sync!r} cannot be lowered: it reads values or runs foreign code (`traceable` is False)")
    parts, spec = tree.flatten_any(request.state)
    fakes = Fakes()
    with within(request.world):
        groups = [] if is_alone() else list(groups_of(sync))
        sizes = [world_size(group) for group in groups]
    with fakes.mode:
        grads = [leaf.empty() for leaf in leaves.values()]
    state = [fakes.tensor(part) if isinstance(part, Tensor) else fakes.number(part) for part in parts]
    divisors = [fakes.number(size) for size in sizes]

    def exchange(grads: list[Tensor], state: list[Any], divisors: list[Any]) -> list[Any]:
        world = World(request.world.wire, True, request.world.size, dict(zip(groups, divisors, strict=True)))
        with within(world):
            done = sync.exchange(dict(zip(leaves, grads, strict=True)), tree.unflatten_any(spec, state))
        return [*(done.mean[path] for path in leaves), *parts_of(sync, done.state, spec)]

    try:
        # Without modes such as a WireCounter, which sees what is sent.
        with _one_at_a_time, without_modes(), without_autocast(), torch.no_grad(), fakes.mode:
            module = traced(exchange, grads, state, divisors)
    except ReadsValue as error:
        raise LoweringError(f"{sync!r} cannot be lowered: it reads the values of tensors ({error})") from error
    except RuntimeError as error:
        if isinstance(error, HasNoFake) or any(text in str(error) for text in _IS_FOREIGN):
            raise LoweringError(
                f"{sync!r} cannot be lowered: it runs code that needs tensors with values ({error})"
            ) from error
        raise
    forget_source(module)
    _require_pure(sync, module.graph)
    remove_dead(module.graph)
    inputs: list[Name] = [*map(Grad, leaves), *map(Part, range(len(parts))), *map(Ranks, groups)]
    names: dict[fx.Node, Name] = dict(zip(placeholders(module.graph), inputs, strict=True))
    for node in module.graph.find_nodes(op="get_attr"):
        held = getattr(module, str(node.target))
        if not isinstance(held, Tensor):
            raise LoweringError(f"{sync!r} cannot be lowered: it holds a {type(held).__name__}, which has a state")
        names[node] = Held(node.name)
    counters = tuple(i for i, part in enumerate(parts) if not isinstance(part, Tensor))
    return Draft(request, module, names, Phase(counters, tuple(groups), fakes.holds()))


def _require_pure(sync: Sync, graph: fx.Graph) -> None:
    """What is written in place is a value as any other only where nobody else reads that memory."""
    for node in tensor_nodes(graph):
        found = schema(node.target)
        if found is None or not found.is_mutable:
            continue
        written = [
            node.kwargs.get(argument.name, node.args[i] if i < len(node.args) else None)
            for i, argument in enumerate(found.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if not found.returns or not all(isinstance(each, fx.Node) and _is_its_own(each) for each in written):
            raise LoweringError(
                f"{sync!r} cannot be lowered: it writes with {node.target} to memory that something else reads"
            )


def _is_its_own(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_view(node) and len(node.users) == 1

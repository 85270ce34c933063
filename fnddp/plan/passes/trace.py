"""Pass 1: a pipeline as one graph of aten operations and collectives.

The pipeline's own Python runs once, on fake tensors, while a recorder writes down what it does. Python ints of the
state enter as symbols, so no step number is baked into a graph: a comparison such as `step < steps` becomes a guard,
and the outcomes of all guards are the phase that the graph is for. What means divide by enters as a symbol too: a step
may have fewer ranks.
"""

import threading

import torch
from torch import Tensor, fx

from fnddp.core import tree
from fnddp.core.sync import groups_of, parts_of, require_means
from fnddp.ir.program import Divisor, Grad, Held, LoweringError, Name, Part
from fnddp.ir.schedule import Phase
from fnddp.plan.draft import Draft, Request
from fnddp.plan.graph import placeholders, remove_dead
from fnddp.plan.recorder import Recorder
from fnddp.torch_private import Fakes, HasNoFake, ReadsValue, refusing_compiled, without_autocast, without_modes
from fnddp.wire.groups import World, is_alone, within, world_size

# How torch says that there is no fake kernel where it has no class for it.
_IS_FOREIGN = (
    "There was no fake impl registered",
    ".numpy() is not supported for tensor subclasses",
    "using FX to symbolically trace a dynamo-optimized function",
)

_one_at_a_time = threading.Lock()  # fake tensors change settings of the whole process; ranks may be threads


def trace(request: Request) -> Draft:
    """Trace one exchange of the pipeline, without what only `sent` needs.

    Raises:
        LoweringError: The pipeline reads values of tensors, or holds foreign code. Other errors are its own.
    """
    sync, leaves = request.sync, request.leaves
    if not sync.traceable:
        raise LoweringError(f"{sync!r} cannot be lowered: it reads values or runs foreign code (`traceable` is False)")
    parts, spec = tree.flatten_any(request.state)
    fakes = Fakes()
    sizes = sizes_of(request)
    with fakes.mode:
        grads = [leaf.empty() for leaf in leaves.values()]
    state = [fakes.tensor(part) if isinstance(part, Tensor) else fakes.number(part) for part in parts]
    divisors = [fakes.number(size) for size in sizes.values()]

    recorder = Recorder(fakes)
    for value in [*grads, *state, *divisors]:
        recorder.add_input(value)
    world = World(request.world.wire, True, request.world.size, dict(zip(sizes, divisors, strict=True)))
    try:
        # Without modes such as a WireCounter, which sees what is sent.
        with (
            _one_at_a_time,
            without_modes(),
            without_autocast(),
            torch.no_grad(),
            refusing_compiled(),
            fakes.mode,
            recorder,
            within(world),
        ):
            done = sync.exchange(dict(zip(leaves, grads, strict=True)), tree.unflatten_any(spec, state))
        require_means(sync, leaves, done.mean)
        # A leaf without an update in this phase has None for a mean.
        outputs = [*(done.mean.get(path) for path in leaves), *parts_of(sync, done.state, spec)]
        graph = recorder.finish(outputs)
    except LoweringError as error:
        raise LoweringError(f"{sync!r} cannot be lowered: {error}") from error
    except ReadsValue as error:
        raise LoweringError(f"{sync!r} cannot be lowered: it reads the values of tensors ({error})") from error
    except RuntimeError as error:
        if isinstance(error, HasNoFake) or any(text in str(error) for text in _IS_FOREIGN):
            raise LoweringError(
                f"{sync!r} cannot be lowered: it runs code that needs tensors with values ({error})"
            ) from error
        raise
    remove_dead(graph)
    inputs: list[Name] = [*map(Grad, leaves), *map(Part, range(len(parts))), *map(Divisor, sizes)]
    names: dict[fx.Node, Name] = dict(zip(placeholders(graph), inputs, strict=True))
    names |= {node: Held(str(node.target)) for node in graph.find_nodes(op="get_attr")}
    counters = tuple(i for i, part in enumerate(parts) if not isinstance(part, Tensor))
    return Draft(request, graph, recorder.held, names, Phase(counters, tuple(sizes), fakes.holds()))


def sizes_of(request: Request) -> dict[str | None, int]:
    """Return the groups over which means are taken, and their sizes, for which rows of payloads are shaped."""
    with within(request.world):
        return {} if is_alone() else {group: world_size(group) for group in groups_of(request.sync)}

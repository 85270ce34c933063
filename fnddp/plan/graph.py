"""Graphs of fx, and what lowering adds to aten: combined collectives, as two functions of a graph.

A graph with them still runs as it stands (blocking, and without buffers), so that every pass can be tested.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from fnddp.ir.program import Collective
from fnddp.torch_private import UNSAFE_VIEWS, functional_collectives
from fnddp.wire.groups import live_name


def launch(payloads: list[Tensor], collective: Collective) -> list[Tensor]:
    """Stands for a combined collective. So that a graph runs as it stands: the collective of each payload."""
    kind, group = collective.kind, live_name(collective.group)
    started = [kind.trace(payload.contiguous(), collective.op, collective.world_size, group) for payload in payloads]
    results = [functional_collectives.wait_tensor(result) for result in started]
    return [result.reshape(collective.received_shape(i)) for i, result in enumerate(results)]


def take(launched: list[Tensor], position: int) -> Tensor:
    """The result at `position`, as it lies in the buffer."""
    return launched[position]


def launch_of(node: fx.Node) -> tuple[list[fx.Node], Collective]:
    """What a `launch` sends: the nodes of its payloads, and the collective."""
    arguments: Any = node.args
    return arguments


def take_of(node: fx.Node) -> tuple[fx.Node, int]:
    """What a `take` takes: the node of the launch, and the position of the payload."""
    arguments: Any = node.args
    return arguments


def value(node: Any) -> Any:
    """The fake tensor, symbolic int or tuple that `node` stands for."""
    return node.meta["val"]


def is_view(node: fx.Node) -> bool:
    """Whether the result of `node` shares memory with its first argument."""
    if node.target is operator.getitem:  # of several results: views if the operation makes views
        return is_view(node.all_input_nodes[0])
    if node.target is take or node.target in UNSAFE_VIEWS:
        return True
    returned = getattr(getattr(node.target, "_schema", None), "returns", ())  # a Python function has none
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returned)


LIGHT = {"cpu": 2**20, "cuda": 2**24}
"""Bytes up to which it is the call of an operation that costs, not its pass over memory. (Larger temporaries of many
leaves at a time would take too much memory, too.)"""


def is_light(node: fx.Node) -> bool:
    """Whether `node` reads and makes small tensors only."""
    return all(map(_is_small, (node, *node.all_input_nodes)))


def _is_small(node: fx.Node) -> bool:
    if "is_small" not in node.meta:
        node.meta["is_small"] = _holds_little(value(node))
    return node.meta["is_small"]


def _holds_little(made: Any) -> bool:
    if isinstance(made, Tensor):
        return made.numel() * made.element_size() <= LIGHT.get(made.device.type, LIGHT["cpu"])
    return not isinstance(made, tuple | list) or all(map(_holds_little, made))


def kind_of(node: fx.Node) -> object:
    """Equal for nodes that do the same, but for the tensors that they do it to."""
    made = value(node)
    constants = [arg if not is_tensor(arg) else None for arg in node.args]
    options = sorted((key, str(option)) for key, option in node.kwargs.items())
    like = (made.dtype, made.device) if isinstance(made, Tensor) else None
    return node.target, str(constants), str(options), like


def is_tensor(argument: object) -> bool:
    """Whether an argument of a node is a node that stands for a tensor."""
    return isinstance(argument, fx.Node) and isinstance(value(argument), Tensor)


def remove_dead(graph: fx.Graph) -> fx.Graph:
    """Removes what nobody reads, collectives too: they are dead on all ranks alike."""
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return graph


def tensor_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of `graph` that compute something."""
    return (node for node in graph.nodes if node.op == "call_function")


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of `graph`: leaves, then parts of the state, then what means divide by."""
    return list(graph.find_nodes(op="placeholder"))


def output_nodes(graph: fx.Graph) -> list[Any]:
    """What the graph returns: nodes, or Python numbers."""
    return list(graph.output_node().args[0])  # pyright: ignore[reportArgumentType]


def numbers(nodes: Sequence[Any], inputs: Sequence[fx.Node]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """A function that computes Python numbers among the nodes of a graph from those among its inputs, in their order.

    It holds no nodes, which would hold the graph.
    """
    place = {node: i for i, node in enumerate(inputs)}

    def of(node: Any) -> Callable[[Sequence[int]], Any]:
        if not isinstance(node, fx.Node):
            return lambda given: node
        if node in place:
            return operator.itemgetter(place[node])
        target: Any = node.target
        arguments = [of(each) for each in node.args]
        return lambda given: target(*(each(given) for each in arguments))

    made = [of(node) for node in nodes]
    return lambda given: tuple(int(each(given)) for each in made)


def is_collective(node: fx.Node) -> bool:
    """Whether `node` is a collective of torch.distributed, functional or not."""
    return str(node.target).startswith(("_c10d_functional", "c10d", "_c10d_functional_autograd"))


def sorted_topologically(graph: fx.Graph) -> fx.Graph:
    """Moves every node behind what it reads, and changes the order no more than that takes."""
    end = graph.output_node()
    placed: set[fx.Node] = set()
    for first in list(graph.nodes):
        pending = [first]
        while pending:
            node = pending[-1]
            missing = [source for source in node.all_input_nodes if source not in placed]
            if missing:
                pending += reversed(missing)
                continue
            pending.pop()
            if node not in placed and node is not end:
                placed.add(node)
                end.prepend(node)
    return graph

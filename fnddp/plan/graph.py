"""fx graphs of aten operations and two more functions, `launch` and `take`, that represent combined collectives."""

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, cast

from torch import Tensor, fx

from fnddp.device import device_of
from fnddp.ir.program import Collective
from fnddp.kernels.leaves import OUT
from fnddp.torch_private import UNSAFE_VIEWS


def launch(payloads: list[Tensor], collective: Collective) -> None:
    """Represent the start of a combined collective. Graphs with this function are not run."""


def take(launched: list[Tensor], position: int) -> None:
    """Represent the result at `position` in the buffer that a collective fills."""


def launch_of(node: fx.Node) -> tuple[list[fx.Node], Collective]:
    """Return the arguments of a `launch`: the nodes of its payloads, and the collective."""
    return cast(Any, node.args)


def take_of(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the arguments of a `take`: the node of the launch, and the position of the payload."""
    return cast(Any, node.args)


def value(node: Any) -> Any:
    """Return the fake tensor, symbolic int or tuple that `node` represents."""
    return node.meta["val"]


def is_view(node: fx.Node) -> bool:
    """Return whether the result of `node` shares memory with its first argument."""
    if node.target is operator.getitem:  # one of several results: a view if the operation makes views
        return is_view(node.all_input_nodes[0])
    return _makes_view(node.target)


@cache
def _makes_view(function: Any) -> bool:
    if function is take or function in UNSAFE_VIEWS:
        return True
    returned = getattr(getattr(function, "_schema", None), "returns", ())  # Python functions have no schema
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returned)


def is_made_in_list(node: fx.Node) -> bool:
    """Return whether `node` is a result of an operator on lists, so that it can be written into given memory."""
    return node.target is operator.getitem and node.all_input_nodes[0].target in OUT


def is_light(node: fx.Node) -> bool:
    """Return whether `node` reads and makes small tensors only (joining large ones would take much memory)."""
    return all(map(_is_small, (node, *node.all_input_nodes)))


def _is_small(node: fx.Node) -> bool:
    if "is_small" not in node.meta:
        node.meta["is_small"] = _holds_little(value(node))
    return node.meta["is_small"]


def _holds_little(made: Any) -> bool:
    if isinstance(made, Tensor):
        return made.numel() * made.element_size() <= device_of(made.device).light_bytes
    return not isinstance(made, tuple | list) or all(map(_holds_little, made))


def kind_of(node: fx.Node) -> object:
    """Return a key that is equal for nodes that are the same operation on different tensors."""
    made = value(node)
    constants = [arg if not is_tensor(arg) else None for arg in node.args]
    options = sorted((key, str(option)) for key, option in node.kwargs.items())
    like = (made.dtype, made.device) if isinstance(made, Tensor) else None
    return node.target, str(constants), str(options), like


def is_tensor(argument: object) -> bool:
    """Return whether an argument of a node is itself a node for a tensor."""
    return isinstance(argument, fx.Node) and isinstance(value(argument), Tensor)


def remove_dead(graph: fx.Graph) -> fx.Graph:
    """Remove nodes that nothing reads, including collectives, because they are unused on all ranks."""
    for node in reversed(graph.nodes):  # fx's own pass would check the whole graph first
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)
    return graph


def call(graph: fx.Graph, function: Any, args: Any, kwargs: Any, made: Any, name: str | None = None) -> fx.Node:
    """Add a node for a call of `function` with the result `made`."""
    node = graph.create_node("call_function", function, name=name)
    # Assign arguments here, because `create_node` would search all of them.
    node.args, node.kwargs, node.meta["val"] = args, kwargs, made
    return node


def tensor_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Return the nodes of `graph` that compute something."""
    return (node for node in graph.nodes if node.op == "call_function")


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs of `graph`: leaves, then parts of the state, then divisors of means."""
    return list(graph.find_nodes(op="placeholder"))


def output_nodes(graph: fx.Graph) -> list[Any]:
    """Return the outputs of `graph`: nodes, or Python numbers."""
    return list(graph.output_node().args[0])  # pyright: ignore[reportArgumentType]


def numbers(nodes: Sequence[Any], inputs: Sequence[fx.Node]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Return a function that computes the numbers `nodes` from `inputs`, without a reference to the graph."""
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


def sorted_topologically(graph: fx.Graph) -> fx.Graph:
    """Move every node after the nodes that it reads, and otherwise keep the order."""
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

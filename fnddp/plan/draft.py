"""A plan while it is made: what one pass hands to the next."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, fx

from fnddp.core.sync import State, Sync
from fnddp.ir.program import LeafSpec, Name, Scratch, Segment, Sent
from fnddp.ir.schedule import Phase
from fnddp.wire.groups import World


@dataclass(frozen=True)
class Request:
    """What a plan is asked for.

    Attributes:
        sync: The pipeline.
        leaves: The gradients, by path.
        state: Shapes, dtypes and devices of its tensors are read, and the values of its Python ints.
        buckets: The bucket of each leaf; its order is the order of arrival.
        donation: What a step may write over.
        dropped: Leaves without gradients on any rank. What is only theirs is neither computed nor sent.
        world: Who moves bytes, and how large groups are.
        backend: Who runs segments; None for Python.
    """

    sync: Sync
    leaves: dict[str, LeafSpec]
    state: State
    buckets: dict[str, int]
    donation: "Donation"
    dropped: frozenset[str]
    world: World
    backend: str | None


@dataclass(frozen=True)
class Donation:
    """What a step may write over.

    Attributes:
        gradients: "no", "at_end" (once all collectives are complete), or "yes" (as soon as nobody reads them).
        state: Whether the state may be, once all collectives are complete. A step that fails leaves it alone.
    """

    gradients: str = "no"
    state: bool = False


@dataclass(frozen=True)
class Cut:
    """What will be a segment: nodes of the graph.

    Attributes:
        slot: Position in the software pipeline.
        needs: Leaves that must have arrived, beyond those that earlier cuts needed.
        waits: Collectives that must be complete, likewise.
        nodes: What is computed, in this order.
        launches: The node of the collective that is issued at the end.
        commits: Whether it runs after all collectives, when the step can no longer fail on another rank.
    """

    slot: int
    needs: tuple[str, ...]
    waits: tuple[int, ...]
    nodes: tuple[fx.Node, ...]
    launches: fx.Node | None
    commits: bool


@dataclass(frozen=True)
class Placement:
    """Where results are written.

    Attributes:
        payloads: The payloads that a node is copied to, as (collective, position).
        targets: What the result of a node is written over: another node's memory, a payload, or the memory of a mean.
        lies_in: The memory in which a result lies, where that is not its own.
        overwritten: The inputs of the graph that are written over.
        scratch: Memory of the plan's own for results that many operations make at once.
        results: Leaves whose mean has memory of its own.
        memories: For leaves what is free to be that memory in the next step: a node, or that memory.
    """

    payloads: dict[fx.Node, list[tuple[int, int]]]
    targets: dict[fx.Node, "fx.Node | Name"]
    lies_in: Mapping[fx.Node, "fx.Node | Name"]
    overwritten: frozenset[fx.Node]
    scratch: Mapping[Scratch, LeafSpec]
    results: frozenset[str]
    memories: dict[str, "fx.Node | Name"]

    def memory(self, node: fx.Node) -> "fx.Node | Name":
        """What the result of `node` lies in, called by the node that made it or by its name."""
        memory: fx.Node | Name = node
        while isinstance(memory, fx.Node) and memory in self.lies_in:
            memory = self.lies_in[memory]
        target = self.targets.get(memory) if isinstance(memory, fx.Node) else None
        return target if isinstance(target, Sent | Scratch) else memory


@dataclass(frozen=True)
class Draft:
    """What a pass takes and returns. It may change the graph that it is given.

    Attributes:
        request: What is asked for.
        graph: From leaves, parts of the state and numbers of ranks to means and the next state.
        held: Tensors with values that the graph reads, by the targets of their nodes.
        names: What the inputs of the graph, and the tensors it holds, are called.
        phase: What the graph is for.
        is_of_rank: Whether the graph is this process's: the pipeline has asked for its rank. (Tests share traces of
            others between ranks that are threads.)
        cuts: The graph in order.
        placement: Where results are written.
        batches: Operations that are run as one: the first of them, and all.
        segments: The code.
    """

    request: Request
    graph: fx.Graph
    held: dict[str, Tensor]
    names: dict[fx.Node, Name]
    phase: Phase
    is_of_rank: bool = False
    cuts: tuple[Cut, ...] = ()
    placement: Placement | None = None
    batches: Mapping[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict[fx.Node, tuple[fx.Node, ...]])
    segments: tuple[Segment, ...] = ()

    @property
    def paths(self) -> list[str]:
        return list(self.request.leaves)


def copied(traced: Draft, request: Request) -> Draft:
    """A trace, with a graph of its own, for another request."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs = graph.graph_copy(traced.graph, copies)
    graph.output(outputs)
    names = {copies[node]: name for node, name in traced.names.items()}
    return Draft(request, graph, traced.held, names, traced.phase, traced.is_of_rank)

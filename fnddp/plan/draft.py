"""The draft of a plan: what one pass gives to the next."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, fx

from fnddp.core.sync import State, Sync
from fnddp.ir.program import LeafSpec, Name, Scratch, Segment, Sent
from fnddp.ir.schedule import Phase
from fnddp.wire.groups import World


@dataclass(frozen=True)
class Donation:
    """Memory that a step may write over.

    Attributes:
        gradients: "no", "at_end" (once all collectives are complete), or "yes" (as soon as nobody reads them).
        state: Whether the state may be, once all collectives are complete. A step that fails leaves it alone.
    """

    gradients: str = "no"
    state: bool = False


@dataclass(frozen=True)
class Request:
    """The input of lowering: the arguments of `lower_leaves`, with the bucket of each leaf.

    Of the tensors in `state`, only shapes, dtypes and devices are read; of its Python ints, the values.
    """

    sync: Sync
    leaves: dict[str, LeafSpec]
    state: State
    buckets: dict[str, int]
    donation: Donation
    dropped: frozenset[str]
    world: World
    backend: str | None


@dataclass
class Cut:
    """The nodes of a future `Segment`, in the order in which they are computed; its other fields are a segment's.

    `needs` and `waits` have only what earlier cuts have not needed and waited for, and `launches` is a node.
    """

    slot: int
    commits: bool
    needs: list[str] = field(default_factory=list[str])
    waits: list[int] = field(default_factory=list[int])
    nodes: list[fx.Node] = field(default_factory=list[fx.Node])
    launches: fx.Node | None = None


@dataclass(frozen=True)
class Placement:
    """The memory of results.

    Attributes:
        payloads: The payloads that a node is copied to, as (collective, position).
        targets: Memory that the result of a node is written over: another node's, a payload, or that of a mean.
        lies_in: The memory of a result, where that is not its own.
        overwritten: The inputs of the graph that are written over.
        scratch: Memory of the plan's own for results that many operations make at once.
        results: Leaves whose mean has memory of its own.
        memories: For leaves the memory of their mean in the next step: a node, or the same.
    """

    payloads: dict[fx.Node, list[tuple[int, int]]]
    targets: dict[fx.Node, "fx.Node | Name"]
    lies_in: Mapping[fx.Node, "fx.Node | Name"]
    overwritten: frozenset[fx.Node]
    scratch: Mapping[Scratch, LeafSpec]
    results: frozenset[str]
    memories: dict[str, "fx.Node | Name"]

    def memory(self, node: fx.Node) -> "fx.Node | Name":
        """Return the memory of the result of `node`: the node that made it, or a name."""
        memory: fx.Node | Name = node
        while isinstance(memory, fx.Node) and memory in self.lies_in:
            memory = self.lies_in[memory]
        target = self.targets.get(memory) if isinstance(memory, fx.Node) else None
        return target if isinstance(target, Sent | Scratch) else memory


@dataclass(frozen=True)
class Draft:
    """The argument and result of a pass, which may change the graph that it is given.

    Attributes:
        graph: From leaves, parts of the state and numbers of ranks to means and the next state.
        held: Tensors with values that the graph reads, by the targets of their nodes.
        names: Names of the inputs of the graph, and of the tensors it holds.
        cuts: The graph in order.
        batches: Operations that are run as one: the first of them, and all.
    """

    request: Request
    graph: fx.Graph
    held: dict[str, Tensor]
    names: dict[fx.Node, Name]
    phase: Phase
    cuts: tuple[Cut, ...] = ()
    placement: Placement | None = None
    batches: Mapping[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict[fx.Node, tuple[fx.Node, ...]])
    segments: tuple[Segment, ...] = ()

    @property
    def paths(self) -> list[str]:
        return list(self.request.leaves)


def copied(traced: Draft, request: Request) -> Draft:
    """Return a trace, with a graph of its own, for another request."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(traced.graph, copies))
    names = {copies[node]: name for node, name in traced.names.items()}
    return Draft(request, graph, traced.held, names, traced.phase)

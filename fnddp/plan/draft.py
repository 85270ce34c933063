"""The draft of a plan: the data that each pass returns to the next."""

from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor, fx

from fnddp.core.sync import State, Sync
from fnddp.ir.plan_data import Phase
from fnddp.ir.program import Collective, LeafSpec, Mean, Name, Scratch, Sent, StepWeight
from fnddp.wire.groups import World

Storage: TypeAlias = fx.Node | Mean | Scratch
"""The memory of a result: the node that made it, or its name."""


@dataclass(frozen=True)
class Donation:
    """Input memory that a step may write over: `gradients`, and the `state` once all collectives are complete.

    `gradients` is "no", "at_end" (once all collectives are complete), or "yes" (once nothing reads them any more). A
    step that fails does not change the state.
    """

    gradients: str = "no"
    state: bool = False


@dataclass(frozen=True)
class Request:
    """The input of lowering: the arguments of `lower_leaves`, with the bucket of each leaf.

    Only shapes, dtypes and devices of the tensors in `state` are read, but the values of its Python ints.
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
class DraftSegment:
    """The nodes of a future `Segment`, in the order of computation. Other fields are as in `Segment`.

    `needs` and `waits` leave out leaves and collectives that earlier segments need or wait for; `launches` is a node.
    """

    slot: int
    commits: bool
    needs: list[str] = field(default_factory=list[str])
    waits: list[int] = field(default_factory=list[int])
    nodes: list[fx.Node] = field(default_factory=list[fx.Node])
    launches: fx.Node | None = None


@dataclass
class Placement:
    """Where results are stored: the decisions of the pass `place`.

    Attributes:
        payloads: The payloads that a node is copied to, by collective and position.
        targets: Memory that the result of a node is written over: another node's, a payload's, or a mean's.
        stored_in: The memory of a result, unless it is its own.
        overwritten: The inputs of the graph that are written over.
        results: Leaves with a mean in separate memory; `memories` is that memory in the next step.
    """

    payloads: dict[fx.Node, list[tuple[Collective, int]]] = field(
        default_factory=dict[fx.Node, list[tuple[Collective, int]]]
    )
    targets: dict[fx.Node, fx.Node | Name] = field(default_factory=dict[fx.Node, fx.Node | Name])
    stored_in: dict[fx.Node, Storage] = field(default_factory=dict[fx.Node, Storage])
    overwritten: set[fx.Node] = field(default_factory=set[fx.Node])
    scratch: dict[Scratch, LeafSpec] = field(default_factory=dict[Scratch, LeafSpec])
    results: set[str] = field(default_factory=set[str])
    memories: dict[str, Storage] = field(default_factory=dict[str, Storage])

    def holder(self, node: fx.Node) -> Storage:
        """Return the memory of the result of `node`: the node that allocated it, or the name of a mean or scratch."""
        memory: Storage = node
        while isinstance(memory, fx.Node) and memory in self.stored_in:
            memory = self.stored_in[memory]
        return memory

    def memory(self, node: fx.Node) -> fx.Node | Name:
        """Return the final memory of a result: as `holder`, but the payload if the result is written into a buffer."""
        memory = self.holder(node)
        target = self.targets.get(memory) if isinstance(memory, fx.Node) else None
        return target if isinstance(target, Sent) else memory


@dataclass
class Draft:
    """An unfinished plan. Each pass takes it, changes it, and returns it.

    Attributes:
        graph: Computes means and the next state from leaves, parts of the state and numbers of ranks.
        held: Tensors with values that the graph reads, by the targets of their nodes.
        names: Names of the inputs of the graph, and of the tensors it holds.
        is_by_bucket: True if the graph is valid for these buckets and dropped leaves only.
        segments: The graph in order. `batches` are groups of its operations that run as one, by their first node.
    """

    request: Request
    graph: fx.Graph
    held: dict[str, Tensor]
    names: dict[fx.Node, Name]
    phase: Phase
    is_by_bucket: bool = False
    segments: list[DraftSegment] = field(default_factory=list[DraftSegment])
    placement: Placement = field(default_factory=Placement)
    batches: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict[fx.Node, tuple[fx.Node, ...]])

    @property
    def weight(self) -> fx.Node | None:
        """The graph input for this rank's weight; None unless the pipeline is `weighted`.

        Operations that depend on it only run before any gradient arrives.
        """
        return next((node for node, name in self.names.items() if isinstance(name, StepWeight)), None)

    @property
    def paths(self) -> list[str]:
        return list(self.request.leaves)


def copied(traced: Draft, request: Request) -> Draft:
    """Return a copy of a trace, with its own graph, for another request."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in traced.graph.nodes:
        # Arguments are assigned later, because `create_node` would search all of them.
        copies[node] = copy = graph.create_node(node.op, node.target, name=node.name)
        copy.args, copy.kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        copy.meta.update(node.meta)
    names = {copies[node]: name for node, name in traced.names.items()}
    return Draft(request, graph, traced.held, names, traced.phase, traced.is_by_bucket)

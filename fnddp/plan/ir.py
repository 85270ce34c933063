"""What lowering adds to aten: combined collectives, as two operations of a graph.

A graph with them still runs as it stands (blocking, and without reuse of buffers), so that every pass can be tested.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fnddp import collectives

# Without a functional view annotation in its schema, but a view all the same.
_UNSAFE_VIEWS = {torch.ops.aten._unsafe_view.default}


@dataclass(frozen=True)
class LeafSpec:
    """What a plan knows of a gradient."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]

    @classmethod
    def of(cls, leaf: Tensor) -> "LeafSpec":
        return cls(leaf.shape, leaf.dtype, leaf.device, leaf.stride())

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def empty(self) -> Tensor:
        """A tensor like it, with arbitrary values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Payload:
    """One tensor in the flat buffer of a collective.

    Attributes:
        label: The leaf it comes from, or the first and last of several.
        shape: Its shape.
        offset: Where it starts in the buffer, in elements.
    """

    label: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Collective:
    """One all-reduce of a flat buffer that many payloads share.

    Attributes:
        index: Its place in the order in which all ranks issue their collectives.
        kind: "all_reduce".
        op: "sum", "max" or "min", as the wire adds (a mean is divided before it is summed).
        group: The process group's name; None for the default one.
        world_size: Number of ranks in the group.
        dtype: Of the buffer.
        device: Of the buffer.
        depth: 0 for what depends on gradients only, 1 for what depends on results of depth 0, and so on.
        bucket: The bucket of gradients it carries.
        slot: When it is issued: the bucket's arrival plus the depth.
        payloads: What lies in the buffer, without gaps.
    """

    index: int
    kind: str
    op: str
    group: str | None
    world_size: int
    dtype: torch.dtype
    device: torch.device
    depth: int
    bucket: int
    slot: int
    payloads: tuple[Payload, ...]

    @property
    def numel(self) -> int:
        """Elements in the buffer."""
        return sum(payload.numel for payload in self.payloads)

    @property
    def wire_bytes(self) -> int:
        """Payload bytes that one rank hands over."""
        return self.numel * self.dtype.itemsize

    @property
    def name(self) -> str:
        return f"c{self.index}"


def launch(payloads: Sequence[Tensor], collective: Collective) -> list[Tensor]:
    """Lays the payloads out in one flat buffer and reduces it."""
    flat = torch.cat([payload.reshape(-1) for payload in payloads])
    collectives.start_all_reduce(flat, collective.op, collective.group).wait()
    pieces = flat.split([payload.numel for payload in collective.payloads])
    return [piece.view(payload.shape) for piece, payload in zip(pieces, collective.payloads, strict=True)]


def take(launched: list[Tensor], position: int) -> Tensor:
    """The reduced payload at `position`."""
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
    if node.target is take or node.target in _UNSAFE_VIEWS:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        ret.alias_info is not None and not ret.alias_info.is_write for ret in schema.returns
    )


def remove_dead(graph: fx.Graph) -> fx.Graph:
    """Removes what nobody reads, collectives too: they are dead on all ranks alike."""
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return graph


def uncombined_bytes(graph: fx.Graph) -> int:
    """Payload bytes of the collectives that the pipeline's own code issues, and that stay as they are."""
    ours = [node for node in tensor_nodes(graph) if str(node.target).startswith("_c10d_functional")]
    sent = [value(node.args[0]) for node in ours if "wait_tensor" not in str(node.target)]
    return sum(payload.numel() * payload.element_size() for payload in sent)


def tensor_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of `graph` that compute something."""
    return (node for node in graph.nodes if node.op == "call_function")


def output_nodes(graph: fx.Graph) -> list[Any]:
    """What the graph returns: nodes, or Python numbers."""
    return list(graph.output_node().args[0])  # pyright: ignore[reportArgumentType]

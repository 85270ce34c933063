"""The parts of plans: leaves, names of values, collectives and segments. They are data without behaviour."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fnddp.wire.kinds import Kind


@dataclass(frozen=True)
class LeafSpec:
    """Shape, dtype, device and strides of a gradient."""

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

    def is_like(self, grad: Tensor) -> bool:
        """Return whether `grad` has this leaf's shape, dtype and device, in any memory layout."""
        return grad.shape == self.shape and grad.dtype == self.dtype and grad.device == self.device

    def empty(self) -> Tensor:
        """Return a tensor of this layout, with arbitrary values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class _OfLeaf:
    path: str


@dataclass(frozen=True)
class _Named:
    name: str


@dataclass(frozen=True)
class _OfPayload:
    collective: int
    position: int


class Grad(_OfLeaf):
    """The gradient of a leaf."""


class Mean(_OfLeaf):
    """Memory of the plan for the mean of a leaf. It persists across steps."""


@dataclass(frozen=True)
class StatePart:
    """A leaf of the state, by its position."""

    index: int


@dataclass(frozen=True)
class Divisor:
    """The number by which a mean over `group` is divided."""

    group: str | None


@dataclass(frozen=True)
class StepWeight:
    """The weight of this rank's gradients in the step, for `weighted`: a scalar of float64."""


@dataclass(frozen=True)
class FoundNonfinite:
    """Whether some rank received NaN or infinity in the step: a scalar of bool, known before the step commits."""


class Held(_Named):
    """A tensor that belongs to the pipeline itself."""


class Scratch(_Named):
    """Memory of the plan for the result of an operation. It persists across steps."""


class Temp(_Named):
    """The result of an operation."""


class Sent(_OfPayload):
    """A payload in the buffer that a collective sends, by the positions of collective and payload."""


class Received(_OfPayload):
    """The result of a payload, in the buffer that a collective fills. An all_reduce fills the buffer that it sends."""


@dataclass(frozen=True)
class PayloadRange:
    """Adjacent payloads in the buffer that a collective sends, as one tensor."""

    collective: int
    first: int
    last: int


BufferSlice: TypeAlias = Sent | Received | PayloadRange
"""A part of the memory of a collective."""

Name: TypeAlias = Grad | StatePart | Divisor | StepWeight | FoundNonfinite | Held | BufferSlice | Mean | Scratch | Temp
"""The name of a value of a plan."""


@dataclass(frozen=True)
class PayloadSpec:
    """One tensor in the flat buffer of a collective.

    Attributes:
        label: Path of the payload's leaf, or of the first and last of several leaves.
        result: The shape of its result.
        offset: Its first column in the buffer, in units of the buffer's dtype.
        width: Number of its columns: all elements, or the elements of one row if the kind sends a row to each rank.
    """

    label: str
    shape: tuple[int, ...]
    result: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    width: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Collective:
    """One message of a plan: many payloads in one flat buffer.

    Attributes:
        index: Its index in the order in which all ranks issue their collectives.
        op: The reduction: "sum" (also for a mean, because inputs are divided first), "max" or "min"; None for a kind
            that does not reduce.
        dtype: The dtype of all payloads; torch.uint8 if they differ.
        depth: 0 if it depends on gradients only, 1 if on results of depth 0, and so on; -1 if on the weight only.
        bucket: The number of its bucket of gradients.
        slot: Its position in the software pipeline: the bucket's number in the order of arrival, plus `depth`.
        width: Columns of the buffer: those of all payloads, then padding zeros, so that each rank's row is aligned.
    """

    index: int
    kind: Kind
    op: str | None
    group: str | None
    world_size: int
    dtype: torch.dtype
    device: torch.device
    depth: int
    bucket: int
    slot: int
    width: int
    payloads: tuple[PayloadSpec, ...]

    def __hash__(self) -> int:
        return hash((self.index, self.width, len(self.payloads)))  # hashing all payloads would be slow

    @property
    def numel(self) -> int:
        """Number of elements of all payloads."""
        return sum(payload.numel for payload in self.payloads)

    @property
    def wire_bytes(self) -> int:
        """Payload bytes of one rank, without padding."""
        return sum(payload.nbytes for payload in self.payloads)

    @property
    def link_bytes(self) -> float:
        """Bytes that one rank sends over its link, in a ring."""
        return self.kind.link_bytes(self.wire_bytes, self.world_size)

    @property
    def send_shape(self) -> tuple[int, ...]:
        """The shape of the buffer that is sent."""
        return (self.world_size, self.width) if self.kind.sends_rows else (self.width,)

    @property
    def receive_shape(self) -> tuple[int, ...]:
        """The shape of the buffer that is filled."""
        return (self.world_size, self.width) if self.kind.receives_rows else (self.width,)

    def sent_shape(self, position: int) -> tuple[int, ...]:
        """Return the shape of a payload in the send buffer: its own, or a row for each rank if it is not contiguous."""
        payload = self.payloads[position]
        is_alone = len(self.payloads) == 1 and not self.has_padding
        fits = not self.kind.sends_rows or is_alone or payload.shape[0] == self.world_size
        return payload.shape if fits else (self.world_size, payload.numel // self.world_size)

    @property
    def has_padding(self) -> bool:
        """True if zeros follow the payloads of a row."""
        last = self.payloads[-1]
        return last.offset + last.width < self.width

    @property
    def has_gaps(self) -> bool:
        """True if a result has several rows with padding, or rows of other results, between them."""
        return self.kind.receives_rows and (len(self.payloads) > 1 or self.has_padding)

    def received_shape(self, position: int) -> tuple[int, ...]:
        """Return the shape of a result in the receive buffer: its own, or a row for each rank if it `has_gaps`."""
        result = self.payloads[position].result
        return (self.world_size, torch.Size(result).numel() // self.world_size) if self.has_gaps else result

    @property
    def name(self) -> str:
        return f"c{self.index}"


@dataclass(frozen=True)
class Operation:
    """One operation of a step, for printing.

    Attributes:
        made: The name of its result.
        spec: Shape and dtype of the result; None if it is not a tensor.
        function: The operation's name in aten.
        options: Keyword arguments that change the result.
        written: The memory that the result is written to, if not new memory.
        count: The number of leaves that it runs for. The other fields are those of the first leaf.
        leaves: For an operator on lists, named by `function`, the number of its leaves; otherwise 0.
    """

    made: Name
    spec: LeafSpec | None
    function: str
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    written: Name | None = None
    count: int = 1
    leaves: int = 0


@dataclass(frozen=True)
class Segment:
    """A part of a plan's computation that runs without interruption.

    Attributes:
        slot: Position in the software pipeline.
        needs, waits: Leaves with gradients that must have arrived, and collectives that must be complete.
        inputs, outputs: The arguments and results of `run`.
        frees: Values that nothing reads after this segment.
        launches: The collective that is issued at the end.
        operations: The computation of `run`, and the copies of `fills`, for printing.
        commits: True if it runs after all collectives and the vote, when no other rank can fail the step any more.
        fills: Gradients that are only copied, and their places in send buffers. They are not inputs of `run`, because
            each may be copied when it arrives, while it is in the cache.
    """

    slot: int
    needs: tuple[str, ...]
    waits: tuple[int, ...]
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    frees: tuple[Name, ...]
    run: Callable[..., tuple[Any, ...]]
    launches: Collective | None
    operations: tuple[Operation, ...]
    commits: bool
    fills: tuple[tuple[str, Sent], ...] = ()


class LoweringError(TypeError):
    """A pipeline has no static schedule: it reads tensor values, or runs untraceable code. It still runs eagerly."""

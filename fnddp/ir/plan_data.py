"""The data of a plan. `fnddp/run` runs it, `fnddp/cost` estimates its cost, `fnddp/show` prints it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fnddp.core import tree
from fnddp.core.sync import State, Sync
from fnddp.ir.program import Collective, Held, LeafSpec, Name, Scratch, Segment

LONGEST = 10_000
"""Number of steps to follow the counters of a pipeline."""


def require_backend(backend: str | None) -> None:
    """Raise a ValueError unless `backend` can run segments."""
    if backend not in (None, "inductor"):
        raise ValueError(f"backend must be None or 'inductor', got {backend!r}")


@dataclass(frozen=True)
class Phase:
    """The condition on step counters and group sizes for a graph to be valid.

    Attributes:
        counters: Positions of the Python ints among the parts of the state.
        groups: The groups over which means are taken.
        holds: Function of these counters, followed by the number of ranks of each group; True if the graph is valid.
    """

    counters: tuple[int, ...]
    groups: tuple[str | None, ...]
    holds: Callable[[Sequence[int]], bool]

    def holds_for(self, state: State, sizes: Mapping[str | None, int]) -> bool:
        """Return whether the graph is valid for the counters of `state` and groups of these sizes."""
        parts, _ = tree.flatten_any(state)
        return self.holds([*(parts[i] for i in self.counters), *sizes.values()])


@dataclass(frozen=True, repr=False)
class PlanData:
    """A pipeline lowered for given leaves, a phase and a world: the work of one rank in one step, in a static order.

    Attributes:
        buckets: The bucket of each leaf, in the order in which gradients are expected.
        means: The name of the mean of each leaf.
        state: The name of each part of the next state, or a number.
        following: Function that takes the arguments of `phase.holds` and returns the next step's counters.
        numbers: The arguments of `phase.holds` for which the plan was made.
        overwrites: Leaves whose gradients a step overwrites.
        overwrites_state: Positions of the parts of the state that it overwrites.
        memories: By leaf, the name of memory that may hold the next step's mean.
        constants: Tensors that belong to the pipeline itself.
        peak_bytes: Peak memory of a step without its gradients and state: buffers of collectives, temporaries, results.
        backend: None for Python, or "inductor".
    """

    sync: Sync
    leaves: dict[str, LeafSpec]
    buckets: dict[str, int]
    segments: tuple[Segment, ...]
    means: dict[str, Name]
    state: tuple[Any, ...]
    phase: Phase
    following: Callable[[Sequence[int]], tuple[int, ...]]
    numbers: tuple[int, ...] = ()
    overwrites: frozenset[str] = frozenset()
    overwrites_state: tuple[int, ...] = ()
    memories: dict[str, Name] = field(default_factory=dict[str, Name])
    constants: dict[Held, torch.Tensor] = field(default_factory=dict[Held, torch.Tensor])
    scratch: dict[Scratch, LeafSpec] = field(default_factory=dict[Scratch, LeafSpec])
    peak_bytes: int = 0
    backend: str | None = None

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives, in the order in which every rank issues them."""
        return tuple(segment.launches for segment in self.segments if segment.launches is not None)

    @property
    def uncapturable(self) -> str | None:
        """The reason why one CUDA graph cannot replay all steps from this one on; None if it can.

        A pipeline that reads values has no plan, and none of its steps can be captured.
        """
        numbers, n = self.numbers, len(self.phase.counters)
        for _ in range(LONGEST):
            following = (*self.following(numbers), *numbers[n:])
            if following == numbers:
                return None
            if not self.phase.holds(following):
                return "another plan follows this one, and each needs its own graph"
            numbers = following
        return None

    @property
    def operations(self) -> int:
        """The number of operations of a step."""
        return sum(len(segment.operations) for segment in self.segments)

    @property
    def wire_bytes(self) -> int:
        """Payload bytes that one rank passes to its collectives in a step."""
        return sum(collective.wire_bytes for collective in self.collectives)

    @property
    def link_bytes(self) -> int:
        """Payload bytes that one rank sends over its link in a step, in rings."""
        return math.ceil(sum(collective.link_bytes for collective in self.collectives))

    @property
    def rounds(self) -> int:
        """The longest chain of collectives that depend on each other."""
        return max((collective.depth + 1 for collective in self.collectives), default=0)

    @property
    def groups(self) -> tuple[str | None, ...]:
        """The process groups that collectives use, in the order of the first collective of each."""
        return tuple(dict.fromkeys(collective.group for collective in self.collectives))

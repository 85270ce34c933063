"""A plan: what one rank does in one step of synchronization, in a static order. Inert data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fnddp.plan.emit import Step
from fnddp.plan.ir import Collective, LeafSpec
from fnddp.sync import Sync


@dataclass(frozen=True)
class Plan:
    """A pipeline lowered for given leaves, a phase and a world.

    Attributes:
        sync: The pipeline.
        leaves: What it synchronizes, by path.
        buckets: The bucket of each leaf, in the order in which gradients are expected.
        collectives: In the order in which every rank issues them.
        steps: In the order in which they run.
        means: For each leaf the name of its mean, by path.
        state: For each part of the next state its name, or a number.
        leaf_names: For each leaf the name of its gradient.
        state_names: For each part of the state its name.
        overwrites: Leaves whose gradients are written over.
        constants: Tensors that the pipeline's own code holds, by name.
        counters: Positions of the Python ints among the parts of the state.
        holds: Whether this plan is the one for these values of the counters.
        peak_bytes: Memory that a step takes at most beside the gradients and the state it is given: buffers of
            collectives, temporaries, and what it returns.
    """

    sync: Sync
    leaves: dict[str, LeafSpec]
    buckets: dict[str, int]
    collectives: tuple[Collective, ...]
    steps: tuple[Step, ...]
    means: dict[str, str]
    state: tuple[Any, ...]
    leaf_names: dict[str, str]
    state_names: tuple[str, ...]
    overwrites: frozenset[str]
    constants: dict[str, torch.Tensor]
    counters: tuple[int, ...]
    holds: Callable[[Sequence[int]], bool]
    peak_bytes: int

    @property
    def wire_bytes(self) -> int:
        """Payload bytes that one rank hands to its collectives in a step."""
        return sum(collective.wire_bytes for collective in self.collectives)

    @property
    def rounds(self) -> int:
        """The longest chain of collectives that depend on each other."""
        return max((collective.depth + 1 for collective in self.collectives), default=0)

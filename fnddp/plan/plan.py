"""A plan: what one rank does in one step of synchronization, in a static order. Inert data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fnddp.cost.estimate import Estimate, Links, estimate
from fnddp.plan.ir import Collective, LeafSpec
from fnddp.plan.passes.emit import Step
from fnddp.show.drawing import to_html, to_svg
from fnddp.show.text import show
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
        overwrites_state: Names of the parts of the state that are written over.
        results: Leaves whose means have persistent memory of their own, by its name.
        memories: For leaves the name of what is free to be that memory in the next step.
        constants: Tensors that the pipeline's own code holds, by name.
        counters: Positions of the Python ints among the parts of the state.
        holds: Whether this plan is the one for these values of the counters.
        uncombined_bytes: Payload of the collectives that the pipeline's own code issues and that cannot be combined.
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
    overwrites_state: frozenset[str]
    results: dict[str, str]
    memories: dict[str, str]
    constants: dict[str, torch.Tensor]
    counters: tuple[int, ...]
    holds: Callable[[Sequence[int]], bool]
    uncombined_bytes: int
    peak_bytes: int

    @property
    def wire_bytes(self) -> int:
        """Payload bytes that one rank hands to its collectives in a step."""
        return sum(collective.wire_bytes for collective in self.collectives) + self.uncombined_bytes

    @property
    def rounds(self) -> int:
        """The longest chain of collectives that depend on each other."""
        return max((collective.depth + 1 for collective in self.collectives), default=0)

    def __repr__(self) -> str:
        return (
            f"<Plan of {self.sync!r}: {len(self.leaves)} leaves, {len(self.collectives)} collectives, "
            f"{self.rounds} rounds, {self.wire_bytes:,} B>"
        )

    def __str__(self) -> str:
        return self.show()

    def show(self, code: bool = False) -> str:
        """The plan as text: slot by slot what must have arrived, what is computed, and what is sent.

        Steps of a slot that look alike are one line. `print(plan)` prints this.

        Args:
            code: Every step, and every operation.

        >>> from fnddp import allreduce, fp16, lower
        >>> params = {"weight": torch.empty(1024, 512, device="meta"), "bias": torch.empty(1024, device="meta")}
        >>> print(lower(fp16(allreduce), params, world_size=8).show())
        fp16(allreduce)
        2 leaves, 525,312 parameters, 2.0 MiB, 1 bucket; 8 ranks
        <BLANKLINE>
        slot 0
          need bias, weight: encode, 4 operations
            send c0: all_reduce sum float16[525312] over 8 ranks, 1,050,624 B, round 1 of 1: bias, weight
        <BLANKLINE>
        slot 1
          wait c0: decode, 2 operations
        <BLANKLINE>
        on the wire: 1,050,624 B per rank; float32 gradients: 2,101,248 B, 2.0x as much
        1 round, 1 collective; peak extra memory ...
        """
        return show(self, code)

    def to_svg(self, link: Links | None = None) -> str:
        """The plan as a picture: a timeline of the gradients that arrive, the computation and the wire.

        Collectives are drawn as long as they are large, or, with a link, as they take; computations all alike, since
        a plan does not know how long they take. In a notebook the last expression of a cell is drawn by itself.

        Args:
            link: What connects the ranks, of all groups or by the group's name.

        Returns:
            An SVG document.

        Raises:
            ValueError: A group has no link.

        >>> from fnddp import allreduce, lower
        >>> svg = lower(allreduce, {"w": torch.empty(8)}, world_size=2).to_svg()
        >>> svg[:4], svg.count('class="collective"')
        ('<svg', 1)
        """
        return to_svg(self, link)

    def _repr_html_(self) -> str:
        return to_html(self)

    def estimate(
        self, link: Links, *, backward_seconds: float | None = None, overhead_seconds: float = 0.0
    ) -> Estimate:
        """What the collectives of a step cost, and with `backward_seconds`, what backward does not hide of them.

        See `fnddp.cost.estimate.estimate` for the model.

        Args:
            link: Of all groups, or by the group's name (None is the default group).
            backward_seconds: Without it nothing is hidden.
            overhead_seconds: Encode and decode that backward does not hide.

        Raises:
            ValueError: A group has no link.

        >>> from fnddp import Link, allreduce, fp16, lower
        >>> params = {"w": torch.empty(1000, 1000, device="meta")}
        >>> for sync in (allreduce, fp16(allreduce)):
        ...     seconds = lower(sync, params, world_size=2).estimate(Link.parse("1gbit")).step_seconds
        ...     print(f"{seconds * 1e3:.0f} ms")
        32 ms
        16 ms
        """
        return estimate(self.collectives, link, backward_seconds=backward_seconds, overhead_seconds=overhead_seconds)

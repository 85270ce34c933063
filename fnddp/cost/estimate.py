"""What a step costs: its collectives one after the other, in a queue behind backward."""

from collections.abc import Iterable
from dataclasses import dataclass

from fnddp.columns import columns
from fnddp.cost.link import duration, scaled
from fnddp.cost.queue import Collective, CollectiveCost, Links, Queue


@dataclass(frozen=True)
class Estimate:
    """What the collectives of a step cost. Printed, it is a table.

    Attributes:
        collectives: Each collective, in the order in which they are issued.
        backward_seconds: As given.
        overhead_seconds: As given.
    """

    collectives: tuple[CollectiveCost, ...]
    backward_seconds: float | None = None
    overhead_seconds: float = 0.0

    @property
    def communication_seconds(self) -> float:
        """All collectives, one after the other."""
        return sum(cost.seconds for cost in self.collectives)

    @property
    def exposed_seconds(self) -> float:
        """From the end of backward to the end of the last collective; all of it without backward."""
        end = max((cost.end_seconds for cost in self.collectives), default=0.0)
        return max(0.0, end - (self.backward_seconds or 0.0))

    @property
    def step_seconds(self) -> float:
        """Backward, the exposed tail, and the overhead."""
        return (self.backward_seconds or 0.0) + self.exposed_seconds + self.overhead_seconds

    @property
    def wire_bytes(self) -> int:
        return sum(cost.wire_bytes for cost in self.collectives)

    @property
    def link_bytes(self) -> int:
        return sum(cost.link_bytes for cost in self.collectives)

    def __str__(self) -> str:
        rows = [("collective", "slot", "payload", "on the link", "time", "done at")]
        for cost in self.collectives:
            sizes = scaled(cost.wire_bytes, "B"), scaled(cost.link_bytes, "B")
            rows.append((cost.kind, str(cost.slot), *sizes, duration(cost.seconds), duration(cost.end_seconds)))
        sizes = scaled(self.wire_bytes, "B"), scaled(self.link_bytes, "B")
        rows.append(("total", "", *sizes, duration(self.communication_seconds), ""))
        lines = [columns(rows)]
        if self.backward_seconds is not None:
            parts = f"backward {duration(self.backward_seconds)} + exposed {duration(self.exposed_seconds)}"
            overhead = f" + encode and decode {duration(self.overhead_seconds)}" if self.overhead_seconds else ""
            lines.append(f"step {duration(self.step_seconds)} = {parts}{overhead}")
        return "\n".join(lines)


def estimate(
    collectives: Iterable[Collective],
    link: Links,
    *,
    backward_seconds: float | None = None,
    overhead_seconds: float = 0.0,
) -> Estimate:
    """What the collectives of one step cost, and with `backward_seconds`, what backward does not hide of them.

    Collectives are served one after the other, in their order. The gradients of K buckets are taken to be ready at 1/K,
    2/K, ... of backward, and a collective starts once its bucket is ready and the one before it is done. The step thus
    takes at least max(backward, all collectives but the last bucket's) + the last bucket's, whose rounds add up.
    The link's burst is full at the start of the step. Backward is not slowed down here: on the CPU, where collectives
    take time of their own, measure it while they run.

    Args:
        collectives: In the order in which they are issued.
        link: Of all groups, or by the group's name (None is the default group). Groups share one link in time even
            where they have links of their own: an upper bound.
        backward_seconds: Without it nothing is hidden.
        overhead_seconds: Encode and decode that backward does not hide.

    Raises:
        ValueError: A group has no link, or a collective is of an unknown kind.

    >>> from types import SimpleNamespace
    >>> from fnddp import Link
    >>> buckets = [
    ...     SimpleNamespace(kind="all_reduce", wire_bytes=4_000_000, world_size=2, group=None, slot=slot, depth=0)
    ...     for slot in range(2)
    ... ]
    >>> print(estimate(buckets, Link.parse("1gbit:20us"), backward_seconds=0.1))
    collective  slot  payload  on the link      time   done at
    all_reduce     0     4 MB         4 MB  32.08 ms  82.08 ms
    all_reduce     1     4 MB         4 MB  32.08 ms  132.1 ms
    total                8 MB         8 MB  64.16 ms
    step 132.1 ms = backward 100 ms + exposed 32.08 ms
    """
    issued = tuple(collectives)
    buckets = 1 + max((each.slot - each.depth for each in issued), default=0)
    queue, backward = Queue(link), backward_seconds or 0.0
    costs = [queue.serve(each, backward * (each.slot - each.depth + 1) / buckets) for each in issued]
    return Estimate(tuple(costs), backward_seconds, overhead_seconds)

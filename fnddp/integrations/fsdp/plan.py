"""The messages of a step of a sharded model, by axis."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from fnddp.core.sync import Sync
from fnddp.core.table import columns
from fnddp.cost.link import Link, duration, scaled
from fnddp.integrations.fsdp.unit import Messages, Traffic


@dataclass(frozen=True)
class Axis:
    """The messages of a step along one axis; on the axis of workers, the messages of `steps` steps."""

    name: str  # "gradients", "weights", "replicas" or "workers"
    pipeline: str  # as text
    ranks: int
    messages: Messages
    steps: int = 1

    @property
    def wire_bytes(self) -> int:
        """Payload bytes that one rank passes to its collectives."""
        return sum(nbytes for _, nbytes, _ in self.messages)

    def link_bytes(self, link: Link | None = None) -> int:
        """Return the payload bytes that one rank sends over `link` for all messages; None for any link of gloo."""
        return sum((link or Link(math.inf)).link_bytes(*message) for message in self.messages)

    def seconds(self, link: Link) -> float:
        """Return the time of all messages on `link`, one after the other."""
        return sum(link.seconds(*message) for message in self.messages)


@dataclass(frozen=True)
class AxesPlan:
    """The messages of a step of a model by axis: of one forward, and a backward that synchronizes all gradients.

    A step that accumulates k micro-batches sends the messages of weights k times, but with `ef21` once. Votes are left
    out: they are a few bytes. Printed, it is a table.
    """

    axes: tuple[Axis, ...]

    def show(self, links: Link | Mapping[str, Link] | None = None) -> str:
        """Return the table, with the time of each axis on its link, or on one link for all.

        "payload" counts the bytes that a rank passes to its collectives, "on the link" those that it then sends.
        """
        last = [] if links is None else ["time"]
        rows = [("axis", "pipeline", "ranks", "messages", "payload", "on the link", *last)]
        for axis in self.axes:
            link = links[axis.name] if isinstance(links, Mapping) else links
            time = [] if link is None else [duration(axis.seconds(link))]
            payload, sent = scaled(axis.wire_bytes, "B"), scaled(axis.link_bytes(link), "B")
            name = axis.name if axis.steps == 1 else f"{axis.name}, every {axis.steps} steps"
            rows.append((name, axis.pipeline, str(axis.ranks), str(len(axis.messages)), payload, sent, *time))
        return columns(rows, text=(0, 1))

    def __str__(self) -> str:
        return self.show()


def axes_of(
    traffic: Iterable[Traffic], gradients: Sync | None, weights: Sync | None, n: int, sends_weight: bool
) -> Iterator[Axis]:
    """Return the axes of gradients and of weights of groups of parameters, of `n` shards each.

    `sends_weight` is True if the weights of ranks in the mean are sent with these gradients.
    """
    reduced, gathered, again = (tuple(chain.from_iterable(each)) for each in zip(*traffic, strict=True))
    if sends_weight and n > 1:
        reduced = (("all_reduce", 8, n), *reduced)
    for name, sync, messages in (("gradients", gradients, reduced), ("weights", weights, gathered + again)):
        yield Axis(name, "FSDP's own" if sync is None else repr(sync), n, messages)

"""The cost of one collective: the alpha-beta-gamma model.

Symbols: n ranks, payload S bytes, latency alpha, bandwidth B, local reduction gamma; g ranks on each of N nodes.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from fnddp.core.expression import Expression
from fnddp.wire.kinds import ALL_REDUCE, REDUCE_SCATTER, Kind, named

# Messages one after the other in one pass around the ranks (a reduce-scatter or an all-gather).
_MESSAGES: dict[str, Callable[[int], int]] = {
    "gloo": lambda n: 2 * (n - 1),  # gloo sends every chunk of a ring in two halves
    "ring": lambda n: n - 1,
    "halving_doubling": lambda n: math.ceil(math.log2(n)),
}
ALGORITHMS = tuple(_MESSAGES)

_NUMBER = r"\d+(?:\.\d+)?"
_RATE = re.compile(rf"({_NUMBER})\s*(?:((?i:[kmgt]?))(?i:bit(?:/s)?)|([KMGT])bps|([kMGT]?)B/s)")
_LATENCY = re.compile(rf"({_NUMBER})\s*([num]?)s")
_EXPONENT = {"": 0, "k": 3, "m": 6, "g": 9, "t": 12}
_SMALL_EXPONENT = {"": 0, "m": -3, "u": -6, "n": -9}


@dataclass(frozen=True, repr=False)
class Link(Expression):
    """The network between the ranks of a process group, as the numbers that determine the time of a collective.

    An all_reduce of S bytes takes 2 m alpha + (n-1)/n S (1/B + max(1/B, gamma)), where m, the messages in a row, is
    2(n-1) with "gloo", n-1 with "ring" and log2(n) with "halving_doubling". If B differs between pairs of ranks, the
    slowest pair of the ring counts. The wrong model for a network that others use too, and for tree all-reduces: large
    NCCL jobs choose these for small payloads.

    With `inner` the network has two levels: g = `ranks_per_node` ranks share a node, `inner` is the link inside, and an
    all_reduce is a reduce-scatter inside, g all_reduces of S/g across nodes at once, and an all-gather inside.

    Args:
        bandwidth: B, bytes per second that one rank sends (and receives at the same time). If g ranks of a node share a
            network card, each has 1/g of its bandwidth. `math.inf` is allowed.
        latency: alpha, seconds for one message.
        gamma: Seconds per byte for adding a received payload. It counts only if it exceeds 1/B: gloo and NCCL add one
            part of the payload while they send the next one.
        algorithm: "gloo", a ring of half chunks (its reduce-scatter costs a whole all-reduce); "ring", as in NCCL for
            large payloads; or "halving_doubling", as in MPI for small ones (n is rounded up to a power of two).
        burst: Payload bytes that pass at once after a pause: a token bucket, as in `tc tbf` or a cloud's allowance. It
            fills up again at B. Only `estimate` counts it; `seconds` assumes a sustained rate.
        inner: The link inside a node.
        ranks_per_node: g. A group of at most g ranks is assumed to be on one node.

    Raises:
        ValueError: A negative number or an unknown algorithm; `inner` without `ranks_per_node`, or the other way round.

    Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005,
    sections 3 and 4; they add gamma instead of hiding it.

    >>> link = Link(bandwidth=125e6, latency=20e-6)
    >>> link.seconds("all_reduce", 4_000_000, world_size=2)
    0.03208
    >>> print(Link.parse("10gbit:20us"))
    10 Gbit/s, 20 us a message
    """

    named: ClassVar[frozenset[str]] = frozenset({"bandwidth"})

    bandwidth: float
    latency: float = 0.0
    gamma: float = 0.0
    algorithm: str = "gloo"
    burst: float = 0.0
    inner: "Link | None" = None
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        bandwidth: object = self.bandwidth
        if not (isinstance(bandwidth, int | float) and bandwidth > 0):
            hint = f"; Link.parse({bandwidth!r}) reads text" if isinstance(bandwidth, str) else " bytes/s"
            raise ValueError(f"Link: bandwidth must be a positive number, got {bandwidth!r}{hint}")
        for name in ("latency", "gamma", "burst"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ValueError(f"Link: {name} must be a finite number and not negative, got {value!r}")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"Link: algorithm must be one of {', '.join(ALGORITHMS)}, got {self.algorithm!r}")
        if (self.inner is None) != (self.ranks_per_node == 1) or self.ranks_per_node < 1:
            raise ValueError(
                f"Link: inner and ranks_per_node go together, got inner={self.inner!r} and "
                f"ranks_per_node={self.ranks_per_node!r}; give both, the number at least 2, or neither"
            )

    @classmethod
    def parse(cls, text: str) -> "Link":
        """Return a link of a rate and, after a colon, a latency (none: 0).

        Prefixes are decimal. Bits: "200mbit", "1gbit", "25 Gbit/s", in any case, and "10Gbps", with a capital letter as
        on data sheets; bytes: "115.4GB/s", with a capital B. Headers, 4.4 % of TCP over Ethernet, are part of it.

        Raises:
            ValueError: `text` is not of this form. "mbps" is refused: some read it as bits, tc as bytes.
            TypeError: `text` is not a string.

        >>> Link.parse("1gbit")
        Link(bandwidth=125000000.0)
        >>> Link.parse("115.4GB/s:2.5us") == Link(bandwidth=115.4e9, latency=2.5e-6)
        True
        """
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"expected a link as text, such as '1gbit:20us', got {text!r}; for numbers use Link(...)")
        rate, colon, latency = (part.strip() for part in text.partition(":"))
        found, late = _RATE.fullmatch(rate), _LATENCY.fullmatch(latency)
        if found is None or (colon and late is None):
            tc = "; bits are mbit or Mbps, since tc reads mbps as bytes" if rate.endswith("bps") else ""
            raise ValueError(
                f"{text!r} is not a link: write a rate and optionally a latency, such as 200mbit, 1gbit, 25gbit:20us "
                f"or 115.4GB/s:2.5us{tc}"
            )
        number, *bits, nbytes = found.groups()
        prefix = next(each for each in (*bits, nbytes) if each is not None)
        bandwidth = float(f"{number}e{_EXPONENT[prefix.lower()]}") / (8 if nbytes is None else 1)
        return cls(bandwidth, float(f"{late[1]}e{_SMALL_EXPONENT[late[2]]}") if late else 0.0)

    def seconds(self, kind: Kind | str, wire_bytes: float, world_size: int) -> float:
        """Return the time of one collective after earlier ones are done; 0 for one rank.

        Args:
            kind: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
            wire_bytes: Payload of one rank. An all_gather returns n times that, a reduce_scatter 1/n of it.
            world_size: n.

        Raises:
            ValueError: The kind is unknown, or the ranks do not fill nodes.

        >>> Link.parse("1gbit").seconds("all_gather", 1_000_000, world_size=8)
        0.056
        """
        kind, (within, g), (across, n) = self._levels(kind, wire_bytes, world_size)
        seconds = 0.0
        for each in self._run_as(kind).passes(n):
            messages = n - 1 if each.is_direct else _MESSAGES[self.algorithm](n)
            seconds_per_byte = max(1 / self.bandwidth, self.gamma if each.adds else 0.0)
            seconds += messages * self.latency + each.share * across * seconds_per_byte
        return seconds if self.inner is None else self.inner.seconds(kind, within, g) + seconds

    def link_bytes(self, kind: Kind | str, wire_bytes: float, world_size: int) -> int:
        """Return the bytes of payload that one rank sends over this link (with `inner`: between nodes), rounded up.

        Args:
            kind, wire_bytes, world_size: See `seconds`, also for the errors.

        >>> Link.parse("1gbit").link_bytes("all_reduce", 1000, world_size=4)  # 2 * 3/4
        1500
        """
        kind, _, (across, n) = self._levels(kind, wire_bytes, world_size)
        return math.ceil(self._run_as(kind).link_bytes(across, n))

    def _run_as(self, kind: Kind) -> Kind:
        return ALL_REDUCE if kind is REDUCE_SCATTER and self.algorithm == "gloo" else kind

    def _levels(self, kind: Kind | str, payload: float, n: int) -> tuple[Kind, tuple[float, int], tuple[float, int]]:
        """Return the kind, and the payload and the number of ranks inside a node and across nodes."""
        if n < 1 or payload < 0:
            raise ValueError(f"Link: no collective has {payload} bytes on {n} ranks")
        kind, g = named(kind), self.ranks_per_node
        if n <= g:
            return kind, (payload, n), (payload, 1)
        if n % g:
            raise ValueError(
                f"Link: {n} ranks do not fill nodes of {g}; give the group its own link, {{None: link, name: other}}"
            )
        within, across = kind.levels(payload, g, n // g)
        return kind, (within, g), (across, n // g)

    def __str__(self) -> str:
        text = f"{scaled(8 * self.bandwidth, 'bit/s')}, {duration(self.latency)} a message"
        return text if self.inner is None else f"{text}; in nodes of {self.ranks_per_node}: {self.inner}"


def scaled(value: float, unit: str) -> str:
    """Return `value` with four digits and a decimal prefix."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def duration(seconds: float) -> str:
    """Return `seconds` with four digits, in s, ms or us."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-6:.4g} us" if seconds else "0 s"

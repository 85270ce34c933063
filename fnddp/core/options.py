"""Checks of options. They also convert numpy's numbers to Python's, because numpy's print differently."""

import difflib
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Limit:
    """The values that an option may have: `holds` is true for them; `text` follows "must be" in errors."""

    holds: Callable[[float], bool]
    text: str


POSITIVE = Limit(lambda value: value > 0, "positive")
"""The limit of options above 0."""


def at_least(bound: float) -> Limit:
    """Return the limit of options that are `bound` or more."""
    return Limit(lambda value: value >= bound, f"at least {bound}")


def one_of(*values: Any) -> Limit:
    """Return the limit of options that are one of `values`."""
    return Limit(values.__contains__, f"one of {', '.join(map(str, values))}")


def checked_int(what: str, value: Any) -> int:
    """Return `value` as an int; `what` names it in the TypeError (not an integer) or ValueError (beyond 64 bits).

    >>> checked_int("powersgd: rank", 2.0)
    Traceback (most recent call last):
        ...
    TypeError: powersgd: rank must be an int, got 2.0
    """
    given: Any = None if isinstance(value, bool) else value
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"{what} must be an int, got {value!r}") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{what} must fit in 64 bits, got a number of {number.bit_length()} bits")
    return number


def checked_bool(what: str, value: Any) -> bool:
    """Return `value` as a bool; `what` names it in the TypeError, raised also for "False", a true value in Python."""
    if value not in (True, False):
        raise TypeError(f"{what} must be True or False, got {value!r}")
    return bool(value)


def checked_str(what: str, value: Any) -> str:
    """Return `value` if it is a string; `what` names it in the TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string, got {value!r}")
    return value


def checked_float(what: str, value: Any) -> float:
    """Return `value` as a finite float, or unchanged if it is an int; `what` names it in the ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number, got {value!r}")
    return value if type(value) is int else float(value)


def checked_pairs(what: str, value: Any, kind: type[T], key: type = object) -> tuple[tuple[Any, T], ...]:
    """Return the items of a dict, or pairs given in place of a dict, as a tuple; `what` begins the TypeError.

    >>> checked_pairs("steps must be a dict of ints by name", {"a": 1}, int, str)
    (('a', 1),)
    """
    pairs: Any = value.items() if isinstance(value, Mapping) else value
    pairs = list(pairs) if isinstance(pairs, Iterable) else [None]
    for pair in pairs:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not (is_pair and isinstance(pair[0], key) and isinstance(pair[1], kind)):
            raise TypeError(f"{what}, got {value!r}")
    return tuple((name, each) for name, each in pairs)


class Share(NamedTuple):
    """The part of a leaf or a chunk that is sent: a fraction of it, or a number of its elements."""

    ratio: float | None
    number: int | None

    def of(self, n: int) -> int:
        """Return how many of `n` elements are sent: at least one, at most all."""
        wanted = round(self.ratio * n) if self.ratio is not None else self.number
        return min(n, max(1, wanted or 1))


def require_share(owner: str, ratio: float | None, name: str, number: int | None) -> None:
    """Raise a ValueError unless exactly one of `ratio` and `number`, an option called `name`, is given and in range."""
    if (ratio is None) == (number is None):
        raise ValueError(f"{owner}: give ratio or {name}, got ratio={ratio!r} and {name}={number!r}")
    if ratio is not None and not 0 < ratio <= 1:
        raise ValueError(f"{owner}: ratio must be in (0, 1], got {ratio!r}")
    if number is not None and number < 1:
        raise ValueError(f"{owner}: {name} must be at least 1, got {number!r}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown `name`: the most similar one of `known`, if any.

    >>> did_you_mean("AllReduc", ["allgather", "allreduce"]), did_you_mean("x", ["allreduce"])
    ("; did you mean 'allreduce'?", '')
    """
    by_lower = {each.lower(): each for each in known}
    like = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[like[0]]!r}?" if like else ""

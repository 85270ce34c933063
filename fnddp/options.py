"""Options, checked and made plain: numpy's numbers compare equal to Python's but print otherwise."""

import difflib
import math
import numbers
import operator
from collections.abc import Iterable
from typing import Any


def checked_int(what: str, value: Any) -> int:
    """`value` as an int; `what` names it in the TypeError (not an integer) or ValueError (beyond 64 bits).

    >>> checked_int("powersgd: rank", 2.0)
    Traceback (most recent call last):
        ...
    TypeError: powersgd: rank must be an int, got 2.0
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an int, got {value!r}") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{what} must fit 64 bits, got a number of {number.bit_length()}")
    return number


def checked_float(what: str, value: Any) -> float:
    """`value` as a finite float, or the int that it is; `what` names it in the ValueError."""
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number, got {value!r}")
    return value if type(value) is int else float(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What to add to an error about an unknown `name`: the one of `known` that it is like, if any.

    >>> f"unknown name 'allreduc'{did_you_mean('allreduc', ['allgather', 'allreduce'])}"
    "unknown name 'allreduc'; did you mean 'allreduce'?"
    >>> did_you_mean("x", ["allreduce"])
    ''
    """
    like = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {like[0]!r}?" if like else ""

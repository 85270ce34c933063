"""Numeric options, checked and made plain: numpy's numbers compare equal to Python's but print otherwise."""

import math
import numbers
import operator
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

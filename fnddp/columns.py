"""Tables as plain text."""

from collections.abc import Collection, Sequence


def columns(rows: Sequence[Sequence[str]], text: Collection[int] = (0,)) -> str:
    """Return `rows` as lines of equally wide columns; `text` has the positions of those that are not numbers.

    >>> print(columns([("collective", "slot", "payload"), ("c0", "0", "4 MB"), ("total", "", "12 MB")]))
    collective  slot  payload
    c0             0     4 MB
    total               12 MB
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if i in text else str.rjust for i in range(len(widths))]
    lines = [[side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)] for row in rows]
    return "\n".join(["  ".join(line).rstrip() for line in lines])

"""The syntax of pipelines as text. Imports no torch: commands check it before they do."""

import ast
import threading

MAX_LENGTH = 100_000
PIPELINE = "a pipeline; write for example fp16(allreduce)"

_lock = threading.Lock()  # threads share one count of recursion in CPython 3.11's ast (SystemError: ... mismatch)


def expression_of(text: str, wanted: str = PIPELINE) -> tuple[str, ast.expr]:
    """Return `text` with the line breaks that ast counts, and its expression.

    Raises:
        TypeError, ValueError: `text` is not an expression; the error has the position.
    """
    if not isinstance(text, str):
        raise TypeError(f"parse: expected a string such as 'fp16(allreduce)', got {text!r}")
    if len(text) > MAX_LENGTH:
        raise ValueError(f"parse: the text has {len(text)} characters, more than {MAX_LENGTH}")
    text = text.strip().replace("\r\n", "\n").replace("\r", "\n")
    if not text:
        raise problem(text, 1, 0, f"the text is empty, expected {wanted}")
    try:
        with _lock:
            return text, ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise problem(text, error.lineno or 1, (error.offset or 1) - 1, error.msg) from error
    except (RecursionError, MemoryError, ValueError) as error:
        raise problem(text, 1, 0, f"cannot be read ({error})") from error


def problem(text: str, line: int, column: int, what: str) -> ValueError:
    """Return a ValueError that shows the position in `text`."""
    return ValueError(f"parse: {what}\n{pointer(text, line, column)}")


def pointer(text: str, line: int, column: int) -> str:
    """Return the line of `text`, and a caret below the column."""
    lines = text.split("\n")
    return f"  {lines[min(line, len(lines)) - 1]}\n  {' ' * column}^"

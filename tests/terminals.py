"""What commands write beside their output."""

import re


def complaints(errors: str) -> list[str]:
    """What a command writes beside its output, but that a lowering took long, as it does where a machine is busy."""
    return [line for line in errors.splitlines() if not re.match(r"lowered .* in [\d.]+ s, which happens once", line)]

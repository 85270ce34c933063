"""Names that have changed: what to write instead, and in which release the old one goes.

docs/release.md shows the table, and says how long an old name works.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Deprecation:
    """What to write instead of an old name, and the release that refuses it."""

    new: str
    refused_in: str


DEPRECATIONS = {
    "compress(shards=...)": Deprecation("compress(gradients=...)", "0.3"),
    "plan_axes(shards=8, replicas=4)": Deprecation('plan_axes(world_size={"shards": 8, "replicas": 4})', "0.3"),
    "plan_axes(sync=...)": Deprecation("plan_axes(replicas=...)", "0.3"),
    "Sync.needs_sums": Deprecation("fnddp.options.require_sums, called in __post_init__", "0.2"),
    "Codec.has_fractions": Deprecation('nests, without "inside" where it was False', "0.2"),
    "Sync.carries": Deprecation('nests, with "around" where it was True', "0.2"),
    "fnddp.cost.estimate.Step": Deprecation("fnddp.cost.estimate.StepCost", "0.3"),
    "fnddp.ir.program.Payload": Deprecation("fnddp.ir.program.PayloadSpec", "0.3"),
}


def warn_deprecated(old: str, stacklevel: int) -> None:
    """Warn that `old`, of `DEPRECATIONS`, will be refused; `stacklevel` counts from the caller of this function."""
    entry = DEPRECATIONS[old]
    text = f"{old} is {entry.new} now; the old one goes in fnddp {entry.refused_in}"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)


def renamed(old: str, value: T | None, new: T | None) -> T | None:
    """Return `new`, the argument under its new name, or `value`, given under the old one, with a warning.

    Raises:
        TypeError: Both are given.
    """
    if value is None:
        return new
    if new is not None:
        raise TypeError(f"{old} is {DEPRECATIONS[old].new} now, and both are given; leave the old one out")
    warn_deprecated(old, 3)
    return value


def refuse_old_flags(cls: type) -> None:
    """Raise a TypeError if the transform `cls` sets a flag that has been replaced, and would have no effect."""
    for old, entry in DEPRECATIONS.items():
        owner, _, flag = old.rpartition(".")
        if owner in ("Sync", "Codec") and flag in vars(cls) and cls.__name__ != owner:
            raise TypeError(f"{cls.__name__}: {old} is {entry.new} since fnddp {entry.refused_in}")


def renamed_name(module: str, name: str, names: Mapping[str, Any]) -> Any:
    """Return what has taken the place of `name` in `module`, of which `names` are the globals, with a warning.

    Raises:
        AttributeError: There has been no such name.
    """
    old = f"{module}.{name}"
    if old not in DEPRECATIONS:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warn_deprecated(old, 3)
    return names[DEPRECATIONS[old].new.rpartition(".")[2]]

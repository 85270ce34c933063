"""What a user has promised about the graphs to come, and whether it is so."""

from collections.abc import Sequence

from fnddp.wire import groups


class Promises:
    """Which parameters the steps so far have used, and whether that is what was promised.

    Args:
        names: Of the parameters.
        group: Name of the process group.

    Attributes:
        static_graph: Promised: the same parameters are used in every step.
        skips_unused: Promised, too: what the first step has not used is not sent in later ones.
        is_static: Whether all steps so far have used the same parameters, promised or not.
    """

    def __init__(self, names: Sequence[str], group: str | None, *, static_graph: bool, skips_unused: bool) -> None:
        self.static_graph = static_graph
        self.skips_unused = skips_unused
        self._names, self._group = list(names), group
        self.begin()

    def begin(self) -> None:
        """The next step counts as the first one."""
        self.is_static = True
        self._first: frozenset[str] | None = None
        self._last: frozenset[str] = frozenset()

    def check(self, unused: frozenset[str]) -> None:
        """Takes note of what no rank has used in a step. Called on all ranks alike, before the step has any effect.

        Raises:
            RuntimeError: A promise is broken. The next step counts as the first one.
        """
        self._last = unused
        if self._first is None:
            self._first = unused
        first = self._first
        self.is_static = self.is_static and unused == first
        if unused == first or not (self.static_graph or self.skips_unused):
            return
        promise = "static_graph" if self.static_graph else "skip_all_reduce_unused_params"
        self._first = None if self.static_graph else first
        if first - unused:
            raise RuntimeError(
                "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, "
                f"but then got used in the second iteration. this is not compatible with {promise} set to True.\n"
                f"Now used: {self._show(first - unused)}; leave {promise} out: fnddp needs neither to be fast"
            )
        raise RuntimeError(
            "Expected to have finished reduction in the prior iteration before starting a new one. This error "
            "indicates that your training graph has changed in this iteration, e.g., one parameter is used in first "
            "iteration, but then got unused in the second iteration. this is not compatible with "
            f"{promise} set to True.\n"
            f"Parameter indices which did not receive grad for rank {groups.rank(self._group)}: "
            f"{self._show(unused - first)}; leave {promise} out: fnddp needs neither to be fast"
        )

    def _show(self, names: frozenset[str]) -> str:
        return ", ".join(f"{i} ({name})" for i, name in enumerate(self._names) if name in names)

    def used(self) -> list[bool]:
        """For each parameter whether some rank has used it in the last step."""
        return [name not in self._last for name in self._names]

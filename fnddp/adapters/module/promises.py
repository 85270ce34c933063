"""The user's promises about the parameters that steps use, and checks that steps keep them."""

from collections.abc import Sequence


class Promises:
    """A record of the parameters that steps have used, to check the user's promises.

    Args:
        names: Names of the parameters.
        static_graph: Promise that every step uses the same parameters.
        skips_unused: Promise that parameters unused in the first step stay unused. They are not sent any more.

    Attributes:
        is_static: True if all steps so far have used the same parameters, promised or not.
        first: The parameters that no rank used in the first step.
    """

    def __init__(self, names: Sequence[str], *, static_graph: bool, skips_unused: bool) -> None:
        self.static_graph, self.skips_unused = static_graph, skips_unused
        self._names = list(names)
        self.begin()

    def begin(self) -> None:
        """Treat the next step as the first one."""
        self.is_static = True
        self.first: frozenset[str] | None = None

    def check(self, unused: frozenset[str]) -> None:
        """Record the parameters that no rank used in a step. All ranks call it, before the step has any effect.

        Raises:
            RuntimeError: A promise is broken. With `static_graph` the next step counts as the first one.
        """
        first = self.first = unused if self.first is None else self.first
        self.is_static = self.is_static and unused == first
        if unused == first or not (self.static_graph or (self.skips_unused and first - unused)):
            return
        promise = "static_graph" if self.static_graph else "skip_all_reduce_unused_params"
        self.first = None if self.static_graph else first
        # In torch's words, because torch's own tests look for them.
        if first - unused:
            raise RuntimeError(
                "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, "
                f"but then got used in the second iteration. this is not compatible with {promise} set to True.\n"
                f"Now used: {self._show(first - unused)}; leave {promise} out: fnddp needs neither to be fast"
            )
        raise RuntimeError(
            "Expected to have finished reduction in the prior iteration before starting a new one. This error "
            "indicates that your training graph has changed in this iteration, e.g., one parameter is used in first "
            "iteration, but then got unused in the second iteration. this is not compatible with static_graph set to "
            f"True.\nParameter indices which did not receive grad for any rank: {self._show(unused - first)}; leave "
            "static_graph out: fnddp does not need it to be fast"
        )

    def _show(self, names: frozenset[str]) -> str:
        return ", ".join(f"{i} ({name})" for i, name in enumerate(self._names) if name in names)

"""What stands in for the executor where a pipeline has no static schedule: everything at the end, as a whole."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fnddp import tree
from fnddp.plan.execute import require_expected
from fnddp.plan.ir import LeafSpec
from fnddp.sync import Sync
from fnddp.tree import Leaves


class Eager:
    """Keeps gradients until `finish`, and runs the pipeline then. The methods are those of `Executor`."""

    def __init__(self, sync: Sync, leaves: Mapping[str, LeafSpec], structure: Any) -> None:
        self._sync, self._leaves, self._structure = sync, leaves, structure

    def start(self, parts: Sequence[Any]) -> None:
        """See `Executor.start`."""
        self._state = tree.unflatten_any(self._structure, list(parts))
        self._grads: Leaves = {}
        self.missing = dict.fromkeys(self._leaves)

    def feed(self, path: str, grad: Tensor) -> None:
        """See `Executor.feed`."""
        require_expected(path, grad, self._leaves, self.missing)
        del self.missing[path]
        self._grads[path] = grad

    def finish(self) -> tuple[Leaves, list[Any]]:
        """See `Executor.finish`."""
        zeros = {path: self._leaves[path].empty().zero_() for path in self.missing}
        arrived, self._grads = self._grads | zeros, {}
        mean, state = self._sync({path: arrived[path] for path in self._leaves}, self._state)
        return mean, tree.flatten_any(state)[0]

    def abort(self) -> None:
        """Forgets the step: nothing has been sent."""
        self._grads = {}

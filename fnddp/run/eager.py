"""What stands in for the executor where a pipeline has no static schedule: everything at the end, as a whole."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fnddp import collectives, tree
from fnddp.plan.ir import LeafSpec
from fnddp.reducers.all_reduce import all_reduce
from fnddp.run.planned import require_expected
from fnddp.sync import Sync
from fnddp.tree import Leaves


def groups_of(sync: Sync) -> list[str | None] | None:
    """The process groups that `sync` reduces over; None if a reducer of another kind, such as a hook, does not say."""
    if isinstance(sync, all_reduce):
        return [collectives.group_name(sync.group)]
    inner = [groups_of(child) for child in sync.children()]
    known = [groups for groups in inner if groups is not None]
    return [group for groups in known for group in groups] if inner and known == inner else None


class Eager:
    """Keeps gradients until `finish`, and runs the pipeline then. The methods are those of `Executor`.

    Args:
        sync: The pipeline.
        leaves: What the gradients are like.
        structure: Of the state.
        on_complete: Called when all gradients that will arrive have arrived, before the pipeline runs. It may raise.
    """

    has_launched_all = True  # there is nothing on its way before `finish`

    def __init__(
        self, sync: Sync, leaves: Mapping[str, LeafSpec], structure: Any, on_complete: Callable[[], None]
    ) -> None:
        self._sync, self._leaves, self._structure, self._on_complete = sync, leaves, structure, on_complete

    def start(self, parts: Sequence[Any]) -> None:
        """See `Executor.start`."""
        self._state = tree.unflatten_any(self._structure, list(parts))
        self._grads: Leaves = {}
        self.missing = dict.fromkeys(self._leaves)

    def feed(self, path: str, grad: Tensor, *, holds: bool = False) -> None:
        """See `Executor.feed`."""
        require_expected(path, grad, self._leaves, self.missing)
        del self.missing[path]
        self._grads[path] = grad

    def finish(self) -> tuple[Leaves, list[Any]]:
        """See `Executor.finish`."""
        self._on_complete()
        zeros = {path: self._leaves[path].empty().zero_() for path in self.missing}
        arrived, self._grads = self._grads | zeros, {}
        mean, state = self._sync({path: arrived[path] for path in self._leaves}, self._state)
        return mean, tree.flatten_any(state)[0]

    def abort(self) -> None:
        """Gives the step up: nothing has been sent."""
        self.forget()

    def forget(self) -> None:
        """See `Executor.forget`."""
        self._grads = {}

"""Methods that tools call on torch's reducer."""

from collections.abc import Callable, Sequence

from torch import Tensor

from fnddp.adapters.module.promises import Promises


class Reducer:
    """An object in the place of torch's reducer, which reduces nothing.

    Args:
        promises: The parameters that the steps so far have used.
        arm: Called where the next backward is to synchronize, though the last forward did not ask for it.
    """

    def __init__(self, promises: Promises, arm: Callable[[], None]) -> None:
        self._promises, self._arm = promises, arm

    def prepare_for_backward(self, _: Sequence[Tensor]) -> None:
        self._arm()

    def _delay_all_reduce(self) -> None:
        """Do nothing: lightning calls it after the first backward of a static graph, which has synchronized."""

    def _rebuild_buckets(self) -> bool:
        return False

    def _ddp_graph_static(self) -> bool:
        return self._promises.is_static

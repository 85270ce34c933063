"""What tools call on torch's reducer."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fnddp.adapters.module.promises import Promises


class Reducer:
    """Stands where torch's reducer does, and reduces nothing.

    Args:
        promises: What is known of the steps so far.
        arm: Called where torch's reducer is told that a backward comes that synchronizes.
    """

    def __init__(self, promises: Promises, arm: Callable[[], None]) -> None:
        self._promises, self._arm = promises, arm

    def prepare_for_backward(self, _: Sequence[Tensor]) -> None:
        """The next backward synchronizes, though the last forward did not say so: what lightning calls."""
        self._arm()

    def _delay_all_reduce(self) -> None:
        """What lightning calls behind the first backward of a static graph, which has been synchronized by then."""

    def _rebuild_buckets(self) -> bool:
        """Plans are made anew by themselves."""
        return False

    def _ddp_graph_static(self) -> bool:
        """Whether all steps so far have used the same parameters."""
        return self._promises.is_static

    def _get_local_used_map(self) -> Tensor:
        """For each parameter whether some rank has used it in the last step."""
        return torch.tensor(self._promises.used(), dtype=torch.int32, device="cpu")

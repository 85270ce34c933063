"""Uneven inputs: what a rank does that has run out of them while others go on."""

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from fnddp.module.wrapper import DistributedDataParallel


class ShadowHook(JoinHook):
    """Takes part in the collectives of the ranks that still have inputs.

    Its gradients are zero, so a mean is over all ranks; with `divide_by_initial_world_size=False` the others scale
    theirs up, so that it is over those that are left. A pipeline's own state goes on: an error feedback residual of
    this rank is still sent, nothing is lost, and what is replicated stays equal.
    """

    def __init__(self, model: "DistributedDataParallel", divide_by_initial_world_size: bool) -> None:
        model.divides_by_initial_world_size = divide_by_initial_world_size
        self._model = model

    def main_hook(self) -> None:
        """One forward and backward of the others."""
        self._model.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have joined: parameters and buffers become those of a rank that has seen the last input."""
        self._model.take_from_last(is_last_joiner)

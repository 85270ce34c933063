"""Uneven inputs: the collectives that ranks with and without inputs have in common, within `join`."""

from fnddp.wire import control, groups


class UnevenInputs:
    """Agreements of the ranks of `group` about which of them still have inputs.

    Attributes:
        divides_by_initial_world_size: Take means over all ranks, not only over those that have inputs.
    """

    def __init__(self, group: str | None) -> None:
        self._group = group
        self.divides_by_initial_world_size = True

    def source_of_buffers(self, has_inputs: bool = True) -> int:
        """Return the last rank that has inputs: its buffers are right."""
        return control.highest(groups.rank(self._group) if has_inputs else -1, self._group)

    def scale(self, synchronizes: bool) -> float:
        """Return the factor of this rank's gradients."""
        left = control.total(int(synchronizes), self._group)
        return 1.0 if self.divides_by_initial_world_size or not left else groups.world_size(self._group) / left

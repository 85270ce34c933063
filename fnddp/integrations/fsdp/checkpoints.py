"""Checkpoints of several pipelines of one model, as one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fnddp.adapters.checkpoint import Checkpoint


class Checkpoints(Checkpoint):
    """The checkpoints of several axes or meshes as one: their keys differ by their prefixes."""

    def __init__(self, axes: Sequence[Checkpoint]) -> None:
        self._axes = axes

    def state_dict(self) -> dict[str, Any]:
        return {key: value for axis in self._axes for key, value in axis.state_dict().items()}

    def about(self) -> dict[str, Any]:
        return {key: value for axis in self._axes for key, value in axis.about().items()}

    def saved_by(self, saved: Mapping[str, Any]) -> Any:
        return tuple(axis.saved_by(saved) for axis in self._axes)

    def require_fitting(self, saved: Mapping[str, Any]) -> None:
        for axis in self._axes:
            axis.require_fitting(saved)

    def adopt_pipeline(self, saved: Mapping[str, Any]) -> None:
        for axis in self._axes:
            axis.adopt_pipeline(saved)

    def prepare(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        prepared = [axis.prepare(state_dict) for axis in self._axes]

        def set_all() -> None:
            for set_axis in prepared:
                set_axis()

        return set_all

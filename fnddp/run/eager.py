"""The runner of a pipeline that has no static schedule: everything at the end, as a whole."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.sync import Sync, parts_of, require_means
from fnddp.core.tree import Leaves
from fnddp.ir.program import LeafSpec
from fnddp.run.runner import unexpected
from fnddp.torch_private import without_autocast
from fnddp.wire.groups import World, within
from fnddp.wire.protocol import CollectiveError, Elastic


class Eager:
    """Keeps gradients until all have arrived that will, and runs the pipeline when ranks have agreed. See `Runner`.

    Args:
        sync: The pipeline.
        leaves: What the gradients are like.
        structure: Of the state.
        world: What the pipeline meets.
    """

    plan = None
    inbox = None
    has_sent = False  # there is nothing on its way before `commit`

    def __init__(self, sync: Sync, leaves: Mapping[str, LeafSpec], structure: Any, world: World) -> None:
        self._sync, self._leaves, self._structure, self._world = sync, leaves, structure, world
        self.missing: dict[str, LeafSpec] = {}
        self._grads: Leaves = {}

    def start(self, parts: Sequence[Any], ranks: Mapping[str | None, int]) -> None:
        self._state = tree.unflatten_any(self._structure, list(parts))
        self._ranks = ranks
        self._grads = {}
        self.missing = dict(self._leaves)

    def feed(self, path: str, grad: Tensor, *, keep: bool = False) -> bool:
        leaf = self.missing.get(path)
        if leaf is None or not leaf.is_like(grad):
            raise unexpected(path, grad, self._leaves, leaf)
        del self.missing[path]
        self._grads[path] = grad
        return False

    def is_due(self) -> bool:
        return False

    def advance(self, *, block: bool = False) -> None:
        pass

    def drain(self) -> None:
        for path in self.missing:
            self._grads[path] = self._leaves[path].empty().zero_()

    def wait(self) -> None:
        pass

    def commit(self) -> tuple[Leaves, list[Any]]:
        arrived, self._grads = self._grads, {}
        with within(World(self._world.wire, ranks=self._ranks)), torch.no_grad(), without_autocast():
            mean, _, state = self._sync.exchange({path: arrived[path] for path in self._leaves}, self._state)
        if isinstance(self._world.wire, Elastic) and self._world.wire.lost is not None:
            raise CollectiveError(f"a rank was lost: {self._world.wire.lost}")
        require_means(self._sync, self._leaves, mean)
        return {path: mean[path] for path in self._leaves if path in mean}, parts_of(self._sync, state, self._structure)

    def abort(self) -> None:
        pass

    def forget(self) -> None:
        self._grads, self.missing = {}, {}

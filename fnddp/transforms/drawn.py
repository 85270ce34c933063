"""Exchanges of some elements of each leaf, which all ranks draw alike."""

import abc
from typing import ClassVar, NamedTuple

from torch import Tensor

from fnddp.core import tree
from fnddp.core.layout import in_format_of
from fnddp.core.options import Share
from fnddp.core.sync import Exchange, Replicated, State, Sync
from fnddp.core.tree import Leaves, Tree, is_inexact, replaced


class DrawnState(NamedTuple):
    """`step`: exchanges done, so that each step draws different elements."""

    step: Replicated[int]
    inner: State


class Drawn(Sync):
    """A pipeline that sends the elements of each leaf at the indices of `draw` over `inner`, and zeros for others."""

    inner: Sync
    unbiased: bool
    seed: int

    needs_sums: ClassVar[str] = "and what is not drawn comes back as zeros"

    @property
    @abc.abstractmethod
    def share(self) -> Share:
        """The part of each leaf that is drawn."""

    @abc.abstractmethod
    def draw(self, path: str, leaf: Tensor, step: int) -> Tensor:
        """Return distinct indices into the flat leaf, as many as its share and equal on all ranks."""

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        payload = dict(leaves)
        for path, leaf in leaves.items():
            if _is_drawn_from(leaf):
                payload[path] = leaf.detach().new_empty(self.share.of(leaf.numel()))
        return DrawnState(0, self.inner.init(payload))

    def exchange(self, leaves: Leaves, state: DrawnState) -> Exchange:
        drawn = {path: self.draw(path, leaf, state.step) for path, leaf in leaves.items() if _is_drawn_from(leaf)}
        payload = {path: leaf.reshape(-1)[drawn[path]] if path in drawn else leaf for path, leaf in leaves.items()}

        def decode(of: Leaves) -> Leaves:
            whole = dict(of)
            for path, indices in drawn.items():
                leaf = leaves[path]
                values = of[path] * (leaf.numel() / indices.numel()) if self.unbiased else of[path]
                # Zeros of the values, which have no row for each rank where a mean is simulated.
                flat = values.new_zeros(leaf.numel()).index_copy(0, indices, values)
                whole[path] = in_format_of(leaf, flat.view(leaf.shape))
            return whole

        done = self.inner.exchange(payload, state.inner)
        return replaced(done.decoded(decode), state=DrawnState(state.step + 1, done.state))


def _is_drawn_from(leaf: Tensor) -> bool:
    return is_inexact(leaf) and leaf.numel() > 0

"""Exchanges of some elements of each leaf, which all ranks draw alike."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from fnddp.core import tree
from fnddp.core.layout import in_format_of
from fnddp.core.options import Share
from fnddp.core.sync import Exchange, Replicated, State, Sync, require_state
from fnddp.core.tree import Leaves, Tree, is_inexact, replaced, require_leaves


class DrawnState(NamedTuple):
    """`step`: exchanges done, which makes each step's choice another one."""

    step: Replicated[int]
    inner: State


def init_drawn(inner: Sync, grads: Tree, share: Share) -> DrawnState:
    leaves, _ = tree.flatten(grads)
    payload = dict(leaves)
    for path, leaf in leaves.items():
        if _is_drawn_from(leaf):
            payload[path] = leaf.detach().new_empty(share.of(leaf.numel()))
    return DrawnState(0, inner.init(payload))


def exchange_drawn(
    owner: str,
    inner: Sync,
    leaves: Leaves,
    state: DrawnState,
    draw: Callable[[str, Tensor], Tensor],
    is_scaled: bool,
) -> Exchange:
    """Exchange the elements of each leaf whose indices are `draw(path, leaf)`, equal on all ranks; others are zeros.

    Args:
        owner, inner, leaves, state: Of the transform.
        draw: Distinct indices into the flat leaf, as many as its share.
        is_scaled: Multiply what comes back by elements / drawn.
    """
    require_leaves(owner, leaves)
    require_state(owner, state, DrawnState)
    drawn = {path: draw(path, leaf) for path, leaf in leaves.items() if _is_drawn_from(leaf)}
    payload = {path: leaf.reshape(-1)[drawn[path]] if path in drawn else leaf for path, leaf in leaves.items()}

    def decode(of: Leaves) -> Leaves:
        whole = dict(of)
        for path, indices in drawn.items():
            leaf = leaves[path]
            values = of[path] * (leaf.numel() / indices.numel()) if is_scaled else of[path]
            # Zeros of the values, which have no row for each rank where a mean is simulated.
            flat = values.new_zeros(leaf.numel()).index_copy(0, indices, values)
            whole[path] = in_format_of(leaf, flat.view(leaf.shape))
        return whole

    done = inner.exchange(payload, state.inner)
    return replaced(done.decoded(decode), state=DrawnState(state.step + 1, done.state))


def _is_drawn_from(leaf: Tensor) -> bool:
    return is_inexact(leaf) and leaf.numel() > 0

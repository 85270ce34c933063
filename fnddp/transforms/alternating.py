"""One round of a factorization, along a basis that all ranks have from the last one: half of PowerSGD's two."""

from fnddp.core.sync import Exchange, State
from fnddp.core.tree import Leaves
from fnddp.transforms.low_rank import LowRank, compute, leaf_of, matrix, rows_of, unit_columns


def p_round(sync: LowRank, leaves: Leaves, q: Leaves, p: Leaves, state: State) -> tuple[Exchange, Leaves]:
    """Send P = M Q_hat, with Q_hat a basis of the columns of `q`: the mean is mean(P) Q_hat^T.

    Args:
        sync: Whose `inner` carries P, and with it, whole, the leaves that are not compressed.
        leaves: This rank's gradients.
        q: By path, `[columns, rank]`.
        p: The last basis of the other side, by path, `[rows, rank]`: kept where the mean of P is zero.
        state: Of `inner`.

    Returns:
        The exchange, whose state is that of `inner`, and the next `p`.
    """
    stacks = sync.stacks(leaves)
    m = {path: matrix(leaves[path]) for paths in stacks for path in paths}
    q_hat = sync.bases(leaves, stacks, q)
    payload = {path: (m[path] @ q_hat[path]).to(leaves[path].dtype) for path in m}  # [rows, rank]
    inner = sync.inner.exchange({**leaves, **payload}, state)
    following: Leaves = {}
    for paths in stacks:
        rows = [compute(inner.mean[path]).mH for path in paths]
        following |= zip(paths, unit_columns(rows, rows_of([p[path] for path in paths])), strict=True)

    def decode(got: Leaves) -> Leaves:
        return {**got, **{path: leaf_of(compute(got[path]) @ q_hat[path].mH, leaves[path]) for path in m}}

    return inner.decoded(decode), {path: following[path] for path in p}


def q_round(sync: LowRank, leaves: Leaves, p: Leaves, q: Leaves, state: State) -> tuple[Exchange, Leaves]:
    """Send Q^T = P_hat^T M, with P_hat a basis of the columns of `p`: the mean is P_hat mean(Q)^T. See `p_round`."""
    stacks = sync.stacks(leaves)
    m = {path: matrix(leaves[path]) for paths in stacks for path in paths}
    p_hat = sync.bases(leaves, stacks, p)
    payload = {path: (p_hat[path].mH @ m[path]).to(leaves[path].dtype) for path in m}  # [rank, columns]
    inner = sync.inner.exchange({**leaves, **payload}, state)
    following: Leaves = {}
    for paths in stacks:
        rows = [inner.mean[path] for path in paths]
        following |= zip(paths, unit_columns(rows, rows_of([q[path] for path in paths])), strict=True)

    def decode(got: Leaves) -> Leaves:
        return {**got, **{path: leaf_of(p_hat[path] @ compute(got[path]), leaves[path]) for path in m}}

    return inner.decoded(decode), {path: following[path] for path in q}

"""One round of a factorization, along a basis that all ranks have from the last one: half of PowerSGD's two."""

from fnddp.core.sync import Exchange, State
from fnddp.core.tree import Leaves
from fnddp.transforms.low_rank import LowRank, compute, leaf_of, matrix, rows_of, unit_columns


def half_round(
    sync: LowRank, leaves: Leaves, basis: Leaves, last: Leaves, state: State, *, sends_p: bool
) -> tuple[Exchange, Leaves]:
    """Send P = M Q_hat, with Q_hat a basis of the columns of Q: the mean is mean(P) Q_hat^T. Or Q^T = P_hat^T M.

    Args:
        sync: Its `inner` carries P or Q^T and, whole, the leaves that are not compressed.
        leaves: This rank's gradients.
        basis: By path, Q `[columns, rank]` to send P, or P `[rows, rank]` to send Q^T.
        last: The last factors of the side that is sent, by path: kept where the mean is zero.
        state: Of `inner`.
        sends_p: Send P, or Q^T.

    Returns:
        The exchange, whose state is that of `inner`, and the next `last`.
    """
    stacks = sync.stacks(leaves)
    m = {path: matrix(leaves[path]) for paths in stacks for path in paths}
    hat = sync.bases(leaves, stacks, basis)
    sent = {path: m[path] @ hat[path] if sends_p else hat[path].mH @ m[path] for path in m}  # [rows, rank] or its mH
    inner = sync.inner.exchange({**leaves, **{path: sent[path].to(leaves[path].dtype) for path in m}}, state)
    following: Leaves = {}
    for paths in stacks:
        rows = [compute(inner.mean[path]).mH if sends_p else inner.mean[path] for path in paths]
        following |= zip(paths, unit_columns(rows, rows_of([last[path] for path in paths])), strict=True)

    def decode(got: Leaves) -> Leaves:
        factors = {path: compute(got[path]) for path in m}
        whole = {path: each @ hat[path].mH if sends_p else hat[path] @ each for path, each in factors.items()}
        return {**got, **{path: leaf_of(each, leaves[path]) for path, each in whole.items()}}

    return inner.decoded(decode), {path: following[path] for path in last}

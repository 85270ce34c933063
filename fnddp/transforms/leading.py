"""The leading singular vectors of matrices that all ranks have, found from scratch."""

from fnddp.core.tree import Leaves
from fnddp.transforms.low_rank import LowRank, compute, matrix, matrix_shape, rows_of, unit_columns

ITERATIONS = 4  # each squares the ratio of what is wanted to what is not


def leading_factors(sync: LowRank, mean: Leaves, q: Leaves, p: Leaves) -> tuple[Leaves, Leaves]:
    """Return bases of the leading right and left singular vectors of matrices in `mean`, the latter where `p` has some.

    Subspace iterations (Halko, Martinsson and Tropp, SIAM Review 2011, Algorithm 4.4), a few products instead of an
    SVD. They begin with a random query, so what the last one missed is found. A zero matrix leaves its factors as they
    are.

    Args:
        sync: Whose rank and seed it is.
        mean: Gradients that are the same on all ranks.
        q: The last queries by path, `[columns, rank]`.
        p: The last bases of the other side, `[rows, rank]`; or none.
    """
    stacks = sync.stacks(mean)
    m = {path: matrix(mean[path]) for paths in stacks for path in paths}
    right = {path: sync.draw(path, mean[path], 0, matrix_shape(mean[path])[1]) for path in m}
    for _ in range(ITERATIONS):
        left = sync.bases(mean, stacks, {path: m[path] @ right[path] for path in m})
        for paths in stacks:
            rows = [left[path].mH @ m[path] for path in paths]  # [rank, columns]
            right |= zip(paths, unit_columns(rows, rows_of([q[path] for path in paths])), strict=True)
    following: Leaves = {}
    for paths in stacks if p else ():
        rows = [compute(m[path] @ right[path]).mH for path in paths]
        following |= zip(paths, unit_columns(rows, rows_of([p[path] for path in paths])), strict=True)
    return {path: right[path] for path in q}, {path: following[path] for path in p}

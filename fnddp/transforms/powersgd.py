"""PowerSGD: the mean gradient as a product of two thin matrices."""

from collections.abc import Sequence
from itertools import chain
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fnddp.core import random, tree
from fnddp.core.buckets import BUCKET_CAPS, assign_buckets
from fnddp.core.codec import wide
from fnddp.core.layout import in_format_of
from fnddp.core.opaque import rounded
from fnddp.core.options import Limit, at_least
from fnddp.core.sync import Exchange, Remembered, Replicated, State, Sync, require_sums, transform
from fnddp.core.tree import Leaves, Tree, check_entries, is_inexact, replaced
from fnddp.device import device_of
from fnddp.transforms.orthogonalize import orthogonalize, orthogonalize_all, unit_rows

ITERATIONS = 4  # of `refresh`: each multiplies wanted / unwanted by the square of their singular values' ratio


class Stacks(NamedTuple):
    """Paths of leaves in stacks of groups. The small factors of a stack are computed together.

    A group is one matrix, or several small ones of one shape, multiplied as one tensor `[count, ...]`. Leaves of a
    stack have one rank, dtype and device. `by_bucket` has a stack for each default gradient bucket: factors of other
    buckets are not there at that time. `whole` joins them. Both have the same groups in the same order. `shapes` has
    rows and columns of each matrix, in that order.
    """

    by_bucket: list[list[list[str]]]
    whole: list[list[list[str]]]
    shapes: dict[str, tuple[int, int]]

    @property
    def groups(self) -> list[list[str]]:
        return list(chain(*self.whole))


class PowerSGDState(NamedTuple):
    """`q`: next queries (Q to multiply M by), by leaf path, `[columns, rank]`, unit columns (empty without warm start).

    `step`: exchanges done, modulo the period of `refresh` or `alternate`; with neither: 0, or all without warm start.
    `p_round`, `q_round`, `whole`: the inner pipeline's states for the two rounds, and for whole gradients (`refresh`).
    `p`: with `alternate`, the next basis of the other side by leaf path, `[rows, rank]`, unit columns.
    """

    q: Replicated[Remembered[Leaves]]
    step: Replicated[int]
    p_round: State
    q_round: State
    p: Replicated[Remembered[Leaves]]
    whole: State


@transform
class powersgd(Sync):
    """Send each matrix M as thin P = M Q_last and Q = M^T P_hat (P_hat: a basis of mean P); return P_hat Q^T.

    A leaf of shape `[n, ...]` is the matrix `[n, m]`; it costs (n + m) * rank elements instead of n * m. Vectors,
    scalars, integers, and leaves that would not shrink by more than `min_compression_rate` are sent whole, with P in
    the first of the two rounds. If the mean gradient's rank is at most `rank`, the output is exact after a step or
    two. It is biased: wrap it in `error_feedback`. The wrong choice on fast links (above about 8 Gbit/s a 16-bit cast
    is hard to beat), and for layers that do not have low-rank gradients.

    Factors have the dtype of the gradients; half-precision ones are computed in float32. Zero gradients, zero columns
    and ranks above the matrix's never give NaN. Small matrices of one shape (up to 32 KiB on a CPU, 16 MiB on an
    accelerator, within 25 MiB of leaves) are copied into one tensor and multiplied together, also if `bucket_cap_mb` is
    smaller. Their means and residuals are views of one tensor.

    Args:
        inner: The pipeline that sends P, Q and uncompressed leaves; `powersgd(fp16(allreduce))` rounds all of these. It
            runs twice in an exchange, or once with `alternate` and in exchanges of `refresh`.
        rank: Number of columns of P and Q, at most min(n, m). More approximate better and cost more.
        warm_start: Use the last Q as the next query (one step of a power iteration for each exchange). Without it a
            random query is drawn in each step: worse, but without state.
        min_compression_rate: Compress only if n * m > (n + m) * rank * min_compression_rate. 0 compresses all matrices.
        orthogonalization: "cholesky", for all leaves at once in a few operations whatever their shapes; or, leaf by
            leaf, "qr" or "gram_schmidt". They span the same columns up to rounding, except where columns are linearly
            dependent: "qr" completes the basis arbitrarily, the others drop them.
        epsilon: Relative norm at or below which a column counts as linearly dependent and is dropped.
        seed: Seed of the random queries; must be the same on all ranks.
        alternate: Send P in even exchanges and Q in odd ones, each along the basis of the other's last mean: one round
            and half the bytes for each exchange, and a worse approximation (ACP-SGD). Only use it inside
            `error_feedback`.
        refresh: Send whole gradients in every `refresh`-th exchange, from the first on, and set queries to the leading
            right singular vectors of their mean (PowerSGD+); 0: never. Warm queries alone can miss a direction forever,
            also with error feedback; see `docs/memory.md`. Costs 1 / refresh of the bytes of `inner` alone.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019, Algorithm 1 (with Algorithm 2: `error_feedback` around it).
    Deviations: queries are scaled to unit columns; this does not change outputs, but keeps P in the range of gradients
    (fp16 wires), and a zero column keeps its old query. Q and queries are stored and sent transposed, as both products
    read them. `alternate`: Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep
    Learning", ICDCS 2023, as ACP-SGD. `refresh`: after the idea of Xie, Chen and Yuan, "PowerSGD+", arXiv 2509.11254,
    with subspace iterations in place of an SVD.

    >>> from fnddp import allreduce
    >>> sync = powersgd(allreduce, rank=2)
    >>> grads = {"weight": torch.outer(torch.arange(32.), torch.arange(16.)), "bias": torch.ones(32)}
    >>> state = sync.init(grads)
    >>> mean, state = sync(grads, state)
    >>> torch.allclose(mean["weight"], grads["weight"], rtol=1e-4, atol=1e-3), state.q["weight"].shape
    (True, torch.Size([16, 2]))
    """

    inner: Sync
    rank: int = 1
    warm_start: bool = True
    min_compression_rate: float = 2
    orthogonalization: Literal["cholesky", "qr", "gram_schmidt"] = "cholesky"
    epsilon: float = 1e-6
    seed: int = 0
    alternate: bool = False
    refresh: int = 0

    limits: ClassVar = {
        "rank": at_least(1),
        "min_compression_rate": at_least(0),
        "epsilon": at_least(0),
        "refresh": Limit(lambda refresh: refresh == 0 or refresh >= 2, "0 (never) or at least 2 exchanges"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sums(self, "but the factors P and Q must add across ranks")
        if (self.alternate or self.refresh) and not self.warm_start:
            raise ValueError("powersgd: alternate and refresh go on from the last factors; leave warm_start=True")

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        stacks = self._stacks(leaves)
        p_like = dict(leaves)
        q_like = dict(leaves) if self.alternate else _emptied(leaves)
        for path, (n, m) in stacks.shapes.items():
            leaf, rank = leaves[path].detach(), self._rank_of(leaves[path])
            p_like[path], q_like[path] = leaf.new_empty((n, rank)), leaf.new_empty((rank, m))

        def drawn(suffix: str, side: int) -> Leaves:
            """Return factors laid out as after any later exchange: torch.compile makes one graph for both."""
            sizes = {path: shape[side] for path, shape in stacks.shapes.items()}
            factors = {path: self._draw(path + suffix, leaves[path], 0, size) for path, size in sizes.items()}
            laid_out = _apart(stacks, _columns_of(stacks, _side_by_side(stacks, _transposed(factors)), side))
            return {path: laid_out[path] for path in leaves if path in stacks.shapes}

        return PowerSGDState(
            q=drawn("", 1) if self.warm_start else {},
            step=0,
            p_round=self.inner.init(p_like),
            q_round=self.inner.init(q_like),
            p=drawn(" p", 0) if self.alternate else {},
            whole=self.inner.init(leaves) if self.refresh else (),
        )

    def exchange(self, leaves: Leaves, state: PowerSGDState) -> Exchange:
        self._require_factors(leaves, state)
        if self.refresh and state.step == 0:
            done = self._whole(leaves, state)
        else:
            done = self._one_round(leaves, state) if self.alternate else self._two_rounds(leaves, state)
        # The counter wraps after one period: exchanges with the same count share a plan, so there are few plans.
        period = self.refresh or 2 * self.alternate
        counted = 0 if self.warm_start and not period else state.step + 1
        return replaced(done, state=replaced(done.state, step=counted % period if period else counted))

    def _two_rounds(self, leaves: Leaves, state: PowerSGDState) -> Exchange:
        stacks, m = self._matrices(leaves)
        # Both products read m along its rows: on a CPU three to five times faster than m.T @ p_hat. So queries and Q
        # are stored transposed, those of a stack side by side.
        queries = state.q
        if not self.warm_start:
            shapes = stacks.shapes.items()
            queries = {path: self._draw(path, leaves[path], state.step, width) for path, (_, width) in shapes}
        query = _side_by_side(stacks, _transposed(queries))  # each: [rank, all columns]
        columns = _columns_of(stacks, query, 1)
        p = _apart(stacks, [x @ each for x, each in zip(m, columns, strict=True)])  # p: [rows, rank]

        # Leaves that are not compressed are sent whole with P and are empty with Q: both rounds have the same paths.
        p_round = self.inner.exchange({**leaves, **_rounded_like(leaves, p)}, state.p_round)
        p_hat = self._bases(leaves, stacks, p_round.mean)
        q = _apart(stacks, [basis.mH @ x for basis, x in zip(p_hat, m, strict=True)])  # q: [rank, columns]
        q_round = self.inner.exchange({**_emptied(leaves), **_rounded_like(leaves, q)}, state.q_round)

        def decode(whole: Leaves, rows: Sequence[Tensor]) -> Leaves:
            q = _groups_of(stacks, rows, 1)
            made = _apart(stacks, [basis @ each for basis, each in zip(p_hat, q, strict=True)])
            return {**whole, **{path: _leaf_of(each, leaves[path]) for path, each in made.items()}}

        rows = _side_by_side(stacks, q_round.mean)
        mean, sent = decode(p_round.mean, rows), decode(p_round.sent, _side_by_side(stacks, q_round.sent))
        following = _apart(stacks, _unit_columns(stacks, rows, 1, query)) if self.warm_start else {}
        q = {path: following[path] for path in state.q}  # empty without warm start
        return Exchange(mean, sent, replaced(state, q=q, p_round=p_round.state, q_round=q_round.state))

    def _one_round(self, leaves: Leaves, state: PowerSGDState) -> Exchange:
        """Send P = M Q_hat, with Q_hat a basis of Q, and return mean(P) Q_hat^T; at odd steps send Q^T = P_hat^T M."""
        sends_p = state.step % 2 == 0
        basis, last = (state.q, state.p) if sends_p else (state.p, state.q)
        stacks, m = self._matrices(leaves)
        hat = self._bases(leaves, stacks, basis)
        # sent: [rows, rank], or transposed
        sent = _apart(stacks, [x @ each if sends_p else each.mH @ x for x, each in zip(m, hat, strict=True)])
        payload = {**leaves, **_rounded_like(leaves, sent)}
        inner = self.inner.exchange(payload, state.p_round if sends_p else state.q_round)
        side = 0 if sends_p else 1

        def side_by_side(got: Leaves) -> list[Tensor]:
            return _side_by_side(stacks, _transposed({path: got[path] for path in stacks.shapes}) if sends_p else got)

        def decode(got: Leaves) -> Leaves:
            rows = side_by_side(got)
            p = _columns_of(stacks, rows, side) if sends_p else hat
            q = [basis.mH for basis in hat] if sends_p else _groups_of(stacks, rows, side)
            whole = _apart(stacks, [each @ other for each, other in zip(p, q, strict=True)])
            return {**got, **{path: _leaf_of(each, leaves[path]) for path, each in whole.items()}}

        fallback = _side_by_side(stacks, _transposed(last))
        following = _apart(stacks, _unit_columns(stacks, side_by_side(inner.mean), side, fallback))
        following = {path: following[path] for path in last}
        if sends_p:
            return replaced(inner.decoded(decode), state=replaced(state, p=following, p_round=inner.state))
        return replaced(inner.decoded(decode), state=replaced(state, q=following, q_round=inner.state))

    def _whole(self, leaves: Leaves, state: PowerSGDState) -> Exchange:
        """Exchange whole leaves, and find the factors anew: bases of the leading singular vectors of the mean.

        It runs subspace iterations (Halko, Martinsson and Tropp, SIAM Review 2011, Algorithm 4.4): a few products, no
        SVD. They start from a random query to find directions that the last one missed. Zero matrices keep factors.
        """
        done = self.inner.exchange(leaves, state.whole)
        stacks, m = self._matrices(done.mean)
        m = [each.clone() for each in m]  # in a buffer's middle BLAS may round products another way
        query = _side_by_side(stacks, _transposed(state.q))
        drawn = {path: self._draw(path, leaves[path], 0, width) for path, (_, width) in stacks.shapes.items()}
        right = _columns_of(stacks, _side_by_side(stacks, _transposed(drawn)), 1)
        for _ in range(ITERATIONS):
            left = _apart(stacks, [x @ each for x, each in zip(m, right, strict=True)])
            bases = zip(self._bases(done.mean, stacks, left), m, strict=True)
            rows = _side_by_side(stacks, _apart(stacks, [basis.mH @ x for basis, x in bases]))
            right = _unit_columns(stacks, rows, 1, query)
        p: Leaves = {}
        if state.p:
            left = _apart(stacks, [x @ each for x, each in zip(m, right, strict=True)])
            rows, last = (_side_by_side(stacks, _transposed(each)) for each in (left, state.p))
            p = _apart(stacks, _unit_columns(stacks, rows, 0, last))
        found = _apart(stacks, right)
        q, p = {path: found[path] for path in state.q}, {path: p[path] for path in state.p}
        return replaced(done, state=replaced(state, q=q, p=p, whole=done.state))

    def _require_factors(self, leaves: Leaves, state: PowerSGDState) -> None:
        low_rank = {path: leaf for path, leaf in leaves.items() if self._is_low_rank(leaf)}
        for has_one, factors, side in ((self.warm_start, state.q, 1), (self.alternate, state.p, 0)):
            if has_one:
                shapes = {path: (matrix_shape(leaf)[side], self._rank_of(leaf)) for path, leaf in low_rank.items()}
                check_entries("powersgd", factors, shapes)

    def _is_low_rank(self, leaf: Tensor) -> bool:
        if leaf.ndim < 2 or leaf.numel() == 0 or not is_inexact(leaf):
            return False
        n, m = matrix_shape(leaf)
        return (n + m) * self._rank_of(leaf) * self.min_compression_rate < n * m

    def _rank_of(self, leaf: Tensor) -> int:
        return min(self.rank, *matrix_shape(leaf))

    def _stacks(self, leaves: Leaves) -> Stacks:
        buckets = assign_buckets({path: leaves[path].nbytes for path in reversed(leaves)}, BUCKET_CAPS)
        alike: dict[object, dict[int, dict[object, list[str]]]] = {}
        # Compiled, ranks with other shapes of data would send the factors of stacks in another order.
        is_compiling = torch.compiler.is_compiling()
        for path, leaf in leaves.items():
            if self._is_low_rank(leaf):
                is_small = not is_compiling and leaf.nbytes <= device_of(leaf.device).stacked_bytes
                of_bucket = alike.setdefault((self._rank_of(leaf), leaf.dtype, leaf.device), {})
                groups = of_bucket.setdefault(buckets[path], {})
                groups.setdefault(matrix_shape(leaf) if is_small else path, []).append(path)
        stacks = [[list(groups.values()) for groups in of_bucket.values()] for of_bucket in alike.values()]
        whole = [list(chain(*stack)) for stack in stacks]
        shapes = {path: matrix_shape(leaves[path]) for group in chain(*whole) for path in group}
        return Stacks(list(chain(*stacks)), whole, shapes)

    def _matrices(self, leaves: Leaves) -> tuple[Stacks, list[Tensor]]:
        """Return the stacks, and the matrices of each of their groups, `[..., rows, columns]`."""
        stacks = self._stacks(leaves)
        whole = {path: _compute(leaves[path]) for path in stacks.shapes}
        # Row-major, since BLAS rounds products of a transposed matrix another way.
        m = {path: each.contiguous().reshape(matrix_shape(each)) for path, each in whole.items()}
        return stacks, _together(stacks, m)

    def _bases(self, leaves: Leaves, stacks: Stacks, factors: Leaves) -> list[Tensor]:
        """Return orthonormal bases of the columns of the factors of each group, `[..., size, rank]`."""
        if self.orthogonalization != "cholesky":
            some = [_compute(each) for each in _together(stacks, factors)]
            return [orthogonalize(each, self.orthogonalization, self.epsilon) for each in some]
        found: list[Tensor] = []
        for groups in stacks.by_bucket:
            dtype = wide(leaves[groups[0][0]].dtype)
            found += orthogonalize_all([[factors[path] for path in group] for group in groups], self.epsilon, dtype)
        return found

    def _draw(self, name: str, leaf: Tensor, step: int, size: int) -> Tensor:
        """Return random unit columns for a factor of `leaf`: `[size, rank]`."""
        like = leaf.detach().new_empty(0, dtype=wide(leaf.dtype))
        factor = random.normal((size, self._rank_of(leaf)), name=name, seed=self.seed, step=step, like=like)
        return factor / torch.linalg.vector_norm(factor, dim=0, keepdim=True)


def matrix_shape(leaf: Tensor) -> tuple[int, int]:
    return leaf.shape[0], leaf.numel() // leaf.shape[0]


def _emptied(leaves: Leaves) -> Leaves:
    return {path: leaf.detach().new_empty(0) for path, leaf in leaves.items()}


def _compute(tensor: Tensor) -> Tensor:
    # Half-precision factorizations do not exist on the CPU and lose too much anywhere.
    return tensor.to(wide(tensor.dtype))


def _leaf_of(matrix: Tensor, like: Tensor) -> Tensor:
    return in_format_of(like, rounded(matrix, like.dtype).reshape(like.shape))


def _rounded_like(leaves: Leaves, factors: Leaves) -> Leaves:
    return {path: rounded(each, leaves[path].dtype) for path, each in factors.items()}


def _transposed(factors: Leaves) -> Leaves:
    return {path: each.mH for path, each in factors.items()}


def _together(stacks: Stacks, matrices: Leaves) -> list[Tensor]:
    """Return the matrices of each group as one tensor: `[count, ...]`, or one matrix alone as it is."""
    groups = [[matrices[path] for path in group] for group in stacks.groups]
    return [torch.stack(group) if len(group) > 1 else group[0] for group in groups]


def _apart(stacks: Stacks, groups: Sequence[Tensor]) -> Leaves:
    """Return the inverse of `_together`: views."""
    found: Leaves = {}
    for paths, group in zip(stacks.groups, groups, strict=True):
        found |= zip(paths, group.unbind() if len(paths) > 1 else [group], strict=True)
    return found


def _side_by_side(stacks: Stacks, rows: Leaves) -> list[Tensor]:
    """Return transposed factors, each `[rank, size]`, of each stack side by side: `[rank, sum of sizes]`."""
    return [
        _compute(torch.cat([rows[path] for path in chain(*groups)], dim=1).resolve_conj()) for groups in stacks.whole
    ]


def _groups_of(stacks: Stacks, rows: Sequence[Tensor], side: int) -> list[Tensor]:
    """Return the inverse of `_side_by_side` for each group, `[..., rank, size]`: views. `side` is 0 for P, 1 for Q."""
    found: list[Tensor] = []
    for groups, stack in zip(stacks.whole, rows, strict=True):
        counts = [(len(group), stacks.shapes[group[0]][side]) for group in groups]
        parts = zip(stack.split([count * size for count, size in counts], dim=1), counts, strict=True)
        found += [x.unflatten(1, shape).transpose(0, 1) if shape[0] > 1 else x for x, shape in parts]
    return found


def _columns_of(stacks: Stacks, rows: Sequence[Tensor], side: int) -> list[Tensor]:
    """Return the factors of each group, `[..., size, rank]`: views, except of complex numbers."""
    return [each.mH.resolve_conj() for each in _groups_of(stacks, rows, side)]


def _unit_columns(stacks: Stacks, rows: Sequence[Tensor], side: int, fallback: Sequence[Tensor]) -> list[Tensor]:
    """Return, by group, unit columns from transposed factors; a zero column is taken from `fallback`."""
    widths = [[stacks.shapes[path][side] for path in chain(*groups)] for groups in stacks.whole]
    scaled = [unit_rows(*each) for each in zip(rows, widths, fallback, strict=True)]
    return _columns_of(stacks, scaled, side)

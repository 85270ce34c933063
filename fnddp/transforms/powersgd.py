"""PowerSGD: the mean gradient as a product of two thin matrices."""

from typing import NamedTuple

import torch
from torch import Tensor

from fnddp import random, tree
from fnddp.buckets import BUCKET_CAPS, assign_buckets
from fnddp.layout import in_format_of
from fnddp.sync import Exchange, Replicated, State, Sync, require_state, require_sums, transform
from fnddp.transforms.orthogonalize import METHODS, orthogonalize, orthogonalize_all, unit_rows
from fnddp.tree import Leaves, Tree, check_entries, is_inexact, require_leaves


class PowerSGDState(NamedTuple):
    """`q`: the next queries by leaf path, `[columns, rank]`, unit columns (empty without warm start).

    `step`: exchanges done, counted only without warm start, where it seeds the queries.
    `p_round`, `q_round`: the inner pipeline's states for the two exchanges.
    """

    q: Replicated[Leaves]
    step: Replicated[int]
    p_round: State
    q_round: State


@transform
class powersgd(Sync):
    """Low-rank compression: each matrix M travels as P = M Q and then Q = M^T P_hat, and becomes P_hat Q^T.

    A leaf of shape `[n, ...]` is the matrix `[n, m]`; it costs (n + m) * rank elements instead of n * m. Leaves that
    are vectors, scalars or integers, or that would not shrink by more than `min_compression_rate`, travel whole, with
    P in the first of the two rounds. The output is exact where the mean gradient's rank is at most `rank` (with warm
    start, after a step or two). It is biased: wrap it in `error_feedback`. The wrong choice on fast links (above
    about 8 Gbit/s a 16-bit cast is hard to beat), and for layers whose gradients are not low-rank.

    The factors travel in the dtype of the gradients; half-precision ones are computed in float32. Momentum, weight
    decay and clipping come after. Zero gradients, zero columns and ranks above the matrix's never give NaN. It works
    from the first step; no global generator is read or written.

    Args:
        inner: What carries P and Q: `powersgd(fp16(allreduce))` rounds only them. It is run twice an exchange.
        rank: Columns of P and Q; higher approximates better and costs more. At most min(n, m) is used.
        warm_start: Use the last Q as the next query (one step of a power iteration per exchange). Without it a fresh
            random query is drawn each step: worse, but needs no state.
        min_compression_rate: Compress only if n * m > (n + m) * rank * min_compression_rate. 0 compresses all matrices.
        orthogonalization: "cholesky", for all leaves at once in a few operations whatever their shapes; or, leaf by
            leaf, "qr" or "gram_schmidt". They span the same columns up to rounding, but where columns are linearly
            dependent: "qr" completes the basis arbitrarily, the others drop them.
        epsilon: Relative norm at or below which a column is taken for linearly dependent and dropped.
        seed: Of the random queries; the same on all ranks.

    Raises:
        ValueError: An option is out of range; at the exchange: the state is of another tree.
        TypeError: `inner` takes a max or min: the factors must add.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019, Algorithm 1 (with Algorithm 2: `error_feedback` around it).
    Deviations: queries are scaled to unit columns, which changes no output but keeps P in the range of the gradients
    (fp16 wires), and a zero column keeps its old query; Q and queries are kept and sent transposed, as both products
    read them. torch's `powerSGD_hook` is
    `warmup(error_feedback(powersgd(allreduce, rank=1)), steps=1000)`.

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
    orthogonalization: str = "cholesky"
    epsilon: float = 1e-6
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise ValueError(f"powersgd: rank must be at least 1, got {self.rank!r}")
        if self.min_compression_rate < 0 or self.epsilon < 0:
            raise ValueError(f"powersgd: min_compression_rate and epsilon must be at least 0, got {self!r}")
        if self.orthogonalization not in METHODS:
            raise ValueError(f"powersgd: orthogonalization must be one of {METHODS}, got {self.orthogonalization!r}")
        require_sums("powersgd", self.inner, "but the factors P and Q must add across ranks")

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        low_rank = [path for path, leaf in leaves.items() if self._is_low_rank(leaf)]
        p_like, q_like = dict(leaves), {path: _nothing_like(leaf) for path, leaf in leaves.items()}
        for path in low_rank:
            leaf, (n, m) = leaves[path].detach(), _matrix_shape(leaves[path])
            p_like[path], q_like[path] = (
                leaf.new_empty((n, self._rank_of(leaf))),
                leaf.new_empty((self._rank_of(leaf), m)),
            )
        q: Leaves = {}
        for paths in self._stacks(leaves) if self.warm_start else ():
            # Laid out as after any later exchange: torch.compile makes one graph for both.
            rows = _rows([self._draw(path, leaves[path], step=0) for path in paths])
            q |= zip(paths, _columns(rows, [_matrix_shape(leaves[path])[1] for path in paths]), strict=True)
        return PowerSGDState(
            q={path: q[path] for path in low_rank} if self.warm_start else {},
            step=0,
            p_round=self.inner.init(p_like),
            q_round=self.inner.init(q_like),
        )

    def exchange(self, leaves: Leaves, state: PowerSGDState) -> Exchange:
        require_leaves("powersgd", leaves)
        require_state("powersgd", state, PowerSGDState)
        stacks = self._stacks(leaves)
        if self.warm_start:
            low_rank = {path: leaves[path] for paths in stacks for path in paths}
            shapes = {path: (_matrix_shape(leaf)[1], self._rank_of(leaf)) for path, leaf in low_rank.items()}
            check_entries("powersgd", state.q, shapes)
        # Both products read m along its rows: on a CPU three to five times faster than m.T @ p_hat. So queries and Q
        # lie transposed, those of a stack side by side.
        query = [_rows(self._queries(leaves, state, paths)) for paths in stacks]  # each: [rank, all columns]
        m = {path: _matrix(leaves[path]) for paths in stacks for path in paths}
        widths = [[m[path].shape[1] for path in paths] for paths in stacks]
        p: Leaves = {}
        for paths, rows, sizes in zip(stacks, query, widths, strict=True):
            for path, columns in zip(paths, rows.mH.split(sizes), strict=True):
                p[path] = (m[path] @ columns).to(leaves[path].dtype)  # p: [rows, rank]

        # Leaves that are not compressed travel whole with P and are empty with Q: both rounds have the same paths.
        p_round = self.inner.exchange({**leaves, **p}, state.p_round)
        p_hat = {k: v for paths in stacks for k, v in zip(paths, self._bases(leaves, paths, p_round.mean), strict=True)}
        q = {path: (p_hat[path].mH @ m[path]).to(leaves[path].dtype) for path in m}  # q: [rank, columns]
        empty = {path: _nothing_like(leaf) for path, leaf in leaves.items()}
        q_round = self.inner.exchange({**empty, **q}, state.q_round)

        mean, sent = dict(p_round.mean), dict(p_round.sent)
        for path in m:
            mean[path] = _leaf(p_hat[path] @ _compute(q_round.mean[path]), leaves[path])
            sent[path] = _leaf(p_hat[path] @ _compute(q_round.sent[path]), leaves[path])
        following: Leaves = {}
        for paths, rows, sizes in zip(stacks, query, widths, strict=True) if self.warm_start else ():
            means = _compute(torch.cat([q_round.mean[path] for path in paths], dim=1))
            following |= zip(paths, _columns(unit_rows(means, sizes, fallback=rows), sizes), strict=True)
        return Exchange(
            mean=mean,
            sent=sent,
            state=PowerSGDState(
                q={path: following[path] for path in state.q},  # empty without warm start
                step=state.step if self.warm_start else state.step + 1,
                p_round=p_round.state,
                q_round=q_round.state,
            ),
        )

    def _is_low_rank(self, leaf: Tensor) -> bool:
        if leaf.ndim < 2 or leaf.numel() == 0 or not is_inexact(leaf):
            return False
        n, m = _matrix_shape(leaf)
        return (n + m) * self._rank_of(leaf) * self.min_compression_rate < n * m

    def _rank_of(self, leaf: Tensor) -> int:
        return min(self.rank, *_matrix_shape(leaf))

    def _bases(self, leaves: Leaves, paths: list[str], p: Leaves) -> list[Tensor]:
        if self.orthogonalization == "cholesky":
            dtype = _compute_dtype(leaves[paths[0]].dtype)
            return orthogonalize_all([p[path] for path in paths], self.epsilon, dtype)
        return [orthogonalize(_compute(p[path]), self.orthogonalization, self.epsilon) for path in paths]

    def _stacks(self, leaves: Leaves) -> list[list[str]]:
        """Paths of leaves whose small factors are computed together.

        No more than share a bucket of gradients, by default, since the others' factors are not there at that time.
        """
        buckets = assign_buckets({path: leaves[path].nbytes for path in reversed(leaves)}, BUCKET_CAPS)
        stacks: dict[object, list[str]] = {}
        for path, leaf in leaves.items():
            if self._is_low_rank(leaf):
                same = buckets[path], self._rank_of(leaf), leaf.dtype, leaf.device
                stacks.setdefault(same, []).append(path)
        return list(stacks.values())

    def _queries(self, leaves: Leaves, state: PowerSGDState, paths: list[str]) -> list[Tensor]:
        if not self.warm_start:
            return [self._draw(path, leaves[path], state.step) for path in paths]
        return [state.q[path] for path in paths]

    def _draw(self, path: str, leaf: Tensor, step: int) -> Tensor:
        _, m = _matrix_shape(leaf)
        like = leaf.detach().new_empty(0, dtype=_compute_dtype(leaf.dtype))
        q = random.normal((m, self._rank_of(leaf)), name=path, seed=self.seed, step=step, like=like)
        return q / torch.linalg.vector_norm(q, dim=0, keepdim=True)


def _matrix_shape(leaf: Tensor) -> tuple[int, int]:
    return leaf.shape[0], leaf.numel() // leaf.shape[0]


def _matrix(leaf: Tensor) -> Tensor:
    return _compute(leaf).reshape(_matrix_shape(leaf))


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    # Half-precision factorizations do not exist on the CPU and lose too much anywhere.
    return torch.promote_types(dtype, torch.float32)


def _compute(tensor: Tensor) -> Tensor:
    return tensor.to(_compute_dtype(tensor.dtype))


def _leaf(matrix: Tensor, like: Tensor) -> Tensor:
    return in_format_of(like, matrix.to(like.dtype).reshape(like.shape))


def _nothing_like(leaf: Tensor) -> Tensor:
    return leaf.detach().new_empty(0)


def _rows(columns: list[Tensor]) -> Tensor:
    """Matrices transposed and side by side; laid out alike, however they are."""
    return torch.cat([each.mH for each in columns], dim=1).resolve_conj()


def _columns(rows: Tensor, widths: list[int]) -> list[Tensor]:
    """The inverse of `_rows`: views, but of complex numbers."""
    return [columns.resolve_conj() for columns in rows.mH.split(widths)]

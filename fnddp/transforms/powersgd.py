"""PowerSGD: the mean gradient as a product of two thin matrices."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from fnddp import random, tree
from fnddp.layout import in_format_of
from fnddp.sync import Exchange, Replicated, State, Sync, require_state, require_sums, transform
from fnddp.transforms.orthogonalize import METHODS, normalize_columns, orthogonalize
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
        orthogonalization: "qr", or "gram_schmidt" (fewer kernels for rank 1 or 2).
        epsilon: Relative norm at or below which Gram-Schmidt takes a column for linearly dependent and drops it.
        seed: Of the random queries; the same on all ranks.
        batch_same_shape: Compute equally shaped matrices in one batched product: faster for many small layers on a
            GPU, at the price of a stacked copy.

    Raises:
        ValueError: An option is out of range; at the exchange: the state is of another tree.
        TypeError: `inner` takes a max or min: the factors must add.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019, Algorithm 1 (with Algorithm 2: `error_feedback` around it).
    Deviations: queries are scaled to unit columns, which changes no output but keeps P in the range of the gradients
    (fp16 wires), and a zero column keeps its old query. torch's `powerSGD_hook` is
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
    orthogonalization: str = "qr"
    epsilon: float = 1e-6
    seed: int = 0
    batch_same_shape: bool = False

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
                leaf.new_empty((m, self._rank_of(leaf))),
            )
        return PowerSGDState(
            q={path: self._draw(path, leaves[path], step=0) for path in low_rank} if self.warm_start else {},
            step=0,
            p_round=self.inner.init(p_like),
            q_round=self.inner.init(q_like),
        )

    def exchange(self, leaves: Leaves, state: PowerSGDState) -> Exchange:
        require_leaves("powersgd", leaves)
        require_state("powersgd", state, PowerSGDState)
        groups = self._group(leaves)
        query = self._queries(leaves, state)

        m = {group: _stack(_matrix(leaves[path]) for path in paths) for group, paths in groups.items()}
        q = {group: _stack(query[path] for path in paths) for group, paths in groups.items()}
        p = {group: _times(m[group], q[group]) for group in groups}  # p: [rows, rank], or a stack of them

        # Leaves that are not compressed travel whole with P and are empty with Q: both rounds have the same paths.
        p_round = self.inner.exchange({**leaves, **_unstack(p, groups, leaves)}, state.p_round)
        p_hat = {
            group: orthogonalize(
                _stack(_compute(p_round.mean[path]) for path in paths), self.orthogonalization, self.epsilon
            )
            for group, paths in groups.items()
        }
        q = {group: _transposed_times(m[group], p_hat[group]) for group in groups}  # q: [columns, rank]
        empty = {path: _nothing_like(leaf) for path, leaf in leaves.items()}
        q_round = self.inner.exchange({**empty, **_unstack(q, groups, leaves)}, state.q_round)

        mean, sent = dict(p_round.mean), dict(p_round.sent)
        for group, paths in groups.items():
            for product, q_of in ((mean, q_round.mean), (sent, q_round.sent)):
                q_group = _stack(_compute(q_of[path]) for path in paths)
                for path, matrix in zip(paths, _split(p_hat[group] @ q_group.mH), strict=True):
                    product[path] = _leaf(matrix, leaves[path])
        # state.q is empty without warm start
        next_q = {path: normalize_columns(_compute(q_round.mean[path]), fallback=query[path]) for path in state.q}
        return Exchange(
            mean=mean,
            sent=sent,
            state=PowerSGDState(
                q=next_q,
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

    def _group(self, leaves: Leaves) -> dict[str, list[str]]:
        """Paths of the low-rank leaves by what can be computed in one batch, named by the group's first leaf."""
        groups: dict[str, list[str]] = {}
        first: dict[object, str] = {}
        for path, leaf in leaves.items():
            if self._is_low_rank(leaf):
                same = (_matrix_shape(leaf), leaf.dtype, leaf.device) if self.batch_same_shape else path
                groups.setdefault(first.setdefault(same, path), []).append(path)
        return groups

    def _queries(self, leaves: Leaves, state: PowerSGDState) -> Leaves:
        paths = [path for path, leaf in leaves.items() if self._is_low_rank(leaf)]
        if self.warm_start:
            shapes = {path: (_matrix_shape(leaves[path])[1], self._rank_of(leaves[path])) for path in paths}
            check_entries("powersgd", state.q, shapes)
            return {path: state.q[path] for path in paths}
        return {path: self._draw(path, leaves[path], state.step) for path in paths}

    def _draw(self, path: str, leaf: Tensor, step: int) -> Tensor:
        _, m = _matrix_shape(leaf)
        like = leaf.detach().new_empty(0, dtype=_compute_dtype(leaf.dtype))
        q = random.normal((m, self._rank_of(leaf)), name=path, seed=self.seed, step=step, like=like)
        return normalize_columns(q, fallback=q)


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


def _stack(tensors: Iterable[Tensor]) -> Tensor:
    tensors = list(tensors)
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0]


def _split(stack: Tensor) -> list[Tensor]:
    return list(stack) if stack.ndim > 2 else [stack]


def _unstack(stacks: dict[str, Tensor], groups: dict[str, list[str]], like: Leaves) -> Leaves:
    return {
        path: matrix.to(like[path].dtype)
        for group, paths in groups.items()
        for path, matrix in zip(paths, _split(stacks[group]), strict=True)
    }


# Both products read m along its rows: on a CPU three to five times faster than m @ q and m.T @ p.
def _times(m: Tensor, q: Tensor) -> Tensor:
    return m @ q if m.ndim > 2 else linear(m, q.mT.contiguous())


def _transposed_times(m: Tensor, p: Tensor) -> Tensor:
    return (p.mH @ m).mH

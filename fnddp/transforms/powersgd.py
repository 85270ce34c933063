"""PowerSGD: the mean gradient as a product of two thin matrices."""

from typing import ClassVar, NamedTuple

from fnddp.core import tree
from fnddp.core.options import Limit, at_least, one_of
from fnddp.core.sync import Exchange, Replicated, State, Sync, transform
from fnddp.core.tree import Leaves, Tree, check_entries, replaced
from fnddp.transforms.alternating import half_round
from fnddp.transforms.leading import leading_factors
from fnddp.transforms.low_rank import (
    LowRank,
    columns_of,
    compute,
    leaf_of,
    matrix,
    matrix_shape,
    rows_of,
    unit_columns,
)
from fnddp.transforms.orthogonalize import METHODS


class PowerSGDState(NamedTuple):
    """`q`: the next queries by leaf path, `[columns, rank]`, unit columns (empty without warm start).

    `step`: exchanges done, without warm start, to seed the queries; modulo the period of `refresh` or `alternate`; or
    0.
    `p_round`, `q_round`, `whole`: the inner pipeline's states for the two rounds, and for whole gradients (`refresh`).
    `p`: with `alternate`, the next basis of the other side by leaf path, `[rows, rank]`, unit columns.
    """

    q: Replicated[Leaves]
    step: Replicated[int]
    p_round: State
    q_round: State
    p: Replicated[Leaves]
    whole: State


@transform
class powersgd(LowRank):
    """Low-rank compression: each matrix M travels as P = M Q and then Q = M^T P_hat, and becomes P_hat Q^T.

    A leaf of shape `[n, ...]` is the matrix `[n, m]`; it costs (n + m) * rank elements instead of n * m. Leaves that
    are vectors, scalars or integers, or that would not shrink by more than `min_compression_rate`, travel whole, with
    P in the first of the two rounds. The output is exact where the mean gradient's rank is at most `rank` (with warm
    start, after a step or two). It is biased: wrap it in `error_feedback`. The wrong choice on fast links (above
    about 8 Gbit/s a 16-bit cast is hard to beat), and for layers whose gradients are not low-rank.

    The factors travel in the dtype of the gradients; half-precision ones are computed in float32. Zero gradients, zero
    columns and ranks above the matrix's never give NaN. No global generator is read or written.

    Args:
        inner: The pipeline of P and Q: `powersgd(fp16(allreduce))` rounds only them. It is run twice an exchange.
        rank: Columns of P and Q; higher approximates better and costs more. At most min(n, m) is used.
        warm_start: Use the last Q as the next query (one step of a power iteration per exchange). Without it a fresh
            random query is drawn each step: worse, but needs no state.
        min_compression_rate: Compress only if n * m > (n + m) * rank * min_compression_rate. 0 compresses all matrices.
        orthogonalization: "cholesky", for all leaves at once in a few operations whatever their shapes; or, leaf by
            leaf, "qr" or "gram_schmidt". They span the same columns up to rounding, but where columns are linearly
            dependent: "qr" completes the basis arbitrarily, the others drop them.
        epsilon: Relative norm at or below which a column is taken for linearly dependent and dropped.
        seed: Of the random queries; the same on all ranks.
        alternate: Send P in even exchanges and Q in odd ones, each along the basis of the other's last mean: one round
            and half the bytes an exchange, and a worse approximation (ACP-SGD). Inside error feedback only.
        refresh: In every `refresh`-th exchange, the first among them, gradients travel whole, and queries become their
            mean's leading right singular vectors (PowerSGD+); 0: never. Warm queries alone can miss a direction
            forever, with error feedback too; see `docs/memory.md`. Costs 1 / refresh of what `inner` alone sends.

    Raises:
        TypeError: `inner` takes a max or min: the factors must add.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019, Algorithm 1 (with Algorithm 2: `error_feedback` around it).
    Deviations: queries are scaled to unit columns, which changes no output but keeps P in the range of the gradients
    (fp16 wires), and a zero column keeps its old query; Q and queries are kept and sent transposed, as both products
    read them. torch's `powerSGD_hook` is
    `warmup(error_feedback(powersgd(allreduce, rank=1)), steps=1000)`. `alternate`: Zhang et al., "Evaluation and
    Optimization of Gradient Compression for Distributed Deep Learning", ICDCS 2023, as ACP-SGD. `refresh`: after the
    idea of Xie, Chen and Yuan, "PowerSGD+", arXiv 2509.11254, with subspace iterations in place of an SVD.

    >>> import torch
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
    alternate: bool = False
    refresh: int = 0

    needs_sums: ClassVar[str] = "but the factors P and Q must add across ranks"
    limits: ClassVar = {
        "rank": at_least(1),
        "min_compression_rate": at_least(0),
        "orthogonalization": one_of(*METHODS),
        "epsilon": at_least(0),
        "refresh": Limit(lambda refresh: refresh == 0 or refresh >= 2, "0 (never) or at least 2 exchanges"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.alternate or self.refresh) and not self.warm_start:
            raise ValueError("powersgd: alternate and refresh go on from the last factors; leave warm_start=True")

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        stacks = self.stacks(leaves)
        shapes = {path: matrix_shape(leaves[path]) for paths in stacks for path in paths}
        p_like = dict(leaves)
        q_like = dict(leaves) if self.alternate else _emptied(leaves)
        for path, (n, m) in shapes.items():
            leaf, rank = leaves[path].detach(), self.rank_of(leaves[path])
            p_like[path], q_like[path] = leaf.new_empty((n, rank)), leaf.new_empty((rank, m))

        def drawn(suffix: str, side: int) -> Leaves:
            """Return factors laid out as after any later exchange: torch.compile makes one graph for both."""
            factors: Leaves = {}
            for paths in stacks:
                rows = rows_of([self.draw(path + suffix, leaves[path], 0, shapes[path][side]) for path in paths])
                factors |= zip(paths, columns_of(rows, [shapes[path][side] for path in paths]), strict=True)
            return {path: factors[path] for path in leaves if path in shapes}

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
            return self._whole(leaves, state)
        if not self.alternate:
            return self._two_rounds(leaves, state)
        if state.step % 2 == 0:
            done, p = half_round(self, leaves, state.q, state.p, state.p_round, sends_p=True)
            following = replaced(state, p=p, p_round=done.state)
        else:
            done, q = half_round(self, leaves, state.p, state.q, state.q_round, sends_p=False)
            following = replaced(state, q=q, q_round=done.state)
        return replaced(done, state=replaced(following, step=self._after(state.step)))

    def _two_rounds(self, leaves: Leaves, state: PowerSGDState) -> Exchange:
        stacks = self.stacks(leaves)
        m = {path: matrix(leaves[path]) for paths in stacks for path in paths}
        # Both products read m along its rows: on a CPU three to five times faster than m.T @ p_hat. So queries and Q
        # are stored transposed, those of a stack side by side.
        queries = state.q
        if not self.warm_start:
            queries = {path: self.draw(path, leaves[path], state.step, m[path].shape[1]) for path in m}
        query = [rows_of([queries[path] for path in paths]) for paths in stacks]  # each: [rank, all columns]
        p: Leaves = {}
        for paths, rows in zip(stacks, query, strict=True):
            widths = [m[path].shape[1] for path in paths]
            for path, columns in zip(paths, rows.mH.split(widths), strict=True):
                p[path] = (m[path] @ columns).to(leaves[path].dtype)  # p: [rows, rank]

        # Leaves that are not compressed travel whole with P and are empty with Q: both rounds have the same paths.
        p_round = self.inner.exchange({**leaves, **p}, state.p_round)
        p_hat = self.bases(leaves, stacks, p_round.mean)
        q = {path: (p_hat[path].mH @ m[path]).to(leaves[path].dtype) for path in m}  # q: [rank, columns]
        q_round = self.inner.exchange({**_emptied(leaves), **q}, state.q_round)

        mean, sent = dict(p_round.mean), dict(p_round.sent)
        for path in m:
            mean[path] = leaf_of(p_hat[path] @ compute(q_round.mean[path]), leaves[path])
            sent[path] = leaf_of(p_hat[path] @ compute(q_round.sent[path]), leaves[path])
        following: Leaves = {}
        for paths, rows in zip(stacks, query, strict=True) if self.warm_start else ():
            following |= zip(paths, unit_columns([q_round.mean[path] for path in paths], rows), strict=True)
        q = {path: following[path] for path in state.q}  # empty without warm start
        step = self._after(state.step)
        return Exchange(mean, sent, replaced(state, q=q, step=step, p_round=p_round.state, q_round=q_round.state))

    def _whole(self, leaves: Leaves, state: PowerSGDState) -> Exchange:
        """Exchange whole leaves, and find the factors anew from the mean."""
        done = self.inner.exchange(leaves, state.whole)
        q, p = leading_factors(self, done.mean, state.q, state.p)
        following = replaced(state, q=q, p=p, step=self._after(state.step), whole=done.state)
        return replaced(done, state=following)

    def _after(self, step: int) -> int:
        """Return the counter of the next exchange, which cycles where exchanges differ, so that there are few plans."""
        period = self.refresh or 2 * self.alternate
        if period:
            return (step + 1) % period
        return step if self.warm_start else step + 1

    def _require_factors(self, leaves: Leaves, state: PowerSGDState) -> None:
        low_rank = {path: leaf for path, leaf in leaves.items() if self.is_low_rank(leaf)}
        for has_one, factors, side in ((self.warm_start, state.q, 1), (self.alternate, state.p, 0)):
            if has_one:
                shapes = {path: (matrix_shape(leaf)[side], self.rank_of(leaf)) for path, leaf in low_rank.items()}
                check_entries("powersgd", factors, shapes)


def _emptied(leaves: Leaves) -> Leaves:
    return {path: leaf.detach().new_empty(0) for path, leaf in leaves.items()}

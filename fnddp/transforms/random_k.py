"""Random-k and random block: all ranks draw the same elements, so payloads add."""

import abc
from typing import Any, ClassVar

import torch
from torch import Tensor

from fnddp.core import random, tree
from fnddp.core.codec import CodecState
from fnddp.core.layout import in_format_of
from fnddp.core.options import Share, require_share
from fnddp.core.sync import Exchange, State, Sync, require_sums, transform
from fnddp.core.tree import Leaves, Tree, is_compressible, replaced


class Drawn(Sync):
    """A pipeline that sends the same elements of each leaf on all ranks through `inner`; all others become zeros."""

    inner: Sync
    ratio: float | None
    unbiased: bool
    seed: int

    counted: ClassVar[str]
    """Name of the field for a number of elements, instead of `ratio`."""
    hides_nonfinite: ClassVar[Any] = True  # unless their elements are drawn

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sums(self, "and elements that are not drawn come back as zeros")
        require_share(type(self).__name__, self.ratio, self.counted, getattr(self, self.counted))

    @abc.abstractmethod
    def draw(self, path: str, leaf: Tensor, step: int) -> Tensor:
        """Return distinct indices into the flat leaf, as many as `share_of` it."""

    def share_of(self, leaf: Tensor) -> int:
        return Share(self.ratio, getattr(self, self.counted)).of(leaf.numel())

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        drawn = {path: leaf.detach() for path, leaf in leaves.items() if is_compressible(leaf)}
        payload = {path: leaf.new_empty(self.share_of(leaf)) for path, leaf in drawn.items()}
        return CodecState(0, self.inner.init({**leaves, **payload}))

    def exchange(self, leaves: Leaves, state: CodecState) -> Exchange:
        drawn = {path: self.draw(path, leaf, state.step) for path, leaf in leaves.items() if is_compressible(leaf)}
        payload = {path: leaf.reshape(-1)[drawn[path]] if path in drawn else leaf for path, leaf in leaves.items()}

        def decode(of: Leaves) -> Leaves:
            whole = dict(of)
            for path, indices in drawn.items():
                leaf = leaves[path]
                values = of[path] * (leaf.numel() / indices.numel()) if self.unbiased else of[path]
                # Zeros like the values, not the leaf: a simulated mean has no row for each rank.
                flat = values.new_zeros(leaf.numel()).index_copy(0, indices, values)
                whole[path] = in_format_of(leaf, flat.view(leaf.shape))
            return whole

        done = self.inner.exchange(payload, state.inner)
        return replaced(done.decoded(decode), state=CodecState(state.step + 1, done.state))


@transform
class random_k(Drawn):
    """Send k elements of each leaf, drawn anew in each step, and zeros for all others.

    All ranks draw from one seed, so indices need not be sent, payloads can be added, and it wraps any pipeline. A
    fraction 1 - k / n of the elements is left out in each step: wrap it in `error_feedback`. If gradients have few
    large elements, use `topk`: it finds them. If drawing takes too long (it hashes each element, and takes the
    largest k), use `random_block`: it draws one number for each leaf.

    A NaN or infinite element shows in the mean only once it is drawn. Integer leaves are sent whole.

    Args:
        inner: The pipeline of the drawn elements, a flat leaf of k.
        ratio: The fraction of elements to send, in (0, 1], at least one element. Give either `ratio` or `k`.
        k: Number of elements to send of each leaf.
        unbiased: Multiply by n / k, so that the expected mean is the mean; the variance is n / k - 1 times the square.
            Wrong with memory: its residual then grows by n / k - 1 in each step.
        seed: Seed of the draws, the same on all ranks.

    Source: Stich et al., "Sparsified SGD with memory", NeurIPS 2018, definition 2.1 (rand-k).

    >>> from fnddp import allreduce
    >>> sync = random_k(allreduce, k=1)
    >>> grads = {"w": torch.ones(4)}
    >>> first, state = sync(grads, sync.init(grads))
    >>> first["w"].sum(), state.step
    (tensor(1.), 1)
    """

    inner: Sync
    ratio: float | None = None
    k: int | None = None
    unbiased: bool = False
    seed: int = 0

    counted: ClassVar[str] = "k"

    def draw(self, path: str, leaf: Tensor, step: int) -> Tensor:
        lots = random.lots(leaf.numel(), name=path, seed=self.seed, step=step, device=leaf.device)
        return lots.topk(self.share_of(leaf)).indices


@transform
class random_block(Drawn):
    """Send one run of neighbouring elements of each leaf, drawn anew in each step, and zeros for all others.

    A run that reaches the end of a leaf continues at its front, so that all elements are equally likely to be sent. Use
    it like `random_k`. It is the cheapest compressor: a copy. The wrong choice where neighbours are similar (rows of an
    embedding), and for gradients with few large elements.

    Args:
        inner: The pipeline of the run, a flat leaf.
        ratio: The fraction of elements to send, in (0, 1], at least one element. Give either `ratio` or `block`.
        block: Number of elements to send of each leaf.
        unbiased, seed: See `random_k`.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019, section 4.1 (random block).

    >>> from fnddp import allreduce
    >>> sync = random_block(allreduce, block=2)
    >>> grads = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    >>> sync(grads, sync.init(grads))[0]
    {'w': tensor([1., 2., 0., 0.])}
    """

    inner: Sync
    ratio: float | None = None
    block: int | None = None
    unbiased: bool = False
    seed: int = 0

    counted: ClassVar[str] = "block"

    def draw(self, path: str, leaf: Tensor, step: int) -> Tensor:
        n = leaf.numel()
        word = random.integers((1,), bits=31, name=path, seed=self.seed, step=step, device=leaf.device)
        # The high half of the product: uniform over all starts of a leaf of up to 2 ** 31 elements.
        return ((word.long() * n >> 31) + torch.arange(self.share_of(leaf), device=leaf.device)) % n

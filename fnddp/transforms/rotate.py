"""Randomized Hadamard rotations of blocks: outliers are spread over their blocks before codecs of few bits."""

from typing import ClassVar

import torch
from torch import Tensor

from fnddp.core import layout, random, tree
from fnddp.core.codec import wide
from fnddp.core.opaque import rounded
from fnddp.core.options import Limit
from fnddp.core.sync import Exchange, State, Sync, require_sums, transform
from fnddp.core.tree import Leaves, Tree, is_inexact

LARGEST = 1024  # a larger block takes more time: each element costs a product with every element of its block


@transform
class rotate(Sync):
    """Multiply each block of a leaf by an orthonormal matrix, exchange, and multiply the results by its inverse.

    The matrix is a Hadamard matrix with random signs, the same for all blocks, ranks and steps. It spreads an element
    evenly over its block, so that one large element does not set the scale of all others: `rotate(quantize(two_shot,
    bits=4))`. The rotated elements are nearly normally distributed; for two bits use levels made for that distribution:
    `rotate(lloyd_max(two_shot, bits=2))`. It is linear, so payloads still add, and `sent` is exact. It keeps norms, so
    residuals do not grow, and `error_feedback` may be outside or inside. Put `bucketize` outside,
    `bucketize(rotate(...))`: then only each bucket, not each leaf, has a rest of less than a block.

    A block is a run of elements in row-major order. The last elements of a leaf that fill no block, and leaves of
    integers, are left as they are; complex numbers are pairs of elements. `inner` gets the shapes of the leaves, in
    float32 or wider: 16 bits could not hold a block's sum. One NaN or infinity makes its whole block NaN or infinite.

    The wrong choice around codecs that keep each element's relative precision or choose elements (casts, `natural`,
    `topk`); around `quantize(bits=2)`, because it sends only outliers; and for gradients without outliers. It costs a
    product with a matrix of `block` x `block` before and after: with `block=32` on a CPU, each takes about as long as a
    copy. With TF32 enabled (`torch.backends.cuda.matmul`) products are rounded to 11 bits; `sent` includes this.

    Args:
        inner: The pipeline of the rotated leaves: codecs around a carrier.
        block: Elements that are mixed, a power of two from 2 to 1024. Larger flattens more and takes longer.
        seed: Seed of the signs; must be the same on all ranks.

    Source: Jia et al., "SDP4Bit", NeurIPS 2024; Suresh et al., "Distributed mean estimation with limited
    communication", ICML 2017 (stochastic rotated quantization). Deviation: the mean is rotated back, once.

    >>> from fnddp import quantize, two_shot
    >>> grads = {"w": torch.ones(32).index_fill(0, torch.tensor(5), 30.0)}
    >>> for sync in quantize(two_shot, bits=4), rotate(quantize(two_shot, bits=4)):
    ...     print((sync(grads, ())[0]["w"] - grads["w"]).norm() < 3)
    tensor(False)
    tensor(True)
    """

    inner: Sync
    block: int = 32
    seed: int = 0

    wraps_skipping: ClassVar[bool] = True
    limits: ClassVar = {
        "block": Limit(
            lambda block: 2 <= block <= LARGEST and int(block).bit_count() == 1, f"a power of two from 2 to {LARGEST}"
        )
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sums(self, "of elements that are mixed")

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        rotated = [path for path, leaf in leaves.items() if self._has_blocks(leaf)]
        like = {path: torch.empty_like(leaves[path].detach(), dtype=wide(leaves[path].dtype)) for path in rotated}
        return self.inner.init({**leaves, **like})

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        wires = {path: _wire(leaf) for path, leaf in leaves.items() if self._has_blocks(leaf)}
        by = {kind: self._matrix(*kind) for kind in dict.fromkeys((x.dtype, x.device) for x in wires.values())}
        rotated = {path: _times(x, by[x.dtype, x.device], leaves[path]) for path, x in wires.items()}

        def decode(got: Leaves) -> Leaves:
            back = dict(got)
            for path in [path for path in got if path in wires]:
                x, leaf = _wire(got[path]), leaves[path]
                back[path] = rounded(_times(x, by[x.dtype, x.device].mT, leaf), leaf.dtype)
            return back

        return self.inner.exchange({**leaves, **rotated}, state).decoded(decode)

    def _has_blocks(self, leaf: Tensor) -> bool:
        return is_inexact(leaf) and layout.size_of(leaf) >= self.block

    def _matrix(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return D H / sqrt(block), with D of random signs and H[i, j] = (-1) ** (number of bits of i & j)."""
        i = torch.arange(self.block, dtype=torch.int32, device=device)
        odd = random.integers((self.block, 1), bits=1, name="rotate", seed=self.seed, step=0, device=device)
        bits = i.unsqueeze(1) & i
        for at in range(self.block.bit_length() - 1):
            odd = odd ^ torch.bitwise_right_shift(bits, at)
        return (1 - 2 * (odd & 1)).to(dtype) * self.block**-0.5


def _wire(leaf: Tensor) -> Tensor:
    return layout.to_wire(leaf.to(wide(leaf.dtype)))


def _times(wire: Tensor, matrix: Tensor, like: Tensor) -> Tensor:
    """Return `wire`, with each of its blocks multiplied by `matrix`, in the form of the leaf `like`."""
    flat, block = wire.reshape(-1), matrix.shape[0]
    blocks, rest = flat.split([flat.numel() - flat.numel() % block, flat.numel() % block])
    product = (blocks.view(-1, block) @ matrix).view(-1)
    whole = torch.cat([product, rest]) if rest.numel() else product
    return layout.from_wire(whole.view(wire.shape), like)

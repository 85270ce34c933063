"""Block-wise integers: a scale for each block, and 8, 4 or 2 bits for each element."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from fnddp.codecs.packing import block_size, blocks_of, in_blocks, inverse, pack, unpack
from fnddp.core.codec import Carrying, Codec, Form, Key, Payload, wide
from fnddp.core.opaque import shortened
from fnddp.core.options import POSITIVE, Limit, at_least
from fnddp.core.sync import transform
from fnddp.kernels.operator import operator, sample, takes_operators


@transform
class quantize(Codec):
    """Round each element to one of 2 ** bits - 1 even levels in [-s, s], s the largest magnitude of its block.

    Rounding to nearest is biased by at most half a level: below 8 bits, wrap it in `error_feedback`. Stochastic
    rounding is unbiased and has a larger error. The wrong choice for blocks with few large elements, because the others
    round to zero. Smaller blocks help; each adds a scale of 32 bits.

    Args:
        inner: `two_shot` or `allgather`, also within a cast of the scales: `bf16(two_shot)`.
        bits: 8, 4 or 2. Below 8, several elements share a byte.
        block: Number of elements that share a scale, a multiple of 8 / bits. None for a row: a leaf, or a rank's part
            of it.
        rounding: "nearest" (ties to even), or "stochastic": up with a probability equal to the fractional part.
        seed: Seed of stochastic rounding. Ranks round differently.

    Source: Alistarh et al., "QSGD", NeurIPS 2017, but scaled by the largest magnitude instead of the norm; Dettmers,
    "8-bit approximations", ICLR 2016.

    >>> from fnddp import allgather
    >>> quantize(allgather, bits=4, block=4)({"w": torch.tensor([7.0, 3.2, -1.4, 0.0])}, ())[0]
    {'w': tensor([ 7.,  3., -1.,  0.])}
    """

    inner: Carrying
    bits: Literal[8, 4, 2] = 8
    block: int | None = 128
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block is not None and (self.block < 1 or self.block * self.bits % 8):
            raise ValueError(f"quantize: block must be a positive multiple of {8 // self.bits}, got {self.block!r}")
        if self.seed and not self.draws:
            raise ValueError(f"quantize: seed={self.seed} has no effect without rounding='stochastic'; remove it")

    @property
    def draws(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rounding == "stochastic"

    @property
    def form(self) -> Form:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Form("quantize", self.bits, option=self.rounding)

    def encode(self, x: Tensor, key: Key | None = None) -> Payload:
        block = block_size(self.block, x.shape[-1])
        if key is None:
            scale, q = (ENCODE if takes_operators(x) else encode_blocks)(x, self.bits, block)
            return {"scale": scale, "q": q}
        blocks, scale = _scaled(x, self.bits, block)
        q = _rounded_at_random(blocks * inverse(scale).unsqueeze(-1), key, 2 ** (self.bits - 1) - 1)
        return {"scale": scale, "q": pack(q.to(torch.int8), self.bits)}

    def lengths(self, n: int, length: Tensor) -> dict[str, Tensor]:
        return {"scale": blocks_of(length, self.block, n)}

    def unit(self, n: int) -> int:
        return block_size(self.block, n)

    def decode(self, payload: Payload, n: int) -> Tensor:
        scale, q = payload["scale"], payload["q"]
        return (DECODE if takes_operators(q) else decode_blocks)(scale, q, self.bits, block_size(self.block, n), n)


def _scaled(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Return the blocks of `x`, in float32 or wider, and the distance of levels in each."""
    blocks = in_blocks(x.to(wide(x.dtype)), block)
    return blocks, torch.maximum(blocks.amax(-1), -blocks.amin(-1)) / (2 ** (bits - 1) - 1)


def encode_blocks(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Return scales and packed integers of the blocks of rows, rounded to the nearest."""
    blocks, scale = _scaled(x, bits, block)
    return scale, pack((blocks * inverse(scale).unsqueeze(-1)).round().to(torch.int8), bits)


def decode_blocks(scale: Tensor, q: Tensor, bits: int, block: int, n: int) -> Tensor:
    """Return rows of `n` numbers: the inverse of `encode_blocks`."""
    return _decoded(unpack(q, bits, block).to(scale.dtype), scale, n)


ENCODE = operator(
    "quantize",
    "(Tensor x, int bits, SymInt block) -> (Tensor scale, Tensor q)",
    encode_blocks,
    kernel="encode",
    sample=lambda device: (sample(device, 3000).view(3, 1000), 4, 128),
)
DECODE = operator(
    "dequantize",
    "(Tensor scale, Tensor q, int bits, SymInt block, SymInt n) -> Tensor",
    decode_blocks,
    kernel="decode",
    sample=lambda device: (*encode_blocks(sample(device, 3000).view(3, 1000), 4, 128), 4, 128, 1000),
)


BITS = {1: 2, 7: 4, 127: 8}  # largest number of levels: bits of an element, with its sign


@transform
class qsgd(Codec):
    """Round each element to ||x||_2 sign(x_i) l_i / s, where l_i in 0..s is rounded up or down at random: unbiased.

    The variance is at most min(d / s^2, sqrt(d) / s) times ||x||_2^2 over the d elements of a block. Memory is not
    needed; use `error_feedback` only if that factor is below 1. For few levels in large blocks, where the factor is
    sqrt(d) / s, use `quantize(rounding="stochastic")`: it scales by the largest element and wastes fewer levels.

    Args:
        levels: s, in 1..127: 1 takes 2 bits an element, up to 7 take 4, more take 8.
        block: d, the number of elements that share a norm. None for a row: a leaf, or a rank's part of it.
        seed: Seed of the rounding. Ranks round differently.

    Source: Alistarh et al., "QSGD", NeurIPS 2017, section 3.1 and lemma 3.1. Deviation: l_i has a fixed length, so that
    shapes do not depend on values; the paper uses a code of variable length (Elias).

    >>> from fnddp import allgather
    >>> sync = qsgd(allgather, levels=5)
    >>> grads = {"w": torch.tensor([3.0, -4.0, 0.0])}
    >>> sync(grads, sync.init(grads))[0]
    {'w': tensor([ 3., -4.,  0.])}
    """

    inner: Carrying
    levels: int = 7
    block: int | None = 512
    seed: int = 0

    draws = True
    limits: ClassVar = {"levels": Limit(lambda levels: 1 <= levels <= 127, "in 1..127"), "block": at_least(1)}

    def encode(self, x: Tensor, key: Key) -> Payload:  # pyright: ignore[reportIncompatibleMethodOverride]
        blocks = in_blocks(x.to(wide(x.dtype)), self.block)
        # In float64: squares of float32 overflow and underflow. (torch 2.11 traces it wrongly without keepdim.)
        norm = torch.linalg.vector_norm(blocks, dim=-1, keepdim=True, dtype=torch.float64).squeeze(-1).to(blocks.dtype)
        q = _rounded_at_random(blocks * inverse(norm / self.levels).unsqueeze(-1), key, self.levels)
        return {"norm": norm, "q": pack(q.to(torch.int8), self._bits)}

    def lengths(self, n: int, length: Tensor) -> dict[str, Tensor]:
        return {"norm": blocks_of(length, self.block, n)}

    def decode(self, payload: Payload, n: int) -> Tensor:
        q = unpack(payload["q"], self._bits, block_size(self.block, n))
        return _decoded(q, payload["norm"] / self.levels, n)

    @property
    def _bits(self) -> int:
        return next(bits for levels, bits in BITS.items() if self.levels <= levels)


@transform
class terngrad(Codec):
    """Send s sign(x_i) with probability |x_i| / s, else 0, where s is the largest |x_i|: unbiased, in 2 bits.

    Memory is not needed, but the variance is large: sum over i of |x_i| (s - |x_i|). The wrong choice for gradients
    with few large elements, because they make s large: clip them, with a bias, or take smaller blocks. It is
    `quantize(bits=2, rounding="stochastic")` with clipping.

    Args:
        clip: Clip elements at this number of standard deviations of the row first, 2.5 in the paper; None does not
            clip. Clipping is biased, so use `error_feedback`.
        block: Number of elements that share a scale. None for a row: a leaf, or a rank's part of it.
        seed: Seed of the random choices. Ranks choose differently.

    Source: Wen et al., "TernGrad", NeurIPS 2017, equations 2 and 3, and 12 for clipping. Deviation: each rank has its
    own scale; the paper shares one, in another round of communication.

    >>> from fnddp import allgather
    >>> sync = terngrad(allgather)
    >>> grads = {"w": torch.tensor([3.0, -3.0, 0.0])}
    >>> sync(grads, sync.init(grads))[0]
    {'w': tensor([ 3., -3.,  0.])}
    """

    inner: Carrying
    clip: float | None = None
    block: int | None = None
    seed: int = 0

    draws = True
    averages = True
    limits: ClassVar = {"clip": POSITIVE, "block": at_least(1)}

    def encode(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, key: Key, length: Tensor | None = None
    ) -> Payload:
        x = x.to(wide(x.dtype))
        if self.clip is not None:
            bound = self.clip * _spread(x, length)
            x = x.clamp(-bound, bound)
        blocks = in_blocks(x, self.block)
        scale = blocks.abs().amax(-1)
        q = _rounded_at_random(blocks / torch.where(scale > 0, scale, 1).unsqueeze(-1), key, 1)
        return {"scale": scale, "q": pack(q.to(torch.int8), bits=2)}

    def lengths(self, n: int, length: Tensor) -> dict[str, Tensor]:
        return {"scale": blocks_of(length, self.block, n)}

    def decode(self, payload: Payload, n: int) -> Tensor:
        return _decoded(unpack(payload["q"], 2, block_size(self.block, n)), payload["scale"], n)


def _rounded_at_random(q: Tensor, key: Key, largest: int) -> Tensor:
    return (q + key.uniform(q.shape, like=q)).floor().clamp(-largest, largest)


def _decoded(q: Tensor, scale: Tensor, n: int) -> Tensor:
    return shortened((q * scale.unsqueeze(-1)).flatten(-2), n)


def _spread(x: Tensor, length: Tensor | None) -> Tensor:
    """Return the standard deviation of each row, `[rows, 1]`. (Under vmap, x.std() adds in another order.)"""
    if length is None:
        return (x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True).sqrt()
    counted = length.clamp(min=1)
    deviation = x - x.sum(-1, keepdim=True) / counted
    # Padding (zeros) does not count.
    deviation = torch.where(torch.arange(x.shape[1], device=x.device) < length, deviation, 0)
    return (deviation.square().sum(-1, keepdim=True) / counted).sqrt()

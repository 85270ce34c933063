"""Signs: one bit an element and a scale, or votes in two bits."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fnddp.codecs.packing import block_size, blocks_of, in_blocks, is_negative, pack, pack_bits, unpack, unpack_bits
from fnddp.core import layout
from fnddp.core.codec import Carrying, Codec, Form, Layer, Payload, wide
from fnddp.core.opaque import shortened
from fnddp.core.options import Limit
from fnddp.core.sync import Exchange, State, transform
from fnddp.core.tree import Leaves, is_inexact


@transform
class sign(Codec):
    """Send the sign of each element, eight in a byte, and one scale a row.

    If the scale is the mean magnitude, it is a contraction by 1 - ||x||_1^2 / (n ||x||_2^2) and needs `error_feedback`;
    with the largest magnitude it is not a contraction. Zeros count as positive. The wrong choice without a memory, and
    for rows whose elements differ much in size: use chunks.

    Args:
        scale: "mean" magnitude, "max", or "none": plain signs of magnitude 1 (signSGD).
        chunk: Number of elements that share a scale, a multiple of 8. None for a row: a leaf, or a rank's part of it.

    Source: Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019, Algorithm 1.

    >>> from fnddp import allgather
    >>> sign(allgather)({"w": torch.tensor([3.0, -1.0, 0.5, -4.0])}, ())[0]
    {'w': tensor([ 2.1250, -2.1250,  2.1250, -2.1250])}
    """

    inner: Carrying
    scale: Literal["mean", "max", "none"] = "mean"
    chunk: int | None = None

    limits: ClassVar = {"chunk": Limit(lambda chunk: chunk > 0 and chunk % 8 == 0, "a positive multiple of 8")}

    @property
    def averages(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.scale == "mean"

    @property
    def nests(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset({"around"} if self.scale == "none" else {"around", "inside"})

    @property
    def form(self) -> Form | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.averages else Form("sign", 1, self.scale)

    def encode(self, x: Tensor, length: Tensor | None = None) -> Payload:
        chunks = in_blocks(x, self.chunk)
        chunk = chunks.shape[-1]
        payload: Payload = {}
        if self.scale == "max":
            payload["scale"] = torch.maximum(chunks.amax(-1), -chunks.amin(-1)).to(wide(x.dtype))
        elif self.scale == "mean":
            # Padding of a row or of its last chunk does not count.
            left = (x.shape[1] if length is None else length) - chunk * torch.arange(chunks.shape[1], device=x.device)
            payload["scale"] = chunks.to(wide(x.dtype)).abs().sum(-1) / left.clamp(1, chunk)
        return payload | {"bits": pack_bits(is_negative(chunks))}

    def lengths(self, n: int, length: Tensor) -> dict[str, Tensor]:
        return {"scale": blocks_of(length, self.chunk, n)}

    def unit(self, n: int) -> int:
        return block_size(self.chunk, n)

    def decode(self, payload: Payload, n: int) -> Tensor:
        negative = unpack_bits(payload["bits"], block_size(self.chunk, n))  # [rows, chunks, chunk]
        if self.scale == "none":
            return shortened((1 - 2.0 * negative).flatten(-2), n)
        scale = payload["scale"].unsqueeze(-1)
        return shortened((negative.to(scale.dtype) * (-2 * scale) + scale).flatten(-2), n)


NOT_FINITE = -2  # the fourth number of two bits


@transform
class majority_vote(Codec):
    """Send the sign of each element. The mean is the sign of their sum: 1, -1, or 0 where the votes are even.

    Zeros abstain: a rank without a gradient, or of weight 0, does not count. The mean has magnitude 1, so the learning
    rate alone sets the size of a step, and must be tuned for it. Do not use it with memory, because residuals would be
    in units of gradients but corrected in units of 1, nor on two ranks: they agree or tie. If an element is NaN
    or infinite on one rank, its mean is NaN.

    Args:
        inner: A carrier. `two_shot` sends 2 bits an element twice; `allgather` sends them once, but to every rank: use
            it on few ranks.

    Source: Bernstein et al., "signSGD with majority vote is communication efficient and fault tolerant", ICLR 2019,
    Algorithm 1. Deviation: there a zero counts as a vote, in one bit.

    >>> from fnddp import two_shot
    >>> majority_vote(two_shot)({"w": torch.tensor([3.0, -1.0, 0.0])}, ())[0]
    {'w': tensor([ 1., -1.,  0.])}
    """

    inner: Carrying

    nests: ClassVar[Any] = frozenset[str]()  # elements that another codec chose or scaled cannot be voted on

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        done = self.inner.carry((Layer(self),), leaves, state)
        mean, sent = dict(done.mean), dict(done.sent)
        for path, leaf in leaves.items():
            if is_inexact(leaf):
                # Of real and imaginary parts. Over two_shot this is done already, and nothing changes.
                wire = layout.to_wire(done.mean[path])
                mean[path] = layout.from_wire(torch.where(wire.isnan(), wire, wire.sign()), done.mean[path])
                sent[path] = done.sent[path] + (mean[path] - done.mean[path])
        return Exchange(mean, sent, done.state)

    def encode(self, x: Tensor) -> Payload:
        return {"votes": pack(torch.where(x.isfinite(), x.sign(), NOT_FINITE).to(torch.int8), bits=2)}

    def unit(self, n: int) -> int:
        return n

    def decode(self, payload: Payload, n: int) -> Tensor:
        votes = unpack(payload["votes"], 2, n)
        return torch.where(votes == NOT_FINITE, torch.nan, votes.float())

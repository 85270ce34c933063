"""Majority vote: the sign of the sum of signs."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from fnddp.codecs.packing import pack, unpack
from fnddp.core import layout
from fnddp.core.codec import Codec, Layer, Payload
from fnddp.core.sync import Exchange, State, Sync, transform
from fnddp.core.tree import Leaves, is_inexact

NOT_FINITE = -2  # the fourth number of two bits


@transform
class majority_vote(Codec):
    """Send the sign of each element; the mean is the sign of their sum: 1, -1, or 0 where the votes are even.

    Zeros abstain: a rank without a gradient, or of weight 0, does not count. The mean's magnitude is 1, so the learning
    rate alone sets the size of a step. The wrong choice without a rate made for it; with memory, whose residuals are
    measured in gradients and are corrected in units of 1; and on two ranks, which either agree or tie.

    The difference between the vote and the mean of the votes is a loss like any other. Over `two_shot` the owner of a
    chunk has it, n times; over `allgather` each rank has its share. An element that is not finite makes its mean NaN.

    Args:
        inner: A carrier. `two_shot` sends 2 bits an element twice, and `allgather` once, but to all ranks: for few.

    Shapes: votes `[rows, ceil(n / 4)]`.

    Source: Bernstein et al., "signSGD with majority vote is communication efficient and fault tolerant", ICLR 2019,
    Algorithm 1. Deviation: there a zero votes as a sign does, in one bit.

    >>> from fnddp import two_shot
    >>> majority_vote(two_shot)({"w": torch.tensor([3.0, -1.0, 0.0])}, ())[0]
    {'w': tensor([ 1., -1.,  0.])}
    """

    inner: Sync

    has_fractions: ClassVar[Any] = False
    carries: ClassVar[Any] = False  # of what another codec has chosen or scaled there is nothing to vote on

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        done = self.inner.carry((Layer(self),), leaves, state)
        mean, sent = dict(done.mean), dict(done.sent)
        for path, leaf in leaves.items():
            if is_inexact(leaf):
                # Over two_shot this is done already, and nothing changes.
                mean[path] = _sign(done.mean[path])
                sent[path] = done.sent[path] + (mean[path] - done.mean[path])
        return Exchange(mean, sent, done.state)

    def encode(self, x: Tensor) -> Payload:
        return {"votes": pack(torch.where(x.isfinite(), x.sign(), NOT_FINITE).to(torch.int8), bits=2)}

    def decode(self, payload: Payload, n: int) -> Tensor:
        votes = unpack(payload["votes"], 2, n)
        return torch.where(votes == NOT_FINITE, torch.nan, votes.float())


def _sign(mean: Tensor) -> Tensor:
    """Return signs, of real and imaginary parts by themselves, in the memory format of `mean`; NaN stays."""
    wire = layout.to_wire(mean)
    return layout.from_wire(torch.where(wire.isnan(), wire, wire.sign()), mean)

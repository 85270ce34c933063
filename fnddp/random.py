"""Random numbers as a pure function of a key: the same on every rank, traceable, and without any global generator.

A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) from a 32-bit
multiply-xorshift hash, in aten integer operations. Statistically good enough for random projections; not for secrets.
"""

import math
import zlib

import torch
from torch import Tensor

_LOW_32 = 0xFFFFFFFF


def normal(shape: tuple[int, ...], *, name: str, seed: int, step: int, like: Tensor) -> Tensor:
    """Standard normal numbers, as a function of `name`, `seed` and `step` alone.

    Args:
        shape: The shape of the result.
        name: Tells leaves apart: equal shapes get different numbers.
        seed: The user's seed.
        step: Tells exchanges apart; may be symbolic under torch.compile.
        like: The result has its dtype and device.

    >>> one = normal((1000,), name="w", seed=0, step=0, like=torch.empty(0))
    >>> bool((one == normal((1000,), name="w", seed=0, step=0, like=torch.empty(0))).all())
    True
    >>> abs(one.mean()) < 0.1 and abs(one.std() - 1) < 0.1
    tensor(True)
    """
    key = _hash(torch.full((), zlib.crc32(f"{seed}:{name}".encode()), dtype=torch.int64, device=like.device))
    key = _hash(key ^ _hash(torch.full((), step, dtype=torch.int64, device=like.device)))
    counter = torch.arange(math.prod(shape), dtype=torch.int64, device=like.device)
    word = _hash((counter ^ key) & _LOW_32)
    radius = (-2 * _uniform(word).log()).sqrt()
    angle = 2 * math.pi * _uniform(_hash(word ^ 0x5BD1E995))
    return (radius * angle.cos()).reshape(shape).to(like.dtype)


def _uniform(word: Tensor) -> Tensor:
    return (word.to(torch.float64) + 0.5) * 2.0**-32  # in (0, 1), never 0: its logarithm is taken


def _hash(word: Tensor) -> Tensor:
    # Multipliers below 2**31 keep every product of a 32-bit word within int64.
    for multiplier, shift in ((0x7FEB352D, 16), (0x1B873593, 15), (0x45D9F3B, 16)):
        word = ((word ^ (word >> shift)) * multiplier) & _LOW_32
    return word ^ (word >> 16)

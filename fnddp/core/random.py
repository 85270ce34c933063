"""Random numbers as a pure function of a key: the same on every rank, traceable, and without any global generator.

A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) from a 32-bit
multiply-xorshift hash, in aten operations on int32, where sums and products wrap around. Statistically good enough for
random projections; not for secrets.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fnddp.core.opaque import product
from fnddp.core.tree import without_wrappers
from fnddp.torch_private import has_modes

_LOW_32 = 0xFFFFFFFF


def normal(shape: tuple[int, ...], *, name: str, seed: int, step: int, like: Tensor) -> Tensor:
    """Return standard normal numbers, in dtype and on the device of `like`, as a function of the other arguments alone.

    Args:
        shape: The shape of the result.
        name: Name of the leaf: each leaf gets different numbers.
        seed: The user's seed.
        step: The number of the exchange; may be symbolic under torch.compile.

    >>> one = normal((1000,), name="w", seed=0, step=0, like=torch.empty(0))
    >>> abs(one.mean()) < 0.1 and abs(one.std() - 1) < 0.1
    tensor(True)
    """
    if like.is_meta and not has_modes():  # a trace needs the operations
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    counter = 2 * torch.arange(math.prod(shape), dtype=torch.int32, device=like.device)  # two words make one number
    counter = counter + _offset(name, seed, step, 0, like.device)
    radius = (-2 * _uniform(counter).log()).sqrt()
    angle = 2 * math.pi * _uniform(counter + 1)
    return (radius * angle.cos()).reshape(shape).to(like.dtype)  # Box and Muller


def uniform(
    shape: tuple[int, ...], *, name: str, seed: int, step: Any, rank: Any = 0, device: torch.device | None = None
) -> Tensor:
    """Return numbers uniform in (0, 1), in float32, as a function of the arguments alone: see `normal`.

    `rank` is an int, or a tensor where ranks are simulated.

    >>> one = uniform((1000,), name="w", seed=0, step=0)
    >>> abs(one.mean() - 0.5) < 0.05, bool((one == uniform((1000,), name="w", seed=0, step=0, rank=1)).any())
    (tensor(True), False)
    """
    word = _words(shape, name, seed, step, rank, device)
    # 23 bits with their sign, doubled and made odd: no step rounds, so a fused one gives the same bits; never 0 or 1.
    return torch.bitwise_right_shift(word, 9).float() * 2.0**-23 + (0.5 + 2.0**-24)


def integers(
    shape: tuple[int, ...],
    *,
    bits: int,
    name: str,
    seed: int,
    step: Any,
    rank: Any = 0,
    device: torch.device | None = None,
) -> Tensor:
    """Return integers uniform in [0, 2 ** bits), in int32, with `bits` of 1 to 31; the other arguments as `uniform`.

    >>> integers((3,), bits=4, name="w", seed=0, step=0)
    tensor([ 0,  8, 14], dtype=torch.int32)
    """
    return _shifted(_words(shape, name, seed, step, rank, device), 32 - bits)


def lots(n: int, *, name: str, seed: int, step: Any, device: torch.device | None = None) -> Tensor:
    """Draw `n` distinct int32 numbers, equal on all ranks: the indices of the largest k are k random indices.

    The hash is a bijection (shifts by half a word and odd factors have inverses), so up to 2 ** 32 numbers have no
    ties. (Devices would break ties differently.)

    >>> lots(3, name="w", seed=0, step=0).topk(3).indices
    tensor([0, 2, 1])
    """
    counter = torch.arange(n, dtype=torch.int32, device=device)
    return _hash(counter + _offset(name, seed, step, 0, device))


def _words(shape: tuple[int, ...], name: str, seed: int, step: Any, rank: Any, device: torch.device | None) -> Tensor:
    """Return 32 random bits for each element; the highest bits are the best."""
    counter = torch.arange(math.prod(shape), dtype=torch.int32, device=device).reshape(shape)
    return _mixed(counter + _offset(name, seed, step, rank, device))


def _offset(name: str, seed: int, step: Any, rank: Any, device: torch.device | None) -> Tensor:
    # The step may be symbolic, so it enters as a tensor.
    if not isinstance(step, Tensor):
        step = torch.full((), step, dtype=torch.int64, device=device)
    return (step * 0x9E3779B9 + key_of(name, seed) + rank * 0x85EBCA6B).to(torch.int32)


def key_of(name: str, seed: int) -> int:
    """Return the number that stands for a leaf's name and a seed."""
    # FNV-1a in plain Python arithmetic, because Dynamo folds it; Dynamo cannot trace zlib.crc32.
    word = 0x811C9DC5
    for character in f"{seed}:{without_wrappers(name)}":
        word = ((word ^ ord(character)) * 0x01000193) & _LOW_32
    return word


def _uniform(counter: Tensor) -> Tensor:
    word = _hash(counter).to(torch.int64) & _LOW_32
    return (word.to(torch.float64) + 0.5) * 2.0**-32  # in (0, 1), never 0, because its logarithm is taken


def _hash(counter: Tensor) -> Tensor:
    word = _mixed(counter)
    return word ^ _shifted(word, 16)


def _mixed(counter: Tensor) -> Tensor:
    # Few rounds: Inductor inlines the chain, and every round doubles it; and each is four passes over memory.
    word = product(counter ^ _shifted(counter, 16), 0x7FEB352D)
    return product(word ^ _shifted(word, 15), 0x68E31DA5)


def _shifted(word: Tensor, by: int) -> Tensor:
    # The mask removes copies of the sign. Not `>>`: its out= form makes new memory in each step, and copies.
    return torch.bitwise_right_shift(word, by) & (_LOW_32 >> by)

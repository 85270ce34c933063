"""Outer steps of the literature that are compositions of `diloco` with a pipeline."""

from typing import Literal

from fnddp.codecs.lloyd_max import lloyd_max
from fnddp.codecs.quantize import quantize
from fnddp.codecs.topk import topk
from fnddp.core.codec import Carrying
from fnddp.outer.contract import Outer, outers
from fnddp.outer.steps.diloco import diloco
from fnddp.reducers.carriers import allgather, two_shot
from fnddp.transforms.bucketize import bucketize
from fnddp.transforms.memory import error_feedback


def sparse_loco(
    every: int = 30,
    *,
    k: int = 64,
    chunk: int = 4096,
    bits: Literal[8, 4, 2] = 2,
    decay: float = 0.95,
    lr: float = 1.0,
    carrier: Carrying = allgather,
) -> Outer:
    """Return SparseLoCo: the largest differences of each chunk, in few bits; decaying memory, no outer momentum.

    The bytes that a rank receives grow with the number of ranks: it is meant for few ranks with slow links.

    Args:
        every, lr: See `diloco`.
        k: Differences sent of each chunk: a multiple of 8 / bits.
        chunk: Elements of a chunk.
        bits: Bits of each value: 8, 4 or 2.
        decay: Factor on the memory of differences that were not sent.
        carrier: The carrier of payloads.

    Source: Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", arXiv 2508.15706, Algorithm 1;
    its quantizer has a table of values for each chunk, this one multiples of the largest value of a chunk.

    >>> sparse_loco(every=30)
    diloco(error_feedback(bucketize(topk(quantize(allgather, bits=2, block=64), k=64, chunk=4096)), decay=0.95),
    every=30, lr=1.0, momentum=0)
    """
    sent = bucketize(topk(quantize(carrier, bits=bits, block=k), k=k, chunk=chunk))
    return diloco(error_feedback(sent, decay=decay), every=every, lr=lr, momentum=0)


def muloco(
    every: int = 30,
    *,
    bits: Literal[1, 2, 3, 4] = 2,
    decay: float = 1.0,
    lr: float = 0.7,
    momentum: float = 0.9,
    carrier: Carrying = two_shot,
) -> Outer:
    """Return MuLoCo's outer half: DiLoCo on differences of few bits, with memory. The other half is a local Muon.

    `torch.optim.Muon` takes matrices only, so scripts have a second optimizer: attach to the one that steps last.

    Args:
        every, lr, momentum: See `diloco`.
        bits: Bits of each difference, 1 to 4.
        decay, carrier: See `sparse_loco`.

    Source: Thérien et al., "MuLoCo", arXiv 2505.23725, Algorithm 1 with quantization and error feedback; with levels
    that are not evenly spaced, as there: two bits of `quantize` train much worse.

    >>> muloco(every=30)
    diloco(error_feedback(bucketize(lloyd_max(two_shot))), every=30)
    """
    sent = bucketize(lloyd_max(carrier, bits=bits))
    return diloco(error_feedback(sent, decay=decay), every=every, lr=lr, momentum=momentum)


outers.add("sparse_loco", sparse_loco)
outers.add("muloco", muloco)

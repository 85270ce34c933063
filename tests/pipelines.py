"""Pipelines and gradient trees for the laws: one per registered name, and nestings drawn by hypothesis."""

from collections.abc import Callable
from typing import Any

import optree
from hypothesis import strategies as st

import fnddp
from fnddp import Sync, allgather, allreduce, laws, two_shot
from fnddp.core.sync import all_in
from fnddp.transforms.orthogonalize import METHODS

# One expression for each registered name; a new transform gets a line here and inherits every law.
EXAMPLES = {
    "allreduce": "allreduce",
    "all_reduce": "all_reduce(op='sum')",
    "hierarchical": "hierarchical(fp16(none))",  # a node alone; several are in test_hierarchical.py
    "cast": "cast(allreduce, 'float64')",
    "fp16": "fp16(allreduce)",
    "bf16": "bf16(allreduce)",
    "bucketize": "bucketize(allreduce, cap_mb=0.001, first_cap_mb=0.0001)",
    "squared": "squared(powersgd(allreduce, rank=2))",
    "powersgd": "powersgd(fp16(allreduce), rank=2)",
    "batched_powersgd": "batched_powersgd(allreduce, rank=2)",
    "error_feedback": "error_feedback(powersgd(fp16(allreduce), rank=2))",
    "ef21": "ef21(topk(allgather, ratio=0.25), eta=0.5)",
    "momentum_correction": "momentum_correction(warmup(topk(allgather, k=2), 1, before=topk(allgather, k=9)))",
    "shared_momentum": "shared_momentum(error_feedback(sign(allgather, chunk=24)), beta=0.7)",
    "warmup": "warmup(powersgd(allreduce, warm_start=False), steps=1, before=fp16(allreduce))",
    "every": "every(2, powersgd(fp16(allreduce), rank=2))",
    "switch": "switch({0: error_feedback(powersgd(allreduce)), 2: error_feedback(powersgd(allreduce, rank=2))})",
    "delayed": "delayed(fp16(allreduce))",
    "skip_nonfinite": "skip_nonfinite(error_feedback(powersgd(fp16(allreduce), rank=2)))",
    "clip_by_global_norm": "clip_by_global_norm(fp16(allreduce), max_norm=2.5)",
    "measure": "measure(powersgd(allreduce, rank=2), every_steps=2)",
    "partition": "partition({'*weight': error_feedback(powersgd(allreduce)), '*': bf16(allreduce)})",
    "none": "none",
    "unreduced": "unreduced()",
    "allgather": "fp16(allgather)",
    "all_gather": "all_gather()",
    "two_shot": "two_shot(server_memory=True)",
    "two_shot_mean": "bf16(two_shot_mean())",
    "random_k": "error_feedback(random_k(fp16(allreduce), ratio=0.3))",
    "random_block": "random_block(bf16(two_shot), block=7, unbiased=True)",
    "topk": "topk(quantize(allgather, bits=4, rounding='stochastic'), k=5, chunk=32)",
    "quantize": "quantize(bf16(two_shot), bits=2, block=16)",
    "fp8": "fp8(two_shot, block=16)",
    "sign": "error_feedback(sign(allgather, chunk=24))",
    "majority_vote": "majority_vote(two_shot)",
    "qsgd": "qsgd(two_shot, levels=3, block=20)",
    "terngrad": "terngrad(allgather, clip=2.5)",
    "natural": "natural(two_shot)",
    "dct_topk": "dct_topk(bf16(allgather), chunk=8, k=6)",
}

LOSSLESS = [
    "allreduce",
    "hierarchical(none)",
    "hierarchical(none, shard=False)",
    "cast(allreduce, 'float64')",
    "bucketize(allreduce, cap_mb=0.001, first_cap_mb=0.0001)",
    "squared(allreduce)",
    "warmup(bucketize(allreduce), steps=1)",
    "error_feedback(bucketize(squared(allreduce)))",
    "partition({'*weight': error_feedback(allreduce), '*': allreduce})",
]


CARRIERS = [allgather, two_shot, two_shot(server_memory=True)]
INNER_CODECS: list[Callable[[Sync], Sync]] = [
    lambda inner: inner,
    fnddp.bf16,
    lambda inner: fnddp.topk(inner, ratio=0.3),
    lambda inner: fnddp.topk(inner, k=3, chunk=16),
    lambda inner: fnddp.quantize(inner, bits=4, block=10),
    lambda inner: fnddp.quantize(inner, rounding="stochastic", block=None),
    lambda inner: fnddp.fp8(inner, "e5m2"),
    fnddp.sign,
    lambda inner: fnddp.qsgd(inner, levels=5, seed=3),
    lambda inner: fnddp.terngrad(inner, block=9),
    fnddp.natural,
]
NO_FRACTIONS = (fnddp.natural, fnddp.majority_vote)  # in their payloads that a codec inside could encode
CODECS = [*INNER_CODECS, fnddp.majority_vote, lambda inner: fnddp.dct_topk(inner, chunk=6, k=4)]


@st.composite
def bottoms(draw: st.DrawFn) -> Sync:
    """A reducer, or a carrier in up to two codecs."""
    if draw(st.booleans()):
        return allreduce
    carrier, inner, outer = draw(st.tuples(*map(st.sampled_from, (CARRIERS, INNER_CODECS, CODECS))))
    return outer(carrier if outer in NO_FRACTIONS else inner(carrier))


MEMORY = ["error_feedback", "ef21", "momentum_correction"]
POWERSGD_FORMS: list[dict[str, Any]] = [
    {},
    {"warm_start": False},
    {"alternate": True},
    {"refresh": 2},
    {"alternate": True, "refresh": 3},
]


@st.composite
def nestings(draw: st.DrawFn, depth: int = 4) -> Sync:
    """A random pipeline at most `depth` transforms deep, around a reducer or codecs."""
    if depth == 0:
        return draw(bottoms())
    inner = draw(nestings(depth=depth - 1))
    kinds = ["keep", "cast", "bucketize", "squared", "powersgd", "random_k", "warmup", "partition"]
    if not any(each.remembers for each in all_in(inner)):
        kinds += MEMORY
    if not any(isinstance(each, fnddp.shared_momentum | fnddp.momentum_correction) for each in all_in(inner)):
        kinds += ["shared_momentum"]
    match draw(st.sampled_from(kinds)):
        case "cast":
            return draw(st.sampled_from([fnddp.fp16, fnddp.bf16, lambda s: fnddp.cast(s, "float32")]))(inner)
        case "bucketize":
            return fnddp.bucketize(inner, cap_mb=draw(st.sampled_from([0.0005, 25])), first_cap_mb=0.0002)
        case "squared":
            return fnddp.squared(inner)
        case "powersgd":
            return fnddp.powersgd(
                inner,
                rank=draw(st.integers(1, 5)),
                **draw(st.sampled_from(POWERSGD_FORMS)),
                min_compression_rate=draw(st.sampled_from([0, 1, 2])),
                orthogonalization=draw(st.sampled_from(METHODS)),
                seed=draw(st.integers(0, 3)),
            )
        case "random_k":
            return fnddp.random_k(inner, ratio=draw(st.sampled_from([0.2, 1])), unbiased=draw(st.booleans()))
        case "error_feedback":
            return fnddp.error_feedback(inner, decay=draw(st.sampled_from([1.0, 0.5])))
        case "ef21":
            return fnddp.ef21(inner, eta=draw(st.sampled_from([1.0, 0.5])))
        case "momentum_correction":
            return fnddp.momentum_correction(inner, momentum=0.5, masking=draw(st.booleans()))
        case "shared_momentum":
            return fnddp.shared_momentum(inner, beta=draw(st.sampled_from([0.9, 0.5])))
        case "warmup":
            return fnddp.warmup(inner, steps=draw(st.integers(0, 2)), before=draw(nestings(depth=depth - 1)))
        case "partition":
            return fnddp.partition({"*": inner})
    return inner


@optree.dataclasses.dataclass(namespace="fnddp")
class Head:
    weight: Any
    scale: Any


def mixed(rank: int, step: int) -> Any:
    """The tree of that name with a node of a registered class in it."""
    tree = laws.mixed(rank, step)
    return {**tree, "head": Head(*tree["head"])}


TREES = {**laws.TREES, "mixed": mixed}


def grads(name: str, rank: int, step: int = 0) -> Any:
    """This rank's gradients in the tree `name`: another draw for each rank and step."""
    return TREES[name](rank, step)

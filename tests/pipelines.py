"""Pipelines and gradient trees for the laws: one per registered name, and nestings drawn by hypothesis."""

from typing import Any

import optree
from hypothesis import strategies as st

import fnddp
from fnddp import Sync, allreduce, laws
from fnddp.transforms.orthogonalize import METHODS

# One expression for each registered name; a new transform gets a line here and inherits every law.
EXAMPLES = {
    "allreduce": "allreduce",
    "all_reduce": "all_reduce(op='sum')",
    "cast": "cast(allreduce, 'float64')",
    "fp16": "fp16(allreduce)",
    "bf16": "bf16(allreduce)",
    "bucketize": "bucketize(allreduce, cap_mb=0.001, first_cap_mb=0.0001)",
    "squared": "squared(powersgd(allreduce, rank=2))",
    "powersgd": "powersgd(fp16(allreduce), rank=2)",
    "batched_powersgd": "batched_powersgd(allreduce, rank=2)",
    "error_feedback": "error_feedback(powersgd(fp16(allreduce), rank=2))",
    "warmup": "warmup(powersgd(allreduce, warm_start=False), steps=1, before=fp16(allreduce))",
    "partition": "partition({'*weight': error_feedback(powersgd(allreduce)), '*': bf16(allreduce)})",
}

LOSSLESS = [
    "allreduce",
    "cast(allreduce, 'float64')",
    "bucketize(allreduce, cap_mb=0.001, first_cap_mb=0.0001)",
    "squared(allreduce)",
    "warmup(bucketize(allreduce), steps=1)",
    "error_feedback(bucketize(squared(allreduce)))",
    "partition({'*weight': error_feedback(allreduce), '*': allreduce})",
]


@st.composite
def nestings(draw: st.DrawFn, depth: int = 4) -> Sync:
    """A random pipeline at most `depth` transforms deep."""
    if depth == 0:
        return allreduce
    inner = draw(nestings(depth=depth - 1))
    kinds = ["keep", "cast", "bucketize", "squared", "powersgd", "error_feedback", "warmup", "partition"]
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
                warm_start=draw(st.booleans()),
                min_compression_rate=draw(st.sampled_from([0, 1, 2])),
                orthogonalization=draw(st.sampled_from(METHODS)),
                seed=draw(st.integers(0, 3)),
            )
        case "error_feedback":
            return fnddp.error_feedback(inner, decay=draw(st.sampled_from([1.0, 0.5])))
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

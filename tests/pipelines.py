"""Pipelines and gradient trees for the laws: one per registered name, and nestings drawn by hypothesis."""

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
from hypothesis import strategies as st

import fnddp
from fnddp import Sync, allreduce, laws
from fnddp.core.codec import Carrier, Layer, Layers
from fnddp.core.sync import all_in

METHODS = ("cholesky", "qr", "gram_schmidt")  # of powersgd

# One expression for each registered name; a new transform gets a line here and inherits every law.
EXAMPLES = {
    "allreduce": "allreduce",
    "all_reduce": "all_reduce(op='sum')",
    "hierarchical": "hierarchical(fp16(none))",  # a node alone; several are in test_hierarchical.py
    "cast": "cast(powersgd(allreduce, rank=2), 'bfloat16', rounding='stochastic')",
    "fp16": "fp16(allreduce)",
    "bf16": "bf16(allreduce)",
    "bucketize": "bucketize(allreduce, cap_mb=0.001, first_cap_mb=0.0001)",
    "squared": "squared(powersgd(allreduce, rank=2, alternate=True))",
    "powersgd": "powersgd(fp16(allreduce), rank=2)",
    "batched_powersgd": "batched_powersgd(allreduce, rank=2)",
    "error_feedback": "error_feedback(powersgd(fp16(allreduce), rank=2))",
    "ef21": "ef21(topk(allgather, ratio=0.25), eta=0.5)",
    "momentum_correction": "momentum_correction(warmup(topk(allgather, k=2), 1, before=topk(allgather, k=9)))",
    "shared_momentum": "shared_momentum(error_feedback(sign(allgather, chunk=24)), beta=0.7)",
    "warmup": "warmup(powersgd(allreduce, warm_start=False), steps=1, before=fp16(allreduce))",
    "every": "every(2, powersgd(fp16(allreduce), rank=2))",
    "switch": "switch({0: error_feedback(powersgd(allreduce)), 2: error_feedback(powersgd(allreduce, rank=2))})",
    "clip_by_global_norm": "clip_by_global_norm(bucketize(squared(fp16(every(2, allreduce)))), max_norm=2.5)",
    "weighted": "weighted(error_feedback(powersgd(bf16(allreduce), rank=2)))",
    "measure": "measure(powersgd(allreduce, rank=2, refresh=2), every_steps=2)",
    "partition": "partition({'*weight': error_feedback(powersgd(allreduce)), '*': bf16(allreduce)})",
    "none": "none",
    "unreduced": "unreduced()",
    "allgather": "fp16(allgather)",
    "all_gather": "all_gather()",
    "two_shot": "two_shot(server_memory=True)",
    "two_shot_mean": "bf16(two_shot_mean())",
    "to_owners": "error_feedback(quantize(to_owners(), bits=4))",
    "to_all": "quantize(to_all(), bits=4, rounding='stochastic')",
    "random_k": "error_feedback(random_k(fp16(allreduce), ratio=0.3), residual='int8')",
    "random_block": "random_block(bf16(two_shot), block=7, unbiased=True)",
    "rotate": "error_feedback(rotate(quantize(two_shot, bits=4), block=16))",
    "topk": "topk(quantize(allgather, bits=4, rounding='stochastic'), k=5, chunk=32)",
    "quantize": "quantize(bf16(two_shot), bits=2, block=16)",
    "fp8": "fp8(two_shot, block=16)",
    "lloyd_max": "lloyd_max(two_shot, bits=3, block=16)",
    "sign": "error_feedback(sign(allgather, chunk=24))",
    "majority_vote": "majority_vote(two_shot)",
    "qsgd": "qsgd(two_shot, levels=3, block=20)",
    "terngrad": "terngrad(allgather, clip=2.5)",
    "natural": "natural(two_shot)",
    "dct_topk": "dct_topk(bf16(allgather), chunk=8, k=6)",
}

HALVES = ("to_owners", "to_all")
"""Examples of a half of a mean, which gives ranks other leaves."""

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


CARRIERS = ["allgather", "two_shot", "two_shot(server_memory=True)"]
CODECS = [
    "topk({}, k=3)",
    "topk({}, ratio=0.1, chunk=16)",
    "topk({}, k=64, chunk=4096)",
    "quantize({})",
    "quantize({}, bits=4, block=10)",
    "quantize({}, bits=2, block=None)",
    "quantize({}, bits=4, block=None, rounding='stochastic')",
    "fp8({})",
    "fp8({}, format='e5m2', block=None)",
    "lloyd_max({})",
    "lloyd_max({}, bits=1, block=None)",
    "lloyd_max({}, bits=3, block=16)",
    "lloyd_max({}, bits=4, block=24)",
    "fp8({}, format='e2m1', block=6)",
    "fp8({}, block=32, scale='e8m0')",
    "fp8({}, format='e5m2', block=None, scale='e8m0')",
    "fp8({}, format='e2m1', block=32, scale='e8m0')",
    "sign({})",
    "sign({}, scale='max', chunk=16)",
    "sign({}, scale='none')",
    "majority_vote({})",
    "qsgd({}, levels=1)",
    "qsgd({}, levels=7, block=None)",
    "qsgd({}, levels=100, block=9)",
    "terngrad({})",
    "terngrad({}, clip=2.5, block=10)",
    "natural({})",
    "dct_topk({})",
    "dct_topk({}, chunk=4, k=3)",
]
CASTS = ["{}", "bf16({})", "cast({}, 'float16', rounding='stochastic', seed=3)"]
# In payloads of these there are none that a codec inside could encode.
NO_FRACTIONS = ("natural", "majority_vote", "scale='none'", "e8m0")


def layers_of(text: str) -> Layers:
    """Return all codecs of a pipeline, the outermost first."""
    layers, codec = list[Layer](), fnddp.parse(text)
    while not isinstance(codec, Carrier):
        layers.append(Layer(codec, getattr(codec, "seed", 0)))
        codec = codec.inner
    return tuple(layers)


@st.composite
def bottoms(draw: st.DrawFn) -> Sync:
    """A reducer, or a carrier in up to two codecs."""
    if draw(st.booleans()):
        return allreduce
    carrier, outer = draw(st.sampled_from(CARRIERS)), draw(st.sampled_from([*CASTS, *CODECS]))
    if not any(each in outer for each in NO_FRACTIONS):
        inside = [each for each in CODECS if not each.startswith(("majority_vote", "dct_topk"))]
        carrier = draw(st.sampled_from([*CASTS, *inside])).format(carrier)
    return fnddp.parse(outer.format(carrier))


TRANSFORMS: list[Callable[[Sync], Sync]] = [
    lambda inner: inner,
    *(fnddp.fp16, fnddp.bf16, partial(fnddp.cast, dtype="float32")),
    partial(fnddp.cast, dtype="bfloat16", rounding="stochastic"),
    *(partial(fnddp.bucketize, cap_mb=cap_mb, first_cap_mb=0.0002) for cap_mb in (0.0005, 25)),
    fnddp.squared,
    *(partial(fnddp.random_k, ratio=ratio, unbiased=ratio < 1) for ratio in (0.2, 1)),
    *(partial(fnddp.rotate, block=block) for block in (4, 32)),
    lambda inner: fnddp.partition({"*": inner}),
]
MEMORY = [
    *(partial(fnddp.error_feedback, decay=decay) for decay in (1.0, 0.5)),
    partial(fnddp.error_feedback, residual="int8"),
    *(partial(fnddp.ef21, eta=eta) for eta in (1.0, 0.5)),
    *(partial(fnddp.momentum_correction, momentum=0.5, masking=masking) for masking in (False, True)),
]
SHARED_MOMENTUM = [partial(fnddp.shared_momentum, beta=beta) for beta in (0.9, 0.5)]
POWERSGD = st.builds(
    lambda form, **options: partial(fnddp.powersgd, **form, **options),
    st.sampled_from(
        [{}, {"warm_start": False}, {"alternate": True}, {"refresh": 2}, {"alternate": True, "refresh": 3}]
    ),
    rank=st.integers(1, 5),
    min_compression_rate=st.sampled_from([0, 1, 2]),
    orthogonalization=st.sampled_from(METHODS),
    seed=st.integers(0, 3),
)


@st.composite
def nestings(draw: st.DrawFn, depth: int = 4) -> Sync:
    """A random pipeline at most `depth` transforms deep, around a reducer or codecs."""
    if depth == 0:
        return draw(bottoms())
    sync, before = draw(nestings(depth=depth - 1)), nestings(depth=depth - 1)
    warmup = st.builds(partial, st.just(fnddp.warmup), before=before, steps=st.integers(0, 2))
    forms, known = list(TRANSFORMS), [*all_in(sync)]
    if not any(each.remembers for each in known):
        forms += MEMORY
    if not any(isinstance(each, fnddp.shared_momentum | fnddp.momentum_correction) for each in known):
        forms += SHARED_MOMENTUM
    around = draw(st.sampled_from([*map(st.just, forms), POWERSGD, POWERSGD, warmup]))
    return draw(around)(sync)


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

"""The laws of a pipeline (DESIGN.md, section 3), each stated once, as a function that every rank runs.

A law takes `(rank, sync, tree)`: a pipeline and the name of a tree in `pipelines.grads`.
"""

import copy
import io
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fnddp
from fnddp import Sync, tree
from fnddp.plan.draft import Donation
from fnddp.plan.ir import LeafSpec
from fnddp.run.engine import Engine, Synchronized
from fnddp.state import describe, parts
from fnddp.wire.agreement import description
from tests.pipelines import grads

STEPS = 4

# What the adapters let a step write over: jit, value_and_grad, DistributedDataParallel, register.
DONATIONS = [Donation(), Donation("yes"), Donation("yes", True), Donation("at_end", True)]
SMALL_BUCKETS = {"bucket_caps": (200, 500)}  # so that the trees take several slots


def gather(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def bits(value: Any) -> Any:
    """Something that compares equal exactly where every bit of every tensor does."""
    leaves = [part.value for part in parts(value)]
    return [x.cpu().contiguous().reshape(-1).view(torch.uint8).tolist() if isinstance(x, Tensor) else x for x in leaves]


def run(
    sync: Sync, name: str, rank: int, steps: int = STEPS, state: Any = None, first: int = 0
) -> tuple[list[Any], Any]:
    """The means of `steps` exchanges and the last state."""
    state = sync.init(grads(name, rank)) if state is None else state
    means = []
    for step in range(first, first + steps):
        mean, state = sync(grads(name, rank, step), state)
        means.append(mean)
    return means, state


def precision(sync: Sync, leaf: Tensor) -> float:
    """The relative rounding error of one operation on `leaf`'s way through `sync`, in its coarsest dtype.

    Alone, a rank's wire has no sum to round: what a cast loses is then to be accounted for to the leaf's own precision.
    """
    text = repr(sync) if dist.get_world_size() > 1 else ""
    dtypes = [leaf.dtype] + [
        d for t, d in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("32'", torch.float32)) if t in text
    ]
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def assert_near(got: Tensor, want: Tensor, sync: Sync, scale: float, terms: int) -> None:
    """Equal up to `terms` roundings in the coarsest dtype of numbers as large as `scale`; integers exactly."""
    tolerance = terms * precision(sync, got) * scale if tree.is_inexact(got) else 0.0
    wide = torch.complex128 if got.is_complex() else torch.float64
    error = (got.to(wide) - want.to(wide)).abs().max().item() if got.numel() else 0.0
    assert error <= tolerance, f"{sync}: off by {error}, allowed {tolerance}"


def exact(name: str, step: int, op: str = "mean") -> dict[str, Tensor]:
    """The reduction over ranks, in double precision, by leaf path."""
    everyone = [tree.flatten(grads(name, rank, step))[0] for rank in range(dist.get_world_size())]
    return reduce_exactly(everyone, op)


def reduce_exactly(everyone: list[dict[str, Tensor]], op: str = "mean") -> dict[str, Tensor]:
    def widen(leaf: Tensor) -> Tensor:
        return leaf.to(torch.complex128 if leaf.is_complex() else torch.float64)

    stacks = {path: torch.stack([widen(leaves[path]) for leaves in everyone]) for path in everyone[0]}
    reduced = {}
    for path, stack in stacks.items():
        leaf = getattr(torch, {"max": "amax", "min": "amin"}.get(op, op))(stack, 0)
        if not tree.is_inexact(everyone[0][path]):
            leaf = (leaf + 0.5).floor()  # a mean of integers is rounded to the nearest, halves up
        # a sum of bools is whether any is True
        reduced[path] = leaf.clamp(max=1) if everyone[0][path].dtype == torch.bool else leaf
    return reduced


def norm_of(name: str, step: int) -> float:
    """The largest norm of a leaf on any rank: what roundings are relative to."""
    leaves = [
        leaf for rank in range(dist.get_world_size()) for leaf in tree.flatten(grads(name, rank, step))[0].values()
    ]
    return max([torch.linalg.vector_norm(leaf.to(torch.complex128)).item() for leaf in leaves], default=0.0)


def law_1_outputs_are_like_inputs(rank: int, sync: Sync, name: str) -> None:
    state = sync.init(grads(name, rank))
    spec = description(sync, grads(name, rank), None), tree.structure(grads(name, rank)), _state_spec(state)
    for step in range(STEPS):
        mean, state = sync(grads(name, rank, step), state)
        assert (description(sync, mean, None), tree.structure(mean), _state_spec(state)) == spec
        for path, leaf in tree.flatten(mean)[0].items():
            assert not tree.is_inexact(leaf) or leaf.isfinite().all(), f"{path} is not finite"
            want = tree.flatten(grads(name, rank))[0][path]
            if want.ndim == 4:
                assert leaf.stride() == want.stride()


def _state_spec(state: Any) -> Any:
    return tree.structure(state), [(part.key, describe(part.value)) for part in parts(state)]


def law_2_all_ranks_get_the_same_bits(rank: int, sync: Sync, name: str) -> None:
    means, state = run(sync, name, rank)
    shared = [part.value for part in parts(state) if part.kind == "replicated"]
    everyone = gather((bits(means), bits(shared)))
    assert all(other == everyone[0] for other in everyone)


def law_3_inputs_are_unmodified(rank: int, sync: Sync, name: str) -> None:
    state = sync.init(grads(name, rank))
    for step in range(STEPS):
        mine = grads(name, rank, step)
        before = bits(mine), bits(state)
        global_rng = torch.get_rng_state()
        _, new_state = sync(mine, state)
        assert (bits(mine), bits(state)) == before
        assert torch.equal(torch.get_rng_state(), global_rng)
        state = new_state


def law_4_sent_averages_to_mean(rank: int, sync: Sync, name: str) -> None:
    state = sync.init(grads(name, rank))
    (op,) = sync.ops
    for step in range(STEPS):
        exchange = sync.exchange(tree.flatten(grads(name, rank, step))[0], state)
        state = exchange.state
        everyone = gather(exchange.sent)
        scale = max(_norm(leaf) for sent in everyone for leaf in [*sent.values(), torch.zeros(())])
        for path, want in reduce_exactly(everyone, op).items():
            assert_near(exchange.mean[path], want, sync, scale, terms=2 * len(everyone) + 4)


def _norm(leaf: Tensor) -> float:
    return torch.linalg.vector_norm(leaf.to(torch.complex128)).item()


def law_5_lossless_is_exact(rank: int, sync: Sync, name: str) -> None:
    (op,) = sync.ops
    means, _ = run(sync, name, rank)
    for step, mean in enumerate(means):
        for path, want in exact(name, step, op).items():
            assert_near(tree.flatten(mean)[0][path], want, sync, norm_of(name, step), terms=2 * dist.get_world_size())


def make_engine(sync: Sync, grads: Any, donation: Donation = DONATIONS[0], learns_order: bool = False) -> Engine:
    leaves = {path: LeafSpec.of(leaf) for path, leaf in tree.flatten(grads)[0].items()}
    return Engine(sync, leaves, donation=donation, learns_order=learns_order, **SMALL_BUCKETS)


def engine_step(engine: Engine, state: Any, grads: Any, order: random.Random) -> Synchronized:
    """One step of `engine`, fed with copies of `grads` in an order drawn from `order`."""
    leaves, _ = tree.flatten(grads)
    engine.start(state)
    for path in order.sample(list(leaves), len(leaves)):
        engine.feed(path, leaves[path].clone())
    done = engine.finish()
    assert not done.unused
    assert list(done.mean) == list(leaves)
    return done


def law_6_lowered_is_eager(rank: int, sync: Sync, name: str, donation: Donation, seed: int) -> None:
    order = random.Random(1000 * seed + rank)  # another one on every rank
    engine = make_engine(sync, grads(name, rank), donation, learns_order=seed % 2 == 1)
    expected = state = sync.init(grads(name, rank))
    state = copy.deepcopy(state)
    want, got = [], []
    for step in range(STEPS):
        mean, expected = sync(grads(name, rank, step), expected)
        done = engine_step(engine, state, grads(name, rank, step), order)
        state = engine.state
        want.append(mean)
        got.append(done.mean)
        assert bits(done.mean) == bits(mean), f"step {step}"
        assert bits(state) == bits(expected), f"state after step {step}"
        assert _state_spec(state) == _state_spec(expected)
        for path, leaf in tree.flatten(mean)[0].items():
            assert (done.mean[path].shape, done.mean[path].dtype) == (leaf.shape, leaf.dtype)
            assert leaf.ndim < 4 or done.mean[path].stride() == leaf.stride()
    assert bits(got) == bits(want), "a later step has written over a mean that somebody holds"


def law_7_resuming_an_engine_is_bit_exact(rank: int, sync: Sync, name: str, donation: Donation, seed: int) -> None:
    order = random.Random(1000 * seed + rank)
    straight, final = run(sync, name, rank)
    state = sync.init(grads(name, rank))
    for half in (range(STEPS // 2), range(STEPS // 2, STEPS)):
        engine = make_engine(sync, grads(name, rank), donation)
        for step in half:
            done = engine_step(engine, state, grads(name, rank, step), order)
            state = engine.state
            assert bits(done.mean) == bits(straight[step])
        file = io.BytesIO()
        torch.save(fnddp.state_dict(state), file)
        file.seek(0)
        state = fnddp.load_state_dict(sync.init(grads(name, rank)), torch.load(file, weights_only=True))
    assert bits(state) == bits(final)


def law_7_resuming_is_bit_exact(rank: int, sync: Sync, name: str) -> None:
    straight, final = run(sync, name, rank)
    _, halfway = run(sync, name, rank, steps=2)
    file = io.BytesIO()
    torch.save(fnddp.state_dict(halfway), file)
    file.seek(0)
    template = sync.init(grads(name, rank))
    untouched = copy.deepcopy(template)
    loaded = fnddp.load_state_dict(template, torch.load(file, weights_only=True))
    assert bits(template) == bits(untouched)
    resumed, again = run(sync, name, rank, steps=STEPS - 2, state=loaded, first=2)
    assert bits(resumed) == bits(straight[2:])
    assert bits(again) == bits(final)


def law_8_error_feedback_loses_nothing(rank: int, sync: Sync, name: str) -> None:
    sync = fnddp.error_feedback(sync)
    means, state = run(sync, name, rank)
    residuals = gather(state.residual)
    scale = sum(norm_of(name, step) for step in range(STEPS))
    scale += max((_norm(leaf) for residual in residuals for leaf in residual.values()), default=0.0)
    left = reduce_exactly(residuals)
    for path in left:
        got = sum(tree.flatten(mean)[0][path].to(left[path].dtype) for mean in means) + left[path]
        want = sum(exact(name, step)[path] for step in range(STEPS))
        assert_near(got.to(residuals[0][path].dtype), want, sync, scale, terms=4 * STEPS * len(residuals))


def law_9_repr_parses_back(rank: int, sync: Sync, name: str) -> None:
    again = fnddp.parse(repr(sync))
    assert again == sync
    assert hash(again) == hash(sync)
    assert repr(again) == repr(sync)


LAWS = [
    law_1_outputs_are_like_inputs,
    law_2_all_ranks_get_the_same_bits,
    law_3_inputs_are_unmodified,
    law_4_sent_averages_to_mean,
    law_7_resuming_is_bit_exact,
    law_8_error_feedback_loses_nothing,
    law_9_repr_parses_back,
]

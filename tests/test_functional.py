"""Functional loops: value_and_grad, torch.func's transforms around and inside, torch.compile over a whole step."""

import warnings
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import optree
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fnddp
from fnddp import allreduce, collectives, error_feedback, fp16, powersgd
from fnddp.laws import bits
from fnddp.torch_private import DIFFERENTIATES_INFERENCE
from tests.ranks import on_ranks
from tests.rings import one_of


def loss_fn(params, x, y):
    return ((x @ params["w"] + params["b"]).tanh() - y).square().mean()


def data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(16, 24, generator=generator), torch.randn(16, 32, generator=generator)


def params() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {"w": torch.randn(24, 32, generator=generator), "b": torch.zeros(32)}


def test_has_aux_and_keyword_arguments():
    def with_aux(params, x, *, scale):
        loss = scale * (params["w"] * x).sum()
        return loss, {"twice": 2 * loss}

    step = fnddp.value_and_grad(with_aux, allreduce, has_aux=True)
    (loss, aux), grads, _ = step({"w": torch.ones(2)}, (), torch.tensor([1.0, 2.0]), scale=3.0)
    assert (loss.item(), aux["twice"].item(), grads["w"].tolist()) == (9.0, 18.0, [3.0, 6.0])
    assert not aux["twice"].requires_grad
    with pytest.raises(TypeError, match=r"must return \(loss, aux\), got a Tensor"):
        fnddp.value_and_grad(lambda params: params["w"], allreduce, has_aux=True)({"w": torch.ones(2)}, ())


@on_ranks(2, threads=True)
def test_a_loss_that_is_no_scalar_is_an_error_on_all_ranks(rank: int):
    step = fnddp.value_and_grad(lambda params, x: params["w"] * x, allreduce)
    with pytest.raises(TypeError, match=r"must return a scalar tensor, got a tensor of shape \(2,\); take its sum"):
        step({"w": torch.ones(2)}, (), torch.ones(2))
    with pytest.raises(TypeError, match=r"must return a scalar tensor, got a float"):
        fnddp.value_and_grad(lambda params: 1.0, allreduce)({"w": torch.ones(2)}, ())
    _, grads, _ = step({"w": torch.tensor(1.0)}, (), torch.tensor(2.0 + rank))
    assert grads["w"].item() == 2.5


@pytest.mark.thorough
@on_ranks(2)
def test_within_compile(rank: int) -> None:
    torch._dynamo.reset()
    sync = error_feedback(fp16(allreduce))
    step = fnddp.value_and_grad(loss_fn, sync)
    want = step(params(), sync.init(params()), *data(rank))
    whole = torch.compile(lambda *given: step(*given), backend="eager", fullgraph=DIFFERENTIATES_INFERENCE)
    got = whole(params(), sync.init(params()), *data(rank))
    torch.testing.assert_close(optree.tree_leaves(got), optree.tree_leaves(want))


def test_within_vmap_without_ranks():
    step = fnddp.value_and_grad(loss_fn, allreduce)
    many = {name: p.expand(3, *p.shape) for name, p in params().items()}
    x, y = (torch.stack(each) for each in zip(*map(data, range(3)), strict=True))
    values, grads, _ = torch.func.vmap(lambda p, x, y: step(p, (), x, y), out_dims=(0, 0, None))(many, x, y)
    for i in range(3):
        want = torch.func.grad(loss_fn)(params(), x[i], y[i])
        torch.testing.assert_close({name: g[i] for name, g in grads.items()}, want)
    assert values.shape == (3,)


def test_autocast_does_not_reach_the_pipeline():
    sync = error_feedback(powersgd(allreduce, rank=2))
    step, grads = fnddp.jit(sync), {"w": torch.randn(24, 16, generator=torch.Generator().manual_seed(0))}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean, state = step(grads, sync.init(grads))
        want, want_state = sync(grads, sync.init(grads))
    assert bits((mean, state)) == bits((want, want_state))


def test_a_gradient_that_backward_still_reads_is_not_written_over():
    def loss(params, x):
        # The addition hands its gradient to `position` as a view, and goes on with it to `w`.
        return ((x @ params["w"])[None] + params["position"][None]).square().sum()

    sync = error_feedback(fp16(allreduce))
    params = {"w": torch.ones(24, 32) / 3, "position": torch.ones(16, 32) / 7}
    step, state, expected = fnddp.value_and_grad(loss, sync), sync.init(params), sync.init(params)
    for rank in range(3):
        x, _ = data(rank)
        mean, expected = sync(torch.func.grad(loss)(params, x), expected)
        _, got, state = step(params, state, x)
        assert bits(got) == bits(mean)


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor | None


def in_another_order(tree, rank: int):
    """Return `tree` with its dicts in another insertion order on each rank, as those made from sets of names have."""
    if isinstance(tree, dict):
        made = [(name, in_another_order(tree[name], rank)) for name in sorted(tree, reverse=rank > 0)]
        return OrderedDict(made) if isinstance(tree, OrderedDict) else dict(made)
    return type(tree)(*[in_another_order(each, rank) for each in tree]) if hasattr(tree, "_fields") else tree


TREES = {
    "flat": {name: torch.full((2, 3), 10.0**i) for i, name in enumerate("abcd")},
    "nested": {"y": OrderedDict(b=torch.ones(2, 3), a=torch.full((2, 3), 10.0)), "x": {"w": torch.full((2, 3), 100.0)}},
}


@on_ranks(2, threads=True)
@pytest.mark.parametrize("tree", TREES)
def test_leaves_are_matched_by_path_whatever_the_order_of_a_tree(rank: int, tree: str) -> None:
    right = TREES[tree]
    grads = in_another_order(right, rank)
    for text in "two_shot", "bucketize(allreduce)", "error_feedback(bucketize(bf16(allreduce)))":
        sync = fnddp.parse(text)
        state = in_another_order(sync.init(grads), rank)

        def of_product(params):
            pairs = zip(*(fnddp.tree.flatten(each)[0].values() for each in (params, grads)), strict=True)
            return sum((p * g).sum() for p, g in pairs)

        for mean in (
            sync(grads, state)[0],
            fnddp.jit(sync)(grads, state)[0],
            fnddp.value_and_grad(of_product, sync)(optree.tree_map(torch.ones_like, grads), state)[1],
        ):
            assert [*mean] == [*grads]  # in the order of this rank's tree
            torch.testing.assert_close(mean, grads, rtol=0, atol=0)


@on_ranks(2)
@pytest.mark.parametrize(
    "text", ["error_feedback(bf16(two_shot))", "error_feedback(warmup(bf16(two_shot), 2))", "rereading"]
)
def test_a_state_of_another_tree_ends_the_step_on_all_ranks_and_the_next_one_works(rank: int, text: str) -> None:
    sync = error_feedback(fp16(allreduce, check=True)) if text == "rereading" else fnddp.parse(text)
    grads = {"w": torch.full((3, 4), 1.0 + rank)}
    right, wrong = sync.init(grads), sync.init({"w": torch.ones(6, 4)})
    of_product = fnddp.value_and_grad(lambda p: (p["w"] * (1 + rank)).sum(), sync)
    jitted = fnddp.jit(sync)
    for call in jitted, lambda _, state: of_product({"w": torch.ones(3, 4)}, state)[1:]:
        with pytest.raises(ValueError, match="for leaf 'w'|'residual.w'"):
            call(grads, wrong)  # on all ranks, and before any right one
        state = right
        for alone in 0, 1, 1:
            mean, state = call(grads, state)
            assert mean["w"].eq(1.5).all()
            with pytest.raises(ValueError if rank == alone else fnddp.StepFailedError, match="'w'|'residual.w'"):
                call(grads, wrong if rank == alone else state)
        assert call(grads, state)[0]["w"].eq(1.5).all()


def test_any_pytree_of_parameters_gives_one_without_a_graph():
    tree = {"list": [torch.ones(2), Pair(torch.ones(3, requires_grad=True), None)], "tuple": (torch.ones(()),)}
    sync = error_feedback(fp16(allreduce))
    step = fnddp.value_and_grad(lambda p: sum((leaf**2).sum() for leaf in optree.tree_leaves(p)), sync)
    value, grads, _ = step(tree, sync.init(tree))
    assert optree.tree_structure(grads) == optree.tree_structure(tree)
    assert all((leaf == 2).all() for leaf in optree.tree_leaves(grads))
    mean, state = sync(tree, sync.init(tree))
    assert not any(
        leaf.requires_grad for leaf in optree.tree_leaves((value, grads, mean, tuple(state.residual.values())))
    )


def within_dual_level(inside, point):
    with forward_ad.dual_level():
        inside({name: forward_ad.make_dual(leaf, leaf) for name, leaf in point.items()})


DIFFERENTIATE = {
    "grad": lambda inside, point: torch.func.grad(inside)(point),
    "jvp": lambda inside, point: torch.func.jvp(inside, (point,), (point,)),
    "vjp": lambda inside, point: torch.func.vjp(inside, point),
    "jacfwd": lambda inside, point: torch.func.jacfwd(inside)(point),
    "hessian": lambda inside, point: torch.func.hessian(inside)(point),
    "functionalize": lambda inside, point: torch.func.jvp(torch.func.functionalize(inside), (point,), (point,)),
    "linearize": torch.func.linearize,
    "forward_ad": within_dual_level,
}
ASK = {"match": "cannot run inside torch.func.grad or jvp"}


@pytest.mark.parametrize("how", DIFFERENTIATE)
def test_synchronizing_inside_a_derivative_raises(how):
    """A tangent would be zero, silently."""

    def stepping(p):
        return fnddp.value_and_grad(lambda p, x: (p["w"] * x).sum(), allreduce)({"w": torch.ones(24, 32)}, (), p["w"])

    point = {"w": torch.ones(24, 32)}
    for run in (allreduce, fnddp.parse("topk(allgather, k=1)"), fnddp.jit(allreduce), lambda p, _: stepping(p)[1:]):
        with pytest.raises(RuntimeError, **ASK):
            DIFFERENTIATE[how](lambda p, run=run: run(p, ())[0]["w"].sum(), point)
    with pytest.raises(RuntimeError, **ASK):
        DIFFERENTIATE[how](lambda p: collectives.reduce_scatter(p["w"].unsqueeze(0)).sum(), point)
    if how in ("grad", "jvp", "vjp"):  # compiled, it would be a silent zero without the question
        with pytest.raises(RuntimeError, **ASK):
            torch.compile(
                lambda: DIFFERENTIATE[how](lambda p: allreduce(p, ())[0]["w"].sum(), point), backend="eager"
            )()


@on_ranks(2, threads=True)
def test_synchronizing_inside_vmap_raises(rank):
    """With ranks: torch would give this rank's own values."""
    with pytest.raises(RuntimeError, match=r"a collective cannot run inside torch.func.vmap: call it on the whole"):
        torch.func.vmap(lambda x: allreduce({"w": x}, ())[0]["w"])(torch.ones(2, 3))


def test_synchronizing_beside_a_derivative_is_no_derivative():
    with forward_ad.dual_level():
        assert allreduce({"w": torch.ones(2)}, ())[0]["w"].tolist() == [1, 1]


@pytest.mark.skipif(not DIFFERENTIATES_INFERENCE, reason="torch.func gives zeros there")
def test_inference_mode_gives_the_gradients():
    sync = error_feedback(fp16(allreduce))
    step = fnddp.value_and_grad(loss_fn, sync)
    state = expected = sync.init(params())
    for i in range(4):
        want_loss, want, expected = fnddp.value_and_grad(loss_fn, sync)(params(), expected, *data(i))
        with torch.inference_mode(i in (1, 2)):
            loss, grads, state = step(params(), state, *data(i))
        assert bits([loss, grads, state]) == bits([want_loss, want, expected])


@pytest.mark.parametrize("sync", [powersgd(fp16(allreduce), rank=1), error_feedback(fp16(allreduce))], ids=repr)
def test_plans_that_are_made_in_inference_mode_are_those_of_other_modes(sync):
    grads = params()
    step, state, expected = fnddp.jit(sync), sync.init(grads), sync.init(grads)
    plan = str(fnddp.lower(sync, nn.Linear(24, 32)))
    with torch.inference_mode():
        assert str(fnddp.lower(sync, nn.Linear(24, 32))) == plan
    for i in range(4):
        want, expected = sync(grads, expected)
        with torch.inference_mode(i < 2):  # the memory of a plan is written to in later steps
            mean, state = step(grads, state)
        assert bits([mean, state]) == bits([want, expected])
    assert step.plan is not None


def test_inference_mode_where_torch_gives_zeros_is_an_error(monkeypatch):
    monkeypatch.setattr("fnddp.adapters.functional.DIFFERENTIATES_INFERENCE", False)
    step = fnddp.value_and_grad(loss_fn, allreduce)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="returns zero gradients in inference mode"):
        step(params(), (), *data(0))


def test_reentrant_checkpoints_that_hide_nothing_are_torchs():
    def in_checkpoint(p, x):
        return checkpoint(lambda x: (x * p["w"]).sum(), x, use_reentrant=True)

    def loss(p, x):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own: "None of the inputs have requires_grad=True"
            scale = in_checkpoint(p, x)
        return (scale * p["w"]).sum()

    _, grads, _ = fnddp.value_and_grad(loss, allreduce)({"w": torch.ones(2)}, (), torch.ones(2))
    assert grads["w"].tolist() == [2.0, 2.0]
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        in_checkpoint({"w": torch.ones(2, requires_grad=True)}, torch.ones(2))  # outside, as torch does


@pytest.mark.parametrize(
    ("loss", "want"),
    [(lambda w: w, 1), (lambda w: torch.tensor(2.0), 0), (lambda w: (3 * w.detach()).sum(), 0)],
    ids=["a parameter", "a constant", "a detached parameter"],
)
def test_losses_that_compute_little(loss, want):
    w = torch.full((), 2.0)
    value, grads, _ = fnddp.value_and_grad(lambda p: loss(p["w"]), allreduce)({"w": w}, ())
    assert (value.item(), grads["w"].item()) == (loss(w).item(), want)


def test_leaves_that_have_no_dense_gradient_are_named():
    def embedded(p, i):
        return nn.functional.embedding(i, p["layer"]["w"], sparse=True).sum()

    index = torch.tensor([1])
    with pytest.raises(ValueError, match=r"the gradient of leaf 'layer.w' has layout torch.sparse_coo"):
        fnddp.value_and_grad(embedded, allreduce)({"layer": {"w": torch.ones(4, 2)}}, (), index)
    with pytest.raises(ValueError, match=r"leaf 'layer.w' has layout torch.sparse_coo"):
        fnddp.value_and_grad(embedded, allreduce)({"layer": {"w": torch.eye(2).to_sparse()}}, (), index)
    with pytest.raises(TypeError, match=r"leaf 'layer.w' is torch.int64, which has no gradient"):
        fnddp.value_and_grad(embedded, allreduce)({"layer": {"w": torch.arange(3)}}, (), index)


@on_ranks(1)
def test_a_state_on_another_device_is_refused_and_the_next_call_works(rank: int) -> None:
    step, grads = fnddp.jit(error_feedback(fp16(allreduce))), {"w": torch.ones(3)}
    for _ in range(2):
        with pytest.raises(ValueError, match=r"has float32\[3\] on cpu as 'residual.w', got float32\[3\] on meta"):
            step(grads, step.init({"w": torch.ones(3, device="meta")}))
        assert step(grads, step.init(grads))[0]["w"].tolist() == [1.0] * 3


def check_compiled_step(rank: int, text: str, named: bool) -> int:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 32))
    sync = fnddp.parse(text).over(dist.group.WORLD.group_name if named else None)

    def loss_of(params, x, y):
        return (torch.func.functional_call(model, params, (x,)) - y).square().mean()

    def step(params, state, x, y):
        mean, state = sync(torch.func.grad(loss_of)(params, x, y), state)
        return {name: params[name] - 0.1 * mean[name] for name in params}, state

    counter, runs = CompileCounterWithBackend("aot_eager"), []  # what Inductor makes of it is in test_compiled
    for run in (step, torch.compile(step, fullgraph=True, backend=counter)):
        p = {name: leaf.detach().clone() for name, leaf in model.named_parameters()}
        state = sync.init(p)
        for _ in range(5):
            p, state = run(p, state, *data(rank))
        runs.append((p, fnddp.state_dict(state)))
    torch.testing.assert_close(*runs, rtol=0, atol=0)
    return counter.frame_count


# the number of graphs: one, and with a counter one per phase (0, a symbolic step, and after the warm-up)
GRAPHS = {
    "bf16(allgather)": 1,
    "error_feedback(powersgd(fp16(allreduce), rank=2))": 1,
    "warmup(error_feedback(powersgd(bucketize(allreduce), rank=2)), steps=3)": 3,
}


@pytest.mark.parametrize(("text", "graphs"), one_of(3, GRAPHS.items()))
def test_compiled_whole_step(gloo, text, graphs):
    named = graphs == 1  # the group
    assert gloo(2, check_compiled_step, text, named) == [graphs, graphs]


@on_ranks(2)
def test_a_call_within_its_own_loss_is_an_error_on_all_ranks(rank: int) -> None:
    sync = error_feedback(powersgd(fp16(allreduce), rank=1))
    own, state = {"w": torch.ones(2, 2)}, sync.init({"w": torch.ones(2, 2)})

    def loss(params, inner):
        value = 3 * (rank + 1) * params["w"].sum()
        if inner is None:
            return value
        with torch.no_grad():  # its results are constants
            own = inner(params, state, None)[1]["w"].sum()
        return value + own

    step, other = (fnddp.value_and_grad(loss, sync) for _ in range(2))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="is already running: its function was called again within its own call"):
            step(own, state, step)
        _, grads, _ = step(own, state, None)
        torch.testing.assert_close(grads["w"], torch.full((2, 2), 4.5))
        _, grads, _ = step(own, state, other)  # the fix that the error names
        torch.testing.assert_close(grads["w"], torch.full((2, 2), 4.5))


def test_a_call_by_another_thread_is_an_error_and_the_step_goes_on():
    def loss(params, calls):
        if calls:
            with ThreadPoolExecutor(1) as threads, pytest.raises(RuntimeError, match="or by another thread"):
                threads.submit(step, own, (), False).result()
        return params["w"].sum()

    step, own = fnddp.value_and_grad(loss, allreduce), {"w": torch.ones(2)}
    for calls in (True, False):
        assert step(own, (), calls)[1]["w"].tolist() == [1.0, 1.0]

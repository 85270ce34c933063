"""Outer steps as values: their laws, over every registered name, on threaded and on virtual ranks."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fnddp
from fnddp import Sync, WireCounter, allreduce, outer, two_shot
from fnddp.core.state import parts
from fnddp.core.sync import REPLICATED
from fnddp.laws import bits, gather
from fnddp.outer.contract import Exchanges, outers
from fnddp.outer.steps.streaming_diloco import divided
from fnddp.simulation.ranks import run_threads
from fnddp.tree import Leaves
from tests.ranks import on_ranks

# One expression for each registered name; a new outer step gets a line here and inherits every law.
EXAMPLES = {
    "local_sgd": "local_sgd(every=2, sync=two_shot)",
    "post_local_sgd": "post_local_sgd(start=3, every=2, sync=allgather)",
    "hierarchical_local_sgd": "hierarchical_local_sgd({2: two_shot, 4: allgather}, start=2)",
    "diloco": "diloco(two_shot, every=3)",
    "diloco_without_momentum": "diloco(error_feedback(quantize(two_shot, bits=4)), every=2, lr=1.0, momentum=0)",
    "diloco_heavy_ball": "diloco(allgather, every=1, nesterov=False)",
    "sparse_loco": "sparse_loco(every=2, k=4, chunk=16)",
    "muloco": "muloco(every=2)",
    "streaming_diloco": "streaming_diloco(quantize(two_shot, bits=4), every=4, fragments=2, delay=3)",
    "streaming_merged": (
        "streaming_diloco(error_feedback(topk(allgather, k=2)), every=3, fragments=3, delay=1, alpha=0.5)"
    ),
    "streaming_at_once": "streaming_diloco(two_shot, every=3, fragments=('b*', '*'))",
    "des_loc_late": (
        "des_loc({'params': hierarchical_local_sgd({2: two_shot}, start=3), "
        "'exp_avg': diloco(error_feedback(random_k(two_shot, ratio=0.3)), every=3)})"
    ),
    "des_loc": "des_loc({'params': diloco(two_shot, every=2), 'exp_avg': local_sgd(every=3, sync=two_shot)})",
}
RANKS = 3
STEPS = 9


def example(name: str) -> outer.Outer:
    return outer.parse(EXAMPLES[name])


def start(step: outer.Outer) -> Leaves:
    generator = torch.Generator().manual_seed(1)
    leaves = {"a": torch.randn(6, 5, generator=generator), "b": torch.randn(7, generator=generator)}
    leaves["c"] = torch.randn(3, 4, 2, generator=generator)
    if not isinstance(step, outer.des_loc):
        return leaves
    zeros = {f"exp_avg.{path}": torch.zeros_like(leaf) for path, leaf in leaves.items()}
    return {f"params.{path}": leaf for path, leaf in leaves.items()} | zeros


def moved(params: Leaves, rank: int, call: int) -> Leaves:
    """A local step: everywhere another one."""
    generator = torch.Generator().manual_seed(100 * rank + call)
    return {path: leaf - 0.1 * torch.randn(leaf.shape, generator=generator) for path, leaf in params.items()}


def agree(value: Any) -> bool:
    return len({str(each) for each in gather(bits(value))}) == 1


class Recording(Exchanges):
    def __init__(self) -> None:
        self.ended: set[str] = set()

    def end(self, name: str, sync: Sync, leaves: Leaves, state: Any) -> tuple[Leaves, Any]:
        tree, slash, _ = name.partition("/")  # of several trees
        self.ended |= {f"{tree}.{path}" if slash else path for path in leaves}
        return super().end(name, sync, leaves, state)


def test_each_registered_name_has_an_example():
    used = {EXAMPLES[name].partition("(")[0] for name in EXAMPLES}
    assert used == set(outers)


@pytest.mark.parametrize("name", EXAMPLES)
def test_text_parses_back(name: str):
    step = example(name)
    assert outer.parse(repr(step)) == step
    assert hash(step) == hash(example(name))
    assert outer.parse(repr(step.over("7"))) == step.over("7") != step


@pytest.mark.parametrize("name", EXAMPLES)
def test_exchanges_are_those_of_the_plan_and_make_ranks_equal_to_the_bit(name: str):
    step = example(name)
    merges = getattr(step, "alpha", 0) > 0
    plan = outer.lower(step, start(step), world_size=RANKS)
    # Called as a function, an exchange is run where it ends.
    expected = dict.fromkeys(range(1, plan.period + 1), 0)
    for each in plan.exchanges:
        expected[(each.ends - 1) % plan.period + 1] += each.plan.wire_bytes

    def body(rank: int) -> dict[int, int]:
        params, state, sent = start(step), step.init(start(step)), {}
        for call in range(1, plan.lead + 2 * plan.period + 1):
            recording = Recording()
            with WireCounter() as counter:
                params, state = step.step(moved(params, rank, call), state, recording)
            if call > plan.lead + plan.period:  # what started before is in it
                sent[call - plan.lead - plan.period] = counter.wire_bytes
            elif call <= plan.lead and not isinstance(step, outer.des_loc):  # of whose trees some begin earlier
                assert counter.collectives == 0
            assert agree([part.value for part in parts(state) if part.kind == REPLICATED])
            for path, leaf in params.items():
                assert agree(leaf) == (path in recording.ended and not merges), (call, path)
        return sent

    assert run_threads(RANKS, body) == [expected] * RANKS


@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_is_written_to(name: str):
    step = example(name)
    params, state = start(step), step.init(start(step))
    for call in range(STEPS):
        given = moved(params, 0, call)
        before = bits(given), bits(state)
        params, following = step(given, state)
        assert before == (bits(given), bits(state))
        for leaf in params.values():  # nor later: an optimizer writes to what it is given back
            if not any(leaf is each for each in given.values()):
                kept = bits(following)
                leaf.add_(1.0)
                assert bits(following) == kept
                leaf.sub_(1.0)
        state = following


@pytest.mark.parametrize("name", EXAMPLES)
def test_resumed_or_simulated_it_is_the_same_to_the_bit(name: str):
    """The pipelines of the examples add in rank order, as simulated ones do."""
    step = example(name)

    def body(rank: int) -> tuple[Leaves, Any]:
        seen = [(start(step), step.init(start(step)))]
        for call in range(STEPS):
            seen.append(step(moved(seen[-1][0], rank, call), seen[-1][1]))
        for begin in range(0, STEPS, 4):
            params, state = seen[begin]
            state = fnddp.load_state_dict(step.init(start(step)), fnddp.state_dict(state))
            for call in range(begin, STEPS):
                params, state = step(moved(params, rank, call), state)
            assert bits((params, state)) == bits(seen[-1])
        return seen[-1]

    simulation = outer.simulate(step, RANKS)
    params = {path: leaf.expand(RANKS, *leaf.shape) for path, leaf in start(step).items()}
    state = simulation.init(params)
    for call in range(STEPS):
        each = [moved({path: leaf[rank] for path, leaf in params.items()}, rank, call) for rank in range(RANKS)]
        params, state = simulation({path: torch.stack([leaves[path] for leaves in each]) for path in params}, state)
    for rank, real in enumerate(run_threads(RANKS, body)):
        virtual = {path: leaf[rank] for path, leaf in params.items()}
        assert bits((virtual, simulation.of_rank(state, rank))) == bits(real)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.9, 0])
def test_the_outer_optimizer_is_torch_sgd_to_the_bit(momentum: float, nesterov: bool):
    step = outer.diloco(allreduce, every=2, lr=0.7, momentum=momentum, nesterov=nesterov)
    params, state = start(step), step.init(start(step))
    anchor = {path: leaf.clone() for path, leaf in params.items()}
    optimizer = torch.optim.SGD(anchor.values(), lr=0.7, momentum=momentum, nesterov=nesterov and momentum > 0)
    for call in range(8):
        params = moved(params, 0, call)
        for path, leaf in anchor.items():
            leaf.grad = leaf - params[path]
        if call % 2:
            optimizer.step()
        params, state = step(params, state)
        assert not call % 2 or bits(params) == bits(anchor)


def test_a_delayed_exchange_applies_what_it_started_with():
    """By hand: one leaf, plain descent, ranks that move by 1 and by 3 a step."""
    step = outer.streaming_diloco(allreduce, every=4, fragments=1, delay=2, alpha=0.25, lr=0.5, momentum=0)

    def body(rank: int) -> list[float]:
        params, seen = {"w": torch.tensor([0.0])}, list[float]()
        state = step.init(params)
        for _ in range(7):
            params, state = step({"w": params["w"] - (1 + 2 * rank)}, state)
            seen.append(params["w"].item())
        return seen

    first, second = run_threads(2, body)
    # After step 4 they are at -4 and -12: a mean of 8, and the anchor goes to -4. Merged after step 6, at -6 and -18.
    assert first == [-1, -2, -3, -4, -5, 0.75 * -4 + 0.25 * -6, 0.75 * -4 + 0.25 * -6 - 1]
    assert second == [-3, -6, -9, -12, -15, 0.75 * -4 + 0.25 * -18, 0.75 * -4 + 0.25 * -18 - 3]


@on_ranks(2, threads=True)
def test_sparse_loco_is_the_composition_of_the_paper(rank: int):
    """e = 0.95 e + d; send the largest of e in two bits; a = a - mean(sent): by hand, for one leaf of one chunk."""
    step = outer.sparse_loco(every=1, k=4, chunk=8, lr=1.0)
    params = {"w": torch.zeros(8)}
    state, residual, anchor = step.init(params), torch.zeros(8), torch.zeros(8)
    for call in range(5):
        params = moved(params, rank, call)
        x = (anchor - params["w"]) + 0.95 * residual
        kept = x.abs().topk(4).indices
        scale = x[kept].abs().max()
        sent = torch.zeros(8)
        sent[kept] = (x[kept] / scale).round() * scale
        residual, mean = x - sent, torch.stack(gather(sent)).sum(0) / 2
        anchor = anchor - mean
        params, state = step(params, state)
        torch.testing.assert_close(params["w"], anchor, rtol=1e-6, atol=1e-6)


def test_a_group_is_that_of_the_largest_period():
    step = outer.hierarchical_local_sgd({1: fnddp.all_reduce("node"), 3: allreduce})
    simulation = outer.simulate(step, 4, groups={"node": ((0, 1), (2, 3))})
    params = {"w": torch.zeros(4)}
    state = simulation.init(params)
    seen: list[list[float]] = []
    for _ in range(3):
        params, state = simulation({"w": params["w"] + torch.tensor([0.0, 2.0, 4.0, 10.0])}, state)
        seen.append(params["w"].tolist())
    assert seen == [[1, 1, 7, 7], [2, 2, 14, 14], [12, 12, 12, 12]]


@on_ranks(2, threads=True)
@pytest.mark.parametrize(
    "text",
    [
        "diloco(bucketize(two_shot), every=1, lr=1.0, momentum=0)",
        "streaming_diloco(allreduce, every=2, fragments=2, lr=1.0, momentum=0)",
    ],
)
def test_parameters_are_matched_by_path_whatever_the_order_of_a_tree(rank: int, text: str) -> None:
    names = sorted("abcd", reverse=rank > 0)
    step, params = outer.parse(text), {name: torch.zeros(4, 4) for name in names}
    state = step.init(params)
    for _ in range(2):
        params, state = step({name: params[name] + 10.0 ** "abcd".index(name) for name in names}, state)
    assert {name: p[0, 0].item() for name, p in params.items()} == {"a": 2.0, "b": 20.0, "c": 200.0, "d": 2000.0}


def test_a_plan_of_two_levels_has_their_sizes():
    step = outer.hierarchical_local_sgd({2: fnddp.all_gather("node"), 4: allreduce})
    params = {"w": torch.empty(8, device="meta")}
    plan = outer.lower(step, params, world_size={"node": 8, None: 1024})
    sizes = [[(c.group, c.world_size) for c in each.plan.collectives] for each in plan.exchanges]
    assert sizes == [[("node", 8)], [(None, 1024)]]
    with pytest.raises(
        ValueError, match=r"the default group \(None\) and group 'node', but world_size=8 does not give"
    ):
        outer.lower(step, params, world_size=8)
    with pytest.raises(
        ValueError, match="must give exactly the sizes of the groups of hierarchical_local_sgd.*got {'node': 8}"
    ):
        outer.lower(step, params, world_size={"node": 8})


def test_fragments_are_runs_of_about_the_same_size():
    def runs(sizes: list[int], n: int) -> list[list[int]]:
        leaves = {str(i): torch.empty(size) for i, size in enumerate(sizes)}
        return [[sizes[int(path)] for path in part] for part in divided(leaves, n)]

    assert runs([5] * 8, 4) == [[5, 5]] * 4
    assert runs([100, 1, 1, 1, 50, 50, 3], 3) == [[100], [1, 1, 1, 50], [50, 3]]
    assert runs([1, 1, 1000], 3) == [[1], [1], [1000]]
    assert runs([1000, 1, 1], 2) == [[1000], [1, 1]]
    parts = divided({"a.0": torch.ones(1), "b.0": torch.ones(1)}, ("b*", "*"))
    assert [list(part) for part in parts] == [["b.0"], ["a.0"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("diloco(allreduce, every=0)", "every must be at least 1"),
        ("diloco(allreduce, every=2, momentum=1)", r"momentum must be in \[0, 1\)"),
        ("diloco(all_reduce(op='sum'), every=2)", "takes a sum; parameters need a mean"),
        ("diloco(every(2, allreduce), every=2)", "skips some leaves in some steps"),
        ("diloco(partition({'a': none, '*': allreduce}), every=2)", "different means of some leaves, but the anchor"),
        ("local_sgd(every=2.5)", "every must be an int"),
        ("local_sgd(every=2, sync=3)", "must be a pipeline"),
        ("post_local_sgd(start=-1, every=2)", "start must be at least 0"),
        ("hierarchical_local_sgd({})", "one or more"),
        ("hierarchical_local_sgd({0: allreduce})", "at least 1"),
        ("hierarchical_local_sgd({2: 3})", "must be a dict of pipelines by period"),
        ("streaming_diloco(allreduce, every=2, fragments=3)", "3 fragments in every=2 steps"),
        ("streaming_diloco(allreduce, every=2, fragments=2, delay=2)", "delay must be below every=2"),
        ("streaming_diloco(allreduce, every=2, fragments=2, alpha=1)", r"alpha must be in \[0, 1\)"),
        ("streaming_diloco(allreduce, every=2, fragments=0)", "fragments must be at least 1"),
        ("streaming_diloco(allreduce, every=2, fragments=('a', 'a'))", "at least one pattern, all different"),
        ("streaming_diloco(allreduce, every=2, fragments=(1,))", "patterns of leaf paths"),
        ("des_loc({})", "at least one name, all different and without dots"),
        ("des_loc({'params': allreduce})", "must be a dict of outer steps by name"),
        ("allreduce", "not an outer step"),
        ("diloco", "is a transform, not a value"),
    ],
)
def test_what_is_wrong_is_said_at_construction(text: str, message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        outer.parse(text)


def test_what_is_wrong_with_leaves_names_them():
    with pytest.raises(TypeError, match=r"leaf 'n' is torch\.int64, which SGD cannot update"):
        outer.diloco(allreduce, every=2).init({"n": torch.ones(2, dtype=torch.int64)})
    with pytest.raises(ValueError, match="2 leaves cannot form 3 fragments"):
        outer.streaming_diloco(allreduce, every=3, fragments=3).init({"a": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(ValueError, match="leaf 'a' matches none of the patterns"):
        outer.streaming_diloco(allreduce, every=3, fragments=("b",)).init({"a": torch.ones(2)})
    with pytest.raises(ValueError, match=r"there is no tree 'exp_avg' among \['params'\]"):
        outer.des_loc({"exp_avg": outer.local_sgd(every=2)}).init({"params": {"w": torch.ones(2)}})
    with pytest.raises(ValueError, match="start with equal parameters, but rows of leaf 'w' differ"):
        outer.simulate(outer.local_sgd(every=2), 2).init({"w": torch.tensor([1.0, 2.0])})
    with pytest.raises(ValueError, match="needs a row for each of 3 ranks"):
        outer.simulate(outer.local_sgd(every=2), 3).init({"w": torch.ones(2)})
    step = outer.diloco(allreduce, every=1)
    with pytest.raises(ValueError, match=r"the state has no entry for leaf 'extra'"):
        step({"w": torch.ones(2), "extra": torch.ones(2)}, step.init({"w": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"an entry of shape \(2,\) for leaf 'w', which needs one of shape \(3,\)"):
        step({"w": torch.ones(3)}, step.init({"w": torch.ones(2)}))
    with pytest.raises(ValueError, match="made for another pipeline"):
        step({"w": torch.ones(2)}, outer.local_sgd(every=2).init({"w": torch.ones(2)}))


def loss_fn(params: Any, x: Tensor, y: Tensor) -> Tensor:
    return (x @ params["w"] - y).square().mean()


def batches(n: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(steps, n, 8, 3, generator=generator)
    return list(zip(x, x @ torch.tensor([1.0, -2.0, 3.0]), strict=True))


SGD = partial(torch.optim.SGD, lr=0.05)


def simulated(step: outer.Outer, steps: int, optimizer: Any = SGD, n: int = 4, **options: Any) -> Any:
    options |= {"world_size": n, "optimizer": optimizer}
    return outer.simulate_training(loss_fn, {"w": torch.zeros(3)}, batches(n, steps), step, **options)


@pytest.mark.parametrize("sync", [None, "every(3, allreduce)"])
@pytest.mark.parametrize("optimizer", [SGD, partial(torch.optim.AdamW, lr=0.05)])
def test_an_optimizer_for_all_ranks_is_one_for_each(optimizer: Any, sync: str | None):
    step = outer.diloco(two_shot, every=3)
    one, each = (simulated(step, 7, optimizer, elementwise=every, sync=sync) for every in (True, False))
    torch.testing.assert_close(one.params, each.params, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.losses, each.losses, rtol=1e-5, atol=1e-6)


def test_post_local_sgd_trains_together_and_then_apart():
    step = outer.post_local_sgd(start=3, every=2, before=two_shot)
    done = [simulated(step, steps, n=2, sync=step.gradients).params["w"] for steps in (3, 4, 5, 6)]
    # Parameters are averaged right after step 3 (the first local one), and after step 5.
    assert [torch.equal(rows[0], rows[1]) for rows in done] == [True, True, False, True]


def test_moments_are_exchanged_in_simulated_training():
    step = outer.des_loc({"params": outer.local_sgd(every=2), "exp_avg": outer.local_sgd(every=4)})
    with pytest.raises(ValueError, match="elementwise=True"):
        simulated(step, 5, torch.optim.Adam)
    done = simulated(step, 4, torch.optim.Adam, n=2, elementwise=True)
    assert done.losses.shape == (4, 2)
    assert torch.equal(done.params["w"][0], done.params["w"][1])
    with pytest.raises(ValueError, match="has no state 'exp_avg' in the shape of parameter 'w'"):
        simulated(step, 5, elementwise=True)

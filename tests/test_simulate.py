"""Simulation: n virtual ranks get what n real ones get."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fnddp
from fnddp import Local, Replicated, collectives, laws, tree
from fnddp.laws import bits
from fnddp.simulation.ranks import run_threads
from fnddp.simulation.simulate import simulate
from tests.pipelines import EXAMPLES, HALVES
from tests.rings import one_of


def stacked(name: str, n: int) -> dict[str, Tensor]:
    each = [tree.flatten(laws.TREES[name](rank, 0))[0] for rank in range(n)]
    return {path: torch.stack([leaves[path] for leaves in each]) for path in each[0]}


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - {"none", "unreduced", "measure", *HALVES}))
def test_a_simulated_mean_has_no_dimension_of_ranks(name):
    """Whatever a mean is decoded to is made from what all ranks have, and not from the ranks' own leaves."""
    simulation = simulate(fnddp.parse(EXAMPLES[name]), 3)
    grads = {"a.weight": torch.randn(3, 6, 5), "b": torch.randn(3, 7), "c": torch.randn(3, 0, 2)}
    weight = [1.0, 2.0, 3.0] if simulation.sync.takes_weight else None
    done = simulation.exchange(grads, simulation.init(grads), weight=weight)
    for path, mean in done.mean.items():
        assert mean.shape == grads[path].shape[1:]
    kept, _ = simulate(fnddp.none, 3)(grads, ())  # where each rank keeps its own
    assert torch.equal(kept["b"], grads["b"])


def test_nothing_given_is_changed():
    sync = fnddp.parse("error_feedback(quantize(two_shot, bits=4, rounding='stochastic'))")
    simulation, grads = simulate(sync, 3), stacked("mixed", 3)
    state = simulation.init(grads)
    before = bits((grads, state))
    simulation(grads, state)
    assert bits((grads, state)) == before


WEIGHTS = [2.0, 0.0, 5.0]
WEIGHTED = fnddp.parse("weighted(error_feedback(topk(two_shot, k=3)))")


def weighted(rank: int) -> Any:
    grads = laws.TREES["model"](rank, 0)
    return bits(WEIGHTED(grads, WEIGHTED.init(grads), weight=WEIGHTS[rank]))


@pytest.mark.parametrize("weight", [WEIGHTS, torch.tensor(WEIGHTS)], ids=["list", "tensor"])
def test_weights_are_those_of_ranks(weight):
    simulation, grads = simulate(WEIGHTED, 3), stacked("model", 3)
    mean, state = simulation(grads, simulation.init(grads), weight=weight)
    assert [bits((mean, simulation.of_rank(state, rank))) for rank in range(3)] == run_threads(3, weighted)


RAGGED = {"w": torch.ones(3, 2), "b": torch.ones(2)}
PAIR = {"w": torch.ones(2, 1)}
FEEDBACK = simulate("error_feedback(sign(allgather))", 2)
NODES = {"node": ((0, 2), (1, 3)), "rail": ((0, 1), (2, 3))}


def test_groups_divide_ranks():
    grads = {"w": torch.randn(4, 5)}
    mean, _ = simulate(fnddp.all_reduce("node"), 4, groups=NODES)(grads, ())
    of_nodes = [grads["w"][[0, 2]].mean(0), grads["w"][[1, 3]].mean(0)]
    torch.testing.assert_close(mean["w"], torch.stack([*of_nodes, *of_nodes]))


class SeenState(NamedTuple):
    seen: Replicated[Tensor]
    mine: Local[Tensor]


@dataclass(frozen=True)
class remembers(fnddp.Sync):
    """Marks as replicated what is the same on all ranks, or, if `wrong`, what is not."""

    wrong: bool = False

    def init(self, grads):
        return SeenState(grads["w"].clone(), torch.zeros(()))

    def exchange(self, leaves, state):
        done = fnddp.allgather.exchange(leaves, ())
        zero = torch.zeros_like(leaves["w"])  # mapped, though the same on all ranks
        seen = leaves["w"] if self.wrong else done.mean["w"] + zero
        return done._replace(state=SeenState(seen, state.mine + collectives.rank(None)))


def test_simulated_states_are_replicated_or_local_as_marked():
    grads, simulation, wrong = {"w": torch.randn(3, 4)}, simulate(remembers(), 3), simulate(remembers(wrong=True), 3)
    state = simulation.init(grads)
    for _ in range(2):
        mean, state = simulation(grads, state)
    assert torch.equal(state.seen, mean["w"])
    assert torch.equal(state.mine, torch.tensor([0.0, 2.0, 4.0]))
    with pytest.raises(ValueError, match="each rank a different 'seen', but its state marks that part as Replicated"):
        wrong(grads, wrong.init(grads))


UNEVEN = {"node": ((0, 1, 2), (3,))}
BATCH = (torch.ones(2, 5), torch.ones(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: simulate(fnddp.allreduce, 0), "world_size must be at least 1, got 0"),
        (lambda: simulate("all_reduce('node')", 4), "process group 'node', whose ranks are not known; pass them"),
        (
            lambda: simulate("all_reduce('node')", 4, groups=UNEVEN),
            "'node' must divide the ranks 0 to 3 into groups of equal",
        ),
        (
            lambda: simulate(fnddp.allreduce, 4, groups=NODES),
            r"does not reduce over any of the groups \['node', 'rail'\]; name one in the pipeline",
        ),
        (lambda: simulate("fp16(allreduce, check=True)", 2), "`traceable` is False"),
        (lambda: simulate(fnddp.allreduce, 3)(RAGGED, ()), r"leaf 'b' has shape \(2,\), but needs a row for each of 3"),
        (lambda: simulate(fnddp.allreduce, 3).init(RAGGED), "leaf 'b'"),
        (lambda: simulate("weighted(allreduce)", 2)(PAIR, (), weight=[1.0] * 3), "entry for each of 2 ranks, got 3"),
        (lambda: simulate("weighted(allreduce)", 2)(PAIR, (), weight=[1, "a"]), "on each rank, but rank 1 gave 'a'"),
        (lambda: trained(fnddp.allreduce, optimizer=None), "give either optimizer, .*, or update"),
        (lambda: trained(fnddp.none), r"the mean of leaf 'w' differs between ranks"),
        (
            lambda: trained(fnddp.allreduce, n=3, given=[BATCH]),
            r"part 0 of a batch has shape \(2, 5\), but needs a row for each of 3 ranks",
        ),
        (lambda: trained(fnddp.allreduce, given=[(1.0,)]), r"part 0 of a batch has shape \(\), but needs a row"),
        (lambda: FEEDBACK(PAIR, FEEDBACK.of_rank(FEEDBACK.init(PAIR), 0)), "part '.*w' of the state has shape .* of 2"),
    ],
)
def test_errors_say_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_text_is_no_pipeline():
    with pytest.raises(TypeError, match="simulate: sync must be a pipeline such as allreduce, got 3"):
        simulate(3, 2)  # pyright: ignore[reportArgumentType]


def test_gradients_through_a_simulation_are_refused():
    with pytest.raises(RuntimeError, match=r"inside torch.func.grad"):
        torch.func.grad(lambda w: simulate(fnddp.allreduce, 2)({"w": w}, ())[0]["w"].sum())(torch.ones(2, 3))


def loss_of(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(x.tanh() @ params["w"], y)


def batches(n: int, steps: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(steps, n, 5, 6, generator=generator)
    return list(zip(x, x[..., :3].argmax(-1), strict=True))


ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5)
START = {"w": torch.randn(6, 3, generator=torch.Generator().manual_seed(0))}


def trained(sync: fnddp.Sync, n: int = 4, steps: int = 6, **options: Any) -> Any:
    options = {"given": batches(n, steps), **({} if "update" in options else {"optimizer": ADAMW}), **options}
    return fnddp.simulate_training(loss_of, START, options.pop("given"), sync, world_size=n, **options)


def momentum(params: Any, mean: Any, memory: Any) -> Any:
    memory = {path: leaf + (0.9 * memory[path] if memory else 0) for path, leaf in mean.items()}
    return {path: leaf - 0.1 * memory[path] for path, leaf in params.items()}, memory


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({"optimizer": ADAMW}, ADAMW),
        ({"update": momentum, "ranks_at_once": 3}, partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    ],
    ids=["optimizer", "update"],
)
def test_training_with_the_mean_is_training_on_the_pooled_batch(options, theirs):
    w = START["w"].clone().requires_grad_()
    optimizer = theirs([w])
    losses: list[Tensor] = []
    for x, y in batches(4, 6):
        optimizer.zero_grad()
        losses.append(loss_of({"w": w}, x.flatten(0, 1), y.flatten()))
        losses[-1].backward()
        optimizer.step()
    done = trained(fnddp.allreduce, **options)
    assert done.losses.shape == (6, 4)
    torch.testing.assert_close(done.losses.mean(1), torch.stack(losses).detach())
    # AdamW makes steps of 0.01 of gradients of any size, so also of their roundings.
    torch.testing.assert_close(done.params["w"], w.detach(), rtol=0, atol=1e-4)


def test_a_step_without_an_update_changes_no_parameter_and_keeps_the_state():
    sync = fnddp.error_feedback(fnddp.every(2, fnddp.allreduce))
    for steps, is_moved in ((1, False), (2, True), (3, True)):
        done = trained(sync, steps=steps)
        assert torch.equal(done.params["w"], START["w"]) != is_moved
        assert done.state.residual["w"].any() == (steps % 2 == 1)


@pytest.mark.parametrize("text", ["lloyd_max(two_shot)", *one_of(9, EXAMPLES.values())])
def test_no_number_depends_on_torchs_default_dtype_or_device(text):
    sync = fnddp.parse(text)
    weight = 3.0 if sync.takes_weight else None
    grads = [(laws.mixed if weight is None else laws.model)(rank, 0) for rank in range(2)]

    def results():
        mean, state = sync(grads[0], sync.init(grads[0]), weight=weight)
        found = laws.bits([mean, *sync(grads[1], state, weight=weight)])
        return found, fnddp.lower(sync, grads[0], world_size=2).wire_bytes

    want = results()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        assert results() == want
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)

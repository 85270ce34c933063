"""The law of replay: a captured step is the eager step, to the bit, as often as it is replayed.

The device of this folder captures with the rules of CUDA's graphs: a wait of the host, pinned memory, or a wait for
work outside of the graph is an error, streams must be joined, and a replay reads and writes the memory of the capture.
So a number of the host that changes from step to step, or memory that does, shows in the bits.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._python_dispatch import TorchDispatchMode

import fnddp
from fnddp.device import device_of
from fnddp.kernels.constants import MOST_TABLES, on_device
from fnddp.laws import bits
from tests.accelerator import steps as by
from tests.accelerator.conftest import ORDERS
from tests.accelerator.steps import FEEDBACK, STEPS, sgd, small, step_of, trained
from tests.pipelines import EXAMPLES, HALVES
from tests.ways import TORCHFT

pytestmark = pytest.mark.thorough

RANDOM = "error_feedback(quantize(two_shot, bits=4, rounding='stochastic'))"  # whose key counts steps
NEAREST = "error_feedback(quantize(two_shot, bits=4))"  # whose operators keep residuals after NaN
WARMUP = "warmup(fp16(allreduce), 5)"


def train(rank: int, device: str, way: Any, given: tuple[Any, ...], warmup: int | None, steps: int = STEPS) -> Any:
    """Return losses, and what has changed; with `warmup` steps before they are captured, also how many graphs."""
    step, found = way(rank, device, *given)
    batches = small(rank, device)[1]
    run: Any = step if warmup is None else fnddp.make_graphed_callable(step, warmup)
    losses = [run(batches[i % STEPS]) for i in range(steps)]
    found = bits([losses, found()])
    if warmup is None:
        return found
    graphs = len(run._graphs)
    run.release()
    return found, graphs


def train_all(rank: int, device: str, texts: list[str], warmup: int | None) -> dict[str, Any]:
    return {text: train(rank, device, by.the_class, (text,), warmup) for text in texts}


def refused(rank: int, device: str, way: Any, given: tuple[Any, ...], is_within: bool | None = None) -> tuple[str, Any]:
    """Return the error of the capture, and what further steps do, which are taken as if nothing had happened.

    With `is_within` the first rank alone fails while it captures: within backward, or at the end of the step.
    """
    step, found = way(rank, device, *given)
    batches, fails = small(rank, device)[1], rank == 0 and is_within is not None

    def fragile(x: Tensor) -> Tensor:
        if fails and torch.get_device_module(device).is_current_stream_capturing():
            if is_within:
                x.requires_grad_().register_hook(lambda grad: grad.sum().item())
            step(x).sum().item()
        return step(x)

    run = fnddp.make_graphed_callable(fragile)
    losses = [run(batch) for batch in batches[:3]]
    before = bits(found())
    with pytest.raises(RuntimeError) as error:
        run(batches[3])
    assert bits(found()) == before
    fails = False
    if is_within is None:
        run.release()
    losses += [(step if is_within is None else run)(batch) for batch in batches[3:]]  # the first is not captured
    result = bits([losses, found()])
    run.release()
    return str(error.value), result


SEVERAL = {"squared": 2, "every": 2, "clip_by_global_norm": 2, "measure": 2}  # phases that follow each other for ever


@pytest.mark.parametrize("last", ORDERS)
def test_every_pipeline_is_captured(ranks: Any, last: str) -> None:
    """Half of them in each order of streams."""
    names = [name for name in EXAMPLES if name not in HALVES][ORDERS.index(last) :: 2]
    named = {name: EXAMPLES[name] for name in names}
    texts = list(named.values())
    want = ranks(2, "side", train_all, texts, None)
    for rank, got in enumerate(ranks(2, last, train_all, texts, 3)):
        assert {text: bits for text, (bits, _) in got.items()} == want[rank]
        assert {name: got[text][1] for name, text in named.items()} == {name: SEVERAL.get(name, 1) for name in named}


WAYS = [
    *((by.the_class, (text,), 3, 1) for text in ("allreduce", RANDOM, NEAREST)),
    (by.the_class, (WARMUP,), 3, 2),  # a graph for each phase
    (by.register, ("",), 11, 1),  # torch's class alone
    *((by.register, (text,), 11, 1) for text in ("allreduce", RANDOM, NEAREST)),
    *((way, (text,), 3, 1) for way in (by.value_and_grad, by.jit) for text in ("allreduce", FEEDBACK, NEAREST)),
    *((by.owners, (text,), 3, 1) for text in ("two_shot", RANDOM)),
    *((by.shards, (text,), 3, 1) for text in ("", "bf16(two_shot)")),
    (by.replicas, (FEEDBACK,), 3, 1),
    (by.two_axes, ("bf16(two_shot)", FEEDBACK), 3, 1),
    (by.two_models, (True, "allreduce", RANDOM), 3, 1),
    (by.two_models, (False, WARMUP, RANDOM), 3, 2),
    *((by.a_compiled_model, (RANDOM, is_outside), 3, 1) for is_outside in (True, False)),
]


@pytest.mark.parametrize(("way", "given", "warmup", "graphs"), WAYS)
def test_every_way_in_is_captured(ranks: Any, way: Any, given: tuple[Any, ...], warmup: int, graphs: int) -> None:
    steps, n = STEPS + warmup, 4 if way is by.two_axes else 2
    want = ranks(n, "side", train, way, given, None, steps)
    at = WAYS.index((way, given, warmup, graphs))
    for last in ORDERS if way in (by.the_class, by.shards) else ORDERS[at % 2 :][:1]:
        assert ranks(n, last, train, way, given, warmup, steps) == [(each, graphs) for each in want]


REFUSED = [
    (by.the_class, ("fp16(allreduce, check=True)",), "it has no plan"),
    (by.value_and_grad, (RANDOM,), "its state counts steps on the host"),
    *(
        (by.owners, ("two_shot", *given), "own compares weights")
        for given in [("ef21(fp16(allgather))",), ("allgather", 2)]
    ),
    (by.shards, ("error_feedback(bf16(two_shot))",), "compress_shards has a pipeline of gradients with a state"),
    (by.shards, ("weighted(bf16(two_shot))",), "compress_shards has a pipeline of gradients with a state or a weight"),
    (by.shards, ("", "ef21(quantize(allgather))"), "with `ef21`, ranks agree on the weights that they send"),
    (by.two_axes, ("error_feedback(bf16(two_shot))", FEEDBACK), "compress_shards has a pipeline of gradients with a"),
    (by.a_hook, (), "it has no plan: it reads values, or runs foreign code"),
    (by.a_scaler, (FEEDBACK,), "operation not permitted when stream is capturing: the host waits"),
    *((by.torchft, (FEEDBACK,), "its ranks come and go") for _ in [*TORCHFT][:1]),
    (by.outer_steps, ("diloco(allreduce, every=3)",), "an outer step counts"),
]


@pytest.mark.parametrize(("way", "given", "error"), REFUSED)
def test_what_cannot_be_captured_is_named(ranks: Any, way: Any, given: tuple[Any, ...], error: str) -> None:
    n = 4 if way is by.two_axes else 2
    want = ranks(n, "side", train, way, given, None)
    for rank, (text, found) in enumerate(ranks(n, "side", refused, way, given)):
        assert error in text
        assert found == want[rank]


def changing(rank: int, device: str) -> None:
    """What changes after the capture is taken over, or is an error by name; nothing is replayed with what was."""
    net, batches = small(rank, device)
    model = fnddp.DistributedDataParallel(net, sync=fnddp.parse(RANDOM), bucket_cap_mb=0.0002)
    optimizer = sgd(net)
    run = fnddp.make_graphed_callable(step_of(model, optimizer))
    for batch in batches[:5]:
        run(batch)
    state, held = model.sync_state, [*net.parameters(), *(each["momentum_buffer"] for each in optimizer.state.values())]
    kept = [each.detach().clone() for each in held]
    want = bits([run(batches[5]), model.sync_state, held])
    assert bits(state) != bits(model.sync_state)  # a copy
    with torch.no_grad():
        for each, before in zip(held, kept, strict=True):
            each.copy_(before)
    model.sync_state = state
    assert bits([run(batches[5]), model.sync_state, held]) == want

    with pytest.raises(ValueError, match=r"captured with float32\[4, 6\].*, got float32\[2, 6\]"):
        run(batches[6][:2])
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(RuntimeError, match="lr of group 0 of SGD has changed"):
        run(batches[6])
    optimizer.param_groups[0]["lr"] = 0.1
    run(batches[6])
    old = net[0].weight.data
    net[0].weight.data = old.clone()
    with pytest.raises(RuntimeError, match="the memory of a parameter"):
        run(batches[6])
    net[0].weight.data = old
    model.sync = fnddp.parse("allreduce")
    with pytest.raises(RuntimeError, match="the pipeline or parameters of a model were replaced"):
        run(batches[6])
    run.release()


def test_a_change_after_the_capture_is_never_ignored(ranks: Any) -> None:
    ranks(2, "side", changing)


def replacing(rank: int, device: str) -> None:
    """Another pipeline for torch's class after the capture is an error, and is captured by another callable."""
    with torch.Stream(device):
        model = TorchDDP(small(rank, device)[0], bucket_cap_mb=0.0002)
        handle = fnddp.register(model, fnddp.parse(RANDOM))
    torch.accelerator.synchronize()
    step, batches = step_of(model, sgd(model)), small(rank, device)[1]
    run = fnddp.make_graphed_callable(step, 11)
    for batch in [*batches, *batches[:5]]:
        run(batch)
    handle._adopt(fnddp.parse(FEEDBACK))  # as a checkpoint does if the pipeline is "auto"
    before = bits([*model.parameters()])
    with pytest.raises(RuntimeError, match="the pipeline or parameters of a model were replaced"):
        run(batches[5])
    assert bits([*model.parameters()]) == before
    run.release()
    again: Any = fnddp.make_graphed_callable(step, 1)
    for batch in batches:
        again(batch)
    assert len(again._graphs) == 1
    again.release()


def test_the_pipeline_of_a_handle_is_replaced_after_the_capture(ranks: Any) -> None:
    ranks(2, "side", replacing)


def reloading(rank: int, device: str, way: Any, given: tuple[Any, ...]) -> None:
    step, found = way(rank, device, *given)
    batches, run = small(rank, device)[1], fnddp.make_graphed_callable(step)
    for batch in batches[:5]:
        run(batch)
    (optimizer,) = run._optimizers
    momenta, before = [*optimizer.state.items()], bits(found())
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(RuntimeError, match="the memory of a state of group 0 of SGD has changed"):
        run(batches[5])
    assert bits(found()) == before
    optimizer.state.update(momenta)
    run(batches[5])


@pytest.mark.parametrize(("way", "given"), [(by.the_class, (RANDOM,)), (by.shards, ("bf16(two_shot)",))])
def test_a_checkpoint_that_moves_an_optimizers_state_is_never_ignored(
    ranks: Any, way: Any, given: tuple[Any, ...]
) -> None:
    ranks(2, "side", reloading, way, given)


def overflowing(rank: int, device: str, text: str, captures: bool) -> Any:
    """One rank overflows in a step, which leaves the memory of all ranks as it was, and all train on."""
    net, batches = small(rank, device)
    model = fnddp.DistributedDataParallel(net, sync=fnddp.parse(text), bucket_cap_mb=0.0002)
    optimizer = sgd(net)
    step = step_of(model, optimizer)
    run: Any = fnddp.make_graphed_callable(step) if captures else step
    for batch in batches[:6]:
        run(batch)
    before = bits(model.sync_state)
    run(batches[6] * (float("inf") if rank == 1 else 1.0))
    assert bits(model.sync_state) == before
    for p in net.parameters():
        p.data.nan_to_num_(0)
        optimizer.state[p]["momentum_buffer"].nan_to_num_(0)
    run(batches[7])
    assert bits(model.sync_state) != before
    return bits([model.sync_state, dict(net.named_parameters())])


@pytest.mark.parametrize("text", [FEEDBACK, NEAREST])
def test_an_overflow_of_one_rank_leaves_the_memory_of_all_as_it_was(ranks: Any, text: str) -> None:
    assert ranks(2, "side", overflowing, text, True) == ranks(2, "side", overflowing, text, False)


FAILING = [
    *((by.the_class, (RANDOM,), is_within) for is_within in (True, False)),
    (by.value_and_grad, ("allreduce",), False),
    (by.jit, (FEEDBACK,), False),
    (by.shards, ("bf16(two_shot)",), False),  # FSDP does not recover from a backward that raises
    (by.two_models, (True, "allreduce", RANDOM), True),
]


@pytest.mark.parametrize(("way", "given", "is_within"), FAILING)
def test_a_rank_that_cannot_capture_its_step_is_named_on_it_and_all_train_on(
    ranks: Any, way: Any, given: tuple[Any, ...], is_within: bool
) -> None:
    (mine, one), (other, two) = ranks(2, "side", refused, way, given, is_within)
    assert [one, two] == ranks(2, "side", train, way, given, None)
    assert "the step cannot be captured, and nothing has happened: RuntimeError: operation not permitted" in mine
    assert "another rank could not capture its step" in other


def with_an_eager_step_between(rank: int, device: str) -> Any:
    """Gradients of an eager step are not overwritten by replays."""
    step, found = by.the_class(rank, device, RANDOM)
    batches, run = small(rank, device)[1], fnddp.make_graphed_callable(step)
    for batch in batches[:5]:
        run(batch)
    step(batches[5])
    kept = [p.grad for p in found()[0].values()]
    before = bits(kept)
    for batch in batches[6:]:
        run(batch)
    assert bits(kept) == before
    run.release()
    return bits(found())


def test_an_eager_step_may_come_between_replays(ranks: Any) -> None:
    assert ranks(2, "side", with_an_eager_step_between) == ranks(2, "side", trained, by.the_class, (RANDOM,))


def two_callables(rank: int, device: str, captures: bool) -> Any:
    """Two graphs of a model, as for two sizes of batches, one of which is released."""
    (step, found), states = by.the_class(rank, device, RANDOM), list[Any]()
    runs: list[Any] = [fnddp.make_graphed_callable(step, 3 - i) if captures else step for i in range(2)]
    for i, batch in enumerate(small(rank, device)[1]):
        for run in runs if i < 6 else runs[1:]:
            run(batch)
            states.append(bits(found()))
        if captures and i == 5:
            runs[0].release()
    return states


def test_graphs_of_one_model_share_its_state_until_the_last_is_released(ranks: Any) -> None:
    assert ranks(2, "side", two_callables, True) == ranks(2, "side", two_callables, False)


class Counted(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def with_tables(rank: int, device: str) -> int:
    """Return how many operations make a table of 148 leaves in a graph. One that graphs read outlives all others."""
    numbers, on = [7 + (i << 40) for i in range(6 * 148)], torch.device(device)
    of, stream = device_of(on), torch.Stream(device)

    def constant(key: int) -> Tensor:
        return on_device(("test", key), lambda: [float(key)] * 64, torch.float32, on)

    with stream:
        constant(1)
    graph, capturing = of.graph(stream)
    with capturing:
        with Counted() as counted:
            made = of.of_host(numbers, torch.int64)
        read = constant(1) * 2
        floats = of.of_host([-0.0, float("inf"), 0.1], torch.float64)
    with stream:
        for key in range(2, 3 + MOST_TABLES):
            constant(key)
        graph.replay()
    torch.accelerator.synchronize()
    assert made.tolist() == numbers
    assert bits(floats.cpu()) == bits(torch.tensor([-0.0, float("inf"), 0.1], dtype=torch.float64))
    assert read.tolist() == [2.0] * 64
    return counted.count


def test_a_table_takes_few_operations_and_those_that_graphs_read_are_kept(ranks: Any) -> None:
    assert ranks(1, "side", with_tables) == [3]  # ones, views of its elements, and a product


def by_hand(rank: int, device: str, way: Any, given: tuple[Any, ...]) -> Any:
    """torch's own context, without `make_graphed_callable`."""
    step, found = way(rank, device, *given)
    batches, module = small(rank, device)[1], torch.get_device_module(device)
    stream, x, graph = torch.Stream(device), batches[0].clone(), module.CUDAGraph()
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        for batch in batches[:3]:
            step(x.copy_(batch))
        try:
            with module.graph(graph, stream=stream):
                step(x)
        except RuntimeError as error:
            step(x.copy_(batches[3]))  # nothing was lost
            return str(error)
        for batch in batches[3:]:
            x.copy_(batch)
            graph.replay()
    torch.accelerator.current_stream().wait_stream(stream)
    return bits(found())


def test_a_pipeline_without_a_state_is_captured_by_hand_and_others_are_refused(ranks: Any) -> None:
    by_class = by.the_class, ("bf16(two_shot)",)
    assert ranks(2, "side", by_hand, *by_class) == ranks(2, "side", trained, *by_class)
    for text in ranks(2, "side", by_hand, by.the_class, (FEEDBACK,)):
        assert "capture it with fnddp.make_graphed_callable" in text


def test_a_leaf_without_a_gradient_is_named(ranks: Any) -> None:
    for text, _ in ranks(2, "side", refused, by.branches, ("allreduce",)):
        assert "leaves without a gradient cannot be captured" in text
        assert "left_out.weight" in text
    ranks(2, "side", by_hand, by.branches, ("allreduce",))  # after an error in torch's own context, steps go on, too

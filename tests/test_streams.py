"""The order of streams on an accelerator, proven on the CPU: see tests/streams.py."""

import ast
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle, product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

import fnddp
from fnddp import DistributedDataParallel, Sync, outer
from fnddp.core import tree
from fnddp.plan.draft import Donation
from fnddp.plan.lower import Traces
from fnddp.run.engine import MAX_PHASES, Engine
from fnddp.wire.c10d import over
from fnddp.wire.protocol import CollectiveError
from tests.pipelines import EXAMPLES, HALVES, nestings
from tests.rings import one_of
from tests.streams import Checker, StreamWire, Work, calls, checking, opaque, require_none, waits
from tests.test_laws import FEW
from tests.wires import engine_for

POWERSGD = "error_feedback(powersgd(fp16(allreduce), rank=2, min_compression_rate=0))"
QUANTIZED = "error_feedback(quantize(two_shot, bits=4))"
TEXTS = ["allreduce", POWERSGD, QUANTIZED, "ef21(topk(allgather, ratio=0.25))", "every(2, fp16(allreduce))"]
PERIODIC = [
    "every(2, powersgd(allreduce, rank=2, min_compression_rate=0))",
    "warmup(powersgd(allreduce, rank=2, min_compression_rate=0), steps=1, before=fp16(allreduce))",
    "switch({0: allreduce, 2: error_feedback(quantize(two_shot, bits=4))})",
]
GROUPS = [
    "hierarchical(error_feedback(powersgd(all_reduce('{across}'), min_compression_rate=0)), intra='{inside}')",
    "hierarchical(quantize(all_gather('{across}')), intra='{inside}')",
]


@pytest.fixture(autouse=True)
def _four_ranks() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)])


def module(sync: Sync | str, wire: StreamWire | None = None, **options: Any) -> DistributedDataParallel:
    sync = fnddp.parse(sync) if isinstance(sync, str) else sync
    return DistributedDataParallel(
        net(), sync=sync, wire=wire or StreamWire(), init_sync=False, bucket_cap_mb=0.0005, **options
    )


def loss(model: Callable[[Tensor], Tensor]) -> Tensor:
    return model(torch.ones(4, 12)).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def read(tensors: Iterable[Tensor | None]) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.square()


Around = Callable[[int], AbstractContextManager[None]]


def train(
    model: nn.Module, around: Around, before: Callable[[], object] = tuple, steps: int = 4, *, keeps: bool = False
) -> None:
    optimizer = sgd(model)
    for i in range(steps):
        optimizer.zero_grad(set_to_none=not keeps)
        with around(i):
            before()
            loss(model).backward()
            optimizer.step()


# What trains: each is given a pipeline, and the checker, which is told where the host must not wait.


def with_the_module(text: str, found: Checker) -> None:
    train(module(text), found.training)


def accumulating(text: str, found: Checker) -> None:
    model = module(text)

    def without_sync() -> None:
        with model.no_sync():
            loss(model).backward()

    train(model, found.training, without_sync, keeps=True)


def with_two_models_in_a_backward(text: str, found: Checker) -> None:
    train(nn.Sequential(module(text), module(text)), found.training)


def with_the_optimizer_on_another_stream(text: str, found: Checker) -> None:
    model, mine = module(text), found.new_stream("optimizer")
    optimizer = sgd(model)
    for i in range(3):
        with found.training(i):
            loss(model).backward()
            mine.learn(found.main.known)
            with found.on(mine):
                optimizer.step()
            found.main.learn(mine.known)
        optimizer.zero_grad()


def engine_of(text: str, **more: Any) -> tuple[Engine, dict[str, Tensor]]:
    sync, leaves = fnddp.parse(text), {name: p.detach() for name, p in net().named_parameters()}
    options: Any = {"donation": Donation(gradients="yes"), "wire": StreamWire()}
    return engine_for(sync, leaves, state=sync.init(leaves), **options, **more), leaves


def with_backward_on_several_streams(text: str, found: Checker) -> None:
    """As autograd does: a gradient is made on the stream on which its part of forward ran."""
    engine, leaves = engine_of(text)
    streams = [found.new_stream(f"backward {i}") for i in range(2)]
    means: dict[str, Tensor] = {}
    for i in range(3):
        read(means.values())
        step = engine.begin(scale=0.5 * (i + 1))
        with found.training(i):
            for at, (name, leaf) in enumerate(reversed(leaves.items())):
                with found.on(streams[at % 2]):
                    step.feed(name, torch.ones_like(leaf))
            means = step.finish().mean


def reading_old_means_late(text: str, found: Checker) -> None:
    """Means of earlier steps are read, and freed, while the next step goes on."""
    engine, leaves = engine_of(text)
    kept: list[dict[str, Tensor]] = []
    for _ in range(5):
        step = engine.begin()
        step.feed_all({name: torch.ones_like(leaf) for name, leaf in reversed(leaves.items())})
        if len(kept) == 3:
            read(kept.pop(0).values())
        kept.append(dict(step.finish().mean))


def told_of_what_is_not_finite(text: str, found: Checker) -> None:
    """As shards tell replicas: by a number that is made on the caller's stream, when all gradients are there."""
    engine, leaves = engine_of(text)
    for _ in range(3):
        step = engine.begin()
        step.feed_all({name: torch.ones_like(leaf) for name, leaf in reversed(leaves.items())})
        step.watch(torch.ones(1).isinf().any())
        read([torch.ones(1)])  # in the memory of that number, unless it is kept
        read(step.finish().mean.values())


def called(step: Any, sync: Sync, around: Around) -> None:
    leaves = {name: p.detach() for name, p in net().named_parameters()}
    state = sync.init(leaves)
    for i in range(3):
        with around(i):
            mean, state = step({name: torch.ones_like(leaf) for name, leaf in leaves.items()}, state)
            read(mean.values())


def eagerly(text: str, found: Checker) -> None:
    sync = fnddp.parse(text)
    called(over(StreamWire(), sync), sync, nullcontext)


def compiled(text: str, found: Checker) -> None:
    sync = fnddp.parse(text)
    called(fnddp.jit(sync, wire=StreamWire()), sync, found.training)


def failing(text: str, found: Checker) -> None:
    """A step fails when all or some gradients are there, and later ones go on; if need be with a new engine."""
    traces = Traces()  # for all engines: a trace takes most of the time
    for arrived in (1, 3, 6):
        engine, leaves = engine_of(text, traces=traces)
        for fails in (False, True, False, False):
            if engine.broken is not None:
                engine, leaves = engine_of(text, traces=traces)
            step = engine.begin()
            for name in list(reversed(leaves))[: arrived if fails else None]:
                step.feed(name, torch.ones_like(leaves[name]))
            if fails:
                step.fail(ZeroDivisionError("here"))
                step.give_up()
            else:
                means = step.finish().mean
                read(means.values())
            del step


def weighted(text: str, found: Checker) -> None:
    model = module(f"weighted({text})")
    train(model, lambda i: model.weight(2 + i % 3))


def with_a_leaf_that_is_missing(text: str, found: Checker) -> None:
    model = module(text, find_unused_parameters=True)
    forwards = cycle([nn.Sequential.forward.__get__(model.module[1]), lambda x: x])
    train(model, nullcontext, lambda: setattr(model.module[1], "forward", next(forwards)))


def with_the_state_replaced(text: str, found: Checker) -> None:
    model = module(text)

    def replace_state() -> None:
        model.sync_state = tree.map_tensors(Tensor.clone, model.sync_state)
        read(p.grad for p in model.parameters())

    train(model, nullcontext, replace_state)


def functional(text: str, found: Checker) -> None:
    model, sync = net(), fnddp.parse(text)
    params = {name: p.detach() for name, p in model.named_parameters()}
    state = sync.init(params)
    step = fnddp.value_and_grad(
        lambda params, x: torch.func.functional_call(model, params, (x,)).square().mean(), sync, wire=StreamWire()
    )
    x = torch.ones(4, 12)
    for i in range(3):
        with found.training(i):
            _, grads, state = step(params, state, x)
            params = {name: p if (mean := grads.get(name)) is None else p - 0.1 * mean for name, p in params.items()}


def within_a_callable(text: str, found: Checker) -> None:
    """Steps on the stream where they will be captured, called on two streams."""
    model, streams = module(text), [found.main, found.new_stream("other")]
    optimizer = sgd(model)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = model(x).square().mean()
        value.backward()
        optimizer.step()
        return value.detach()

    run = fnddp.make_graphed_callable(step, num_warmup_iters=4)
    for i in range(4):
        with found.training(i), found.on(streams[i % 2]):
            read([run(torch.ones(4, 12) * i)])


def registered(text: str, found: Checker) -> None:
    """On torch's DistributedDataParallel, of one rank, whose own copies are noted as well."""
    model = TorchDDP(net(), bucket_cap_mb=0.0005)
    handle = fnddp.register(model, fnddp.parse(text), wire=StreamWire())
    train(model, found.training)
    del model, handle


def run_by_inductor(text: str, found: Checker) -> None:
    """Segments of plans for Inductor, each of them one operation: see `opaque`."""
    with mock.patch("torch.compile", opaque):
        train(module(text, backend="inductor"), found.training)


def exchanging_parameters(text: str, found: Checker) -> None:
    """`outer`: exchanges of fragments are under way while the model trains."""
    sync = fnddp.parse(text)
    if sync.skips:
        return  # outer steps have a period of their own
    model = net()
    step = outer.streaming_diloco(sync, every=4, fragments=2, delay=3)
    attached = outer.attach(model, None, step, wire=StreamWire(), init_sync=False)
    # Until each fragment has made its plans the host waits.
    train(model, lambda i: found.training(i if i > 9 else 0), attached.step, steps=18)


SCENARIOS = [
    *(with_the_module, accumulating, with_two_models_in_a_backward, with_the_optimizer_on_another_stream, failing),
    *(weighted, with_backward_on_several_streams, with_a_leaf_that_is_missing, with_the_state_replaced),
    *(told_of_what_is_not_finite, functional, compiled, registered, reading_old_means_late, eagerly),
    *(exchanging_parameters, run_by_inductor, within_a_callable),
]
# A node alone: see GROUPS; what is a scenario; and means that are no gradients of a module.
LEFT_OUT = ("hierarchical", "weighted", *HALVES)
REGISTERED = [text for name, text in EXAMPLES.items() if name not in LEFT_OUT]
OTHERS = [text for text in (*TEXTS, *PERIODIC, *GROUPS) if text not in (POWERSGD, QUANTIZED)]
# Each scenario with several rounds, with two hops, and with two of the others in turn.
CASES = [
    *product(SCENARIOS, [POWERSGD, QUANTIZED]),
    *((each, OTHERS[i % 4 + more]) for i, each in enumerate(SCENARIOS) for more in (0, 4)),
    *product([with_the_module], [*OTHERS, *REGISTERED]),
]
CASES = [case for case in dict.fromkeys(CASES) if case[0] is not weighted or case[1] not in GROUPS]  # no weights there


def require_no_race(scenario: Callable[[str, Checker], None], text: str) -> None:
    with checking() as found:
        scenario(text, found)
    require_none(found)


@pytest.mark.parametrize(("scenario", "text"), one_of(8, CASES))
def test_nothing_races(scenario, text):
    named = {"inside": dist.new_group([0, 1]).group_name, "across": dist.new_group([0, 2]).group_name}
    require_no_race(scenario, text.format(**named) if text in GROUPS else text)


ONCE_WAITED = "fp16(powersgd(powersgd(random_k(allgather, ratio=0.2, unbiased=True), rank=4, refresh=2), seed=1))"


@pytest.mark.thorough
@FEW
@given(nestings())
@example(fnddp.parse(ONCE_WAITED))
def test_no_nesting_races(sync):
    require_no_race(with_the_module, repr(sync))


# Where no step of a pipeline waits.
APART = {
    "device.py": "says how devices wait",
    "wire/c10d.py": "waits in threads, for gloo",
    "wire/control.py": "exchanges Python objects, for which the host waits",
    "cost/measure.py": "measures links",
    "integrations/fsdp/unit.py": "agrees on what to send of weights, for which the host waits",
    "integrations/fsdp/shards.py": "does what FSDP's own all-gather does",
}


def test_only_one_file_knows_streams():
    """Or there would be waits that none of these tests leaves out."""
    own = {"record_stream", "wait_stream", "wait_event", "Stream", "Event", "stream", "current_stream"}
    found = [
        site
        for site, _, node in calls(APART)
        if isinstance(node.func, ast.Attribute) and node.func.attr in own
        if "torch" in ast.unparse(node.func.value) or node.func.attr.startswith(("record_", "wait_"))
    ]
    assert found == []


# The scenario that needs each of them.
NEEDED = {
    "adapters/graphs.py __call__ wait": within_a_callable,
    "adapters/graphs.py __call__ wait, the last": within_a_callable,
    "adapters/graphs.py __call__ keep": within_a_callable,
    "core/collectives.py results waited": eagerly,
    "run/program.py begin keep": weighted,
    "run/step.py _start wait": with_backward_on_several_streams,
    "run/step.py commit wait": with_the_module,
    "run/step.py commit keep": reading_old_means_late,
    "run/step.py commit keep, the last": within_a_callable,
    "run/step.py watch wait": told_of_what_is_not_finite,
    "run/step.py watch keep": told_of_what_is_not_finite,
    "run/step.py _ingest wait": with_the_module,
    "run/step.py _ingest keep": with_backward_on_several_streams,
    "run/step.py _wait waited": with_the_module,
    "run/step.py _wait_for_side_stream wait": failing,
    "run/vote.py _gathered waited": with_the_module,
}


def test_each_wait_and_keep_has_a_scenario():
    assert set(NEEDED) == set(waits(APART))


@pytest.mark.thorough
@pytest.mark.parametrize("name", NEEDED)
def test_every_wait_and_keep_is_needed(name):
    line = waits(APART)[name]
    for text in ("quantize(allgather)", POWERSGD, "allreduce", QUANTIZED, PERIODIC[0]):
        with checking(without=line) as found:
            NEEDED[name](text, found)
        if found.hazards:
            return
    raise AssertionError(f"nothing races without {name}: leave it out, or add what needs it")


class FailingWire(StreamWire):
    """Another rank votes that it has failed, in the step of that number."""

    def __init__(self, fails_at: int, leaves: int = 6) -> None:
        super().__init__()
        self.fails_at, self.leaves, self.votes = fails_at, leaves, 0

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, Work]:
        gathered, work = super().vote(flags, group)
        if flags.dtype == torch.uint8 and flags.numel() == 5 + self.leaves:
            with _disable_current_modes():
                gathered[1, 0] = self.votes == self.fails_at
            self.votes += 1
        return gathered, work


LATE = "another rank failed in the previous step"
REFUSED = "an earlier step failed on this rank"


def test_a_failure_is_noticed_by_a_call_for_other_leaves():
    wire = FailingWire(1)
    step, other = fnddp.jit(fnddp.allreduce, wire=wire), {"other": torch.ones(2)}
    leaves = {name: p.detach() for name, p in net().named_parameters()}
    with checking():
        for _ in range(2):
            step(leaves, ())
        with pytest.raises(CollectiveError, match=LATE):
            step(other, ())
        for n in range(MAX_PHASES + 1):  # more engines than are kept
            with pytest.raises(RuntimeError, match=REFUSED):
                step({str(n): torch.ones(2)}, ())
        with pytest.raises(RuntimeError, match=REFUSED):
            step(leaves, ())


def test_a_failure_of_an_exchange_of_parameters_is_noticed_before_they_are_saved():
    with checking():
        model = net()
        optimizer = sgd(model)
        step = outer.streaming_diloco(fnddp.allreduce, every=4, fragments=2)
        attached = outer.attach(model, optimizer, step, wire=FailingWire(1, leaves=3), init_sync=False)
        for _ in range(4):  # an exchange of each fragment, of which the second fails
            assert attached.state is not None
            loss(model).backward()
            optimizer.step()
        for save in (attached.state_dict, attached.replicated_state_dict, lambda: attached.state):
            with pytest.raises(CollectiveError, match=LATE):
                save()
        optimizer.step()
        with pytest.raises(CollectiveError, match=LATE):  # in the next exchange of the first one
            optimizer.step()

"""`make_graphed_callable`: a training step as one launch, captured in CUDA graphs."""

from collections.abc import Callable
from traceback import walk_tb
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fnddp.core import tree
from fnddp.core.options import checked_int
from fnddp.core.state import placed
from fnddp.device import accelerator, current, device_of
from fnddp.run.engine import Engine, noting_engines
from fnddp.torch_private import local_of
from fnddp.wire import control
from fnddp.wire.c10d import C10d

P = ParamSpec("P")
T = TypeVar("T")

_OWNER = "make_graphed_callable"


class _Captured(NamedTuple):
    """A captured step: its graph, the memory of its arguments and results, and other memory that it uses."""

    graph: Any
    inputs: Any
    outputs: Any
    held: list[Tensor]


class make_graphed_callable(Generic[P, T]):
    """Capture a training step in a CUDA graph, and replay it: a launch takes the host the same time for any model.

    Write a function that does a whole step: set gradients to None, forward, backward, and the optimizer's step. Each
    call of the result is a step. The first calls run it. The next one captures it, and all later ones replay the graph:
    same numbers, but no Python code of `step` runs. It spares the traps of `torch.cuda.graph`: all calls run on a side
    stream, other threads may use the device, arguments are copied into the graph's memory, the pipeline's state keeps
    its memory, its counters are on the device, and each phase of the pipeline (`warmup`, `every`) has its own graph.

    The wrong choice if a step does not wait for its host, or reads values (`loss.item()`, a GradScaler, `check=True`).
    If a rank fails between two steps, the others wait for it, and the process group's timeout does not end that.

    Args:
        step: The step. It takes and returns pytrees of tensors. Arguments that are not tensors must not change.
        num_warmup_iters: Number of calls that run it before the first capture; 11 for torch's class with `register`.

    Raises:
        TypeError: `step` is not a function, or is a module.
        RuntimeError: At the call that captures, on all ranks, and nothing has happened: `step` waits for the device, or
            does something else that cannot be captured. At a later call: an optimizer's hyperparameter, the memory of
            its state or of a parameter, or the pipeline of a model has changed.
        ValueError: At a later call: an argument has another shape, dtype or device, or is not a tensor and has changed.

    Without an accelerator it calls `step`.

    >>> from fnddp import DistributedDataParallel
    >>> model = DistributedDataParallel(torch.nn.Linear(2, 1), sync="fp16(allreduce)")
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def step(x):
    ...     optimizer.zero_grad()
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     return loss.detach()
    >>> train = make_graphed_callable(step)
    >>> losses = [train(torch.ones(4, 2)) for _ in range(5)]
    >>> train.release()  # before torch.distributed.destroy_process_group()
    """

    def __init__(self, step: Callable[P, T], num_warmup_iters: int = 3) -> None:
        if not callable(step) or isinstance(step, torch.nn.Module):
            raise TypeError(
                f"{_OWNER}: expected a function that does a whole training step, got {type(step).__name__}; for parts "
                "of a step see torch.cuda.make_graphed_callables"
            )
        self._step, self._left = step, checked_int(f"{_OWNER}: num_warmup_iters", num_warmup_iters)
        kind = accelerator()
        self._device = device_of(torch.device("cpu") if kind is None else current(kind))
        self._stream = self._device.stream()
        self._engines: dict[Engine, int] = {}  # and the numbers of engines of their lanes
        self._functions: dict[Engine, None] = {}  # engines whose states belong to the caller
        self._optimizers: dict[torch.optim.Optimizer, Any] = {}  # and their values that must not change
        self._graphs: dict[Any, _Captured] = {}  # by the programs of the engines

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Take a step. See the class for errors."""
        if self._stream is None:
            return self._step(*args, **kwargs)
        device, mine = self._device, self._device.current()
        device.wait(self._stream, mine)
        with device.on(self._stream):
            done: Any = self._take((args, kwargs))
        device.wait(mine, self._stream)
        tree.map_tensors(lambda each: device.keep(each, mine) or each, done)
        return done

    def _take(self, given: Any) -> Any:
        if self._left > 0:
            self._left -= 1
            return self._run(given)
        for engine in self._all:
            engine.refuse_after_failure()
            engine.require_noticed()
        for engine in self._engines:
            engine.pin(self)
        if self._graphs:
            self._require_unchanged()
        found = {engine: program for engine in self._engines if (program := engine.next_program()) is not None}
        programs = tuple(found.values())
        if len(found) < len(self._engines):  # a phase begins
            return self._run(given)
        if captured := self._graphs.get(programs):
            self._copy(given, captured.inputs)
            for engine, program in found.items():
                engine.count(program)
                engine.steps += 1
        else:
            captured = self._graphs[programs] = self._capture(given)
        captured.graph.replay()
        return tree.map_tensors(Tensor.clone, captured.outputs)

    def _run(self, given: Any) -> Any:
        args, kwargs = given
        step: Any = self._step

        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._optimizers.setdefault(optimizer)

        with noting_engines() as engines:
            noted = register_optimizer_step_pre_hook(note)
            try:
                return step(*args, **kwargs)
            finally:
                noted.remove()
                self._engines |= {engine: engine.lane.engines for engine in engines if engine.owns_state}
                self._functions |= {engine: None for engine in engines if not engine.owns_state}

    @property
    def _all(self) -> list[Engine]:
        return [*self._engines, *self._functions]

    def _capture(self, given: Any) -> _Captured:
        inputs, error = tree.map_tensors(Tensor.clone, given), None
        counts = {engine: dict(engine.counts or {}) for engine in self._engines}
        graph, outputs = None, None
        try:
            graph, capturing = self._device.graph(self._stream)
            with capturing:
                try:
                    outputs = self._run(inputs)
                except Exception as first:  # torch's, at the end of the block, would be about its consequences
                    error = first
        except Exception as last:
            error = error or last
        if not self._any_failed(error is not None):
            self._optimizers = {optimizer: _fixed(optimizer) for optimizer in self._optimizers}
            held = [tensor for engine in self._all for tensor in engine.end_capture()]
            return _Captured(graph, inputs, outputs, held)
        for engine in self._all:
            engine.fail(error or RuntimeError("another rank failed"))
            engine.end_capture(failed=True, counts=counts.get(engine))
        self._left = 1  # plans were dropped
        _reset_scalers(error)
        if error is None:
            raise RuntimeError(f"{_OWNER}: another rank could not capture its step; see its own error")
        raise RuntimeError(
            f"{_OWNER}: the step cannot be captured, and nothing has happened: {type(error).__name__}: {error}"
        ) from error

    def _any_failed(self, failed: bool) -> bool:
        engines = sorted(self._all, key=lambda engine: engine.lane.number)
        groups = dict.fromkeys(g for each in engines if isinstance(each.wire, C10d) for g in each.groups)
        for group in groups:
            if C10d().size(group) > 1:
                failed = bool(control.highest(int(failed), group))
        return failed

    def _copy(self, given: Any, inputs: Any) -> None:
        for new, static in zip(*(tree.flatten_any(each)[0] for each in (given, inputs)), strict=True):
            if isinstance(new, Tensor) and isinstance(static, Tensor):
                if (got := placed(new)) != (was := placed(static)):
                    raise ValueError(f"{_OWNER}: it was captured with {was}, got {got}; make another callable")
                static.copy_(new)
            elif new is not static and new != static:
                raise ValueError(f"{_OWNER}: it was captured with {static!r}, got {new!r}; make another callable")

    def _require_unchanged(self) -> None:
        if any(engine.lane.engines != n for engine, n in self._engines.items()):
            raise RuntimeError(f"{_OWNER}: the pipeline or parameters of a model were replaced; make another callable")
        for optimizer, before in self._optimizers.items():
            now = _fixed(optimizer)
            changed = next((name for name, value in before.items() if now.get(name) != value), None)
            if changed is not None:
                raise RuntimeError(
                    f"{_OWNER}: {changed} of {type(optimizer).__name__} has changed, but the graph has what it was; "
                    "make a number a tensor on the device, write into tensors, or make another callable"
                )

    def release(self) -> None:
        """Drop the graphs, and let models use other memory again. Call it before the process group is destroyed."""
        self._device.synchronize()
        for captured in self._graphs.values():
            captured.graph.reset()
        self._graphs.clear()
        for engine in self._engines:
            engine.unpin(self)


def _fixed(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a graph of a step of `optimizer` has as constants: numbers, and addresses of tensors."""
    found: dict[str, Any] = {}
    for i, group in enumerate(optimizer.param_groups):
        states = [optimizer.state.get(p, {}).values() for p in group["params"]]
        found |= {f"{key} of group {i}": _constant(value) for key, value in group.items() if key != "params"}
        found[f"the memory of a parameter of group {i}"] = [_constant(p) for p in group["params"]]
        found[f"the memory of a state of group {i}"] = [_constant(part) for state in states for part in state]
    return found


def _constant(value: Any) -> Any:
    return local_of(value).data_ptr() if isinstance(value, Tensor) else value


def _reset_scalers(error: BaseException | None) -> None:
    """Let a GradScaler that raised `error` begin its step again, or it would not unscale gradients in the next one."""
    for frame, _ in walk_tb(None if error is None else error.__traceback__):
        scaler = frame.f_locals.get("self")
        if isinstance(scaler, torch.amp.GradScaler):
            scaler.update(scaler.get_scale())

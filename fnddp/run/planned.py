"""The executor: runs a plan while gradients arrive.

Steps run strictly in the order of the plan. Execution stops at the first step whose gradients are not there or whose
collectives are not complete, and goes on at the next feed; `finish` waits. So collectives leave in the same order on
all ranks, whatever the timing, and nothing blocks inside backward.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fnddp import collectives
from fnddp.plan.ir import Collective, LeafSpec
from fnddp.plan.passes.emit import Step
from fnddp.plan.plan import Plan
from fnddp.run.memory import Buffers, storage_uses
from fnddp.tree import Leaves


class CollectiveError(RuntimeError):
    """A collective failed: another rank has died or left, or it took longer than the process group's timeout."""


def require_expected(path: str, grad: Tensor, leaves: Mapping[str, LeafSpec], missing: Container[str]) -> LeafSpec:
    """What is known of the leaf at `path`. Raises a ValueError unless it is missing yet and `grad` is like it."""
    leaf = leaves.get(path)
    if leaf is None or path not in missing:
        problem = "has arrived already in this step" if leaf is not None else "is not among the plan's leaves"
        raise ValueError(f"gradient {path!r} {problem}")
    if (grad.shape, grad.dtype, grad.device) != (leaf.shape, leaf.dtype, leaf.device):
        raise ValueError(
            f"gradient {path!r} is {LeafSpec.of(grad)} on {grad.device}, but the plan was made for {leaf} on "
            f"{leaf.device}; lower the pipeline again for the new parameters"
        )
    return leaf


def _nothing() -> None:
    pass


class Executor:
    """Runs one plan, once for each `start`.

    On CUDA everything is issued on a side stream, waits are stream waits, and the host never blocks.

    Args:
        plan: What to run.
        buffers: Where its collectives' buffers come from; plans that follow each other may share them.
        on_last_launch: Called when the last collective has been issued.
        on_complete: Called when all collectives are complete, before anything is written over that a step which fails
            must leave alone. It may raise.
    """

    def __init__(
        self,
        plan: Plan,
        buffers: Buffers | None = None,
        on_last_launch: Callable[[], None] = _nothing,
        on_complete: Callable[[], None] = _nothing,
    ) -> None:
        self.plan = plan
        self._on_complete = on_complete
        self._committing = False
        self._buffers = buffers or Buffers()
        self._on_last_launch = on_last_launch
        self._read = {name for step in plan.steps for name in step.needs} | {*plan.means.values(), *plan.state}
        device = next((leaf.device for leaf in plan.leaves.values() if leaf.device.type == "cuda"), None)
        self._stream = None if device is None else self._buffers.stream(device)
        self._works: dict[int, collectives.Work] = {}
        self._values: dict[str, Any] = {}
        self._flat: dict[int, Tensor] = {}
        self._next = len(plan.steps)
        self._to_launch = 0
        self.missing: dict[str, None] = {}

    @property
    def has_launched_all(self) -> bool:
        """Whether every collective of this step has been issued."""
        return self._to_launch == 0

    @property
    def has_launched_some(self) -> bool:
        """Whether a collective of this step has been issued."""
        return self._to_launch < len(self.plan.collectives)

    def start(self, parts: Sequence[Any]) -> None:
        """Begins a step.

        Args:
            parts: The leaves of the pipeline's state.
        """
        plan = self.plan
        self._values = {**plan.constants, **dict(zip(plan.state_names, parts, strict=True))}
        for collective in plan.collectives:
            buffer = self._buffers.take(collective)
            self._flat[collective.index] = buffer.flat
            self._values.update(buffer.parts)
        for name, path in plan.results.items():
            self._values[name] = self._buffers.take_mean(path, plan.leaves[path])
        for name in plan.overwrites_state:
            if storage_uses(self._values[name]) > 1:  # somebody else reads it
                self._values[name] = self._values[name].clone()
        self._next, self._to_launch = 0, len(plan.collectives)
        self._committing = False
        self.missing = dict.fromkeys(plan.leaves)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def feed(self, path: str, grad: Tensor, *, holds: bool = False) -> None:
        """Hands over the gradient of a leaf, and runs what can run now. It never blocks on the CPU.

        With a plan that donates, the gradient is the executor's from now on.

        Args:
            path: Of the leaf.
            grad: Its gradient.
            holds: Run nothing yet.

        Raises:
            ValueError: There is no such leaf, it has arrived already, or it differs from what the plan is for.
        """
        self._accept(path, grad)
        if not holds:
            self._advance(block=False)

    def poll(self, *, block: bool = False) -> None:
        """Runs what can run now; with `block`, all that needs no gradient that is not there."""
        self._advance(block)

    def finish(self) -> tuple[Leaves, list[Any]]:
        """Waits for everything and ends the step. Leaves that have not arrived are zeros.

        Returns:
            The means by path and the leaves of the next state. They may be parts of the plan's buffers, which are not
            written again while somebody holds them.
        """
        for path in list(self.missing):
            self._accept(path, self.plan.leaves[path].empty().zero_())
        self._advance(block=True)
        with torch.no_grad(), self._on_side_stream():  # those that only steps wait for which commit
            self._wait_for_all()
        self._on_complete()
        self._committing = True
        self._advance(block=True)
        values, stream = self._values, self._stream
        # New tensors (not views, which would hold what they view): whoever holds one of them holds its memory.
        means = {path: values[name].data for path, name in self.plan.means.items()}
        parts = [values[part] if isinstance(part, str) else part for part in self.plan.state]
        state = [part.data if isinstance(part, Tensor) else part for part in parts]
        for path, name in self.plan.memories.items():
            self._buffers.give_mean(path, values[name].view(self.plan.leaves[path].shape).data)
        self._values = {}
        if stream is not None:
            current = torch.cuda.current_stream(stream.device)
            current.wait_stream(stream)
            for made in [*means.values(), *state]:
                if isinstance(made, Tensor) and made.is_cuda:
                    made.record_stream(current)
        return means, state

    def abort(self) -> None:
        """Gives the step up without leaving other ranks alone: sends zeros where this rank had still to send.

        Raises:
            RuntimeError: A collective failed; the ranks are out of step.
        """
        with torch.no_grad(), self._on_side_stream():
            for step in self.plan.steps[self._next :]:
                if step.launches is not None:
                    self._flat[step.launches.index].zero_()
                    self._launch(step.launches)
            self._next = len(self.plan.steps)
            self._wait_for_all()
        if self._stream is not None:  # before memory is freed that the side stream still writes to
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._values = {}
        self.missing = {}

    def forget(self) -> None:
        """Gives a step up that has sent nothing."""
        self._values, self.missing = {}, {}
        self._next, self._to_launch = len(self.plan.steps), 0

    def _accept(self, path: str, grad: Tensor) -> None:
        leaf = require_expected(path, grad, self.plan.leaves, self.missing)
        del self.missing[path]
        name = self.plan.leaf_names[path]
        if name in self._read:
            if grad.stride() != leaf.stride:
                grad = leaf.empty().copy_(grad)
            if self._stream is not None and grad.is_cuda:
                self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
                grad.record_stream(self._stream)
            self._values[name] = grad

    def _advance(self, block: bool) -> None:
        # Without autocast, which would compute factors in half precision where backward runs within it.
        with torch.no_grad(), torch._C._DisableAutocast(), self._on_side_stream():  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            steps = self.plan.steps
            for index in self._works if self._stream is None else ():
                self._is_completed(index)  # which carries on what takes several messages
            while self._next < len(steps) and self._is_ready(steps[self._next], block):
                step = steps[self._next]
                for index in step.waits:
                    if index in self._works:
                        self._wait(index)
                self._compute(step)
                self._next += 1
                if step.launches is not None:
                    self._launch(step.launches)

    def _is_ready(self, step: Step, block: bool) -> bool:
        if any(name not in self._values for name in step.needs):
            return False
        if step.commits and not self._committing:
            return False
        if block or self._stream is not None:
            return True
        return all(self._is_completed(index) for index in step.waits if index in self._works)

    def _is_completed(self, index: int) -> bool:
        try:
            return self._works[index].is_completed()
        except RuntimeError as error:
            raise self._failure(index, error) from error

    def _compute(self, step: Step) -> None:
        values = self._values
        made = step.run(*[values[name] for name in step.inputs])
        values.update(zip(step.outputs, made, strict=True))
        for name in step.frees:
            del values[name]

    def _launch(self, collective: Collective) -> None:
        flat = self._flat[collective.index]
        try:
            self._works[collective.index] = collectives.start_all_reduce(
                flat, collective.op, collective.group, tag=collective.index
            )
        except RuntimeError as error:
            raise self._failure(collective.index, error) from error
        self._to_launch -= 1
        if self._to_launch == 0:
            self._on_last_launch()

    def _wait_for_all(self) -> None:
        for index in list(self._works):
            self._wait(index)

    def _wait(self, index: int) -> None:
        try:
            self._works.pop(index).wait()
        except RuntimeError as error:
            raise self._failure(index, error) from error

    def _failure(self, index: int, error: RuntimeError) -> CollectiveError:
        collective = self.plan.collectives[index]
        carried = ", ".join([payload.label for payload in collective.payloads][:3])
        return CollectiveError(
            f"{collective.kind} {collective.name} of {len(collective.payloads)} payloads ({carried}, ...) over "
            f"{collective.world_size} ranks failed: {error}. Another rank has failed, left, or not called backward; "
            "see its own error"
        )

    def _on_side_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

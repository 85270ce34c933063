"""Backward passes of a wrapped module as steps of an engine.

A step begins with the first gradient of what the module has returned, and ends with the backward pass. In between each
parameter hands its gradient over, in one of two ways: as `parameter.grad`, once it is accumulated; or, where
`torch.autograd.grad` asks for it, through a hook that gives autograd memory which is filled at the end.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from fnddp.module.log import Log
from fnddp.plan.engine import Engine, Synchronized
from fnddp.sync import State


class Steps:
    """Feeds the gradients of `parameters` to an engine.

    Args:
        parameters: By name.
        engine: For leaves of these names.
        state: The pipeline's state before the first step.
        log: What is measured goes there.
        at_end: Called when a step is over.

    Attributes:
        state: The pipeline's state after the last step.
        is_armed: Whether the next backward is one that synchronizes.
        scale: What gradients are multiplied by on their way.
        unsynchronized: Parameters with gradients that no step has synchronized yet: of backwards within `no_sync`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        engine: Engine,
        state: State,
        log: Log,
        at_end: Callable[[], None],
    ) -> None:
        self.parameters = dict(parameters)
        self.engine = engine
        self.state = state
        self.is_armed = False
        self.scale = 1.0
        self._log = log
        self._at_end = at_end
        self.unsynchronized: set[str] = set()
        self._kept: set[str] = set()  # with a gradient that the step adds to
        self._late: set[str] = set()  # whose gradient waits for the end of the step
        self._task = -1  # autograd's number for the backward of the step
        self._is_finishing = False
        self._sparse: dict[str, int] = {}
        self._captured: dict[str, Tensor] = {}  # what torch.autograd.grad will return
        self._capturing: list[RemovableHandle] = []
        self._nodes: dict[str, Any] = {}  # where autograd accumulates the gradient of each parameter
        self._feeders = [
            parameter.register_post_accumulate_grad_hook(_Feeder(self, name))
            for name, parameter in self.parameters.items()
        ]

    def arm(self) -> None:
        """The next backward synchronizes."""
        self.is_armed = True

    def start(self, _: Tensor | None = None) -> None:
        """At the beginning of a backward."""
        if self.engine.is_open:
            return
        # What is there already is added to, and is the user's: it is not written over.
        self._kept = {name for name, parameter in self.parameters.items() if parameter.grad is not None}
        self._sparse, self._captured, self._late = {}, {}, set()
        self._task = torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]
        with self._log.errors():
            self.engine.start(self.state)
        self._log.backward_starts()
        self._capturing = [self.parameters[name].register_hook(self._capture(name)) for name in self._asked_for()]
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]

    def fail(self, error: BaseException) -> None:
        """Ends an open step because of `error`."""
        self.engine.fail(error)
        self._close()

    def shadow(self) -> None:
        """Takes part in a step in which this rank has no gradients, and keeps nothing of it but the state."""
        with self._log.errors():
            self.engine.start(self.state)
        try:
            done = self._run()
        except BaseException as error:
            self.fail(error)
            raise
        if not self._is_none(done):
            self.state = done.state

    def detach(self) -> None:
        """Lets go of the parameters: from now on their gradients are nobody's."""
        self.fail(RuntimeError("its hooks were removed"))
        for handle in self._feeders:
            handle.remove()
        self._feeders = []

    def _asked_for(self) -> list[str]:
        """The parameters whose gradients torch.autograd.grad will return, if this is a backward of that kind."""
        asked: list[str] = []
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                continue
            if name not in self._nodes:
                self._nodes[name] = get_gradient_edge(parameter).node
            try:
                if torch._C._will_engine_execute_node(self._nodes[name]):  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
                    return []  # a gradient is accumulated: this is no torch.autograd.grad
            except RuntimeError:  # so torch says that it returns the gradient
                asked.append(name)
        return asked

    def accumulated(self, name: str, parameter: Tensor) -> None:
        """Autograd has accumulated a gradient in `parameter.grad`."""
        grad = parameter.grad
        if grad is None:  # an undefined one
            return
        if not self.engine.is_open:
            if not self.is_armed:  # a forward within no_sync, or of the module itself
                self.unsynchronized.add(name)
                return
            self.start()  # the module has returned what we know no tensors of
            self._kept.add(name)  # too late to tell
        if torch._C._current_graph_task_id() != self._task and not self._is_finishing:  # pyright: ignore[reportPrivateUsage]
            self._late.add(name)  # a backward within the backward, of reentrant checkpointing: more may be added
            return
        if grad.is_sparse:
            self._sparse[name] = grad.sparse_dim()
            grad = grad.to_dense()
        if name not in self._kept:
            parameter.grad = None  # so that its memory is free once it is on its way
        self._feed(name, grad)

    def _capture(self, name: str) -> Callable[[Tensor], Tensor]:
        def hook(grad: Tensor) -> Tensor:
            # With create_graph a derivative passes through as if this were the rank's own gradient; synchronized in
            # its turn, it is the one of the mean.
            self._captured[name] = placeholder = grad.clone()
            self._feed(name, grad.detach())
            return placeholder

        return hook

    def _feed(self, name: str, grad: Tensor) -> None:
        scaled = grad if self.scale == 1 else grad * self.scale
        self.engine.feed(name, scaled, keep=name in self._kept and scaled is grad)
        self._log.fed(self.engine)

    def _finish(self) -> None:
        """At the end of a backward."""
        self._log.backward_ends()
        was_armed = self.is_armed
        try:
            # What was accumulated within no_sync, of parameters that this backward has not reached.
            self._is_finishing = True
            missing = self.engine.missing - self._late
            waiting = self.unsynchronized if len(missing) < len(self.parameters) else set[str]()
            for name in sorted((waiting & missing) | self._late):
                self.accumulated(name, self.parameters[name])
            done = self._run()
        except BaseException as error:
            self.fail(error)
            raise
        captured = self._captured
        self._close()
        if self._is_none(done):
            self.is_armed = was_armed  # for a backward through the gradients of inputs that this one has made
            return
        # With create_graph likewise: what follows is synchronized too.
        self.is_armed = was_armed and any(placeholder.requires_grad for placeholder in captured.values())
        self.state = done.state
        self.unsynchronized = set()
        for name, placeholder in captured.items():
            placeholder.data.copy_(done.mean[name])
        for name, mean in done.mean.items() if not captured else ():
            if name not in done.unused:
                self._set_grad(name, mean)
        self._at_end()
        self._log.step_ends(self.engine, done.unused)

    def _set_grad(self, name: str, mean: Tensor) -> None:
        parameter = self.parameters[name]
        if name in self._sparse:
            mean = mean.to_sparse(self._sparse[name])
        elif mean.stride() != parameter.stride():  # which optimizers expect of a dense parameter, as torch does
            mean = torch.empty_like(parameter).copy_(mean)
        parameter.grad = mean
        optimizers = getattr(parameter, "_in_backward_optimizers", ())
        for optimizer in optimizers:
            optimizer.step()
        if optimizers:
            parameter.grad = None

    def _run(self) -> Synchronized:
        # So torch calls it in profiles: it is here that ranks learn what none of them has used.
        with self._log.errors(), torch.autograd.profiler.record_function("search_unused_parameters"):
            return self.engine.finish()

    def _is_none(self, done: Synchronized) -> bool:
        """Whether no parameter had a gradient on any rank."""
        return len(done.unused) == len(self.parameters)

    def _close(self) -> None:
        self.is_armed = self._is_finishing = False
        for handle in self._capturing:
            handle.remove()
        self._capturing, self._captured = [], {}


class _Feeder:
    """The hook of one parameter."""

    def __init__(self, owner: Steps, name: str) -> None:
        self._owner, self._name = weakref.ref(owner), name  # the garbage collector does not see hooks of tensors

    def __call__(self, tensor: Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.accumulated(self._name, tensor)


def take_over_optimizers(parameters: Iterable[nn.Parameter]) -> None:
    """Optimizers that run within backward run when gradients are synchronized, not when they are accumulated.

    They are those of `torch.distributed.optim._apply_optimizer_in_backward`. As in torch, gradients are None then.
    """
    theirs = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
    if theirs:
        # Whoever has such an optimizer has imported it; others would be warned of what it imports.
        from torch.distributed.optim import apply_optimizer_in_backward

        for parameter in theirs:
            for handle in apply_optimizer_in_backward.param_to_optim_hook_handle_map.pop(parameter, []):
                handle.remove()

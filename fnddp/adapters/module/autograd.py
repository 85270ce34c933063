"""What autograd is asked for in a backward, and what it calls: callbacks that keep nothing alive."""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from fnddp import torch_private
from fnddp.run.inbox import Inbox
from fnddp.torch_private import current_backward

Owner = TypeVar("Owner")

_NO_TASK = -2  # outside of a backward autograd says -1


class Requests:
    """Which gradients of `parameters` are returned instead of accumulated."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters

    def asked_for(self) -> set[str] | None:
        """Return the parameters whose gradients torch.autograd.grad will return; None if one is accumulated instead."""
        asked: set[str] = set()
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad:
                continue
            try:
                if torch_private.will_execute(get_gradient_edge(parameter).node):
                    return None
            except RuntimeError:  # so torch says that it returns the gradient
                asked.add(name)
        return asked


def accumulates(nodes: Iterable[Any]) -> bool:
    """Return whether the running backward accumulates the gradients of all leaves behind `nodes` of its graph.

    `torch.autograd.grad` does not, nor does `backward(inputs=...)` where there are others.
    """
    waiting, has_leaves = [*nodes], False
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):  # it accumulates a leaf's gradient
            try:
                if not torch_private.will_execute(node):
                    return False
            except RuntimeError:  # so torch says that it returns the gradient
                return False
            has_leaves = True
        behind = {following for following, _ in node.next_functions} - seen
        seen |= behind
        waiting += behind
    return has_leaves


class WeakHook(Generic[Owner]):
    """A hook of one parameter: calls `method(owner, name, tensor)`."""

    def __init__(self, owner: Owner, method: Callable[[Owner, str, Tensor], Any], name: str) -> None:
        self._owner = weakref.ref(owner)  # the garbage collector does not see hooks of tensors
        self._method, self._name = method, name

    def __call__(self, tensor: Tensor) -> Any:
        owner = self._owner()
        return None if owner is None else self._method(owner, self._name, tensor)


class Quick:
    """The short way of gradients to their step, for all but the first step, weighted ones, and unusual gradients.

    A hook only counts; gradients are taken when a segment of the plan is complete.

    Args:
        takes: By the positions of leaves, the long way of a gradient.
    """

    __slots__ = ("_counted", "_inbox", "_kept", "_takes", "_task")

    def __init__(self, takes: Sequence[Callable[[Tensor], Any]]) -> None:
        self._takes = takes
        self._task = _NO_TASK
        self._inbox: Inbox | None = None
        self._kept: Collection[int] = ()
        self._counted: list[tuple[int, Tensor]] = []  # whose parameters only a step holds: see WeakHook

    @property
    def is_open(self) -> bool:
        """Whether a step is, in which no gradient needs a graph, and nobody else waits for one."""
        return self._task != _NO_TASK

    def open(self, task: int, inbox: Inbox | None, kept: Collection[int]) -> None:
        """A step begins with the backward `task`. Of those that are `kept` the gradient is the user's."""
        self._task, self._inbox, self._kept = task, inbox, kept

    def close(self) -> None:
        """No step is open. Gradients that were not taken are dropped, but for those that are the user's."""
        for position, parameter in self._counted:
            if position not in self._kept:
                parameter.grad = None
        self._task, self._inbox, self._kept, self._counted = _NO_TASK, None, (), []

    def before(self, look: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """A hook of a parameter's gradient, which calls `look` unless it is one that this step will count."""

        def arrives(grad: Tensor) -> Any:
            return None if self._task == current_backward() else look(grad)

        return arrives

    def after(self, position: int, carry_on: Callable[[], Callable[[], None] | None]) -> Callable[[Tensor], None]:
        """A hook of a parameter whose gradient is accumulated.

        Args:
            position: Of the leaf.
            carry_on: Gives what is called when a segment is complete.
        """
        take = self._takes[position]

        def accumulated(parameter: Tensor) -> None:
            inbox = self._inbox
            if inbox is None or self._task != current_backward() or not inbox.is_open:
                take(parameter)
                return
            self._counted.append((position, parameter))
            if inbox.count(position):
                run = carry_on()
                if run is not None:
                    run()

        return accumulated

    def hand_over(self) -> None:
        """Gives what has been counted to the step."""
        counted, self._counted = self._counted, []
        inbox, kept = self._inbox, self._kept
        if inbox is None:
            return
        unusual: list[tuple[int, Tensor]] = []
        for position, parameter in counted:
            grad = parameter.grad
            if grad is None or grad.is_sparse or position in kept:
                inbox.uncount(position)
                unusual.append((position, parameter))
            else:
                parameter.grad = None  # so that its memory is free once it is on its way
                inbox.noted.append((position, grad))
        for position, parameter in unusual:
            self._takes[position](parameter)

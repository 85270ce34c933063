"""What autograd is asked for in a backward, and what it calls: callbacks that keep nothing alive."""

import weakref
from collections.abc import Callable, Mapping
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
        self._nodes: dict[str, Any] = {}

    def asked_for(self) -> set[str]:
        """The parameters whose gradients torch.autograd.grad will return, if the backward that runs is of that kind."""
        asked: set[str] = set()
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad:
                continue
            try:
                if torch_private.will_execute(self._node(name, parameter)):
                    return set()  # a gradient is accumulated: this is no torch.autograd.grad
            except RuntimeError:  # so torch says that it returns the gradient
                asked.add(name)
        return asked

    def _node(self, name: str, parameter: nn.Parameter) -> Any:
        """Where autograd accumulates the gradient: another place once the parameter was moved or cast."""
        kind = parameter.dtype, parameter.device
        if name not in self._nodes or self._nodes[name][0] != kind:
            self._nodes[name] = kind, get_gradient_edge(parameter).node
        return self._nodes[name][1]


class WeakHook(Generic[Owner]):
    """A hook of one parameter: calls `method(owner, name, tensor)`."""

    def __init__(self, owner: Owner, method: Callable[[Owner, str, Tensor], Any], name: str) -> None:
        self._owner = weakref.ref(owner)  # the garbage collector does not see hooks of tensors
        self._method, self._name = method, name

    def __call__(self, tensor: Tensor) -> Any:
        owner = self._owner()
        return None if owner is None else self._method(owner, self._name, tensor)


class Quick:
    """The short way of a gradient to its step, for all but the first step, weighted ones, and unusual gradients.

    Attributes:
        watches: Whether gradients must be seen before they are accumulated.
        inbox: Of the step that is open.
    """

    __slots__ = ("_kept", "_task", "inbox", "watches")

    def __init__(self) -> None:
        self.watches = True
        self.inbox: Inbox | None = None
        self._task = _NO_TASK
        self._kept: list[bool] = []

    def open(self, task: int, inbox: Inbox | None, kept: list[bool]) -> None:
        """A step begins with the backward `task`. Of those that are `kept` the gradient is the user's."""
        self.watches = False
        self._task, self.inbox, self._kept = task, inbox, kept

    def close(self) -> None:
        """No step is open."""
        self.watches = True
        self._task, self.inbox = _NO_TASK, None

    def before(self, look: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """A hook of a parameter's gradient, which calls `look` where it must."""

        def arrives(grad: Tensor) -> Any:
            return look(grad) if self.watches or self._task != current_backward() else None

        return arrives

    def after(
        self, position: int, take: Callable[[Tensor], Any], carry_on: Callable[[], Callable[[], None] | None]
    ) -> Callable[[Tensor], None]:
        """A hook of a parameter whose gradient is accumulated.

        Args:
            position: Of the leaf.
            take: The long way.
            carry_on: Gives what is called when a segment is complete.
        """

        def accumulated(parameter: Tensor) -> None:
            grad, inbox = parameter.grad, self.inbox
            if (
                inbox is None
                or not inbox.is_open
                or self._task != current_backward()
                or grad is None
                or self._kept[position]
                or grad.requires_grad
                or grad.is_sparse
            ):
                take(parameter)
                return
            parameter.grad = None  # so that its memory is free once it is on its way
            if inbox.put(position, grad):
                run = carry_on()
                if run is not None:
                    run()

        return accumulated


class Ending:
    """The callback at the end of a backward. It lives as long as that is going on."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def __call__(self) -> None:
        self._run()

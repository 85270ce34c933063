"""What autograd is asked for in a backward, and what it calls: callbacks that keep nothing alive."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from fnddp import torch_private

Owner = TypeVar("Owner")


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


class Ending:
    """The callback at the end of a backward. It lives as long as that is going on."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def __call__(self) -> None:
        self._run()

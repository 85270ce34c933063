"""The gradients before a backward, for a step that may be withheld."""

from collections.abc import Collection, Mapping

from torch import nn


class Gradients:
    """A copy of `.grad` of `parameters`, as it is now.

    Args:
        parameters: By name.
        unsynchronized: Those with gradients that no step has synchronized yet.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], unsynchronized: Collection[str]) -> None:
        self.unsynchronized = set(unsynchronized)
        self._parameters = parameters
        self._grads = {name: p.grad.detach().clone() for name, p in parameters.items() if p.grad is not None}

    def put_back(self) -> None:
        """Give the parameters these gradients again."""
        for name, parameter in self._parameters.items():
            before, grad = self._grads.get(name), parameter.grad
            if before is None or grad is None or before.layout != grad.layout or before.is_sparse:
                parameter.grad = before
            else:
                grad.detach().copy_(before)  # others may hold it, as a part of a flat buffer

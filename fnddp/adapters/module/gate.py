"""A wrapped module within torch.func transforms: its parameters pass through a gate.

Within `torch.func.grad` there is no `backward` to hook into, and gradients do not belong to parameters. So the tensors
that stand for parameters go through an identity on their way in, whose derivative synchronizes their gradients. Other
transforms of parameters have no rule here, so torch raises: no result is silently that of one rank.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fnddp import torch_private

Run = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


def is_differentiated(tensor: Tensor) -> bool:
    """Return whether a torch.func transform or forward-mode AD differentiates with respect to `tensor`."""
    return torch_private.has_tangent(tensor) or torch_private.tracks_gradient(tensor)


def gated(tensors: Mapping[str, Tensor], mean_of: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> Any:
    """Return the same tensors, whose gradients will be `mean_of` their gradients."""
    names = tuple(tensors)

    def run(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        mean = mean_of(dict(zip(names, grads, strict=True)))
        return tuple(mean[name] for name in names)

    return dict(zip(names, _Gate.apply(run, *tensors.values()), strict=True))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(run: Run, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.run = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *_Run.apply(ctx.run, *grads)  # pyright: ignore[reportUnknownMemberType, reportGeneralTypeIssues]


class _Run(torch.autograd.Function):
    """A function of its own: torch.func takes the transform off the gradients before it runs."""

    @staticmethod
    def forward(run: Run, *grads: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return run(grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ARG004
        raise RuntimeError("a gradient synchronization has no derivative: this is the second one of the loss")

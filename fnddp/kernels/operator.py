"""Operators of codecs: PyTorch's operations everywhere, and a kernel in their place on a GPU, with the same bits."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fnddp.device import device_of
from fnddp.torch_private import without_modes

_log = logging.getLogger("fnddp")
KEYS = ("CUDA", "XPU")  # ROCm's devices have the key CUDA


def takes_operators(x: Tensor) -> bool:
    """Return whether codecs are single operators for tensors like `x`: on accelerators, where each launch costs."""
    return device_of(x.device).is_asynchronous


def operator(
    name: str,
    schema: str,
    run: Callable[..., Any],
    *,
    kernel: Callable[[Any], Callable[..., Any]],
    sample: Callable[[torch.device], tuple[Any, ...]],
) -> Any:
    """Define an operator of a codec, whose first dimensions are rows; return its default overload.

    Args:
        run: Computes it with PyTorch's operations.
        kernel: Returns the function that computes it with Triton, of the module of kernels. The function returns None
            for arguments that it does not take.
        sample: Returns arguments on a device. The kernel is used where it gives the bits of `run` for these.
    """

    def batch(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        moved = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(arguments, in_dims, strict=True)]
        made = made_by(*moved)
        return made, 0 if isinstance(made, Tensor) else (0,) * len(made)

    @functools.cache
    def works_on(device: torch.device) -> bool:
        """Return whether there is a kernel that gives the same bits on `device`: it may have been tried on no such."""
        try:
            from fnddp.kernels import blocks

            arguments = sample(device)
            with without_modes():
                made, expected = kernel(blocks)(*arguments), run(*arguments)
            if all(map(is_same, _all(made), _all(expected))):
                return True
            _log.warning("fnddp: the kernel of %s gives other bits on %s, so PyTorch's operations run", name, device)
        except ImportError:
            pass
        except Exception as error:  # of a compiler, or a driver: the operations still run
            _log.warning("fnddp: %s has no kernel on %s, and PyTorch's operations run: %s", name, device, error)
        return False

    def on_device(*arguments: Any) -> Any:
        if works_on(arguments[0].device):
            from fnddp.kernels import blocks

            with device_of(arguments[0].device).selected():
                made = kernel(blocks)(*arguments)
            if made is not None:
                return made
        return run(*arguments)

    torch.library.define(name, schema, tags=())
    torch.library.impl(name, "CompositeExplicitAutograd", run)
    for key in KEYS:
        torch.library.impl(name, key, on_device)
    torch.library.register_fake(name, run)
    torch.library.register_vmap(name, batch)
    namespace, of = name.split("::")
    made_by = getattr(getattr(torch.ops, namespace), of).default
    return made_by


def is_same(made: Tensor, expected: Tensor) -> bool:
    """Return whether numbers are equal; NaN are, too."""
    return torch.equal(made != made, expected != expected) and torch.equal(
        made.masked_fill(made != made, 0), expected.masked_fill(expected != expected, 0)
    )


def _all(made: Any) -> tuple[Tensor, ...]:
    return (made,) if isinstance(made, Tensor) else tuple(made)

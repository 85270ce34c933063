"""Operators of codecs: PyTorch's operations everywhere, or on a GPU a kernel that returns the same bits."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fnddp.core.opaque import is_compiled
from fnddp.device import device_of
from fnddp.torch_private import without_modes

_log = logging.getLogger("fnddp")
Sample: TypeAlias = Callable[[torch.device], tuple[Any, ...]]
KEYS = ("CUDA", "XPU")  # ROCm's devices have the key CUDA


def takes_operators(x: Tensor) -> bool:
    """Return whether codecs are single operators for tensors like `x`: on accelerators, because each launch costs time.

    Not under compilers: they fuse several operations into a kernel themselves.
    """
    return not is_compiled() and device_of(x.device).is_asynchronous


class KernelOr:
    """A kernel; or PyTorch's operations, on devices without the kernel or where its results differ.

    Args:
        name: The operator's name.
        run: A function that computes it with PyTorch's operations.
        kernel: Name of the function in `fnddp.kernels.blocks` that computes it with Triton. It returns None for
            arguments that it does not support.
        sample: A function that returns arguments on a device; both results are compared there before the first use.
    """

    def __init__(self, name: str, run: Callable[..., Any], kernel: str, sample: Sample) -> None:
        self._name, self._run, self._kernel, self._sample = name, run, kernel, sample
        self._works: dict[torch.device, bool] = {}

    def __call__(self, *arguments: Any) -> Any:
        device = arguments[0].device
        with device_of(device).selected():
            if device not in self._works:
                self._works[device] = self._works_on(device)
            made = self._from_kernel(*arguments) if self._works[device] else None
        return self._run(*arguments) if made is None else made

    def _from_kernel(self, *arguments: Any) -> Any:
        from fnddp.kernels import blocks  # needs Triton

        return getattr(blocks, self._kernel)(*arguments)

    def _works_on(self, device: torch.device) -> bool:
        def results() -> Iterator[tuple[Any, Any]]:
            arguments = self._sample(device)
            yield self._from_kernel(*arguments), self._run(*arguments)

        with without_modes():
            return works(f"the kernel of {self._name}", device, results)


def works(name: str, device: torch.device, results: Callable[[], Iterable[tuple[Any, Any]]]) -> bool:
    """Return whether all `results`, of a kernel and of PyTorch's operations, are the same; log a warning if not.

    A result is None if there is no kernel for the sample.
    """
    try:
        for made, expected in results():
            if made is None:
                return False
            if not all(map(is_same, _all(made), _all(expected))):
                _log.warning("%s gives other numbers on %s: PyTorch's operations run", name, device)
                return False
    except ImportError:
        return False
    except Exception as error:  # of a compiler, or a driver
        _log.warning("%s does not run on %s, where PyTorch's operations run: %s", name, device, error)
        return False
    return True


def sample(device: torch.device, n: int) -> Tensor:
    """Return numbers with zeros, subnormal and large numbers, ties and NaN, to test a kernel."""
    x = torch.linspace(-3, 4, n, device=device).exp() * (torch.arange(n, device=device) // 1000 - 1)
    x[:7] = torch.tensor([0.0, 1e-40, 3e38, 63.5, 62.5, -0.0, 127.0], device=device)
    x[2500:2501] = math.nan
    return x


def operator(name: str, schema: str, run: Callable[..., Any], *, kernel: str, sample: Sample) -> Any:
    """Define and return an operator of a codec; the first dimensions of its tensors are rows. See `KernelOr`."""

    def batch(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        moved = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(arguments, in_dims, strict=True)]
        made = overload(*moved)
        return made, 0 if isinstance(made, Tensor) else (0,) * len(made)

    torch.library.define(name, schema, tags=())
    torch.library.impl(name, "CompositeExplicitAutograd", run)
    for key in KEYS:
        torch.library.impl(name, key, KernelOr(name, run, kernel, sample))
    torch.library.register_fake(name, run)
    torch.library.register_vmap(name, batch)
    namespace, _, of = name.partition("::")
    overload = getattr(getattr(torch.ops, namespace), of).default
    return overload


def is_same(made: Tensor, expected: Tensor) -> bool:
    """Return whether numbers are equal, with NaN equal to NaN."""
    a, b = (x.masked_fill(x != x, 0) for x in (made, expected))
    return torch.equal(made != made, expected != expected) and torch.equal(a, b)


def _all(made: Any) -> tuple[Tensor, ...]:
    return (made,) if isinstance(made, Tensor) else tuple(made)

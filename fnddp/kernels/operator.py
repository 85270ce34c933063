"""Operators of codecs: PyTorch's operations everywhere, or on a GPU a kernel that returns the same bits."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fnddp.core.opaque import define, is_compiled
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


def kernel_or(name: str, run: Callable[..., Any], kernel: str, sample: Sample) -> Callable[..., Any]:
    """Return a function that calls a kernel, or `run` on devices without the kernel or where its results differ.

    Args:
        name: The operator's name.
        run: A function that computes it with PyTorch's operations.
        kernel: Name of the function in `fnddp.kernels.blocks` that computes it with Triton. It returns None for
            arguments that it does not support.
        sample: A function that returns arguments on a device; both results are compared there before the first use.
    """

    def of_kernel(*arguments: Any) -> Any:
        from fnddp.kernels import blocks  # needs Triton

        return getattr(blocks, kernel)(*arguments)

    @cache
    def works_on(device: torch.device) -> bool:
        def results() -> Iterator[tuple[Any, Any]]:
            arguments = sample(device)
            yield of_kernel(*arguments), run(*arguments)

        return works(f"the kernel of {name}", device, results)

    def called(*arguments: Any) -> Any:
        device = arguments[0].device
        with device_of(device).selected():
            made = of_kernel(*arguments) if works_on(device) else None
        return run(*arguments) if made is None else made

    return called


def works(name: str, device: torch.device, results: Callable[[], Iterable[tuple[Any, Any]]]) -> bool:
    """Return whether all `results`, of a kernel and of PyTorch's operations, are the same; log a warning if not.

    A result is None if there is no kernel for the sample.
    """
    try:
        with without_modes():
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
    """Define and return an operator of a codec; the first dimensions of its tensors are rows. See `kernel_or`."""

    def batch(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        moved = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(arguments, in_dims, strict=True)]
        made = overload(*moved)
        return made, 0 if isinstance(made, Tensor) else (0,) * len(made)

    overload = define(name, schema, run, run)
    for key in KEYS:
        torch.library.impl(f"fnddp::{name}", key, kernel_or(name, run, kernel, sample))
    torch.library.register_vmap(overload, batch)
    return overload


def list_operator(
    name: str, schema: str, like: Callable[..., list[Tensor]], run: Callable[..., None], by_kernel: Callable[..., None]
) -> tuple[Any, Any]:
    """Define an operator on lists of tensors: one form makes its results, and one writes them to existing tensors.

    `like` returns tensors for the results. `run`, and `by_kernel` on devices with kernels, write the results to `out`.
    """

    def made(into: Callable[..., None], *arguments: Any) -> list[Tensor]:
        out = like(*arguments)
        into(*arguments, out=out)
        return out

    torch.library.define(f"fnddp::{name}", f"({schema}) -> Tensor[]", tags=())
    torch.library.define(f"fnddp::{name}.out", f"({schema}, *, Tensor(a!)[] out) -> ()", tags=())
    for key, into in (("CompositeExplicitAutograd", run), *((key, by_kernel) for key in KEYS)):
        torch.library.impl(f"fnddp::{name}", key, partial(made, into))
        torch.library.impl(f"fnddp::{name}.out", key, into)
    torch.library.register_fake(f"fnddp::{name}", like)
    packet = getattr(torch.ops.fnddp, name)
    return packet.default, packet.out


def is_same(made: Tensor, expected: Tensor) -> bool:
    """Return whether numbers are equal, with NaN equal to NaN."""
    a, b = (x.masked_fill(x != x, 0) for x in (made, expected))
    return torch.equal(made != made, expected != expected) and torch.equal(a, b)


def _all(made: Any) -> tuple[Tensor, ...]:
    return (made,) if isinstance(made, Tensor) else tuple(made)

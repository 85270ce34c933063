"""Operations that a compiler would miscompile or change, in a form that it cannot change.

In eager mode they are a view, a cast and a product. While torch.compile traces, or a plan is traced for a compiler, the
first two are operators of their own.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

_is_for_compiler: ContextVar[bool] = ContextVar("_is_for_compiler", default=False)


@contextmanager
def for_compiler(enabled: bool = True) -> Generator[None]:
    """Use the forms that a compiler cannot change in traces of the block; do nothing unless `enabled`."""
    token = _is_for_compiler.set(enabled)
    try:
        yield
    finally:
        _is_for_compiler.reset(token)


def is_compiled() -> bool:
    """Return whether a compiler will see the operations that run now."""
    return torch.compiler.is_compiling() or _is_for_compiler.get()


def shortened(x: Tensor, n: int) -> Tensor:
    """Return `x[..., :n]`.

    Inductor miscompiles this slice for CPUs if `x` was computed in blocks (`try_loop_split`, torch 2.11 to 2.15): it
    splits the loop over `n` elements by the size of a block, and leaves out the last `n % size`.

    >>> shortened(torch.arange(4), 3)
    tensor([0, 1, 2])
    """
    if n == x.shape[-1]:
        return x
    return SHORTENED(x, n) if is_compiled() else x[..., :n]


def rounded(x: Tensor, dtype: torch.dtype, *, copy: bool = False) -> Tensor:
    """Return `x.to(dtype, copy=copy)`, rounded if `dtype` has fewer digits, even if the result is cast back.

    Inductor removes a cast to 16 bits and back; error feedback would then see no loss.

    >>> rounded(torch.tensor(1 / 3), torch.bfloat16)
    tensor(0.3340, dtype=torch.bfloat16)
    """
    return ROUNDED(x, dtype) if x.dtype != dtype and is_compiled() else x.to(dtype, copy=copy)


def product(x: Tensor, factor: int) -> Tensor:
    """Return `x * factor`, modulo 2 ** 32 for int32.

    Inductor writes C++ for CPUs; gcc assumes that a product of int32 never overflows, and infers its sign from factors.

    >>> product(torch.tensor([1 << 30, 3], dtype=torch.int32), 5)
    tensor([1073741824,         15], dtype=torch.int32)
    """
    if x.dtype == torch.int32 and is_compiled():
        return (x.to(torch.int64) * factor).to(torch.int32)
    return x * factor


def _shortened(x: Tensor, n: int) -> Tensor:
    return x[..., :n].clone(memory_format=torch.contiguous_format)


def _no_shortened(x: Tensor, n: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def _batched(operator: Any, info: Any, in_dims: tuple[int, None], x: Tensor, option: Any) -> tuple[Tensor, int]:
    return operator(x.movedim(in_dims[0], 0), option), 0


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define and return the operator `fnddp::name`; `fake` returns tensors like its results."""
    torch.library.define(f"fnddp::{name}", schema, tags=())
    torch.library.impl(f"fnddp::{name}", "CompositeExplicitAutograd", run)
    torch.library.register_fake(f"fnddp::{name}", fake)
    return getattr(torch.ops.fnddp, name).default


SHORTENED = define("shortened", "(Tensor x, SymInt n) -> Tensor", _shortened, _no_shortened)
ROUNDED = define("rounded", "(Tensor x, ScalarType dtype) -> Tensor", _rounded, _rounded)
for _operator in (SHORTENED, ROUNDED):
    torch.library.register_vmap(_operator, partial(_batched, _operator))

"""Low-precision wires: cast, exchange, cast back."""

from typing import ClassVar

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.codec import Code, Layer, Payload
from fnddp.core.sync import Exchange, State, Sync, registry, require_agreement, transform
from fnddp.core.tree import Leaves, Tree, is_inexact

# Dtypes that every backend can add up.
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@transform
class cast(Sync):
    """Send floating-point leaves in another dtype.

    `fp16(powersgd(allreduce))` casts gradients and compresses the result; `powersgd(fp16(allreduce))` compresses in
    full precision and casts only the factors. The wrong choice where the gradients' range does not fit the dtype: a
    value beyond it becomes infinite, and the mean of its element with it, on every rank; under `error_feedback` its
    residual is NaN from then on. `check=True` raises instead. Complex leaves are cast as pairs of real numbers. Integer
    and bool leaves pass through.

    Args:
        dtype: torch.float16, bfloat16, float32 or float64, or its name ("bfloat16").
        check: After each exchange, raise a FloatingPointError, on all ranks, that names the leaves of the mean that are
            not finite. It reads values, so it cannot be traced: for debugging.

    >>> from fnddp import allreduce
    >>> cast(allreduce, torch.float64), cast(allreduce, "bfloat16")
    (cast(allreduce, 'float64'), bf16(allreduce))
    >>> big = {"w": torch.tensor([1e5, 1.0])}
    >>> cast(allreduce, "float16")(big, ())[0]
    {'w': tensor([inf, 1.])}
    >>> fp16(allreduce, check=True)(big, ())
    Traceback (most recent call last):
        ...
    FloatingPointError: fp16(allreduce, check=True): not finite after a float16 wire: leaf 'w' (on this rank 1 of 2
    values beyond the largest float16, 65504.0); use bf16, or scale the loss
    """

    inner: Sync
    dtype: torch.dtype | str
    check: bool = False

    wraps_skipping: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        dtype = DTYPES.get(self.dtype) if isinstance(self.dtype, str) else self.dtype
        if dtype not in DTYPES.values():
            raise ValueError(f"cast: dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        object.__setattr__(self, "dtype", dtype)
        if self.check:
            require_agreement(SHORT.get(self._wire_dtype, "cast"), self.inner)

    def init(self, grads: Tree) -> State:
        return self.inner.init(grads if self.carries else tree.map_leaves(self._spec, grads))

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        if self.carries:  # cast only the payload, not the mean
            return self.carry((), leaves, state)
        wires = {path: self._encode(leaf) for path, leaf in leaves.items()}
        inner = self.inner.exchange(wires, state)
        done = inner.decoded(lambda wires: {path: _decode(wire, leaves[path]) for path, wire in wires.items()})
        if self.check:
            self._raise_if_not_finite(done.mean, leaves)
        return done

    @property
    def carries(self) -> bool:
        return self.inner.carries and not self.check

    def carry(self, code: Code, leaves: Leaves, state: State) -> Exchange:
        if not self.carries:
            return super().carry(code, leaves, state)
        return self.inner.carry((*code, Layer(self)), leaves, state)

    # Called by a codec around this cast, to send floating-point parts of its payload in the dtype of the wire.
    draws: ClassVar[bool] = False
    averages: ClassVar[bool] = False

    def encode(self, x: Tensor) -> Payload:
        return {"": x.to(self._wire_dtype)}

    def lengths(self, n: int, length: Tensor) -> dict[str, Tensor]:
        return {"": length}

    def unit(self, n: int) -> int:
        return 1

    def decode(self, payload: Payload, n: int) -> Tensor:
        return payload[""]  # the codec around this restores the dtype

    @property
    def traceable(self) -> bool:
        return not self.check and super().traceable

    @property
    def _wire_dtype(self) -> torch.dtype:
        assert isinstance(self.dtype, torch.dtype)  # __post_init__ has resolved names
        return self.dtype

    def _spec(self, leaf: Tensor) -> Tensor:
        return torch.empty_like(_real(leaf.detach()), dtype=self._wire_dtype) if is_inexact(leaf) else leaf

    def _encode(self, leaf: Tensor) -> Tensor:
        return _real(leaf).to(self._wire_dtype) if is_inexact(leaf) else leaf

    def _raise_if_not_finite(self, mean: dict[str, Tensor], leaves: dict[str, Tensor]) -> None:
        largest, dtype = torch.finfo(self._wire_dtype).max, str(self._wire_dtype).removeprefix("torch.")
        problems: list[str] = []
        for path, each in mean.items():
            leaf = leaves[path]
            if is_inexact(leaf) and not bool(each.isfinite().all()):
                beyond = f"{int((leaf.abs() > largest).sum())} of {leaf.numel()} values"
                problems.append(f"leaf {path!r} (on this rank {beyond} beyond the largest {dtype}, {largest})")
        if problems:
            found = "; ".join(problems)
            raise FloatingPointError(f"{self!r}: not finite after a {dtype} wire: {found}; use bf16, or scale the loss")

    def __repr__(self) -> str:
        short = SHORT.get(self._wire_dtype)
        if short is None:
            return super().__repr__()
        return f"{short}({self.inner!r}{', check=True' if self.check else ''})"


def fp16(inner: Sync, *, check: bool = False) -> cast:
    """Return `cast(inner, torch.float16)`: half the bytes, 11 bits of precision, range 6e-8 to 65504.

    The wrong choice when gradients leave that range.

    >>> from fnddp import allreduce
    >>> fp16(allreduce)({"w": torch.tensor([1.0, 1 / 3])}, ())[0]
    {'w': tensor([1.0000, 0.3333])}
    """
    return cast(inner, torch.float16, check)


def bf16(inner: Sync, *, check: bool = False) -> cast:
    """Return `cast(inner, torch.bfloat16)`: half the bytes, 8 bits of precision, the range of float32.

    The wrong choice for large world sizes without error feedback: the wire's sum is rounded to 8 bits too.

    >>> from fnddp import allreduce
    >>> bf16(allreduce)({"w": torch.tensor([1.0, 1e30])}, ())[0]
    {'w': tensor([1.0000e+00, 1.0003e+30])}
    """
    return cast(inner, torch.bfloat16, check)


registry.add("fp16", fp16)
registry.add("bf16", bf16)


def _real(leaf: Tensor) -> Tensor:
    return torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf


def _decode(wire: Tensor, leaf: Tensor) -> Tensor:
    if leaf.is_complex():
        return torch.view_as_complex(wire.to(leaf.real.dtype).contiguous())
    return wire.to(leaf.dtype)

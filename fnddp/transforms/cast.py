"""Low-precision wires: cast, exchange, cast back."""

import math
from typing import ClassVar, Literal, overload

import torch
from torch import Tensor

from fnddp.core import collectives, tree
from fnddp.core.codec import Carrying, CodecState, Key, Payload
from fnddp.core.opaque import rounded
from fnddp.core.sync import (
    Exchange,
    State,
    Sync,
    all_in,
    groups_of,
    registry,
    require_agreement,
    require_state,
    transform,
)
from fnddp.core.tree import Leaves, Tree, is_inexact, replaced
from fnddp.torch_private import reinterpreted

# Dtypes that every backend can add up.
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16"}

MANTISSA, LOWEST = 23, -126  # bits of float32, and the exponent of its smallest normal number


@transform
class cast(Carrying):
    """Send floating-point leaves in another dtype.

    `fp16(powersgd(allreduce))` casts gradients and compresses the result; `powersgd(fp16(allreduce))` compresses in
    full precision and casts only the factors. The wrong choice where gradients exceed the range of the dtype: such a
    value and its mean become infinite on every rank, and its residual in `error_feedback` is NaN from then on.
    `check=True` raises instead. Complex leaves are cast as pairs of real numbers. Integer and bool leaves are not cast.

    Args:
        dtype: torch.float16, bfloat16, float32 or float64, or its name ("bfloat16").
        check: After each exchange, raise a FloatingPointError on all ranks if the mean has NaN or infinite values; it
            names the leaves. For debugging: it reads values, so it cannot be traced.
        rounding: "nearest" (ties to even), or, for float16 and bfloat16, "stochastic": to one of the two neighbours of
            an element, so that its expectation is the element (of float64, after rounding to float32). Around a
            carrier, because carriers add in float32, means are then unbiased; an `allreduce` still rounds its sums to
            nearest. Ranks draw different numbers, except ranks that do the same exchange over other groups.
        seed: Seed of stochastic rounding.

    >>> from fnddp import allreduce
    >>> cast(allreduce, torch.float64), cast(allreduce, "bfloat16")
    (cast(allreduce, 'float64'), bf16(allreduce))
    >>> big = {"w": torch.tensor([1e5, 1.0])}
    >>> cast(allreduce, "float16")(big, ())[0]
    {'w': tensor([inf, 1.])}
    >>> fp16(allreduce, check=True)(big, ())
    Traceback (most recent call last):
        ...
    FloatingPointError: fp16(allreduce, check=True): not finite after a cast to float16: leaf 'w' (on this rank 1 of 2
    values beyond the largest float16, 65504.0); use bf16, or scale the loss
    """

    inner: Sync
    dtype: torch.dtype | str
    check: bool = False
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0

    wraps_skipping: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        dtype = DTYPES.get(self.dtype) if isinstance(self.dtype, str) else self.dtype
        if dtype not in DTYPES.values():
            raise ValueError(f"cast: dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        object.__setattr__(self, "dtype", dtype)
        if self.draws and dtype not in SHORT:
            raise ValueError(f"cast: rounding='stochastic' is for float16 and bfloat16, got {self.dtype!r}")
        if self.seed and not self.draws:
            raise ValueError(f"cast: seed={self.seed} has no effect without rounding='stochastic'; remove it")
        if self.check:
            require_agreement(SHORT.get(self._wire_dtype, "cast"), self.inner)

    @property
    def draws(self) -> bool:
        return self.rounding == "stochastic"

    def init(self, grads: Tree) -> State:
        inner = self.inner.init(grads if self.carries else tree.map_leaves(self._spec, grads))
        return CodecState(0, inner) if self.draws else inner

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        if self.carries:  # cast only the payload, not the mean
            return self.carry((), leaves, state)
        if self.draws:
            require_state("cast", state, CodecState)
            rank = 0  # within the ranks that the groups connect
            for group in groups_of(self.inner):
                rank = rank * collectives.world_size(group) + collectives.rank(group)
            wires = {path: self._encode(leaf, Key(path, rank, self.seed, state.step)) for path, leaf in leaves.items()}
            inner = self.inner.exchange(wires, state.inner)
            inner = replaced(inner, state=CodecState(state.step + 1, inner.state))
        else:
            inner = self.inner.exchange({path: self._encode(leaf) for path, leaf in leaves.items()}, state)
        done = inner.decoded(lambda wires: {path: _decode(wire, leaves[path]) for path, wire in wires.items()})
        if self.check:
            self._raise_if_not_finite(done.mean, leaves)
        return done

    @property
    def nests(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset({"around", "inside"} if self.inner.carries and not self.check else ())

    # Called by a codec around this cast, to send floating-point parts of its payload in the dtype of the wire.
    averages: ClassVar[bool] = False

    def encode(self, x: Tensor, key: Key | None = None) -> Payload:
        return {"": rounded(x, self._wire_dtype) if key is None else _rounded_at_random(x, self._wire_dtype, key)}

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

    def _encode(self, leaf: Tensor, key: Key | None = None) -> Tensor:
        return self.encode(_real(leaf), key)[""] if is_inexact(leaf) else leaf

    def _raise_if_not_finite(self, mean: dict[str, Tensor], leaves: dict[str, Tensor]) -> None:
        largest, dtype = torch.finfo(self._wire_dtype).max, str(self._wire_dtype).removeprefix("torch.")
        finite = {path: each.isfinite().all() for path, each in mean.items() if is_inexact(leaves[path])}
        if not finite or bool(torch.stack(list(finite.values())).all()):  # an accelerator's host waits once
            return
        problems: list[str] = []
        for path in (path for path, each in finite.items() if not each):
            leaf = leaves[path]
            beyond = f"{int((leaf.abs() > largest).sum())} of {leaf.numel()} values"
            problems.append(f"leaf {path!r} (on this rank {beyond} beyond the largest {dtype}, {largest})")
        found = "; ".join(problems)
        raise FloatingPointError(f"{self!r}: not finite after a cast to {dtype}: {found}; use bf16, or scale the loss")

    def __repr__(self) -> str:
        short = SHORT.get(self._wire_dtype)
        if short is None or self.draws:
            return super().__repr__()
        return f"{short}({self.inner!r}{', check=True' if self.check else ''})"


@overload
def fp16(inner: Carrying, *, check: bool = False) -> cast: ...
@overload
def fp16(inner: Sync, *, check: bool = False) -> Sync: ...
def fp16(inner: Sync, *, check: bool = False) -> Sync:
    """Return `cast(inner, torch.float16)`: half the bytes, 11 bits of precision, range 6e-8 to 65504.

    The wrong choice when gradients leave that range. `check` is that of `cast`.

    >>> from fnddp import allreduce
    >>> fp16(allreduce)({"w": torch.tensor([1.0, 1 / 3])}, ())[0]
    {'w': tensor([1.0000, 0.3333])}
    """
    return cast(inner, torch.float16, check)


@overload
def bf16(inner: Carrying, *, check: bool = False) -> cast: ...
@overload
def bf16(inner: Sync, *, check: bool = False) -> Sync: ...
def bf16(inner: Sync, *, check: bool = False) -> Sync:
    """Return `cast(inner, torch.bfloat16)`: half the bytes, 8 bits of precision, the range of float32.

    Use it around a carrier on many ranks: sums of `bf16(allreduce)` are rounded, and error feedback does not see it.
    `check`: see `cast`.

    >>> from fnddp import allreduce
    >>> bf16(allreduce)({"w": torch.tensor([1.0, 1e30])}, ())[0]
    {'w': tensor([1.0000e+00, 1.0003e+30])}
    """
    return cast(inner, torch.bfloat16, check)


def refuse_check(who: str, sync: Sync) -> None:
    """Raise a TypeError if a cast in `sync` has `check=True`: for `who` each cast must carry payloads."""
    if any(isinstance(each, cast) and each.check for each in all_in(sync)):
        raise TypeError(f"{who}={sync!r}: leave out check=True, which reads values on the host")


registry.add("fp16", fp16)
registry.add("bf16", bf16)


def _real(leaf: Tensor) -> Tensor:
    return torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf


def _rounded_at_random(x: Tensor, dtype: torch.dtype, key: Key) -> Tensor:
    # Adding random bits carries into the kept bits with a probability proportional to the bits that are cut. After
    # scaling by a power of two, float32 and `dtype` become subnormal at the same magnitude.
    kept = torch.finfo(dtype)
    scale, cut = kept.smallest_normal / 2.0**LOWEST, MANTISSA + round(math.log2(kept.eps))
    wide = x.float() / scale
    raised = reinterpreted(wide, torch.int32) + key.integers(x.shape, bits=cut, like=x)
    drawn = reinterpreted(raised & -(1 << cut), torch.float32) * scale
    return rounded(torch.where(wide.isnan(), x, drawn), dtype)  # the carry of a NaN may be a zero


def _decode(wire: Tensor, leaf: Tensor) -> Tensor:
    if leaf.is_complex():
        # Under vmap not as a view: rows of ranks may be of odd size.
        return torch.complex(*wire.to(leaf.real.dtype).unbind(-1))
    return rounded(wire, leaf.dtype)

"""Placeholders in `.grad` of parameters with a gradient on other ranks, their owners. They make clipping work."""

import weakref
from typing import Any

import optree
import torch
from torch import Tensor

from fnddp import torch_private

aten: Any = torch.ops.aten

_LINEAR = {aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar}
_SCALING = {
    *_LINEAR,
    aten.zero_.default,
    *(aten.clamp_.default, aten.clamp_min_.default, aten.clamp_max_.default, aten.nan_to_num_.default),
}
_FINITE = {aten.zero_.default, aten.nan_to_num_.default}
_EACH = {
    aten._foreach_norm.Scalar: aten.linalg_vector_norm.default,
    **{getattr(aten, f"_foreach_{op}_").Tensor: getattr(aten, f"{op}_").Tensor for op in ("mul", "div")},
    **{getattr(aten, f"_foreach_{op}_").Scalar: getattr(aten, f"{op}_").Scalar for op in ("mul", "div")},
    aten._foreach_zero_.default: aten.zero_.default,
    aten._foreach_clamp_min_.Scalar: aten.clamp_min_.default,
    aten._foreach_clamp_max_.Scalar: aten.clamp_max_.default,
}
"""For operations on lists, such as those in clipping with `foreach=True`, the operation on each tensor."""
_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default


class OwnedGradient(Tensor):
    """A placeholder in a parameter's `.grad` for a mean that is stored on the ranks that own it.

    Its norm is the norm of the complete mean; all ranks must ask for norms in the same order. Multiplying by a number,
    clamping and `zero_` change the mean on its owners. So `torch.nn.utils.clip_grad_norm_` and loss scalers work as if
    every rank had the mean. Other operations raise a RuntimeError.
    """

    path: str  # the name of the parameter
    part: Tensor | None  # of the mean that this rank owns; None if it owns none
    is_nonfinite: Tensor | bool  # true if some rank received NaN or infinity: the mean is NaN then
    added: Tensor | None  # the sum of gradients from backwards that are not synchronized yet, if any
    _dtype: torch.dtype
    owned: "weakref.ref[Any]"  # the `OwnerDataParallel` that knows the owners of the gradient

    @staticmethod
    def __new__(cls: "type[OwnedGradient]", name: str, p: Tensor, owned: Any, dtype: torch.dtype) -> "OwnedGradient":
        made = torch_private.stand_in(cls, p)
        made.path, made.part, made.is_nonfinite, made.added = name, None, False, None
        made.owned, made._dtype = weakref.ref(owned), dtype
        return made

    __torch_function__ = torch_private.without_torch_function

    @property
    def dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dtype of the mean. A GradScaler reads it; `.grad` itself needs a tensor of the parameter's dtype."""
        return self._dtype

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self, *others = args
        options = kwargs or {}
        if func in _EACH and not options:
            done = [_EACH[func](each, *others) for each in self]
            return done if func is aten._foreach_norm.Scalar else None
        if func is _UNSCALE:
            return _unscale(self, *others)
        if func is aten.detach.default:
            return self
        owned = self.owned() if isinstance(self, cls) else None
        is_sum = func is aten.add_.Tensor and not options and isinstance(others[0], Tensor)
        if owned is not None and is_sum and others[0].shape == self.shape:  # autograd accumulates a gradient
            self.added = others[0].clone() if self.added is None else self.added.add_(others[0])
            return self
        is_norm = func is aten.linalg_vector_norm.default and len(args) < 3 and not options
        scales = func in _SCALING and not any(isinstance(x, Tensor) and x.ndim for x in others)
        clears = func is aten.zero_.default
        if owned is not None and (is_norm or scales) and self.added is not None and not clears and func not in _LINEAR:
            raise RuntimeError(
                f"own: {func} reads the gradient of {self.path!r}, part of which is not synchronized yet, as "
                "after a backward within no_sync; first run the step's last backward, outside of no_sync"
            )
        if owned is not None and is_norm:
            return owned.norm_of_gradient(self.path, *(others or [2.0]))
        if owned is not None and scales:
            owned.norms.clear()
            self.added = None if clears else self.added
            for each in (self.part, self.added):
                if each is not None:
                    func(each, *others, **options)
            self.is_nonfinite = self.is_nonfinite if func not in _FINITE else False
            return self
        names = [each.path for each in optree.tree_leaves(args) if isinstance(each, cls)]  # pyright: ignore
        what = f"that of {names[0]!r}" if names else "one"
        raise RuntimeError(  # not a TypeError: Python would change its text to "unsupported operand"
            f"own: gradients are only on the ranks that own them, so {func} cannot use {what}. Norms, clipping (such "
            "as torch.nn.utils.clip_grad_norm_), scaling by a number and zero_ work here, on all ranks; p.grad.part is "
            "the part that this rank owns, or None"
        )

    def __repr__(self, **_: Any) -> str:
        return f"OwnedGradient({self.path!r}, {tuple(self.shape)}, {self.dtype})"


def _unscale(grads: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Unscale what this rank has of `grads`, for a GradScaler. All ranks find the same overflows."""
    here: list[Tensor] = []
    overflows: dict[int, Tensor | bool] = {}  # usually one for all gradients of a backward
    for each in grads:
        if isinstance(each, OwnedGradient):
            if (owned := each.owned()) is not None:
                owned.norms.clear()
            if each.added is not None:
                each.added.mul_(inverse_scale)
            if each.part is not None:
                here.append(each.part._values() if each.part.is_sparse else each.part)
            elif each.is_nonfinite is not False:
                overflows[id(each.is_nonfinite)] = each.is_nonfinite
        else:
            here.append(each)
    if here:
        _UNSCALE(here, found_inf, inverse_scale)
    for is_nonfinite in overflows.values():
        found_inf.masked_fill_(torch.as_tensor(is_nonfinite, device=found_inf.device).any(), 1.0)

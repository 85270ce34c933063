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
_EACH = {
    aten._foreach_norm.Scalar: aten.linalg_vector_norm.default,
    **{getattr(aten, f"_foreach_{op}_").Tensor: getattr(aten, f"{op}_").Tensor for op in ("mul", "div")},
    **{getattr(aten, f"_foreach_{op}_").Scalar: getattr(aten, f"{op}_").Scalar for op in ("mul", "div")},
    aten._foreach_zero_.default: aten.zero_.default,
    aten._foreach_clamp_min_.Scalar: aten.clamp_min_.default,
    aten._foreach_clamp_max_.Scalar: aten.clamp_max_.default,
}
"""For operations on lists, such as those in clipping with `foreach=True`, the operation on each tensor."""


class OwnedGradient(Tensor):
    """A placeholder in a parameter's `.grad` for a mean that is stored on the ranks that own it.

    Its norm is the norm of the complete mean; all ranks must ask for norms in the same order. Multiplying by a number,
    clamping and `zero_` change the mean on its owners. So `torch.nn.utils.clip_grad_norm_` works as if every rank had
    the mean. Other operations raise a RuntimeError.

    Attributes:
        path: The name of the parameter.
        owned: The model that knows the owners of the gradient, an `OwnerDataParallel`.
        added: The sum of gradients from backwards that are not synchronized yet, if any.
    """

    path: str
    owned: "weakref.ref[Any]"
    added: Tensor | None

    @staticmethod
    def __new__(cls: "type[OwnedGradient]", name: str, parameter: Tensor, owned: Any) -> "OwnedGradient":
        made = torch_private.stand_in(cls, parameter)
        made.path, made.owned, made.added = name, weakref.ref(owned), None
        return made

    __torch_function__ = torch_private.without_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self, *others = args
        if func in _EACH and not kwargs:
            done = [_EACH[func](each, *others) for each in self]
            return done if func is aten._foreach_norm.Scalar else None
        owned = self.owned() if isinstance(self, cls) else None
        if func is aten.detach.default:
            return self
        is_sum = func is aten.add_.Tensor and not kwargs and isinstance(others[0], Tensor)
        if owned is not None and is_sum and others[0].shape == self.shape:  # autograd accumulates a gradient
            self.added = others[0].clone() if self.added is None else self.added.add_(others[0])
            return self
        if owned is not None and func is aten.linalg_vector_norm.default and len(args) < 3 and not kwargs:
            return owned.norm_of_gradient(self.path, *(others or [2.0]))
        if owned is not None and func in _SCALING and not any(isinstance(x, Tensor) and x.ndim for x in others):
            clears = func is aten.zero_.default
            if clears:
                self.added = None
            elif self.added is not None and func not in _LINEAR:
                raise RuntimeError(
                    f"own: {func} reads the gradient of {self.path!r}, part of which is not synchronized yet, as "
                    "after a backward within no_sync; first run the step's last backward, outside of no_sync"
                )
            elif self.added is not None:
                func(self.added, *others, **(kwargs or {}))
            change: Any = lambda mine: func(mine, *others, **(kwargs or {}))  # noqa: E731 # pyright: ignore
            owned.change_gradient(self.path, change, clears=clears)
            return self
        names = [each.path for each in optree.tree_leaves(args) if isinstance(each, cls)]  # pyright: ignore
        what = f"that of {names[0]!r}" if names else "one"
        raise RuntimeError(  # not a TypeError: Python would change its text to "unsupported operand"
            f"own: gradients are only on the ranks that own them, so {func} cannot use {what}. Norms, clipping (such "
            "as torch.nn.utils.clip_grad_norm_), scaling by a number and zero_ work here, on all ranks; the leaves "
            "that this rank owns are in the optimizer's param_groups"
        )

    def __repr__(self, **_: Any) -> str:
        return f"OwnedGradient({self.path!r}, {tuple(self.shape)}, {self.dtype})"


class OthersGradient(Tensor):
    """The gradient of an optimizer's substitute for the leaves of other ranks: one element, zero or NaN.

    A loss scaler reads it. Its norm raises a RuntimeError: clipping the optimizer's parameters, instead of the model's,
    would use a different norm on each rank.
    """

    value: Tensor

    @staticmethod
    def __new__(cls: "type[OthersGradient]", value: Tensor) -> "OthersGradient":
        made = torch_private.stand_in(cls, value)
        made.value = value
        return made

    __torch_function__ = torch_private.without_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "norm" in func.name():
            raise RuntimeError(
                "own: this optimizer holds only the parameters that this rank owns, so their norm differs between "
                "ranks; clip the gradients of the model: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
            )
        plain: Any = optree.tree_map(lambda x: x.value if isinstance(x, OthersGradient) else x, args)  # pyright: ignore
        return func(*plain, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:
        return f"OthersGradient({self.value!r})"

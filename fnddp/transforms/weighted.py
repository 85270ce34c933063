"""Means over samples or tokens where ranks have different numbers of them."""

from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fnddp.core import collectives
from fnddp.core.codec import wide
from fnddp.core.opaque import rounded
from fnddp.core.sync import Exchange, State, Sync, transform
from fnddp.core.tree import Leaves, Tree
from fnddp.wire.groups import current
from fnddp.wire.weights import Weight

T = TypeVar("T")


@transform
class weighted(Sync):
    """Weight each rank's gradients in the mean by the number of its samples or tokens in this step.

    With n ranks, weights w and their sum W, a rank's gradients are multiplied by n w / W and synchronized by `inner`.
    The sum W costs an all_reduce of 8 bytes. Each step needs a weight: `sync(grads, state, weight=tokens)`, or `with
    model.weight(tokens): loss.backward()`. A weight of 0 is allowed, but not on all ranks; the gradient may then be
    NaN. The wrong choice where all ranks have the same number: it costs a message and a pass over the gradients.

    It must be the outermost transform. A residual inside is a residual of weighted gradients, and the next step sends
    it unscaled, also with a weight of 0. Gradients in float16 may overflow: they grow up to n times.

    Args:
        inner: A pipeline that takes a mean over one process group.

    Raises:
        TypeError: `inner` does not take a mean, reduces over several process groups, or does not name its group.
        ValueError: In a step: a leaf is of integers; on all ranks: a weight is missing or invalid, or all are 0.

    >>> import torch
    >>> from fnddp import allreduce, bf16, error_feedback
    >>> sync = weighted(error_feedback(bf16(allreduce)))
    >>> grads = {"w": torch.ones(2)}
    >>> sync(grads, sync.init(grads), weight=12)[0]
    {'w': tensor([1., 1.])}
    >>> sync(grads, sync.init(grads))
    Traceback (most recent call last):
        ...
    ValueError: weight: must be a number of at least 0 and at most 1e+300 on each rank, but rank 0 gave none
    """

    inner: Sync

    takes_weight: ClassVar[bool] = True
    wraps_skipping: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.ops != {"mean"}:
            taken = ", ".join(sorted(self.inner.ops)) or "nothing"
            raise TypeError(f"weighted: {self.inner!r} takes {taken} over ranks, and only a mean can be weighted")
        if self.inner.groups is None:
            raise TypeError(
                f"weighted: {self.inner!r} does not name the process group it reduces over, so weights could be taken "
                "over other ranks; use a pipeline that does, such as allreduce"
            )
        if len(self.inner.groups) > 1:
            groups = sorted(self.inner.groups, key=str)
            raise TypeError(f"weighted: {self.inner!r} reduces over several process groups, {groups}; use one group")

    def init(self, grads: Tree) -> State:
        return self.inner.init(grads)

    def __call__(self, grads: T, state: State, *, weight: float | Tensor | None = None) -> tuple[T, State]:
        is_compiled = torch.compiler.is_compiling() and weight is not None
        given = torch.as_tensor(weight, dtype=torch.float64) if is_compiled else Weight.of(weight)
        return self._called(grads, state, partial(self._weigh, weight=given))

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        given = current().weight
        return self._weigh(leaves, state, Weight.of(None) if given is None else given)

    def _weigh(self, leaves: Leaves, state: State, weight: Any) -> Exchange:
        mine = {path: leaf for path, leaf in leaves.items() if self.inner.reduces(path)}
        for path, leaf in mine.items():
            if not (leaf.is_floating_point() or leaf.is_complex()):
                raise ValueError(
                    f"weighted: leaf {path!r} is {leaf.dtype}, which cannot be scaled; make it float, or do not "
                    "synchronize it: weighted(partition({'steps': none, '*': ...}))"
                )
        (group,) = self.inner.groups or {None}
        if isinstance(weight, Weight) and weight.number == 0:  # no samples: the mean gradient may be NaN
            mine = {path: torch.zeros_like(leaf) for path, leaf in mine.items()}
        elif isinstance(weight, Tensor) and not current().traced:  # a plan's engine does it
            mine = {path: torch.where(weight == 0, torch.zeros_like(leaf), leaf) for path, leaf in mine.items()}
        device = next((leaf.device for leaf in leaves.values()), torch.device("cpu"))
        scale = collectives.scale_of_weight(weight, group, device)
        return self.inner.exchange(leaves | {path: self.scaled(leaf, scale) for path, leaf in mine.items()}, state)

    @staticmethod
    def scaled(leaf: Tensor, scale: Tensor) -> Tensor:
        """Return `leaf` times the scalar `scale`, of float64, rounded once."""
        x = leaf.to(wide(leaf.dtype))
        return rounded(x * scale.to(x.real.dtype), leaf.dtype)

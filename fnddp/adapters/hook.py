"""Any torch DDP communication hook as a reducer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp.core.group import Group
from fnddp.core.layout import in_format_of
from fnddp.core.sync import Exchange, State, Sync
from fnddp.core.tree import Leaves, Tree, require_leaves


# Not registered: a hook is an object, not text, so `parse` cannot create one.
@dataclass(frozen=True, repr=False)
class from_hook(Sync):
    """Run a torch DDP communication hook as a reducer. The wrong choice if fnddp has a transform that does the same.

    All floating-point gradients of one dtype and device form a bucket (a duck-typed `dist.GradBucket`), in registration
    order, as in DDP's first step. Bucket indices never change, so stateful hooks need not wait for a rebuild.

    A hook is not pure: its `state` is neither checkpointed nor rolled back when a step fails. A hook does not report
    the values that it sent, so `sent` is the mean. `error_feedback(from_hook(...))` then remembers `input - mean`, like
    torch's PowerSGD hook itself. torch's PowerSGD hooks wait in callbacks and may abort on gloo; `powersgd` does not.

    Args:
        hook: `hook(state, bucket) -> Future[Tensor]`.
        state: The hook's first argument: a process group for torch's default hooks, or a `PowerSGDState`. The hook
            communicates over the process group in it, so `over` has no effect.
        parameters: The parameters by leaf path, for hooks that call `bucket.parameters()`.

    Raises:
        TypeError: `hook` is not callable; or, at the exchange, it returned no future.
        ValueError: At the exchange: a leaf is not floating-point, or the hook's result has another number of elements.
        RuntimeError: At the exchange: torch.distributed is not initialized.

    >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    >>> from_hook(fp16_compress_hook)
    from_hook(torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook, None)
    """

    hook: Callable[[Any, Any], torch.futures.Future[Tensor]]
    state: Any = None
    parameters: Mapping[str, Tensor] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.hook):
            raise TypeError(f"from_hook: expected hook(state, bucket), got {self.hook!r}")

    @property
    def ops(self) -> frozenset[str]:
        return frozenset({"mean"})

    @property
    def traceable(self) -> bool:
        return False

    def over(self, group: Group, *, unnamed_only: bool = False) -> Sync:
        return self

    def init(self, grads: Tree) -> State:
        return ()

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        require_leaves("from_hook", leaves)
        if not dist.is_initialized():
            raise RuntimeError(f"{self!r} needs a process group: call torch.distributed.init_process_group() first")
        buckets: dict[tuple[torch.dtype, torch.device], Leaves] = {}
        for path, leaf in leaves.items():
            if not leaf.is_floating_point():
                raise ValueError(
                    f"from_hook: leaf {path!r} is {leaf.dtype}; hooks average floating-point gradients only"
                )
            buckets.setdefault((leaf.dtype, leaf.device), {})[path] = leaf
        mean: Leaves = {}
        for index, bucket in enumerate(buckets.values()):
            mean.update(self._run(bucket, index, is_last=index == len(buckets) - 1))
        mean = {path: mean[path] for path in leaves}
        return Exchange(mean, sent=mean, state=state)

    def _run(self, leaves: Leaves, index: int, is_last: bool) -> Leaves:
        shapes = [leaf.shape for leaf in leaves.values()]
        flat = torch.cat([leaf.reshape(-1) for leaf in leaves.values()])  # a copy: hooks may write to the buffer
        parameters = None if self.parameters is None else [self.parameters[path] for path in leaves]
        future = self.hook(self.state, Bucket(flat, shapes, index, is_last, parameters))
        if not isinstance(future, torch.Future):
            raise TypeError(f"{self!r} returned {type(future).__name__} instead of a torch.futures.Future")
        result = future.wait()
        tensor = result[0] if isinstance(result, list) else result
        if tensor.numel() != flat.numel():
            raise ValueError(f"{self!r} returned {tensor.numel()} elements for a bucket of {flat.numel()} elements")
        views = _views(tensor.reshape(-1), shapes)
        return {
            path: in_format_of(leaf, view.to(leaf.dtype))
            for (path, leaf), view in zip(leaves.items(), views, strict=True)
        }

    def __repr__(self) -> str:
        # Without object addresses, so that the text is the same on all ranks.
        hook: Any = self.hook
        name = getattr(hook, "__qualname__", None)
        shown = f"{hook.__module__}.{name}" if name else f"<{type(hook).__name__}>"
        return f"from_hook({shown}, {'None' if self.state is None else f'<{type(self.state).__name__}>'})"


class Bucket:
    """A duck-typed `dist.GradBucket`, because Python cannot construct that class."""

    def __init__(
        self, buffer: Tensor, shapes: list[torch.Size], index: int, is_last: bool, parameters: list[Tensor] | None
    ) -> None:
        self._buffer, self._shapes, self._index, self._is_last = buffer, shapes, index, is_last
        self._parameters = parameters

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        return _views(self._buffer, self._shapes)

    def parameters(self) -> list[Tensor]:
        if self._parameters is None:
            raise TypeError(
                "from_hook: this hook calls bucket.parameters(), but a pipeline only has gradients; pass "
                "parameters={path: parameter}"
            )
        return self._parameters


def _views(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    pieces = flat.split([shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

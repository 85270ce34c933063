"""Backwards that a custom autograd function runs within its own: autograd does not see the parameters they reach."""

import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.utils import checkpoint

# torch looks the class up in its module at each checkpoint, for all threads; ranks may be threads.
_torchs: Any = checkpoint.CheckpointFunction
_lock = threading.Lock()
_refusing = Counter[int]()


@contextmanager
def refuse_reentrant_checkpoints() -> Generator[None]:
    """Raise at each of torch's reentrant checkpoints that this thread reaches while gradients are enabled.

    They work only in a backward that accumulates the gradients of all leaves, the caller's included. One whose inputs
    do not require grad hides its parameters from that, too: torch warns once and gives them no gradient.
    """
    me = threading.get_ident()
    with _lock:
        _refusing[me] += 1
        checkpoint.CheckpointFunction = _Refusing
    try:
        yield
    finally:
        with _lock:
            _refusing[me] -= 1
            if not _refusing.total():
                _refusing.clear()
                checkpoint.CheckpointFunction = _torchs


def is_within_loss() -> bool:
    """Return whether `refuse_reentrant_checkpoints` is in force in this thread."""
    return bool(_refusing[threading.get_ident()])


class _Refusing:
    @staticmethod
    def apply(*arguments: Any) -> Any:
        if is_within_loss() and torch.is_grad_enabled():
            raise RuntimeError(
                "value_and_grad: torch.utils.checkpoint with use_reentrant=True hides the parameters inside it from "
                "autograd, so their gradients may be lost; pass use_reentrant=False"
            )
        return _torchs.apply(*arguments)


def custom_functions(loss: Tensor) -> list[GradientEdge]:
    """Return the custom autograd functions (`torch.autograd.Function`) that the graph of `loss` contains.

    Given as `inputs` of its backward, each of them runs, even if autograd finds no parameter behind it.
    """
    root = loss.grad_fn
    found: set[Any] = {root}
    todo = list(found)
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                todo.append(node)
    return [GradientEdge(node, 0) for node in found if issubclass(type(node), BackwardCFunction)]

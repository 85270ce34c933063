"""Backwards that a custom autograd function runs within its own: autograd does not see the parameters they reach."""

import threading
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
_refusing: list[tuple[int, str]] = []  # threads, and who refuses in them


@contextmanager
def refuse_reentrant_checkpoints(owner: str) -> Generator[None]:
    """Raise at each of torch's reentrant checkpoints that this thread reaches while gradients are enabled.

    They run the module again when the tensors that stood for its parameters are gone, and work only in a backward that
    accumulates the gradients of all leaves, the caller's included. One whose inputs do not require grad hides its
    parameters from that, too: torch warns once and gives them no gradient.

    Args:
        owner: Who refuses them, for the error.
    """
    entry = threading.get_ident(), owner
    with _lock:
        _refusing.append(entry)
        checkpoint.CheckpointFunction = _Refusing
    try:
        yield
    finally:
        with _lock:
            _refusing.remove(entry)
            if not _refusing:
                checkpoint.CheckpointFunction = _torchs


def refuses_reentrant_checkpoints(owner: str) -> bool:
    """Return whether `owner` refuses reentrant checkpoints in this thread."""
    return (threading.get_ident(), owner) in _refusing


class _Refusing:
    @staticmethod
    def apply(*arguments: Any) -> Any:
        owners = [owner for thread, owner in [*_refusing] if thread == threading.get_ident()]
        if owners and torch.is_grad_enabled():
            raise RuntimeError(
                f"{owners[-1]}: torch.utils.checkpoint with use_reentrant=True hides the parameters inside it from "
                "autograd, so their gradients may be lost; pass use_reentrant=False"
            )
        return _torchs.apply(*arguments)


def custom_functions(loss: Tensor, first: int) -> list[GradientEdge]:
    """Return the custom autograd functions in the graph of `loss`, among its nodes from number `first` on.

    Given as `inputs` of its backward, each of them runs, even if autograd finds no parameter behind it.
    """
    todo: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]  # None of a loss that is a parameter
    found = set(todo)
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in found and node._sequence_nr() >= first:
                found.add(node)
                todo.append(node)
    return [GradientEdge(node, 0) for node in found if issubclass(type(node), BackwardCFunction)]

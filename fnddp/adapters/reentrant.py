"""Nested backwards, run by a custom autograd function. Autograd does not see the parameters that they reach."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint

# torch looks this class up in its module at each checkpoint, in all threads; ranks may be threads.
_torchs: Any = checkpoint.CheckpointFunction
_lock = threading.Lock()
_refusing: list[tuple[int, str]] = []  # ids of threads, and the functions that refuse in them


@contextmanager
def refuse_reentrant_checkpoints(owner: str) -> Generator[None]:
    """Raise an error at each of torch's reentrant checkpoints that this thread reaches while gradients are enabled.

    Such a checkpoint runs the module again after the tensors that replaced its parameters are gone. It works only in a
    backward that accumulates the gradients of all leaves, the caller's included. If its inputs do not require grad, its
    parameters are lost even there: torch warns once and gives them no gradient.

    Args:
        owner: Name of the function that refuses them, for the error.
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

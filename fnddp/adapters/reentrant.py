"""Reentrant activation checkpoints that would lose gradients without an error."""

import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

# torch looks the class up in its module at each checkpoint, for all threads; ranks may be threads.
_torchs: Any = checkpoint.CheckpointFunction
_lock = threading.Lock()
_refusing = Counter[int]()


@contextmanager
def refuse_lost_gradients() -> Generator[None]:
    """Has this thread's reentrant checkpoints raise where none of their inputs requires grad.

    Such a checkpoint hides the parameters inside it from autograd: torch warns once and gives them no gradient.
    torch.func.grad refuses all reentrant checkpoints.
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


class _Refusing:
    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *inputs: Any) -> Any:
        needs_grad = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        if _refusing[threading.get_ident()] and torch.is_grad_enabled() and not needs_grad:
            raise RuntimeError(
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=True) on inputs that do not require grad gives "
                "the parameters used inside it no gradient; pass use_reentrant=False"
            )
        return _torchs.apply(function, preserve_rng_state, *inputs)

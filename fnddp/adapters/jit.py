"""A pipeline as a function that runs its plan."""

from typing import TypeVar

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.sync import State, Sync, require_sync
from fnddp.core.tree import Tree
from fnddp.plan.draft import Donation
from fnddp.plan.plan import Plan
from fnddp.run.engine import Engines
from fnddp.torch_private import is_transforming
from fnddp.wire.c10d import C10D, over
from fnddp.wire.protocol import Wire

T = TypeVar("T")  # of trees


class jit:
    """Runs a pipeline through its plan: combined collectives, reused buffers, the same numbers as `sync` itself.

    For gradients that are all there. It is called as the pipeline is; plans are made at the first call for leaves of
    given shapes, for each phase. The wrong choice where gradients are still being computed: `value_and_grad`,
    `register` and `DistributedDataParallel` overlap the same plan with backward. Within torch.compile it is `sync`.

    Args:
        sync: The pipeline. One that cannot be lowered runs as it is.
        wire: Who moves bytes; torch.distributed by default.
        backend: Who runs what is computed between collectives: None for Python, or "inductor"; see
            `docs/compile.md`. A pipeline that cannot be lowered is then an error.

    >>> from fnddp import allreduce, fp16
    >>> step = jit(fp16(allreduce))
    >>> grads = {"w": torch.tensor([1.0, 1 / 3])}
    >>> step(grads, step.init(grads))
    ({'w': tensor([1.0000, 0.3333])}, ())
    """

    def __init__(self, sync: Sync, *, wire: Wire = C10D, backend: str | None = None) -> None:
        self._sync = require_sync("jit: sync", sync)
        self._eager = over(wire, sync)
        self._engines = Engines(sync, donation=Donation(), learns_order=False, wire=wire, backend=backend)

    @property
    def sync(self) -> Sync:
        """The pipeline that runs."""
        return self._sync

    def init(self, grads: Tree) -> State:
        """See `Sync.init`."""
        return self.sync.init(grads)

    @property
    def plan(self) -> Plan | None:
        """The plan of the last call; None before the first, and for a pipeline that cannot be lowered."""
        return None if self._engines.last is None else self._engines.last.plan

    def __call__(self, grads: T, state: State, *, weight: float | Tensor | None = None) -> tuple[T, State]:
        """See `Sync.__call__`.

        Raises:
            RuntimeError: It is called by two threads at once, for such leaves.
            StepFailedError: Another rank has failed in this step.
        """
        if torch.compiler.is_compiling() or is_transforming():
            return self._eager(grads, state, weight=weight)
        leaves, spec = tree.flatten(grads)
        # Plans, and the memory that they keep, outlive inference mode.
        with torch.inference_mode(False), self._engines.alone(leaves, state) as engine:
            done = engine.run({path: leaf.detach() for path, leaf in leaves.items()}, state, weight=weight)
            return tree.unflatten(spec, done.of(leaves)), engine.hand_over()

    def __repr__(self) -> str:
        return f"jit({self.sync!r})"

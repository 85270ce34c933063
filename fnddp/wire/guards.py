"""Refusals inside transforms of torch.func, where a collective would silently give wrong numbers."""

import torch.distributed as dist

# torch.func's first call imports it, and its default arguments hold on to the default group of that moment: imported
# after init_process_group, it keeps gloo's threads alive beyond destroy_process_group, and ranks abort at exit.
import torch.distributed.nn.functional  # noqa: F401  # pyright: ignore[reportUnusedImport]

from fnddp.torch_private import is_batching, is_differentiating


def refuse_differentiation() -> None:
    """Raise a RuntimeError inside torch.func.grad or jvp, under torch.compile too."""
    # torch.func.jvp through a functional collective gives a zero tangent, silently; under torch.compile, so does grad.
    if is_differentiating():
        raise RuntimeError(
            "a gradient synchronization cannot run inside torch.func.grad or jvp: its derivative is not defined; "
            "synchronize the gradients that they return"
        )


def refuse_batching() -> None:
    """Raise a RuntimeError inside torch.func.vmap where there is a process group."""
    # torch has no rule for it: under vmap a functional collective returns what this rank had, or memory as it was.
    if dist.is_initialized() and is_batching():
        raise RuntimeError(
            "a collective cannot run inside torch.func.vmap: call it on the whole batch, outside of vmap; "
            "fnddp.distributed.AllGatherGrad can"
        )

"""Numbers of a pipeline for a log."""

from typing import Any, Protocol

from fnddp.run.stats import SyncStats


class Measured(Protocol):
    """A model with statistics: `DistributedDataParallel`, or the handle of `register`."""

    def sync_stats(self) -> SyncStats: ...


class Writer(Protocol):
    """A writer of scalars: `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> Any: ...


def log_sync_stats(writer: Writer, model: Measured, *, step: int | None = None, prefix: str = "fnddp/") -> SyncStats:
    """Write the statistics of `model` to TensorBoard, or to anything with its `add_scalar`, and return them.

    Call it on one rank: reading them waits for the device. For other loggers: `logger.log(model.sync_stats())`.

    Args:
        writer: A `SummaryWriter`.
        model: The model, or the handle of `register`.
        step: The number to write them under; None for the number of committed steps.
        prefix: Of each name.

    >>> import torch, fnddp
    >>> class Printer:
    ...     def add_scalar(self, tag, scalar_value, global_step=None): print(tag, scalar_value, global_step)
    >>> model = fnddp.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> written = log_sync_stats(Printer(), model)
    fnddp/steps 1 1
    fnddp/failed_steps 0 1
    fnddp/wire_bytes 0 1
    fnddp/link_bytes 0 1
    fnddp/collectives 0 1
    """
    stats = model.sync_stats()
    at = stats["steps"] if step is None else step
    for name, value in stats.items():
        if value is not None:
            writer.add_scalar(f"{prefix}{name}", value, at)
    return stats

"""Numbers of a pipeline for a log."""

from typing import Any, Protocol

from fnddp.run.stats import SyncStats


class Measured(Protocol):
    """What has statistics: `DistributedDataParallel`, or the `Handle` of `register`."""

    def sync_stats(self) -> SyncStats: ...


class Writer(Protocol):
    """What takes scalars: `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> Any: ...


def log_sync_stats(writer: Writer, model: Measured, *, step: int | None = None, prefix: str = "fnddp/") -> SyncStats:
    """Writes the statistics of `model` to TensorBoard, or to anything with its `add_scalar`.

    Call it on one rank, as often as you log: reading them waits for the device. The wrong choice for other loggers:
    give them the dict, `logger.log(model.sync_stats())`.

    Args:
        writer: A `SummaryWriter`.
        model: What is trained.
        step: The number to write them under; None for the steps that have ended well.
        prefix: Of each name.

    Returns:
        What it has written, and None for what is not known.

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

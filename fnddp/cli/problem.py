"""Problems of `fnddp tune`: a workload on its own data, or on other data, as virtual ranks train it."""

from collections.abc import Callable, Iterator
from importlib import import_module

import torch
from torch import nn

from fnddp.cli.failures import WrongArgument
from fnddp.cli.models import Batch, Task, load
from fnddp.simulate.tune import Problem

DATA = {"digits": "fnddp.cli.digits", "text": "fnddp.cli.characters"}
"""Modules with data for any model, imported when asked for: digits need scikit-learn."""


def problem(model: str, data: str | None, *, batch: int, ranks: int, steps: int, rate: float | None) -> Problem:
    """Return what `--model` and `--data` name; the learning rate falls from `rate`, or what suits the data, to zero.

    Raises:
        WrongArgument: There is no such model, it and the data do not go together, or it cannot be simulated.
    """
    workload = load(model)
    _require_simulable(model, workload.make(0))
    if data in DATA:
        task: Task = import_module(DATA[data]).task(batch)
    else:
        task = workload.task(batch)

    def batches(n: int, seed: int, steps: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            rows = [task.batch(rank, n, generator) for rank in range(n)]
            yield tuple(torch.stack(parts) for parts in zip(*rows, strict=True))

    _require_fit(task, workload.make(0), f"--model {model}", data or "own", ranks)
    return Problem(workload.make, task.loss, batches, _falling(task.optimizer, steps, rate), task.quality)


def _require_fit(task: Task, model: nn.Module, name: str, data: str, ranks: int) -> None:
    """Raise a WrongArgument unless the model takes one rank's batch of the data."""
    batch = task.batch(0, ranks, torch.Generator().manual_seed(0))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            loss = task.loss(model, batch)
    except Exception as error:  # a model may raise anything
        raise WrongArgument(f"{name} does not take --data {data}: {type(error).__name__}: {error}") from error
    if loss.ndim:
        raise WrongArgument(f"{name} on --data {data}: the loss must be a scalar, got {list(loss.shape)}")


def _require_simulable(name: str, model: nn.Module) -> None:
    for path, module in model.named_modules():
        if getattr(module, "track_running_stats", False):
            raise WrongArgument(
                f"{name} cannot be tuned: {path} ({type(module).__name__}) changes its buffers in forward, which "
                "virtual ranks cannot; use another normalization for the comparison, such as GroupNorm"
            )


def _falling(
    make: Callable[..., torch.optim.Optimizer], steps: int, rate: float | None
) -> Callable[[list[torch.Tensor]], torch.optim.Optimizer]:
    """Make optimizers whose learning rate falls linearly to zero: final losses depend less on the last batches."""

    def optimizer(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        made = make(params) if rate is None else make(params, lr=rate)
        schedule = torch.optim.lr_scheduler.LinearLR(made, 1.0, 1e-2, total_iters=steps)

        def fall(*_: object) -> None:
            schedule.step()

        made.register_step_post_hook(fall)
        return made

    return optimizer

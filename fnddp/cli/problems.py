"""What `fnddp tune` trains: a model by name on data by name, or a function's own."""

from collections.abc import Callable, Iterator
from functools import partial
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fnddp.cli import digits
from fnddp.cli.failures import WrongArgument
from fnddp.cli.models import Batch, Forward, Workload, load
from fnddp.tune import Problem

DATA = ("digits", "text", "own")
DIGITS = "digits"  # a model, too
CONTEXT = 64  # characters: as many as the transformer takes
HELD_OUT = 0.1  # of the text

Batches = Iterator[Batch]


def problem(model: str, data: str | None, *, batch: int, steps: int, rate: float | None) -> Problem:
    """What `--model` and `--data` name.

    Args:
        model: "digits", or as `fnddp.cli.models.load` takes it.
        data: One of DATA, or None for the digits with their own model, and a model's own batch with others.
        batch: Samples of each rank in each step; a model's own batches are what they are.
        steps: Training steps, over which the learning rate falls to zero.
        rate: The first learning rate; None for what suits the data.

    Raises:
        ModelError: There is no such model, or it has no data of its own.
        WrongArgument: The model and the data do not go together, or it cannot be simulated.
    """
    data = data or (DIGITS if model == DIGITS else "own")
    workload = None if model == DIGITS else load(model, [DIGITS])
    make = digits.make_model if workload is None else partial(_made, workload)
    _require_simulable(model, make(0))
    if data == DIGITS:
        train, test = digits.load()
        return Problem(
            make,
            _class_loss,
            partial(images, train, batch),
            _falling(lambda params: torch.optim.SGD(params, lr=rate or 0.1, momentum=0.9), steps),
            lambda forward: _class_loss(forward, test).item(),
        )
    adam = _falling(lambda params: torch.optim.AdamW(params, lr=rate or 1e-3), steps)
    if workload is None:
        raise WrongArgument(f"--model digits takes images: use --data digits, not --data {data}")
    if data == "own":
        task = workload.task()
        return Problem(make, task.loss, partial(_own, task.batch), adam)
    whole = characters()
    train, held_out = whole.split([len(whole) - (kept := int(HELD_OUT * len(whole))), kept])
    judged = windows(held_out, torch.arange(0, 64 * CONTEXT, CONTEXT))
    return Problem(
        make,
        _character_loss,
        partial(_text, train, batch),
        adam,
        lambda forward: _character_loss(forward, judged).item(),
    )


def require_fit(asked: Problem, model: str, data: str, ranks: int) -> None:
    """Runs the model once, on one rank's batch, to say before all else that it and the data go together.

    Raises:
        ModelError: The model has no data of its own.
        WrongArgument: They do not, or there are fewer images than ranks.
    """
    batch = tuple(part[0] for part in next(iter(asked.batches(ranks, 0, 1))))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            loss = asked.loss(asked.make(0), batch)
    except Exception as error:  # a model may raise anything
        raise WrongArgument(f"--model {model} does not take --data {data}: {type(error).__name__}: {error}") from error
    if loss.ndim:
        raise WrongArgument(f"--model {model} on --data {data}: the loss must be a scalar, got {list(loss.shape)}")


def _made(workload: Workload, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return workload.make()


def _require_simulable(name: str, model: nn.Module) -> None:
    for path, module in model.named_modules():
        if getattr(module, "track_running_stats", False):
            raise WrongArgument(
                f"{name} cannot be tuned: {path} ({type(module).__name__}) changes its buffers in forward, which "
                "virtual ranks cannot; use another normalization for the comparison, such as GroupNorm"
            )


def _class_loss(forward: Forward, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(forward(x), y)


def _character_loss(forward: Forward, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(forward(x).flatten(0, 1), y.flatten())


def images(train: digits.Digits, size: int, n: int, seed: int, steps: int) -> Batches:
    """Random ones of each rank's own share.

    Raises:
        WrongArgument: There are fewer of them than ranks.
    """
    if n > len(train.y):
        raise WrongArgument(f"--ranks {n}: each needs an image, and there are {len(train.y):,} to train on")
    generator = torch.Generator().manual_seed(seed)
    shards = [train.shard(rank, n) for rank in range(n)]
    for _ in range(steps):
        drawn = [shard.batch(size, generator) for shard in shards]
        yield torch.stack([each.x for each in drawn]), torch.stack([each.y for each in drawn])


def _own(batch: Callable[[int], Batch], n: int, seed: int, steps: int) -> Batches:
    rows = [batch(rank) for rank in range(n)]
    stacked = tuple(torch.stack(parts) for parts in zip(*rows, strict=True))
    for _ in range(steps):
        yield stacked


def _text(text: Tensor, size: int, n: int, seed: int, steps: int) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield windows(text, torch.randint(len(text) - CONTEXT, (n, size), generator=generator))


def windows(text: Tensor, starts: Tensor, context: int = CONTEXT) -> tuple[Tensor, Tensor]:
    """So many characters from each of `starts` on, and those that follow on each of them."""
    pieces = text[starts.unsqueeze(-1) + torch.arange(context + 1)]
    return pieces[..., :-1], pieces[..., 1:]


def text() -> str:
    """The help texts that ship with Python."""
    return "\n".join(topics[name] for name in sorted(topics))


def characters() -> Tensor:
    """A number for each character of them."""
    written = text()
    place = {symbol: i for i, symbol in enumerate(sorted(set(written)))}
    return torch.tensor([place[symbol] for symbol in written])


def _falling(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], steps: int
) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    """An optimizer whose learning rate falls to zero, linearly: final losses then depend less on the last batches."""

    def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
        made = make(params)
        schedule = torch.optim.lr_scheduler.LinearLR(made, 1.0, 1e-2, total_iters=steps)

        def fall(*_: object) -> None:
            schedule.step()

        made.register_step_post_hook(fall)
        return made

    return optimizer

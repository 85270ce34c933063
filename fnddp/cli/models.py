"""Workloads: a model, batches and a loss, by name, or from a function in a file. All commands take them."""

import importlib
import inspect
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fnddp.cli import modules
from fnddp.cli.failures import WrongArgument
from fnddp.cli.options import MODELS
from fnddp.core.options import did_you_mean
from fnddp.simulate.tune.problem import Batch, Forward, Loss, functional, trained

__all__ = ["BATCH_SIZE", "Batch", "Forward", "Loss", "Params", "Task", "Workload", "functional", "load", "trained"]

Params = dict[str, Tensor]
BATCH_SIZE = 32  # of a rank, where it can be chosen and is not


class Task(NamedTuple):
    """Data and a loss, to train a module on.

    Attributes:
        batch: `batch(rank, ranks, generator)`: the next batch of one of `ranks` ranks.
        loss: The mean loss of a module on a batch. It calls the module and nothing else of it.
        quality: The loss on held-out data; None where there is none.
        accuracy: The share of held-out data that is recognized; None where there is none.
        optimizer: Makes one that suits the data, with `lr` to choose the learning rate.
    """

    batch: Callable[[int, int, torch.Generator], Batch]
    loss: Loss
    quality: Callable[[Forward], float] | None = None
    accuracy: Callable[[Forward], float] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True)
class Workload:
    """A model, batches and a loss.

    Attributes:
        build: Makes a new module. Its initial values are a function of torch's global seed.
        task: `task(size)`: the data and the loss, with `size` samples in a batch where that can be chosen. Raises a
            `WrongArgument` where there are none.
    """

    build: Callable[[], nn.Module]
    task: Callable[[int], Task]

    def make(self, seed: int) -> nn.Module:
        """Make a new module, a function of `seed` alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()

    def parameters(self) -> Params:
        """Return the parameters to train, by name, without values (on the meta device): enough for planning."""
        try:
            with torch.device("meta"):
                module = self.build()
        except (WrongArgument, RuntimeError):  # perhaps it reads values, and on the meta device there are none
            module = self.build()
        return {name: p.to("meta") for name, p in trained(module).items()}


def class_loss(forward: Forward, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of classes: of samples, or of each position in sequences."""
    inputs, labels = batch
    return cross_entropy(forward(inputs).flatten(0, labels.ndim - 1), labels.flatten())


def load(name: str) -> Workload:
    """Return the workload `name`: one of MODELS, "FILE.py:fn", or "module:fn".

    In a file or an importable module, `fn()` returns a module, or `(module, inputs, loss_fn)`: a tensor or tuple of
    tensors that the module takes, and a function from the module's output to a scalar. A module alone can be planned,
    not trained. `fn` may be a module, too, or the class of one.

    Raises:
        WrongArgument: There is no such model or file. (What `fn()` returns is checked when it is first called.)

    >>> sum(p.numel() for p in load("gpt2").parameters().values())
    124439808
    """
    where, colon, function = MODELS.get(name, name).rpartition(":")
    if name in MODELS:
        return getattr(importlib.import_module(where), function)()
    if name.removesuffix(":").endswith(".py"):
        file = name.removesuffix(":")
        raise WrongArgument(f"{file} is a file: name the function in it that makes the model, {file}:fn")
    if not colon or not where or not function:
        hint = did_you_mean(name, MODELS) or f"; known ones are {', '.join(MODELS)}."
        raise WrongArgument(f"unknown model {name!r}{hint} Your own is FILE.py:fn or module:fn")
    build = _maker(name, where, function)
    return Workload(lambda: _parts(name, build())[0], lambda size: _task(name, *_parts(name, build())))


def _maker(name: str, where: str, attribute: str) -> Callable[[], Any]:
    """Return what makes the model `name`: a function or a class, or for a module, of which copies are made."""
    module = modules.load(where)
    made = getattr(module, attribute, None)
    if isinstance(made, nn.Module):
        return partial(deepcopy, made)
    if not callable(made):
        there = sorted(key for key, value in vars(module).items() if _is_model(value) and not key.startswith("_"))
        hint = did_you_mean(attribute, there) or f"; it has {', '.join(there) or 'none'}"
        raise WrongArgument(f"{where} has no function or module {attribute!r}{hint}")
    try:
        inspect.signature(made).bind()
    except ValueError:  # some built-in ones have no signature
        pass
    except TypeError as error:
        raise WrongArgument(
            f"{name} cannot be called without arguments: {error}; give it a default, or name a function that returns "
            "the module"
        ) from error
    return partial(_called, name, made)


def _is_model(value: Any) -> bool:
    return isinstance(value, nn.Module | FunctionType) or (isinstance(value, type) and issubclass(value, nn.Module))


def _called(name: str, made: Callable[[], Any]) -> Any:
    try:
        return made()
    except (Exception, SystemExit) as error:
        raise WrongArgument(f"{name} failed: {modules.described(error)}") from error


def _parts(name: str, built: Any) -> tuple[nn.Module, Any, Any]:
    if isinstance(built, nn.Module):
        return built, None, None
    if isinstance(built, tuple) and len(built) == 3 and isinstance(built[0], nn.Module):
        return built
    raise WrongArgument(f"{name} must return a torch.nn.Module or (module, inputs, loss_fn), got {_kind(built)}")


def _task(name: str, module: nn.Module, inputs: Any, loss_fn: Any) -> Task:
    batch: Any = (inputs,) if isinstance(inputs, Tensor) else inputs
    if loss_fn is None:
        raise WrongArgument(f"{name} returns a module alone; to train it, it must return (module, inputs, loss_fn)")
    if not isinstance(batch, tuple) or not all(isinstance(part, Tensor) for part in batch):
        raise WrongArgument(f"{name}: inputs must be a tensor or a tuple of tensors, got {_kind(inputs)}")
    if not callable(loss_fn):
        raise WrongArgument(f"{name}: loss_fn must be a function of the module's output, got {_kind(loss_fn)}")

    def loss(forward: Forward, batch: Batch) -> Tensor:
        value = loss_fn(forward(*batch))
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else _kind(value)
            raise WrongArgument(f"{name}: loss_fn must return a scalar tensor, such as a mean, got {got}")
        return value

    def always(rank: int, ranks: int, generator: torch.Generator) -> Batch:
        return batch

    return Task(always, loss)


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__

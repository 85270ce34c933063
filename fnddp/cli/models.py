"""Workloads by name, for `fnddp bench` and `fnddp plan`: a model, batches and a loss; or a function in a file.

The named models need nothing but torch, and their data is random: what they are for is shapes and time.
"""

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fnddp.cli import architectures, modules
from fnddp.cli.modules import ModuleError
from fnddp.options import did_you_mean

Batch = tuple[Tensor, ...]
Forward = Callable[..., Any]  # a module, or a function that stands for one with other parameters
Loss = Callable[[Forward, Batch], Tensor]


class ModelError(ValueError):
    """No such model, or it is not what it should be; the message is for the user."""


class Task(NamedTuple):
    """What a module is trained on.

    Attributes:
        batch: The batch of a rank, always the same one.
        loss: The mean loss of a module on a batch. It calls the module and nothing else of it.
    """

    batch: Callable[[int], Batch]
    loss: Loss


@dataclass(frozen=True)
class Workload:
    """Something to train.

    Attributes:
        name: As `load` takes it.
        make: Makes a new module. Its initial values are a function of torch's global seed.
        task: What it is trained on. Raises a `ModelError` where there is no such thing.
    """

    name: str
    make: Callable[[], nn.Module]
    task: Callable[[], Task]

    def parameters(self) -> dict[str, Tensor]:
        """The parameters that are trained, by name, without values (on the meta device): enough for planning."""
        try:
            with torch.device("meta"):
                module = self.make()
        except (ModelError, RuntimeError):  # perhaps it reads values, and on the meta device there are none
            module = self.make()
        return {name: p.detach().to("meta") for name, p in module.named_parameters() if p.requires_grad}


def load(name: str, others: Sequence[str] = ()) -> Workload:
    """The workload `name`: "transformer", "deep", "gpt2", "resnet18", "FILE.py:fn", or "module:fn".

    In a file or an importable module, `fn()` returns a module, or `(module, inputs, loss_fn)`: a tensor or tuple of
    tensors that the module takes, and a function from the module's output to a scalar. A module alone can be planned,
    not benchmarked. `fn` may be a module, too, or the class of one.

    Args:
        name: See above.
        others: What the caller knows besides, for the error.

    Raises:
        ModelError: There is no such model or file. (What `fn()` returns is looked at when it is first called.)

    >>> sum(p.numel() for p in load("gpt2").parameters().values())
    124439808
    """
    if name in _NAMED:
        return _NAMED[name]
    path, colon, function = name.rpartition(":")
    if name.removesuffix(":").endswith(".py"):
        file = name.removesuffix(":")
        raise ModelError(f"{file} is a file: say what in it makes the model, {file}:fn")
    if not colon or not path or not function:
        known = [*others, *_NAMED]
        hint = did_you_mean(name, known) or f"; known ones are {', '.join(known)}."
        raise ModelError(f"unknown model {name!r}{hint} Your own is FILE.py:fn or module:fn")
    build = _maker(name, path, function)
    return Workload(name, lambda: _parts(name, build())[0], lambda: _task(name, *_parts(name, build())))


def _tokens(rank: int, *, size: int, context: int, vocabulary: int) -> Batch:
    tokens = torch.randint(vocabulary, (size, context + 1), generator=_generator(rank))
    return tokens[:, :-1], tokens[:, 1:]


def _noise(rank: int, *, size: int) -> Batch:
    deep = architectures.Deep
    return (torch.randn(size, deep.CONTEXT, deep.WIDTH, generator=_generator(rank)),)


def _images(rank: int, *, size: int) -> Batch:
    generator = _generator(rank)
    return torch.randn(size, 3, 32, 32, generator=generator), torch.randint(10, (size,), generator=generator)


def _generator(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank)


def _token_loss(forward: Forward, batch: Batch) -> Tensor:
    tokens, following = batch
    return cross_entropy(forward(tokens).flatten(0, 1), following.flatten())


def _square_loss(forward: Forward, batch: Batch) -> Tensor:
    return forward(*batch).square().mean()


def _class_loss(forward: Forward, batch: Batch) -> Tensor:
    images, labels = batch
    return cross_entropy(forward(images), labels)


_Transformer, _GPT2 = architectures.Transformer, architectures.GPT2
_SENTENCES = Task(
    partial(_tokens, size=4, context=_Transformer.CONTEXT, vocabulary=_Transformer.VOCABULARY), _token_loss
)
_SENTENCE = Task(partial(_tokens, size=1, context=64, vocabulary=_GPT2.VOCABULARY), _token_loss)
_VECTORS = Task(partial(_noise, size=2), _square_loss)
_PICTURES = Task(partial(_images, size=8), _class_loss)
_NAMED = {
    "transformer": Workload("transformer", _Transformer, lambda: _SENTENCES),
    "deep": Workload("deep", architectures.Deep, lambda: _VECTORS),
    "gpt2": Workload("gpt2", _GPT2, lambda: _SENTENCE),
    "resnet18": Workload("resnet18", architectures.ResNet18, lambda: _PICTURES),
}


def _maker(name: str, where: str, attribute: str) -> Callable[[], Any]:
    """What makes the model that `name` is: a function or a class, or a module, of which each time a copy is made."""
    try:
        module = modules.load(where)
    except ModuleError as error:
        raise ModelError(str(error)) from error
    made = getattr(module, attribute, None)
    if isinstance(made, nn.Module):
        return partial(deepcopy, made)
    if not callable(made):
        there = sorted(key for key, value in vars(module).items() if _is_model(value) and not key.startswith("_"))
        hint = did_you_mean(attribute, there) or f"; it has {', '.join(there) or 'none'}"
        raise ModelError(f"{where} has no function or module {attribute!r}{hint}")
    if needed := _required(made):
        raise ModelError(
            f"{name} cannot be called without arguments: it needs {', '.join(needed)}; give them defaults, or name a "
            "function that returns the module"
        )
    return partial(_called, name, made)


def _is_model(value: Any) -> bool:
    return isinstance(value, nn.Module | FunctionType) or (isinstance(value, type) and issubclass(value, nn.Module))


def _required(made: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(made).parameters.values()
    except (TypeError, ValueError):  # some built-in ones have no signature
        return []
    varying = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in varying]


def _called(name: str, made: Callable[[], Any]) -> Any:
    try:
        return made()
    except (Exception, SystemExit) as error:
        raise ModelError(f"{name} failed: {modules.told(error)}") from error


def _parts(name: str, built: Any) -> tuple[nn.Module, Any, Any]:
    if isinstance(built, nn.Module):
        return built, None, None
    if isinstance(built, tuple) and len(built) == 3 and isinstance(built[0], nn.Module):
        return built
    raise ModelError(f"{name} must return a torch.nn.Module or (module, inputs, loss_fn), got {_kind(built)}")


def _task(name: str, module: nn.Module, inputs: Any, loss_fn: Any) -> Task:
    batch: Any = (inputs,) if isinstance(inputs, Tensor) else inputs
    if loss_fn is None:
        raise ModelError(f"{name} returns a module alone; to train it, it must return (module, inputs, loss_fn)")
    if not isinstance(batch, tuple) or not all(isinstance(part, Tensor) for part in batch):
        raise ModelError(f"{name}: inputs must be a tensor or a tuple of tensors, got {_kind(inputs)}")
    if not callable(loss_fn):
        raise ModelError(f"{name}: loss_fn must be a function of the module's output, got {_kind(loss_fn)}")
    return Task(partial(_same, batch), partial(_loss_of_output, name, loss_fn))


def _same(batch: Batch, rank: int) -> Batch:
    return batch


def _loss_of_output(name: str, loss_fn: Callable[..., Any], forward: Forward, batch: Batch) -> Tensor:
    loss = loss_fn(forward(*batch))
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else _kind(loss)
        raise ModelError(f"{name}: loss_fn must return a scalar tensor, such as a mean, got {got}")
    return loss


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__

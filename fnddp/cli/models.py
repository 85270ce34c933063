"""Workloads by name, for `fnddp bench` and `fnddp plan`: a model, batches and a loss; or a function in a file.

The named models need nothing but torch, and their data is random: what they are for is shapes and time.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fnddp.cli import architectures

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
        except RuntimeError:  # it reads values, and on the meta device there are none
            module = self.make()
        return {name: p.detach().to("meta") for name, p in module.named_parameters() if p.requires_grad}


def load(name: str) -> Workload:
    """The workload `name`: "transformer", "deep", "gpt2", "resnet18", "FILE.py:fn", or "module:fn".

    In a file or an installed module, `fn()` returns a module, or `(module, inputs, loss_fn)`: a tensor or tuple of
    tensors that the module takes, and a function from the module's output to a scalar. A module alone can be planned,
    not benchmarked.

    Raises:
        ModelError: There is no such model or file. (What `fn()` returns is looked at when it is first called.)

    >>> sum(p.numel() for p in load("gpt2").parameters().values())
    124439808
    """
    if name in _NAMED:
        return _NAMED[name]
    path, colon, function = name.rpartition(":")
    if not colon or not path:
        known = ", ".join(_NAMED)
        raise ModelError(f"unknown model {name!r}; known ones are {known}, and FILE.py:fn or module:fn for your own")
    build = _function(_of_file(Path(path)) if path.endswith(".py") else _installed(path), path, function)
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


def _of_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise ModelError(f"there is no file {file}")
    spec = importlib.util.spec_from_file_location(f"fnddp_model_{file.stem}", file)
    assert spec is not None  # its name ends with .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    if (folder := str(file.absolute().parent)) not in sys.path:
        sys.path.append(folder)  # as if Python ran the file: it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ModelError(f"cannot import {file}: {type(error).__name__}: {error}") from error
    return module


def _installed(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ModelError(f"cannot import {name}: {type(error).__name__}: {error}") from error


def _function(module: ModuleType, where: str, name: str) -> Callable[[], Any]:
    function = getattr(module, name, None)
    if not callable(function):
        there = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ModelError(f"{where} has no function {name!r}; it has {', '.join(there) or 'none'}")
    return function


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
    return Task(partial(_same, batch), partial(_loss_of_output, loss_fn))


def _same(batch: Batch, rank: int) -> Batch:
    return batch


def _loss_of_output(loss_fn: Callable[..., Any], forward: Forward, batch: Batch) -> Tensor:
    return loss_fn(forward(*batch))


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__

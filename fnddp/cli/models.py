"""Problems by name, or from a function in a file: a model, batches and a loss. All commands take them."""

import sys
import sysconfig
import traceback
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module, util
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fnddp.cli.failures import WrongArgument
from fnddp.cli.options import MODELS
from fnddp.core.options import did_you_mean
from fnddp.simulate.tune import Batch, Forward, Problem, trained

Params = dict[str, Tensor]
BATCH_SIZE = 32  # of a rank, where it can be chosen and is not
DATA = {"digits": "fnddp.cli.digits", "text": "fnddp.cli.characters"}
"""Modules with data for any model, imported when asked for: digits need scikit-learn."""

EXAMPLE = """\
import torch

def make():
    module = torch.nn.Linear(20, 1)
    inputs = torch.randn(32, 20)
    return module, inputs, lambda output: output.square().mean()"""

# Files that users have not written: fnddp's, Python's, and what is installed.
_NOT_OWN = (str(Path(__file__).parent.parent), "<frozen", *sysconfig.get_paths().values())


def imported(name: str) -> ModuleType:
    """Import and return the module `name`: an installed one, one of this folder, or "FILE.py"."""
    try:
        if name.endswith(".py"):
            return _of_file(Path(name))
        _add_path(Path.cwd())  # a console script, unlike `python -m`, does not
        return import_module(name)
    except (Exception, SystemExit) as error:
        raise WrongArgument(f"cannot import {name}: {described(error)}") from error


def described(error: BaseException) -> str:
    """Return the type and text of an error, and the line of a user's module that raised it, if one did."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    own = [at for at in traceback.extract_tb(error.__traceback__) if not at.filename.startswith(_NOT_OWN)]
    return f"{text} (at {own[-1].filename}:{own[-1].lineno})" if own else text


def _of_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    name = f"fnddp_file_{file.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(file.absolute()):
        return sys.modules[name]  # transforms are registered once
    spec = util.spec_from_file_location(name, file.absolute())
    assert spec is not None  # its name ends with .py
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    _add_path(file.absolute().parent)  # as if Python ran the file: it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _add_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def class_loss(forward: Forward, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of classes: of samples, or of each position in sequences."""
    inputs, labels = batch
    return cross_entropy(forward(inputs).flatten(0, labels.ndim - 1), labels.flatten())


def load(name: str) -> Problem:
    """Return the problem `name`: one of MODELS, "FILE.py:fn", or "module:fn".

    `fn()` returns `(module, inputs, loss_fn)`: a tensor or tuple of tensors that the module takes, and a function from
    its output to a scalar; or a `Problem`.
    """
    make = _maker(name)
    built = make()
    if isinstance(built, Problem):
        return built
    if isinstance(built, nn.Module):
        raise _wrong(name, "returns a module alone; to train it, it must return (module, inputs, loss_fn)")
    _, inputs, loss_fn = built
    batch: Any = (inputs,) if isinstance(inputs, Tensor) else inputs
    if not isinstance(batch, tuple) or not all(isinstance(part, Tensor) for part in batch):
        raise _wrong(name, f"returns inputs of {_kind(inputs)}; inputs must be a tensor or a tuple of tensors")
    if not callable(loss_fn):
        raise _wrong(name, f"returns {_kind(loss_fn)}; loss_fn must be a function of the module's output")

    def loss(forward: Forward, batch: Batch) -> Tensor:
        value = loss_fn(forward(*batch))
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else _kind(value)
            raise WrongArgument(f"{name}: loss_fn must return a scalar tensor, such as a mean, got {got}")
        return value

    def always(rank: int, ranks: int, generator: torch.Generator) -> Batch:
        return batch

    return Problem(lambda: _module(make()), loss, always)


def parameters(name: str) -> Params:
    """Return the parameters of the model `name`, without values (on the meta device): enough for planning.

    `fn()` may also return, or be, a module alone, or the class of one.

    >>> sum(p.numel() for p in parameters("gpt2").values())
    124439808
    """
    make = _maker(name)
    try:
        with torch.device("meta"):
            module = _module(make())
    except (WrongArgument, RuntimeError):  # perhaps it reads values, and on the meta device there are none
        module = _module(make())
    return {path: p.to("meta") for path, p in trained(module).items()}


def to_tune(model: str, data: str | None, *, batch: int, ranks: int, steps: int, rate: float | None) -> Problem:
    """Return what `--model` and `--data` name; the learning rate falls from `rate`, or what suits the data, to zero."""
    source = data if data in DATA else model if model in DATA else None
    make = _maker(model)
    problem = import_module(DATA[source]).problem(batch, lambda: _module(make())) if source else load(model)
    module = problem.make(0)
    for path, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            raise WrongArgument(
                f"{model} cannot be tuned: {path} ({type(part).__name__}) changes its buffers in forward, which "
                "virtual ranks cannot; use another normalization for the comparison, such as GroupNorm"
            )
    first, where = problem.batch(0, ranks, torch.Generator().manual_seed(0)), f"--data {data or 'own'}"
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            loss = problem.loss(module, first)
    except Exception as error:  # a model may raise anything
        raise WrongArgument(f"--model {model} does not take {where}: {type(error).__name__}: {error}") from error
    if loss.ndim:
        raise WrongArgument(f"--model {model} on {where}: the loss must be a scalar, got {list(loss.shape)}")

    def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
        made = problem.optimizer(params) if rate is None else problem.optimizer(params, lr=rate)
        schedule = torch.optim.lr_scheduler.LinearLR(made, 1.0, 1e-2, total_iters=steps)

        def fall(*_: object) -> None:
            schedule.step()

        made.register_step_post_hook(fall)
        return made

    # Final losses depend less on the last batches where the learning rate falls to zero.
    return replace(problem, optimizer=optimizer)


def _maker(name: str) -> Callable[[], Any]:
    """Return a function or class that makes the model `name`; for a module, a function that copies it."""
    where, colon, attribute = MODELS.get(name, name).rpartition(":")
    if name in MODELS:
        return getattr(import_module(where), attribute)
    if name.removesuffix(":").endswith(".py"):
        file = name.removesuffix(":")
        raise WrongArgument(f"{file} is a file: name the function in it that makes the model, {file}:fn")
    if not colon or not where or not attribute:
        hint = did_you_mean(name, MODELS) or f"; known ones are {', '.join(MODELS)}."
        raise WrongArgument(f"unknown model {name!r}{hint} Your own is FILE.py:fn or module:fn")
    module = imported(where)
    made = getattr(module, attribute, None)
    if isinstance(made, nn.Module):
        return partial(deepcopy, made)
    if not callable(made):
        there = sorted(key for key, value in vars(module).items() if _is_model(value) and not key.startswith("_"))
        hint = did_you_mean(attribute, there) or f"; it has {', '.join(there) or 'none'}"
        raise WrongArgument(f"{where} has no function or module {attribute!r}{hint}")
    return partial(_called, name, made)


def _is_model(value: Any) -> bool:
    return isinstance(value, nn.Module | FunctionType) or (isinstance(value, type) and issubclass(value, nn.Module))


def _called(name: str, made: Callable[[], Any]) -> Any:
    try:
        built = made()
    except (Exception, SystemExit) as error:
        raise WrongArgument(f"{name} failed: {described(error)}") from error
    is_triple = isinstance(built, tuple) and len(built) == 3 and isinstance(built[0], nn.Module)
    if not is_triple and not isinstance(built, nn.Module | Problem):
        raise _wrong(name, f"must return a torch.nn.Module or (module, inputs, loss_fn), got {_kind(built)}")
    return built


def _module(built: Any) -> nn.Module:
    if isinstance(built, Problem):
        return built.build()
    return built if isinstance(built, nn.Module) else built[0]


def _wrong(name: str, problem: str) -> WrongArgument:
    return WrongArgument(f"{name} {problem}. All commands take this, for example:\n\n{EXAMPLE}")


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__

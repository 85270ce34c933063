"""Problems by name, or from a function in a file: a model, batches and a loss. All commands take them."""

import sys
import sysconfig
import traceback
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, relu
from torch.nn.parameter import UninitializedParameter

from fnddp.cli.failures import WrongArgument
from fnddp.cli.options import MODELS
from fnddp.core.options import did_you_mean
from fnddp.reducers.all_reduce import allreduce
from fnddp.run.hops import several
from fnddp.run.measure import measure_backward
from fnddp.simulation.tune import Batch, Forward, Loss, Problem, final_loss, trained

Params = dict[str, Tensor]
BATCH_SIZE = 32  # of a rank, the default where it can be chosen
DATA = {"digits": "fnddp.cli.digits", "text": "fnddp.cli.characters"}
"""Modules with data for any model, imported when asked for: digits need scikit-learn."""

EXAMPLE = """\
import torch

def make():
    module = torch.nn.Linear(20, 1)
    inputs = torch.randn(32, 20)
    return module, inputs, lambda output: output.square().mean()"""

# Files that users have not written: fnddp's, Python's, and installed packages.
_NOT_OWN = (str(Path(__file__).parent.parent), "<frozen", *sysconfig.get_paths().values())


def imported(name: str) -> ModuleType:
    """Import and return the module `name`: an installed module, a module of this folder, or "FILE.py"."""
    file = Path(name).absolute() if name.endswith(".py") else None
    # As if Python ran the file, or `python -m`, so that it can import its neighbours: console scripts cannot.
    near = [Path.cwd()] if file is None else [file.parent, Path.cwd()]
    sys.path += [folder for folder in dict.fromkeys(map(str, near)) if folder not in sys.path]
    try:
        return import_module(name) if file is None else _of_file(file)
    except (Exception, SystemExit) as error:
        raise WrongArgument(f"cannot import {name}: {described(error)}") from error


def described(error: BaseException) -> str:
    """Return the type and text of an error, and the line of a user's module that raised it, if one did."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    own = [at for at in traceback.extract_tb(error.__traceback__) if not at.filename.startswith(_NOT_OWN)]
    return f"{text} (at {own[-1].filename}:{own[-1].lineno})" if own else text


def _of_file(file: Path) -> ModuleType:
    name = f"fnddp_file_{file.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(file):
        return sys.modules[name]  # transforms are registered once
    module = sys.modules[name] = ModuleType(name)  # dataclasses look their module up there
    module.__file__ = str(file)
    try:
        exec(compile(file.read_bytes(), file, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]  # it is incomplete
        raise
    return module


def class_loss(forward: Forward, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of classes, over samples or over all positions in sequences."""
    inputs, labels = batch
    return cross_entropy(forward(inputs).flatten(0, labels.ndim - 1), labels.flatten())


def load(name: str) -> Problem:
    """Return the problem `name`: one of MODELS, "FILE.py:fn", or "module:fn".

    `fn()` returns `(module, inputs, loss_fn)` or a `Problem`. `inputs` is a tensor or a tuple of tensors for the
    module, and `loss_fn` a function from its output to a scalar.
    """
    make = _maker(name)
    built = make()
    if isinstance(built, Problem):
        return built
    if isinstance(built, nn.Module):
        raise _wrong(name, "returns only a module; for a training it must return (module, inputs, loss_fn)")
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


def has_one_batch(problem: Problem) -> bool:
    """Return whether all ranks train on the same batch in every step, as with `(module, inputs, loss_fn)`."""
    generator = torch.Generator()
    return problem.batch(0, 2, generator) is problem.batch(1, 2, generator)


def parameters(name: str) -> Params:
    """Return the parameters of the model `name`, without values (on the meta device): enough for planning.

    `fn()` may also return a module alone; `fn` may also be a module or a module class.

    >>> sum(p.numel() for p in parameters("gpt2").values())
    124439808
    """
    make = _maker(name)
    try:
        with torch.device("meta"):
            module = _module(make())
    except (WrongArgument, RuntimeError):  # perhaps it reads values; the meta device has none
        module = _module(make())
    if any(isinstance(p, UninitializedParameter) for p in module.parameters()):
        raise WrongArgument(f"{name} has uninitialized lazy parameters; run its forward once before you return it")
    return {path: p.to("meta") for path, p in trained(module).items()}


def arrival(name: str) -> list[str] | None:
    """Return the names of parameters in the order of their gradients in backward, as known after the first step.

    None for a module alone, and for a model that cannot run without values.

    >>> arrival("transformer")[-2:], list(parameters("transformer"))[:2]
    (['position', 'embed.weight'], ['position', 'embed.weight'])
    """
    try:
        with torch.device("meta"):
            problem = load(name)
            module = problem.build()
        batch = [part.to("meta") for part in problem.batch(0, 1, torch.Generator().manual_seed(0))]
        return measure_backward(problem.loss_of(module), trained(module), *batch, calls=1).order
    except Exception:  # a model may raise anything
        return None


def to_tune(model: str, data: str | None, *, batch: int, ranks: int, steps: int, rate: float | None) -> Problem:
    """Return the problem of `--model` and `--data`; the learning rate falls from `rate`, or a default, to zero."""
    source = data if data in DATA else model if model in DATA else None
    make = _maker(model)
    problem = import_module(DATA[source]).problem(batch, lambda: _module(make())) if source else load(model)

    def optimizers(params: list[Tensor]) -> list[torch.optim.Optimizer]:
        made = several(problem.optimizer(params) if rate is None else problem.optimizer(params, lr=rate))
        for each in made:
            if isinstance(each, torch.optim.LBFGS):
                raise WrongArgument(f"{model} cannot be tuned with LBFGS (it needs closures); return another optimizer")
            schedule = torch.optim.lr_scheduler.LinearLR(each, 1.0, 1e-2, total_iters=steps)
            each.register_step_post_hook(lambda optimizer, args, kwargs, schedule=schedule: schedule.step())
        return made

    # Final losses depend less on the last batches if the learning rate falls to zero.
    asked, module, at = replace(problem, optimizer=optimizers), problem.make(0), f"--data {data or 'own'}"
    variables = {name: p for name, p in module.named_parameters() if p.requires_grad}
    try:
        with torch.random.fork_rng(devices=[]):
            loss = problem.loss(module, problem.batch(0, ranks, torch.Generator().manual_seed(0)))
            grads = torch.autograd.grad(loss.sum(), [*variables.values()], allow_unused=True)
        if loss.ndim:
            raise WrongArgument(f"--model {model} on {at}: the loss must be a scalar, got {list(loss.shape)}")
        if sparse := [name for name, g in zip(variables, grads, strict=True) if g is not None and g.is_sparse]:
            raise WrongArgument(f"{model} cannot be tuned: the gradient of {sparse[0]} is sparse; remove sparse=True")
        parts = [name for name, of in module.named_modules() if of.training and getattr(of, "track_running_stats", 0)]
        at = "virtual ranks" + (f", since {parts[0]} changes its buffers (GroupNorm does not)" if parts else "")
        final_loss(asked, allreduce, ranks, 0, 1)
    except WrongArgument:
        raise
    except Exception as error:  # a model may raise anything
        raise WrongArgument(f"--model {model} fails on {at}: {described(error)}") from error
    return asked


def _maker(name: str) -> Callable[[], Any]:
    """Return a function or class that makes the model `name`; for a module, a function that copies it."""
    where, colon, attribute = MODELS.get(name, name).rpartition(":")
    if name in MODELS:
        return getattr(import_module(where), attribute)
    if name.removesuffix(":").endswith(".py"):
        file = name.removesuffix(":")
        raise WrongArgument(f"{file} is a file: name its function that makes the model, {file}:fn")
    if not colon or not where or not attribute:
        hint = did_you_mean(name, MODELS) or f"; known ones are {', '.join(MODELS)}."
        raise WrongArgument(f"unknown model {name!r}{hint} Name your own as FILE.py:fn or module:fn")
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


# Well-known networks in plain torch, for shapes and time: their data is random, and always the same on a rank.


def transformer() -> Problem:
    """Return 4 causal layers of width 384 over embeddings, 10.3 million parameters; 4 sentences of 64 tokens."""
    return _problem(lambda: Transformer(4096, 384, 4, 6, 64), lambda random: _tokens(4, 64, 4096, random))


def deep() -> Problem:
    """Return 32 encoder layers of width 128, 4.2 million parameters in 384 leaves: it shows the cost of a leaf."""
    return _problem(
        lambda: nn.Sequential(*(_layer(128, 4, 256) for _ in range(32))),
        lambda random: (torch.randn(2, 32, 128, generator=random),),
        lambda forward, batch: forward(*batch).square().mean(),
    )


def gpt2() -> Problem:
    """Return GPT-2 small; one sentence of 64 tokens."""
    return _problem(GPT2, lambda random: _tokens(1, 64, GPT2.VOCABULARY, random))


def resnet18() -> Problem:
    """Return the ResNet18 for CIFAR; 8 images."""
    return _problem(
        _resnet18,
        lambda random: (torch.randn(8, 3, 32, 32, generator=random), torch.randint(10, (8,), generator=random)),
    )


def _problem(
    build: Callable[[], nn.Module], batch: Callable[[torch.Generator], Batch], loss: Loss = class_loss
) -> Problem:
    return Problem(build, loss, lambda rank, ranks, generator: batch(torch.Generator().manual_seed(rank)))


def _tokens(size: int, context: int, vocabulary: int, random: torch.Generator) -> Batch:
    tokens = torch.randint(vocabulary, (size, context + 1), generator=random)
    return tokens[:, :-1], tokens[:, 1:]


def _layer(width: int, heads: int, hidden: int, activation: str = "relu") -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        width, heads, hidden, dropout=0.0, activation=activation, batch_first=True, norm_first=True
    )


def _causal(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """Return `x: [batch, tokens, width]` after layers where a token attends only to earlier ones."""
    later = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
    for layer in layers:
        x = layer(x, src_mask=later, is_causal=True)
    return x


class Transformer(nn.Module):
    """Causal layers over learned embeddings: a language model."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(_layer(width, heads, 4 * width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(_causal(self.blocks, self.embed(tokens) + self.position))


class GPT2(nn.Module):
    """GPT-2 small (Radford et al., 2019) without dropout, of torch's layers: 124,439,808 parameters in 148 leaves."""

    VOCABULARY, WIDTH, LAYERS, HEADS, CONTEXT = 50257, 768, 12, 12, 1024

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.wpe = nn.Embedding(self.CONTEXT, self.WIDTH)
        layers = (_layer(self.WIDTH, self.HEADS, 4 * self.WIDTH, "gelu") for _ in range(self.LAYERS))
        self.h = nn.ModuleList(layers)
        self.ln_f = nn.LayerNorm(self.WIDTH)
        for module in self.modules():  # torch's default for embeddings would start at a loss of hundreds
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        n = tokens.shape[1]
        x = self.wte(tokens) + self.wpe(torch.arange(n, device=tokens.device))
        return linear(self.ln_f(_causal(self.h, x)), self.wte.weight)


def _resnet18() -> nn.Module:
    """Make the ResNet18 for CIFAR that PowerSGD's paper trains (He et al., 2016): 11,173,962 parameters, 62 leaves."""
    first = {"conv1": nn.Conv2d(3, 64, 3, padding=1, bias=False), "bn1": nn.BatchNorm2d(64), "relu": nn.ReLU()}
    stages = {
        f"layer{i}": nn.Sequential(_Residual(below, width), _Residual(width, width))
        for i, (below, width) in enumerate(pairwise((64, 64, 128, 256, 512)), 1)
    }
    last = {"mean": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "linear": nn.Linear(512, 10)}
    return nn.Sequential(OrderedDict({**first, **stages, **last}))


class _Residual(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        stride = 1 if out == channels else 2
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if out != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        out = relu(self.bn1(self.conv1(x)))
        return relu(self.bn2(self.conv2(out)) + self.shortcut(x))

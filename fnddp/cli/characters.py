"""The help texts that ship with Python, character by character: data for language models."""

from collections.abc import Callable
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from fnddp.cli.models import class_loss
from fnddp.simulation.tune import Batch, Problem

CONTEXT = 64  # characters of a sample: the context length of the transformer
HELD_OUT = 0.1


def problem(size: int, build: Callable[[], nn.Module]) -> Problem:
    """Return batches of `size` random windows, and the loss of predicting each next character."""
    whole = characters()
    train, held_out = whole.split([len(whole) - (kept := int(HELD_OUT * len(whole))), kept])
    judged = windows(held_out, torch.arange(0, 64 * CONTEXT, CONTEXT))

    def batch(rank: int, ranks: int, generator: torch.Generator) -> Batch:
        return windows(train, torch.randint(len(train) - CONTEXT, (size,), generator=generator))

    return Problem(build, class_loss, batch, quality=lambda forward: class_loss(forward, judged).item())


def windows(text: Tensor, starts: Tensor, context: int = CONTEXT) -> tuple[Tensor, Tensor]:
    """Return `context` characters from each of `starts` on, and the next character of each."""
    pieces = text[starts.unsqueeze(-1) + torch.arange(context + 1)]
    return pieces[..., :-1], pieces[..., 1:]


def text() -> str:
    """Return the concatenation of all help texts."""
    return "\n".join(topics[name] for name in sorted(topics))


def characters() -> Tensor:
    """Return `text()` as a tensor of character ids."""
    written = text()
    place = {symbol: i for i, symbol in enumerate(sorted(set(written)))}
    return torch.tensor([place[symbol] for symbol in written])

"""What torch's class tells its reducer about parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def sparse_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The parameters whose gradients are sparse."""
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse]
    return {parameter for part in embeddings for parameter in part.parameters(recurse=False)}


def debug_names(parameters: Sequence[nn.Parameter], managed: Mapping[str, nn.Parameter]) -> dict[int, str]:
    """The name of each of `parameters` by its index.

    Raises:
        ValueError: They are not the managed ones.
    """
    indices: dict[Any, int] = {parameter: i for i, parameter in enumerate(parameters)}
    for name, parameter in managed.items():
        if parameter not in indices:
            raise ValueError(f"Param with name {name} found in module parameters, but not DDP parameters.")
    if len(indices) != len(managed):
        raise ValueError(
            "Expected param to name mapping to cover all parameters, but got conflicting lengths: "
            f"{len(indices)} vs {len(managed)}."
        )
    return {indices[parameter]: name for name, parameter in managed.items()}

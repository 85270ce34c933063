"""Parameters with sparse gradients."""

from torch import nn


def sparse_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of embeddings whose gradients are sparse."""
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse]
    return {parameter for part in embeddings for parameter in part.parameters(recurse=False)}

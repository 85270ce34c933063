"""Well-known networks in plain torch, with the parameter shapes that papers and users know.

Their data is random, and always the same on a rank: use them for shapes and time.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from fnddp.cli.models import class_loss
from fnddp.simulate.tune import Batch, Loss, Problem


def transformer() -> Problem:
    """Return 4 encoder layers of width 384 over embeddings, 10.3 million parameters; 4 sentences of 64 tokens."""
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
        ResNet18,
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


class Transformer(nn.Module):
    """Encoder layers over learned embeddings."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(_layer(width, heads, 4 * width) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens) + self.position))


class GPT2(nn.Module):
    """GPT-2 small (Radford et al., 2019): 124,439,808 parameters in 148 leaves; the output head is the embedding.

    Without dropout, of torch's own layers, whose names are not Hugging Face's.
    """

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
        later = nn.Transformer.generate_square_subsequent_mask(n, device=tokens.device, dtype=x.dtype)
        for layer in self.h:
            x = layer(x, src_mask=later, is_causal=True)
        return linear(self.ln_f(x), self.wte.weight)


class ResNet18(nn.Module):
    """The ResNet18 for CIFAR that the PowerSGD paper trains (He et al., 2016): 11,173,962 parameters, 62 leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(_Residual(64, 64, 1), _Residual(64, 64, 1))
        self.layer2 = nn.Sequential(_Residual(64, 128, 2), _Residual(128, 128, 1))
        self.layer3 = nn.Sequential(_Residual(128, 256, 2), _Residual(256, 256, 1))
        self.layer4 = nn.Sequential(_Residual(256, 512, 2), _Residual(512, 512, 1))
        self.linear = nn.Linear(512, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = relu(self.bn1(self.conv1(images)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.linear(x.mean(dim=(2, 3)))


class _Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if (channels, stride) != (out, 1):
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        out = relu(self.bn1(self.conv1(x)))
        return relu(self.bn2(self.conv2(out)) + self.shortcut(x))

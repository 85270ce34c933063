"""Well-known networks in plain torch, with the parameter shapes that papers and users know."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, relu, scaled_dot_product_attention


class Transformer(nn.Module):
    """10.3 million parameters: 4 encoder layers of width 384 over learned embeddings."""

    VOCABULARY: ClassVar = 4096
    WIDTH: ClassVar = 384
    LAYERS: ClassVar = 4
    HEADS: ClassVar = 6
    CONTEXT: ClassVar = 64

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.position = nn.Parameter(torch.zeros(self.CONTEXT, self.WIDTH))
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    self.WIDTH, self.HEADS, 4 * self.WIDTH, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(self.LAYERS)
            )
        )
        self.head = nn.Linear(self.WIDTH, self.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens) + self.position))


class Deep(nn.Module):
    """4.2 million parameters in 384 leaves: 32 encoder layers of width 128. It shows what a leaf costs."""

    WIDTH: ClassVar = 128
    LAYERS: ClassVar = 32
    CONTEXT: ClassVar = 32

    def __init__(self) -> None:
        super().__init__()
        layers = (
            nn.TransformerEncoderLayer(self.WIDTH, 4, 2 * self.WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(self.LAYERS)
        )
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class GPT2(nn.Module):
    """GPT-2 small (Radford et al., 2019): 124,439,808 parameters in 148 leaves; the output head is the embedding.

    Without dropout. Names and order are Hugging Face's; linear weights are stored `[out, in]`, as torch does.
    """

    VOCABULARY: ClassVar = 50257
    WIDTH: ClassVar = 768
    LAYERS: ClassVar = 12
    HEADS: ClassVar = 12
    CONTEXT: ClassVar = 1024

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.wpe = nn.Embedding(self.CONTEXT, self.WIDTH)
        self.h = nn.Sequential(*(_Block(self.WIDTH, self.HEADS) for _ in range(self.LAYERS)))
        self.ln_f = nn.LayerNorm(self.WIDTH)
        for module in self.modules():  # torch's default for embeddings would start at a loss of hundreds
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return linear(self.ln_f(self.h(self.wte(tokens) + self.wpe(positions))), self.wte.weight)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = _Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = _MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.c_attn(x).unflatten(-1, (3, self.heads, -1))  # [batch, position, 3, head, channel]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).flatten(-2))


class _MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(gelu(self.c_fc(x), approximate="tanh"))


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

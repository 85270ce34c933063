"""Kernels of codecs against PyTorch's operations: in Triton's interpreter, and compiled for GPUs that are not there."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fnddp.codecs import quantize as codec
from fnddp.kernels.operator import KernelOr, is_same

ROOT = Path(__file__).parents[1]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of many magnitudes, with zeros, subnormal numbers, infinities and NaN, each in some blocks."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)
    x.view(-1)[::37] = 0
    if x.numel() >= 3000:
        x[0, 5], x[1, 500] = float("inf"), float("nan")
        x[2, :200] *= 1e-30
        x[2, 200:500] = 1e-41
    return x.to(dtype)


def in_the_interpreter() -> None:
    """Compare the kernels: run in a process with TRITON_INTERPRET=1."""
    from fnddp.kernels import blocks

    taken = 0
    for bits in (8, 4, 2):
        for block in (None, 16, 100, 128, 4096):
            for shape in ((3, 1000), (1, 129), (4, 2, 256), (2, 16), (0, 8), (1, 1)):
                for dtype in FLOATS:
                    x = numbers(shape, dtype)
                    size = codec.block_size(block, shape[-1])
                    expected = codec.encode_blocks(x, bits, size)
                    made = blocks.encode(x, bits, size)
                    if made is not None:
                        taken += 1
                        assert all(map(is_same, made, expected)), (bits, block, shape, dtype)
                    decoded = blocks.decode(*expected, bits, size, shape[-1])
                    if decoded is not None:
                        assert is_same(decoded, codec.decode_blocks(*expected, bits, size, shape[-1])), (
                            bits,
                            block,
                            shape,
                        )
    assert taken > 50


def for_targets() -> None:
    """Compile the kernels for GPUs without one, and check that no register is spilled: needs no driver."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fnddp.kernels import blocks

    for target in (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)):  # of ROCm's there is no linker here
        for bits in (8, 4, 2):
            options = {"BLOCK": 128, "BITS": bits, "MANY": blocks.ELEMENTS // 128}
            q = "*i8" if bits == 8 else "*u8"
            given = {"x": "*fp32", "scale": "*fp32", "q": q, "n": "i32", "blocks": "i32"}
            for kernel in (blocks.encode_kernel, blocks.decode_kernel):
                types = {name: given[name] for name in kernel.arg_names if name in given}
                source = ASTSource(kernel, types | dict.fromkeys(options, "constexpr"), options)
                made = triton.compile(source, target=target, options=dict(blocks.UNFUSED))
                about = target.arch, kernel.__name__, bits
                assert "fma.rn.f32" not in made.asm["ptx"], (about, "a product and a sum are fused")
                assert "div.full" not in made.asm["ptx"], (about, "a division is not IEEE's")
                assert not made.metadata.num_warps * made.metadata.shared > 1 << 20, about
                assert ".local" not in made.asm["ptx"], (about, "registers are spilled")


@pytest.mark.thorough
@pytest.mark.parametrize(("what", "interpret"), [("in_the_interpreter", "1"), ("for_targets", "0")])
def test_kernels_have_the_bits_of_operations_and_compile_without_a_gpu(what: str, interpret: str, tmp_path: Path):
    pytest.importorskip("triton")
    code = f"import warnings; warnings.simplefilter('ignore'); from tests import test_kernels; test_kernels.{what}()"
    environment = {
        **os.environ,
        "TRITON_INTERPRET": interpret,
        "PYTHONPATH": str(ROOT),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_kernel_that_fails_or_is_wrong_is_not_used(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    from fnddp.kernels import blocks

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def used(kernel: Callable[[torch.Tensor], Any]) -> bool:
        calls: list[torch.Tensor] = []

        def counted(x: torch.Tensor) -> Any:
            calls.append(x)
            return kernel(x)

        monkeypatch.setattr(blocks, "encode", counted)
        tried = KernelOr("fnddp::doubled", doubled, "encode", lambda device: (torch.ones(3, device=device),))
        for _ in range(2):
            assert tried(torch.tensor([5.0])) == 10
        return len(calls) > 1

    assert used(doubled)
    assert not caplog.records
    assert not used(lambda x: 2 * x + 1)
    assert not used(lambda x: x.new_ones(1 // 0))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert used(lambda x: doubled(x) if len(x) == 3 else None)  # it takes no others: they run by operations

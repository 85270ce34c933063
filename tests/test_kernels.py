"""Kernels of codecs against PyTorch's operations: in Triton's interpreter, and compiled for GPUs that are not there."""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import fnddp
from fnddp import device
from fnddp.codecs import quantize as codec
from fnddp.core.codec import Key
from fnddp.kernels.int8 import encoded
from fnddp.kernels.leaves import DECODE, ENCODE, ENCODE_SUM, REDUCE, RESIDUAL, SENT, text_of
from fnddp.kernels.operator import is_same, kernel_or
from fnddp.plan.draft import Donation
from fnddp.plan.lower import KEEP
from tests.pipelines import layers_of

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

    taken, shapes = 0, ((3, 1000), (1, 129), (4, 2, 256), (2, 16), (0, 8), (1, 1))
    for case in product((8, 4, 2), (None, 16, 100, 128, 4096), shapes, FLOATS):
        bits, block, shape, dtype = case
        x = numbers(shape, dtype)
        size = codec.block_size(block, shape[-1])
        expected = codec.encode_blocks(x, bits, size)
        made = blocks.encode(x, bits, size)
        if made is not None:
            taken += 1
            assert all(map(is_same, made, expected)), case
        decoded = blocks.decode(*expected, bits, size, shape[-1])
        if decoded is not None:
            assert is_same(decoded, codec.decode_blocks(*expected, bits, size, shape[-1])), case
    assert taken > 50


def lists_in_the_interpreter(texts: list[str]) -> None:
    """Compare the kernels on lists of leaves, with gaps between the rows of payloads: run like the other one."""
    cases = [((1000, 7, 130), 3, 1), ((2 * 4099, 3), 4, 3), ((1,), 2, 1), ((640, 5, 64), 1, 0)]
    # An operation takes long in the interpreter: each text with a case in float32, and one in half precision.
    for (i, text), is_half in product(enumerate(texts), (False, True)):
        dtype = FLOATS[1 + i % 2] if is_half else torch.float32
        counts, n, rank = cases[i // 2 % 2 if is_half else (i + i // 4) % 4]
        every = numbers((3, 3000), dtype).flatten()
        codec, x = text_of(layers_of(text)), [every[2900 * i :][:count].contiguous() for i, count in enumerate(counts)]
        given: Any = list(counts), n, dtype
        draws = (torch.tensor(2**20 + 7), [f"leaf {i}" for i in range(len(x))]) if "stochastic" in text else ()
        payload = with_gaps(ENCODE.run(codec, x, *given, rank, *draws))
        moved = with_gaps([part.flip(0) for part in payload])
        again = REDUCE.run(codec, moved, *given, rank, n, *draws)
        calls = (ENCODE, [x], (rank, *draws)), (REDUCE, [moved], (rank, n, *draws)), (DECODE, [payload], ())
        residual = [each.flip(0).to(torch.float32) / 3 for each in x]
        added = [x, residual, []]
        if "scale='none'" in text:  # without a scale, the code of a NaN matters: its sign, which a CPU's sum chooses
            added = [[each.nan_to_num() for each in of] for of in added]
        finite = [[each.nan_to_num(0, 1e4, -1e4) for each in of] for of in added]
        stored = [encoded(each) for each in finite[1]]
        small = [[each[i] for each in stored] for i in range(2)]
        in_int8 = [[x, *small]] if dtype == torch.float32 and n == 3 else []
        calls += tuple((ENCODE_SUM, of, (decay, rank, *draws)) for decay in (1.0, 0.9) for of in (added, *in_int8))
        for decay, found in ((0.9, torch.tensor(False)), (1.0, torch.tensor(True))):
            calls += ((RESIDUAL, [payload, moved, again, x, residual, []], (rank, n, decay, found)),)
            sent = [
                [torch.nan_to_num(part, 1, 1, 1) if part.is_floating_point() else part for part in of]
                for of in (payload, moved, again)
            ]
            if in_int8:
                calls += ((RESIDUAL, [*sent, finite[0], *small], (rank, n, decay, found)),)
        for each, lists, ranks in (*calls, (SENT, [payload, moved, again], (rank, n))):
            out = [with_gaps([part])[0] for part in each.like(codec, *lists, *given, *ranks)]
            assert each.kernel(codec, *lists, *given, *ranks, out=out), (text, dtype, counts)
            expected = each.run(codec, *lists, *given, *ranks)
            parts = out, expected
            is_nan = (expected[0] != expected[0]) | (expected[0] == 255)
            if each in (ENCODE, REDUCE, ENCODE_SUM) and bool(is_nan.any()):
                # A block with a NaN scale is NaN as a whole, so its codes do not matter: a CPU gives NaN either sign.
                assert is_same(out[0], expected[0])
                parts = (DECODE.run(codec, [part.expand(n, -1) for part in of], *given) for of in parts)
            assert all(map(is_same, *parts)), (text, dtype, counts, each.name)


def keeping_in_the_interpreter() -> None:
    """Compare the kernel that keeps memory, in new memory and over its arguments."""
    from fnddp.kernels import copies, keep

    for made, expected in keep.samples(torch.device("cpu")):
        assert made is not None
        assert all(map(torch.equal, made, expected))
    for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.complex64):
        new, found = [torch.zeros(3, 4099, dtype=dtype)], torch.tensor(True)
        old = [torch.ones(4099, 3, dtype=dtype).mT]
        assert copies.run(old, new, found, new)
        assert torch.equal(new[0], old[0])
    assert not copies.run([torch.ones(2, 2, 2).mT], [torch.ones(2, 2, 2).transpose(0, 2)], found, [torch.ones(2, 2, 2)])


def random_in_the_interpreter() -> None:
    """Pin each random number of a kernel to its last bit: numbers that it just lifts to zero, and just does not."""
    codec = text_of(layers_of("quantize(two_shot, block=None, rounding='stochastic', seed=3)"))
    drawn = Key("w", 0, seed=3, step=2**40 + 5).uniform((1, 1024), like=torch.empty(0)).view(-1)
    for lowered, code in ((0.0, 0), (2.0**-24, -1)):
        x = -drawn - lowered
        x[0] = 127  # a scale of 1
        given: Any = [1024], 1, torch.float32, 0, torch.tensor(2**40 + 5), ["w"]
        out = ENCODE.like(codec, [x], *given)
        assert ENCODE.kernel(codec, [x], *given, out=out)
        assert out[1][0, 1:].eq(code).all(), lowered


QUANTIZE = [f"quantize(two_shot, bits={bits}, block={block})" for bits in (8, 4, 2) for block in (128, 16, 24, None)]
STOCHASTIC = [
    f"quantize(two_shot, bits={bits}, block={block}, rounding='stochastic', seed={bits})"
    for bits, block in product((8, 4, 2), (128, 24, None))
]
FP8, MXFP = (
    [
        f"fp8(two_shot, format={name!r}, block={block}, scale={scale!r})"
        for name, block in product(("e4m3", "e5m2", "e2m1"), (32, 24, None))
    ]
    for scale in ("float32", "e8m0")
)
SIGN = [f"sign(two_shot, scale={scale!r}, chunk={chunk})" for scale, chunk in product(("max", "none"), (8, 128, None))]


def divided_in_the_interpreter() -> None:
    """On CUDA, PyTorch multiplies by the inverse of a number instead of dividing by it, and so does a kernel."""
    from fnddp.kernels import blocks

    device.Device.divides_lists_alike = False
    x = numbers((1, 2048), torch.float32)
    largest = x.view(1, -1, 128).abs().amax(-1)
    by_inverse = largest * (torch.ones(()) / 127)
    made = blocks.encode(x, 8, 128)
    assert made is not None
    assert is_same(made[0], by_inverse)
    assert not is_same(by_inverse, largest / 127)


def with_gaps(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return rows as they are in the buffer of a message with several payloads."""
    return [torch.cat([part, part], 1)[:, : part.shape[1]] if part.ndim == 2 else part for part in parts]


CODECS = [
    *("quantize(two_shot)", "quantize(two_shot, bits=4, block=16)", "quantize(bf16(two_shot), bits=2)"),
    *("bf16(two_shot)", "fp8(two_shot)", "fp8(two_shot, format='e2m1', block=32, scale='e8m0')"),
    "sign(two_shot, scale='max', chunk=8)",
    *("lloyd_max(two_shot)", "majority_vote(two_shot)", "quantize(two_shot, bits=4, rounding='stochastic', seed=3)"),
]


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("n", [1, 3])
def test_operators_on_lists_have_the_numbers_of_the_pipeline(text: str, n: int):
    """All ranks by hand: encode, exchange rows, reduce, exchange results, decode."""
    codec, shapes = text_of(layers_of(text)), {"w": (5, 77), "v": (3,), "u": (129,)}
    generator = torch.Generator().manual_seed(0)
    stacked = {path: torch.randn(n, *shape, generator=generator) for path, shape in shapes.items()}
    simulated = fnddp.simulate(fnddp.parse(text), world_size=n)
    mean = simulated(stacked, simulated.init(stacked))[0]
    given: Any = [each[0].numel() for each in stacked.values()], n, torch.float32
    is_random = "stochastic" in text
    draws, again_draws = ((torch.tensor(0), [f"{path}{hop}" for path in shapes]) * is_random for hop in ("", " again"))
    payloads = [ENCODE.default(codec, [each[r] for each in stacked.values()], *given, r, *draws) for r in range(n)]
    moved = [[torch.stack([each[i][r] for each in payloads]) for i in range(len(payloads[0]))] for r in range(n)]
    again = [REDUCE.default(codec, moved[r], *given, r, n, *again_draws) for r in range(n)]
    gathered = [torch.cat([each[i] for each in again]) for i in range(len(again[0]))]
    made = DECODE.default(codec, gathered, *given)
    for path, each in zip(stacked, made, strict=True):
        of_all = mean[path][0] if mean[path].ndim == stacked[path].ndim else mean[path]
        assert torch.equal(each.view(shapes[path]), of_all), path
    if "majority" not in text:  # whose sent counts ties
        sent = [SENT.default(codec, payloads[r], moved[r], again[r], *given, r, n) for r in range(n)]
        for of_all, *of_ranks in zip(made, *sent, strict=True):  # law 4
            torch.testing.assert_close(torch.stack(of_ranks).mean(0), of_all, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", ["quantize(two_shot, bits=4)", "quantize(two_shot, bits=4, rounding='stochastic')"])
def test_a_plan_for_an_accelerator_has_one_operation_for_each_hop(text: str):
    """It reads payloads in the buffers of messages, and writes them there."""
    lines = operations(planned(text))
    assert [line for line in lines if " leaves " in line] == [
        f"encode {text} of 3 leaves -> c0[0]",
        f"reduce {text} of 3 leaves from c0[0] -> c1[0]",
        f"decode {text} of 3 leaves from c1[0] -> mean[u]",
    ]
    assert len(lines) == (3 if "stochastic" not in text else 5), lines  # with the number of the exchange


def planned(text: str, donation: Donation = KEEP) -> fnddp.Plan:
    device.register("meta", device.Accelerator)
    try:
        shapes = {"u": (3,), "v": (64,), "w": (64, 32)}
        params = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        return fnddp.lower(text, params, world_size=4, donation=donation)
    finally:
        device.register("meta", device.Meta)


def operations(plan: fnddp.Plan) -> list[str]:
    return [line.strip() for line in plan.show(code=True).splitlines() if line.startswith("      ")]


@pytest.mark.parametrize("options", ["", ", decay=0.5", ", residual='int8'", ", decay=0.5, residual='int8'"])
def test_error_feedback_around_two_shot_has_no_operations_of_its_own(options: str):
    """Residuals are written in place, and then means over gradients, if no memory of theirs is there for them."""
    codec, in_int8 = "quantize(two_shot, bits=4)", "int8" in options
    plan = planned(f"error_feedback({codec}{options})", Donation("yes", state=True))
    assert operations(plan) == [
        f"encode_sum {codec} of 3 leaves -> c0[0]",
        f"reduce {codec} of 3 leaves from c0[0] -> c1[0]",
        f"residual {codec} of 3 leaves -> state[0]",
        f"decode {codec} of 3 leaves from c1[0] -> {'mean' if in_int8 else 'grads'}[u]",
    ]
    assert plan.overwrites_state == (tuple(range(6)) if in_int8 else (0, 1, 2))  # numbers, and scales
    assert set(plan.memories if in_int8 else plan.overwrites) == {"u", "v", "w"}


def test_all_results_of_an_operator_are_made_where_it_runs():
    """A mean is decoded together with a factor that another message needs."""
    code = planned("powersgd(fp8(two_shot), rank=1, min_compression_rate=0)").show(code=True)
    assert code.count("\n      decode") == 2
    assert "getitem(decode_leaves" not in code


@pytest.mark.parametrize(
    "text",
    [
        "error_feedback(quantize(allgather), residual='int8')",
        "error_feedback(bucketize(quantize(two_shot)))",
        "momentum_correction(quantize(two_shot), masking=False)",
        "error_feedback(quantize(two_shot(server_memory=True)))",
    ],
)
def test_other_memories_are_kept_by_an_operation_of_their_own(text: str):
    plan = planned(text, Donation("yes", state=True))
    lines = operations(plan)
    assert any(line.startswith("keep of ") for line in lines)
    assert not any("residual quantize" in line or "encode_sum" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "donation", "place"),
    [
        ("error_feedback(bf16(allreduce))", Donation("yes", state=True), "sub"),
        ("error_feedback(bf16(allreduce))", KEEP, "sub"),
        ("shared_momentum(allreduce)", Donation("yes", state=True), "state[0]"),  # else in the buffer of a message
        ("shared_momentum(allreduce)", KEEP, "getitem"),
    ],
)
def test_memory_is_kept_where_its_next_values_are_if_nothing_else_needs_them(text: str, donation: Any, place: str):
    (kept,) = [line for line in operations(planned(text, donation)) if line.startswith("keep ")]
    assert kept.startswith("keep of 3 parts")
    assert kept.split(" -> ")[1].rstrip("_0123456789") == place


def for_targets() -> None:
    """Compile the kernels for GPUs without one, and check what the table in docs/launches.md says: needs no driver."""
    from benchmarks import compile_kernels

    for row in compile_kernels.rows():
        assert "fma.rn.f32" not in row.ptx, (row.about, "a product and a sum are fused")
        assert "div.full" not in row.ptx, (row.about, "a division is not IEEE's")
        assert row.spilled <= 8, (row.about, "more than one address is spilled")
        assert row.registers <= 128, row.about  # so that 16 warps fit on a multiprocessor
        assert row.shared <= 48 * 2**10, row.about


def in_few_passes() -> None:
    """Count what a step with error feedback moves: its operators leave nothing to copy, select or add."""
    from benchmarks import measure_kernels

    shapes = [(64, 64), (300,), (7,)]
    bare, of_bare = measure_kernels.launches(measure_kernels.Leaves(shapes))
    for options, passes in (("", 7.5), (", residual='int8'", 5.5)):
        number, nbytes = measure_kernels.ours(shapes, f"error_feedback(quantize(two_shot, bits=4){options})")
        assert (nbytes - of_bare) / (4 * sum(torch.Size(shape).numel() for shape in shapes)) < passes
        assert number - bare < 32


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("what", "interpret"),
    [
        ("in_the_interpreter()", "1"),
        *(
            (f"lists_in_the_interpreter(test_kernels.{texts})", "1")
            for texts in ("QUANTIZE", "STOCHASTIC", "FP8", "MXFP", "SIGN")
        ),
        ("keeping_in_the_interpreter()", "1"),
        ("random_in_the_interpreter()", "1"),
        ("divided_in_the_interpreter()", "1"),
        ("for_targets()", "0"),
        ("in_few_passes()", "0"),
    ],
)
def test_kernels_have_the_bits_of_operations_and_compile_without_a_gpu(what: str, interpret: str, tmp_path: Path):
    pytest.importorskip("triton")
    code = f"import warnings; warnings.simplefilter('ignore'); from tests import test_kernels; test_kernels.{what}"
    triton = {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(tmp_path)}
    environment = {**os.environ, **triton, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
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
        tried = kernel_or("fnddp::doubled", doubled, "encode", lambda device: (torch.ones(3, device=device),))
        for _ in range(2):
            assert tried(torch.tensor([5.0])) == 10
        return len(calls) > 1

    assert used(doubled)
    assert not caplog.records
    assert not used(lambda x: 2 * x + 1)
    assert not used(lambda x: x.new_ones(1 // 0))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert used(lambda x: doubled(x) if len(x) == 3 else None)  # it takes no others: they run by operations

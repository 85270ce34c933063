"""Compile the codecs' kernels for GPUs that are not there, and print registers, spills and bytes of each.

Needs Triton and no driver: `python benchmarks/compile_kernels.py`. Bytes are those that a kernel reads and writes for
each element of a leaf, in blocks of 128 (32 with scales of 8 bits), on four ranks; they are counted from its arguments,
not measured. Kernels for ROCm are assembled, but not linked.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.backends.nvidia
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import fnddp
from fnddp.core.codec import Form
from fnddp.kernels import blocks
from fnddp.kernels.constants import INT8_BLOCK

CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
WHAT = ("encode_leaves", "reduce_leaves", "decode_leaves", "sent_leaves", "encode_sum_leaves", "residual_leaves")
WHAT += ("encode_sum_leaves in int8", "residual_leaves in int8")
RANKS, BLOCK = 4, 128
TARGETS = {"sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
CODECS = {
    "quantize(two_shot)": tl.float32,
    "quantize(two_shot, bits=4)": tl.float32,
    "quantize(two_shot, bits=2)": tl.float32,
    "bf16 quantize(two_shot)": tl.bfloat16,
    "quantize(two_shot, rounding='stochastic')": tl.float32,
    "fp8(two_shot)": tl.float32,
    "fp8(two_shot, format='e5m2')": tl.float32,
    "fp8(two_shot, block=32, scale='e8m0')": tl.float32,
    "fp8(two_shot, format='e2m1', block=32, scale='e8m0')": tl.float32,
    "sign(two_shot, scale='max', chunk=128)": tl.float32,
}
LINKER = '#!/bin/sh\nif [ "$1" = --version ]; then echo none; else cp "$4" "$6"; fi\n'  # Triton needs one for ROCm


class Row(NamedTuple):
    """A compiled kernel; `nbytes` is for each element of a leaf."""

    about: tuple[Any, ...]
    registers: int
    spilled: int
    shared: int
    nbytes: float
    ptx: str


def rows() -> Iterator[Row]:
    """Compile each operation of each codec for all GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        linker = Path(folder, "linker")
        linker.write_text(LINKER)
        linker.chmod(0o755)
        os.environ["TRITON_HIP_LLD_PATH"] = str(linker)
        for gpu in TARGETS:
            for text, dtype in CODECS.items():
                for what in WHAT:
                    yield compiled(gpu, what, text, dtype)


def compiled(gpu: str, what: str, text: str, dtype: Any) -> Row:
    """Compile one kernel as `blocks.run` launches it."""
    sync: Any = fnddp.parse(text.removeprefix("bf16 "))
    form: Form = sync.form
    block = BLOCK if form.scale != "e8m0" else 32
    given = {"tiles": "*i32", "table": "*i64", "step": "*i64"}
    given |= dict.fromkeys(("q", "q_moved", "q_again"), "*i8" if form.codec == "quantize" and form.bits == 8 else "*u8")
    given |= dict.fromkeys(("scale", "moved", "again"), "*fp32" if form.scale in ("float32", "max") else "*u8")
    given |= dict.fromkeys(("scales", "bytes", "moves", "bytes_moved", "rank", "ranks"), "i32")
    given |= {"decay": "fp32", "nonfinite": "*u8"}
    operation, _, in_int8 = what.partition(" in ")
    kernel = blocks.residual_in_int8 if what == "residual_leaves in int8" else blocks.kernel
    options = {"N": RANKS, "WHAT": operation, "BY_INVERSE": True, "DTYPE": dtype, "BLOCK": block}
    options |= {"MANY": blocks.blocks_of(block), "BITS": form.bits, "SCALE": form.scale, "OPTION": form.option}
    options |= {"DRAWS": sync.draws and operation in ("encode_leaves", "encode_sum_leaves", "reduce_leaves")}
    options |= {"IN_INT8": bool(in_int8), "ROWS": blocks.ROWS_IN_INT8}
    options |= dict(zip(("ENCODE", "DECODE"), blocks.FORMATS[form.codec], strict=True))
    types = {name: given.get(name, "constexpr") for name in kernel.arg_names}
    options = {name: option for name, option in options.items() if name in types}
    # As at run time: pointers are aligned to 16 bytes.
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if types[name].startswith("*")}
    source = ASTSource(kernel, types, options, attributes)
    made = triton.compile(source, target=TARGETS[gpu], options=dict(blocks.UNFUSED))
    registers, spilled = of_rocm(made.asm["amdgcn"]) if "amdgcn" in made.asm else of_cuda(made.asm["cubin"])
    scale = 0 if form.scale == "none" else 4 if form.scale in ("float32", "max") else 1
    code, leaf = form.bits / 8 + scale / block, dtype.primitive_bitwidth / 8
    residual = 1 + 4 / INT8_BLOCK if in_int8 else 4
    nbytes = {
        "encode_leaves": leaf + code,
        "reduce_leaves": code + code / RANKS,
        "decode_leaves": code + leaf,
        "sent_leaves": 2 * code + code / RANKS + leaf,
        "encode_sum_leaves": leaf + residual + code,
        "residual_leaves": leaf + 2 * residual + 2 * code + code / RANKS,
    }[operation]
    about = gpu, text.replace("two_shot, ", "").replace("(two_shot)", ""), what.replace("_leaves", "")
    return Row(about, registers, spilled, made.metadata.shared, nbytes, made.asm.get("ptx", ""))


def of_cuda(cubin: bytes) -> tuple[int, int]:
    """Return registers of a thread, and bytes that it spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([str(CUOBJDUMP), "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", said.stdout)[0]
    return int(registers), int(stack)


def of_rocm(amdgcn: str) -> tuple[int, int]:
    """Return vector registers of a lane, and bytes that it spills: vector or scalar registers, of 4 bytes."""
    counts = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count): +(\d+)", amdgcn))
    return int(counts["vgpr_count"]), 4 * (int(counts["vgpr_spill_count"]) + int(counts["sgpr_spill_count"]))


def main() -> None:
    """Print the table."""
    print("The numbers of a cell are for", ", ".join(what.replace("_leaves", "") for what in WHAT), end=".\n\n")
    print("| GPU | codec | registers | spilled bytes | shared bytes | bytes an element |")
    print("|---|---|---|---|---|---|")
    made = rows()
    while some := list(islice(made, len(WHAT))):
        gpu, text, _ = some[0].about
        columns = [[str(getattr(row, name)) for row in some] for name in ("registers", "spilled", "shared")]
        columns.append([f"{row.nbytes:.2f}" for row in some])
        cells = [each[0] if len(set(each)) == 1 else ", ".join(each) for each in columns]
        print(f"| {gpu} | `{text}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

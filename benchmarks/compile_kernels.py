"""Compile the codecs' kernels for GPUs that are not there, and print registers, spills and bytes of each.

Needs Triton and no driver: `python benchmarks/compile_kernels.py`. Bytes are those that a kernel reads and writes for
each element of a leaf, in blocks of 128, on four ranks; they are counted from its arguments, not measured.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.backends.nvidia
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fnddp.kernels import blocks

CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
WHAT = ("encode_leaves", "reduce_leaves", "decode_leaves", "sent_leaves", "encode_sum_leaves", "residual_leaves")
RANKS, BLOCK = 4, 128


class Row(NamedTuple):
    """A compiled kernel; `nbytes` is for each element of a leaf."""

    about: tuple[Any, ...]
    registers: int
    spilled: int
    shared: int
    nbytes: float
    ptx: str


def rows() -> Iterator[Row]:
    """Compile each operation for both GPUs, in float32 with 8, 4 and 2 bits, and in bfloat16 with 8."""
    for arch in (80, 90):  # for ROCm's there is no linker here
        for bits, dtype in ((8, tl.float32), (4, tl.float32), (2, tl.float32), (8, tl.bfloat16)):
            for what in WHAT:
                yield compiled(arch, what, bits, dtype)


def compiled(arch: int, what: str, bits: int, dtype: Any) -> Row:
    """Compile one kernel as `blocks.run` launches it."""
    q = "*i8" if bits == 8 else "*u8"
    given = {"tiles": "*i32", "table": "*i64", **dict.fromkeys(("q", "q_moved", "q_again"), q)}
    given |= dict.fromkeys(("scale", "moved", "again"), "*fp32")
    given |= dict.fromkeys(("scales", "bytes", "moves", "bytes_moved", "rank", "ranks"), "i32")
    given |= {"decay": "fp32", "nonfinite": "*u8"}
    options = {"N": RANKS, "WHAT": what, "BY_INVERSE": True, "DTYPE": dtype, "BLOCK": BLOCK, "BITS": bits}
    options["MANY"] = blocks.ELEMENTS // BLOCK
    types = {name: given.get(name, "constexpr") for name in blocks.kernel.arg_names}
    # As at run time: pointers are aligned to 16 bytes.
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if types[name].startswith("*")}
    source = ASTSource(blocks.kernel, types, options, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(blocks.UNFUSED))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([str(CUOBJDUMP), "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", said.stdout)[0]
    code, leaf = bits / 8 + 4 / BLOCK, dtype.primitive_bitwidth / 8
    nbytes = {
        "encode_leaves": leaf + code,
        "reduce_leaves": code + code / RANKS,
        "decode_leaves": code + leaf,
        "sent_leaves": 2 * code + code / RANKS + leaf,
        "encode_sum_leaves": leaf + 4 + code,
        "residual_leaves": leaf + 8 + 2 * code + code / RANKS,
    }[what]
    about = arch, what.removesuffix("_leaves"), bits, str(dtype).removeprefix("triton.language.")
    return Row(about, int(registers), int(stack), made.metadata.shared, nbytes, made.asm["ptx"])


def main() -> None:
    """Print the table."""
    print("| GPU | operation | bits | leaves | registers | spilled bytes | shared bytes | bytes an element |")
    print("|---|---|--:|---|--:|--:|--:|--:|")
    for row in rows():
        arch, what, bits, dtype = row.about
        print(
            f"| sm_{arch} | {what} | {bits} | {dtype} | {row.registers} | {row.spilled} | {row.shared:,} | "
            f"{row.nbytes:.2f} |"
        )


if __name__ == "__main__":
    main()

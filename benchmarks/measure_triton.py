"""What Triton makes of a plan's segments for an H100, without one: Inductor's kernels, compiled to machine code.

    python benchmarks/measure_triton.py "bucketize(quantize(two_shot))"

Needs a torch that is built for CUDA (2.15), with its Triton, and no driver: tensors are fake, and what Inductor asks
the driver for is written down here. Prints the kernels that a step launches, of four ranks; of their machine code for
sm_90 the most registers of a thread, and the most bytes of shared memory and of spilled registers; and what Inductor
counts as read and written, in passes over the gradients. No times: nothing runs. PowerSGD is not to be had: in its
initial state `torch.tensor(..., device="cuda")` asks for the driver, in C++.
"""

import argparse
import re
import subprocess
import tempfile
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import triton.backends.nvidia
from measure_kernels import RANKS, Launching, deep, transformer
from torch._guards import detect_fake_mode
from torch._inductor import decomposition
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import fnddp
from fnddp import device
from fnddp.run.measure import measure_segments

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 * 2**20,
    total_memory=80 * 2**30,
    gcnArchName="",
)
TARGET = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"


class Faked(Launching):
    """CUDA without a driver: what tells a plan about it, and no streams."""

    mark, seconds = device.Device.mark, device.Device.seconds

    @property
    def backend(self) -> str:
        return "fake"


@contextmanager
def pretending() -> Iterator[None]:
    """Answer for the driver."""
    answers: dict[str, Any] = {
        "_get_device_properties": lambda *_: H100,
        "get_device_properties": lambda *_: H100,
        "get_device_capability": lambda *_: (H100.major, H100.minor),
        "current_device": lambda: 0,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "_lazy_init": lambda: None,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer, create=True))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu"))
        driver.set_active(SimpleNamespace(get_current_target=lambda: TARGET, get_current_device=lambda: 0))
        torch._C._ensureCUDADeviceGuardSet()  # or indexing asks the runtime
        device.register("cuda", Faked)
        yield


class Written(NamedTuple):
    """What Inductor makes of a segment: kernels of Triton, calls of others such as cuBLAS, and the bytes of all."""

    kernels: list[Any]
    others: int
    nbytes: int


def written_for(run: Any, inputs: list[Any], folder: str) -> Written:
    traced = make_fx(lambda *given: [*run(*given)], decomposition.select_decomp_table())(*inputs)
    graph = GraphLowering(traced, example_inputs=inputs, is_inference=True)
    mode = V.set_fake_mode(detect_fake_mode(inputs))
    with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()), mode:
        graph.run(*inputs)
        code = graph.codegen()[0].value
        nbytes, *_ = graph.count_bytes()
    found = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.DOTALL)
    launched = re.findall(r"^ +(\w+)\.run\(", code, re.MULTILINE)
    tuners = {name: _loaded(name, source, folder) for name, source in found}
    others = len(re.findall(r"^ +extern_kernels\.|^ +(?:buf\d+ = )?torch\.ops\.", code, re.MULTILINE))
    return Written([tuners[name] for name in launched if name in tuners], others, nbytes)


def _loaded(name: str, source: str, folder: str) -> Any:
    """Import a kernel from a file, where Triton reads its source."""
    path = Path(tempfile.mkdtemp(dir=folder)) / f"{name}.py"  # segments have kernels of the same name
    path.write_text(source)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module.__dict__[name]


def compiled(tuner: Any, folder: str) -> dict[str, int]:
    """Return what the machine code of a kernel's first configuration says, in registers of a thread and bytes."""
    made: list[Any] = []
    compiles = triton.compile

    def keep(*given: Any, **options: Any) -> Any:
        made.append(compiles(*given, **options))
        return made[-1]

    with mock.patch.object(triton, "compile", keep):
        tuner._precompile_config(tuner.configs[0])
    path = Path(folder) / "kernel.cubin"
    path.write_bytes(made[0].asm["cubin"])
    said = subprocess.run([CUOBJDUMP, "--dump-resource-usage", path], check=True, capture_output=True, text=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    return {
        "registers": numbers["REG"],
        "shared": made[0].metadata.shared,
        "spilled": numbers["STACK"] + numbers["LOCAL"],
    }


def segments_of(text: str, shapes: list[tuple[int, ...]]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield what each segment of a plan runs, with fake inputs, as a step of rank 0 of four would."""
    calls: list[tuple[Any, list[Any]]] = []

    def keep(run: Any, **_: Any) -> Any:
        def called(*inputs: Any) -> Any:
            calls.append((run, [*inputs]))
            return run(*inputs)

        return called

    sync, mode = fnddp.parse(text), FakeTensorMode()
    with mode:
        leaves = {f"{i}": torch.empty(shape, device="cuda") for i, shape in enumerate(shapes)}
        state = sync.init(leaves)
    plan = fnddp.lower(sync, leaves, state=state, world_size=RANKS, backend="inductor")
    with mode, mock.patch.object(torch, "compile", keep), mock.patch.object(torch, "from_dlpack", torch.clone):
        measure_segments(plan, state, calls=1)
        yield from calls[: len(calls) // 2]  # of one step of two


def main() -> None:
    """Print a row for each pipeline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipelines", nargs="+")
    parser.add_argument("--model", choices=["transformer", "deep"], default="transformer")
    args = parser.parse_args()
    shapes = {"transformer": transformer, "deep": deep}[args.model]()
    size = 4 * sum(torch.Size(shape).numel() for shape in shapes)
    print("| pipeline | Triton's | others | registers | shared | spilled | passes |\n|---|--:|--:|--:|--:|--:|--:|")
    for text in args.pipelines:
        with pretending(), tempfile.TemporaryDirectory() as folder:
            segments = [written_for(run, inputs, folder) for run, inputs in segments_of(text, shapes)]
            kernels = [compiled(tuner, folder) for segment in segments for tuner in segment.kernels]
        most = [max(each[name] for each in kernels) for name in ("registers", "shared", "spilled")]
        others, nbytes = sum(each.others for each in segments), sum(each.nbytes for each in segments)
        cells = [f"`{text}`", len(kernels), others, *most, f"{nbytes / size:.1f}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()

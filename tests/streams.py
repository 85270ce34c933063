"""A device that proves the order of streams: tensors of the CPU, on streams that are vector clocks.

Every operation notes which bytes it reads and writes, and when on which stream; so does a wire, on a stream of its own
for each process group, as NCCL's. A hazard is two accesses to the same bytes, one of them a write, that no wait
orders; or memory that its own stream may hand out while another stream still uses it; or a host that waits.

After `torch.cuda._sanitizer` (Lin et al.) and the vector clocks of Mattern (1989).
"""

import ast
import sys
import threading
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import fnddp
from fnddp import device as devices
from fnddp.wire.groups import live_size
from fnddp.wire.kinds import Kind
from tests.wires import AloneWire

LIBRARY = Path(fnddp.__file__).parent


class Moment(NamedTuple):
    stream: int
    tick: int


class Clock:
    """A stream: what of every stream is known to have happened before what is started here next."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.known = {number: 0}

    def tick(self) -> Moment:
        self.known[self.number] += 1
        return Moment(self.number, self.known[self.number])

    def learn(self, known: dict[int, int]) -> None:
        for stream, tick in known.items():
            self.known[stream] = max(self.known.get(stream, 0), tick)


@dataclass
class Block:
    owner: Clock
    first: int
    end: int
    # When, and for what, by the first and the last byte, the stream, and whether it has written.
    uses: dict[tuple[int, int, int, bool], tuple[Moment, str]] = field(default_factory=dict)
    kept_for: set[int] = field(default_factory=set)


def site() -> str:
    """The line of the library that is running: `run/step.py:312`."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        is_between = path.name in ("device.py", "kinds.py") or frame.f_code.co_name == "_named"
        if path.is_relative_to(LIBRARY) and not is_between:
            return f"{path.relative_to(LIBRARY).as_posix()}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def calls(apart: Container[str] = ()) -> Iterator[tuple[str, str, ast.Call]]:
    """Every call in the library but in the files `apart`: the line, as `site` names it, the function, and the call."""
    for file in sorted(LIBRARY.rglob("*.py")):
        name = file.relative_to(LIBRARY).as_posix()
        if name not in apart:
            nodes = list(ast.walk(ast.parse(file.read_text())))
            functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
            inside = {each: function.name for function in functions for each in ast.walk(function)}  # the innermost
            found = [node for node in nodes if isinstance(node, ast.Call)]
            yield from ((f"{name}:{node.lineno}", f"{name} {inside.get(node, '')}", node) for node in found)


def waits(apart: Container[str] = ()) -> dict[str, str]:
    """The line of every call by which a stream waits, or memory is kept for one, but in the files `apart`; by name."""
    found: dict[str, str] = {}
    for line, function, node in calls(apart):
        match node:
            case ast.Call(func=ast.Attribute(attr="wait" | "keep" as kind), args=[_, _]):
                name = f"{function} {kind}"
            case ast.Call(func=ast.Name("waited")) | ast.Call(func=ast.Name("partial"), args=[ast.Name("waited"), _]):
                name = f"{function} waited"
            case _:
                continue
        found[f"{name}, the last" if name in found else name] = line
    return found


class Checker:
    """What has happened on all streams; the waits and keeps of a line of the library (see `site`) may be left out."""

    def __init__(self, without: str = "") -> None:
        self.without, self._is_training = without, False
        self.hazards: list[str] = []
        self.streams: list[Clock] = []
        self.main = self.new_stream("main")
        self.wires: dict[str | None, Clock] = {}
        self._threads = threading.local()
        self._blocks: dict[int, Block] = {}  # by the address of their storage
        self._freed: dict[int, list[tuple[Moment, str]]] = defaultdict(list)  # uses of free memory, by its stream
        self.host = self.new_stream("host")  # knows what it has waited for

    def new_stream(self, name: str) -> Clock:
        self.streams.append(Clock(len(self.streams), name))
        return self.streams[-1]

    @property
    def _stack(self) -> list[Clock]:
        if not hasattr(self._threads, "stack"):
            self._threads.stack = [self.main]
        return self._threads.stack

    @property
    def current(self) -> Clock:
        return self._stack[-1]

    @contextmanager
    def on(self, stream: Clock) -> Iterator[None]:
        self._stack.append(stream)
        try:
            yield
        finally:
            self._stack.pop()

    def leaves_out(self) -> bool:
        return bool(self.without) and site() == self.without

    def report(self, text: str) -> None:
        if len(self.hazards) < 20:
            where = [line for line in traceback.format_stack() if "fnddp" in line and "/tests/streams.py" not in line]
            self.hazards.append(f"{text}\n{''.join(where[-4:])}")

    # Memory

    def block(self, tensor: Tensor) -> Block:
        """The memory of `tensor`; handed out on the current stream, if it has not been seen before."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._blocks:
            owner = self.current
            for moment, what in self._freed.pop(owner.number, ()):
                if not self._precedes(moment, owner):
                    self.report(
                        f"memory of stream {owner.name} was freed, and may be handed out there again, while "
                        f"{self.streams[moment.stream].name} still uses it for {what}: wait, or keep it"
                    )
            self._blocks[key] = Block(owner, key, key + storage.nbytes())
            weakref.finalize(storage, self._free, key).atexit = False
        return self._blocks[key]

    def _free(self, key: int) -> None:
        """Give a block back to the pool of its stream, which may hand it out at the next allocation."""
        block = self._blocks.pop(key)
        self._freed[block.owner.number] += [use for use in block.uses.values() if use[0].stream not in block.kept_for]

    def keep(self, tensor: Tensor, stream: Clock) -> None:
        if tensor.numel() and _is_real(tensor):
            self.block(tensor).kept_for.add(stream.number)

    def access(self, tensor: Tensor, what: str, *, writes: bool, stream: Clock | None = None) -> None:
        if not tensor.numel():
            return
        stream = stream or self.current
        block = self.block(tensor)
        first = tensor.data_ptr()
        extent = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        end = first + extent * tensor.element_size()
        now = stream.tick()
        for use, (moment, before) in list(block.uses.items()):
            other_first, other_end, _, has_written = use
            if other_first < end and first < other_end and (writes or has_written):
                does, did = "writes" if writes else "reads", "written" if has_written else "read"
                self._require(stream, moment, f"{what} {does}", f"{before} has {did}")
                if writes:
                    del block.uses[use]
        block.uses[first, end, stream.number, writes] = now, what

    def _require(self, stream: Clock, moment: Moment, now: str, before: str) -> None:
        if not self._precedes(moment, stream):
            self.report(f"{now} on {stream.name} what {before} on {self.streams[moment.stream].name}: nothing waits")

    @contextmanager
    def training(self, step: int) -> Iterator[None]:
        """Mind that the host waits: between forward and the end of `optimizer.step()`, but for the first step.

        In that one plans are made, and ranks agree on the order in which gradients arrive.
        """
        self._is_training = step > 0
        try:
            yield
        finally:
            self._is_training = False

    def _precedes(self, moment: Moment, stream: Clock) -> bool:
        return any(each.known.get(moment.stream, 0) >= moment.tick for each in (stream, self.host))

    def host_waits(self, what: str) -> None:
        self.host.learn(self.current.known)
        if self._is_training:
            self.report(f"the host waits for the device: {what}")


_checker: Checker | None = None


def checker() -> Checker:
    assert _checker is not None
    return _checker


class Checked(devices.Device):
    is_asynchronous = True

    def stream(self) -> Clock:
        return checker().new_stream("side")

    def current(self) -> Clock:
        return checker().current

    def on(self, stream: Clock | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else checker().on(stream)

    def wait(self, stream: Clock, other: Clock) -> None:
        if not checker().leaves_out():
            stream.learn(other.known)

    def keep(self, tensor: Tensor, stream: Clock) -> None:
        if not checker().leaves_out():
            checker().keep(tensor, stream)

    def of_host(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        with _disable_current_modes():
            made = torch.tensor(values, dtype=dtype)
        checker().access(made, "a copy from the host", writes=True)
        return made

    def to_host(self, tensor: Tensor) -> Callable[[], list[int]]:
        with _disable_current_modes():
            numbers = [int(number) for number in tensor]
        checker().access(tensor, "a copy to the host", writes=False)
        checker().keep(tensor, checker().current)
        known = dict(checker().current.known)

        def read() -> list[int]:  # a step later: the host waits for what is done by then
            checker().host.learn(known)
            return numbers

        return read

    def future(self) -> "torch.futures.Future[Any]":
        return _Future()

    def synchronize(self) -> None:
        checker().host_waits("synchronize")

    @property
    def backend(self) -> str:
        return "gloo"


# Names of the kinds of functions that have the host wait for a device.
_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_NEW = ("aten.new_", "aten.empty_like", "aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.rand")  # no data


def _is_of_known_size(name: str, args: Any, kwargs: Any) -> bool:
    """Whether the host knows the size of a result whose operation may have to compute it."""
    if name.startswith("aten.index."):
        return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])
    return kwargs.get("output_size") is not None


def _see_calls(frame: Any, event: str, called: Any) -> None:
    """Note what has the host wait and reaches no operation of the device, as profilers see it: within hooks, too."""
    if event == "c_call" and called.__name__ in ("tolist", "numpy", "cpu") and _is_real(called.__self__):
        checker().host_waits(called.__name__)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found, name = checker(), str(func)
        result = func(*args, **kwargs)
        schema = func._schema
        returns_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        if _WAITS & set(func.tags) and not _is_of_known_size(name, args, kwargs):
            found.host_waits(name)
        if returns_view or name.startswith(("aten.detach", "aten.alias")):
            return result
        named = {each.name: each for each in schema.arguments}
        given = [*zip(schema.arguments, args, strict=False), *((named[key], value) for key, value in kwargs.items())]
        touched = set()
        for argument, value in given if not name.startswith(_NEW) else ():
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for each in tree_leaves(value):
                if _is_real(each):
                    touched.add(each.data_ptr())
                    if "resize_" not in name:
                        found.access(each, name, writes=writes)
        for each in tree_leaves(result):
            if _is_real(each) and each.data_ptr() not in touched:
                if "empty" in name:
                    if each.numel():
                        found.block(each)
                else:
                    found.access(each, name, writes=True)
        return result


def opaque(run: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    """Return `run` as Inductor's: one operation on the current stream, of which only what it reads and writes is seen.

    For `torch.compile`, whose code launches all of its kernels there, and reaches no dispatch mode.
    """

    def whole(*inputs: Any) -> Any:
        given = [each for each in tree_leaves(inputs) if _is_real(each)]
        before = [each._version for each in given]
        with _disable_current_modes():
            results = run(*inputs)
        for each, version in zip(given, before, strict=True):
            checker().access(each, "a compiled segment", writes=each._version != version)
        for each in tree_leaves(results):
            if _is_real(each) and each.numel():
                checker().block(each)
        return results

    return whole


class _Future(torch.futures.Future):
    """The main stream, on which DDP takes the result, waits for what the stream that sets it has started."""

    def set_result(self, result: Any) -> None:
        checker().main.learn(checker().current.known)
        super().set_result(result)


def _is_real(value: Any) -> bool:
    """Whether it is a tensor with memory: not one that only stands for others while a plan is made."""
    return (
        isinstance(value, Tensor)
        and type(value) in (Tensor, torch.nn.Parameter)
        and (value.device.type == "cpu" and value.layout is torch.strided)
    )


class Work:
    """A collective on the stream of its process group.

    It keeps the memory of its tensors until a stream has waited for it, or else until it is done: ProcessGroupNCCL's
    `TensorShelf`.
    """

    def __init__(self, stream: Clock, *tensors: Tensor) -> None:
        self.stream, self.known, self.tensors = stream, dict(stream.known), tensors
        for tensor in tensors:
            checker().keep(tensor, stream)

    def is_completed(self) -> bool:
        return False  # as far as the host can tell

    def wait(self) -> bool:
        if not checker().leaves_out():
            checker().current.learn(self.known)
        for tensor in filter(Tensor.numel, self.tensors):
            checker().block(tensor).kept_for.discard(self.stream.number)
        self.tensors = ()
        return True


class StreamWire(AloneWire):
    """A wire on torch's fake process groups, which moves bytes as NCCL does."""

    def size(self, group: str | None) -> int:
        return live_size(group)

    def start(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None, group: str | None) -> Work:
        stream = self._begin(group)
        checker().access(send, f"{kind.name} of what is sent", writes=False, stream=stream)
        checker().access(receive, f"{kind.name} into what is received", writes=True, stream=stream)
        with _disable_current_modes():
            super().start(kind, send, receive, op, group)
        return Work(stream, send, receive)

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, Work]:
        with _disable_current_modes():
            gathered, _ = super().vote(flags, group)
        checker().block(gathered)
        stream = self._begin(group)
        checker().access(flags, "a vote's flags", writes=False, stream=stream)
        checker().access(gathered, "a vote", writes=True, stream=stream)
        return gathered, Work(stream, flags, gathered)

    def _begin(self, group: str | None) -> Clock:
        found = checker()
        if group not in found.wires:
            found.wires[group] = found.new_stream(f"wire of {group}")
        stream = found.wires[group]
        stream.learn(found.current.known)
        return stream


@contextmanager
def checking(without: str = "") -> Iterator[Checker]:
    """Make the CPU a device with streams within the block, and note what is done there. Raises nothing by itself."""
    global _checker
    before, _checker = _checker, Checker(without)
    devices.register("cpu", Checked)
    sys.setprofile(_see_calls)
    try:
        with _Operations():
            yield _checker
    finally:
        sys.setprofile(None)
        devices.register("cpu", devices.Device)
        _checker = before


def require_none(found: Checker) -> None:
    if found.hazards:
        raise AssertionError(f"{len(found.hazards)} hazards:\n" + "\n".join(dict.fromkeys(found.hazards)))

"""Pass 1: a pipeline as one graph of aten operations and collectives.

The pipeline's own Python runs once, on fake tensors, under make_fx. Python ints of the state enter as symbols, so no
step number is baked into a graph: a comparison such as `step < steps` becomes a guard, and the outcomes of all guards
are the phase that the graph is for.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils._sympy.printers import PythonPrinter

from fnddp import tree
from fnddp.plan.ir import LeafSpec, remove_dead
from fnddp.sync import State, Sync

_READS_VALUES = DataDependentOutputException, DynamicOutputShapeException
_HAS_NO_FAKE = UnsupportedOperatorException, UnsupportedFakeTensorException
# How torch says the same where it has no class for it.
_IS_FOREIGN = (
    "There was no fake impl registered",
    ".numpy() is not supported for tensor subclasses",
    "using FX to symbolically trace a dynamo-optimized function",
    "argument of type: <class 'torch._C.Generator'>",
)

_one_at_a_time = threading.Lock()  # make_fx patches torch for the whole process; ranks may be threads


class LoweringError(TypeError):
    """A pipeline has no static schedule: it reads values, or runs foreign code. It still runs eagerly."""


@dataclass(frozen=True)
class Trace:
    """A graph from leaves and state to means and the next state.

    Attributes:
        module: Its placeholders are the leaves, then the parts of the state; its output is a flat list, means first.
        leaves: Leaf paths, in the order of the placeholders and of the means.
        counters: Positions of the Python ints among the parts of the state.
        holds: Whether this graph is the right one for these values of the counters.
    """

    module: fx.GraphModule
    leaves: tuple[str, ...]
    counters: tuple[int, ...]
    holds: Callable[[Sequence[int]], bool]


def trace(sync: Sync, leaves: Mapping[str, LeafSpec], state: State) -> Trace:
    """Traces one exchange of `sync`, without what only `sent` needs.

    Args:
        sync: The pipeline.
        leaves: The gradients.
        state: Shapes, dtypes and devices of its tensors are read, and the values of its Python ints.

    Raises:
        LoweringError: The pipeline reads values of tensors, or holds foreign code. Other errors are its own.
    """
    if not sync.traceable:
        raise LoweringError(f"{sync!r} cannot be lowered: it reads values or runs foreign code (`traceable` is False)")
    parts, spec = tree.flatten_any(state)
    shapes = ShapeEnv(
        specialize_zero_one=False, duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False
    )
    mode = FakeTensorMode(shape_env=shapes, static_shapes=True, allow_non_fake_inputs=True)
    symbols: list[sympy.Symbol] = []

    def fake(part: Any) -> Any:
        if isinstance(part, Tensor):
            return mode.from_tensor(part.detach(), static_shapes=True)
        source = ConstantSource(f"counter_{len(symbols)}")
        symbols.append(shapes.create_unspecified_symbol(part, source, DimDynamic.DYNAMIC))  # pyright: ignore[reportArgumentType]
        return shapes.create_symintnode(symbols[-1], hint=part, source=source)

    def exchange(grads: list[Tensor], parts: list[Any]) -> list[Any]:
        done = sync.exchange(dict(zip(leaves, grads, strict=True)), tree.unflatten_any(spec, parts))
        return [*(done.mean[path] for path in leaves), *tree.flatten_any(done.state)[0]]

    with mode:
        grads = [leaf.empty() for leaf in leaves.values()]
    fakes = grads, [fake(part) for part in parts]
    try:
        # Without modes such as a WireCounter, which sees what is sent, and autocast.
        no_autocast: Any = torch._C._DisableAutocast()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        with _one_at_a_time, _disable_current_modes(), no_autocast, torch.no_grad(), mode:
            module = make_fx(exchange)(*fakes)
    except _READS_VALUES as error:
        raise LoweringError(f"{sync!r} cannot be lowered: it reads the values of tensors ({error})") from error
    except RuntimeError as error:
        if isinstance(error, _HAS_NO_FAKE) or any(text in str(error) for text in _IS_FOREIGN):
            raise LoweringError(
                f"{sync!r} cannot be lowered: it runs code that needs tensors with values ({error})"
            ) from error
        raise
    remove_dead(module.graph)
    for node in module.graph.find_nodes(op="get_attr"):
        held = getattr(module, str(node.target))
        if not isinstance(held, Tensor):
            raise LoweringError(f"{sync!r} cannot be lowered: it holds a {type(held).__name__}, which has a state")
    counters = tuple(i for i, part in enumerate(parts) if not isinstance(part, Tensor))
    guards = sympy.And(*(guard.expr for guard in shapes.guards))
    return Trace(module, tuple(leaves), counters, _predicate(symbols, guards))


def _predicate(symbols: list[sympy.Symbol], guards: Any) -> Callable[[Sequence[int]], bool]:
    if guards is sympy.true:
        return lambda values: True
    # As torch prints its own guards: sympy's printer does not know // and % of Python.
    names = ", ".join([str(symbol) for symbol in symbols])
    holds = eval(f"lambda {names}: {PythonPrinter().doprint(guards)}", {"math": math})
    return lambda values: bool(holds(*values))

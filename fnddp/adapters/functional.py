"""Functional training loops: `value_and_grad`, and a pipeline as a function that runs its plan."""

from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from fnddp.adapters.reentrant import refuse_reentrant_checkpoints, refuses_reentrant_checkpoints
from fnddp.core import tree
from fnddp.core.collectives import refuse_differentiation
from fnddp.core.parse import pipeline_of
from fnddp.core.sync import State, Sync
from fnddp.core.tree import Leaves, Tree
from fnddp.plan.draft import Donation
from fnddp.plan.plan import Plan
from fnddp.run.engine import Engines
from fnddp.run.step import Step, applying
from fnddp.torch_private import (
    DIFFERENTIATES_INFERENCE,
    current_backward,
    is_forward_ad,
    is_transforming,
    next_node_number,
    tree_leaves,
)
from fnddp.wire.c10d import C10D, over
from fnddp.wire.protocol import Wire, reporting

T = TypeVar("T")  # the tree of parameters or gradients
V = TypeVar("V")  # what a loss function returns
P = ParamSpec("P")  # of a batch

_OWNER = "value_and_grad"


def value_and_grad(
    loss_fn: Callable[Concatenate[T, P], V],
    sync: Sync | str,
    has_aux: bool = False,
    *,
    wire: Wire = C10D,
    backend: str | None = None,
) -> Callable[Concatenate[T, State, P], tuple[V, T, State]]:
    """Return a function that differentiates `loss_fn` and synchronizes the gradients while backward runs.

    The pipeline is lowered at the first call. Each gradient is sent when it is ready, and collectives run while
    backward continues. The results are those of `sync(torch.func.grad(loss_fn)(params), state)`. Within torch.compile,
    another torch.func transform or torch.inference_mode, that expression itself runs.

    Start with `state = sync.init(params)` (of a text: `fnddp.parse(text).init`), and call `fnddp.verify(sync, params,
    state)` once, to check that ranks agree. The wrong choice if `forward` changes buffers (BatchNorm): return them as
    `aux`, or use `DistributedDataParallel`.

    On CPUs an error on one rank ends the step on all: the others raise `StepFailedError`. On GPUs see docs/gpu.md.

    Args:
        loss_fn: `loss_fn(params, *batch) -> loss`, a scalar tensor, or `(loss, aux)` with `has_aux`.
        sync: The pipeline, or its text.
        has_aux: True if `loss_fn` returns auxiliary data in addition to the loss.
        wire: Moves bytes between ranks; torch.distributed by default.
        backend: Runs the computation between collectives: None for Python, or "inductor"; see
            `docs/functional.md`. With a backend, a pipeline that cannot be lowered is an error.

    Returns:
        `f(params, state, *batch, **kwargs) -> (value, grads, state)`. `params`: a pytree of real or complex tensors;
        `value`: this rank's own loss, or `(loss, aux)`; `grads`: the mean over ranks, with the tree of `params`,
        zero for parameters that do not affect the loss, None where the pipeline has no update in this step.

    Raises:
        TypeError: `sync` is `weighted`. At the call: a leaf is not floating-point or complex, or the loss no scalar.
        ValueError: At the call: a leaf or its gradient is sparse.
        RuntimeError: At the call: `loss_fn` uses a reentrant activation checkpoint, or another custom autograd function
            with a nested backward that reaches a parameter; `loss_fn` calls `backward()` on parameters, or another
            `value_and_grad` while gradients are enabled; two threads call this function at once (make one for each); or
            inference mode is on, and torch is older than 2.13.

    >>> from fnddp import allreduce
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> step = value_and_grad(lambda params, x: (params["w"] * x).sum(), allreduce)
    >>> step(params, allreduce.init(params), torch.tensor([3.0, 4.0]))
    (tensor(11.), {'w': tensor([3., 4.])}, ())
    """
    pipeline = pipeline_of("value_and_grad: sync", sync)
    if pipeline.takes_weight:
        raise TypeError(
            "value_and_grad: all its arguments are passed to the loss, so it cannot take a weight; call "
            f"torch.func.grad, then {pipeline!r}(grads, state, weight=...), or fnddp.jit of that pipeline"
        )
    engines = Engines(pipeline, donation=Donation(gradients="yes"), learns_order=True, wire=wire, backend=backend)

    def run(params: T, state: State, *batch: P.args, **kwargs: P.kwargs) -> tuple[V, T, State]:
        leaves, spec = tree.flatten(params)
        # If parameters required grad, autograd would record a second, unused graph.
        leaves = {path: _checked(path, leaf).detach() for path, leaf in leaves.items()}

        def loss_of(leaves: Leaves, *batch: Any) -> Any:
            return loss_fn(tree.unflatten(spec, leaves), *batch, **kwargs)

        if not DIFFERENTIATES_INFERENCE and torch.is_inference_mode_enabled():  # breaks a graph
            raise RuntimeError(
                f"value_and_grad: torch {torch.__version__} returns zero gradients in inference mode; call it outside "
                "of torch.inference_mode(), or install torch 2.13 or later"
            )
        # In inference mode torch.func still differentiates; autograd does not.
        if torch.compiler.is_compiling() or is_transforming() or torch.is_inference_mode_enabled():
            # Differentiate a flat dict, because torch.func does not know all pytrees that optree, and so fnddp, knows.
            grads, value = torch.func.grad_and_value(loss_of, has_aux=has_aux)(leaves, *batch)
            grads, state = over(wire, pipeline)(tree.unflatten(spec, grads), state)
            return value, grads, state

        if is_forward_ad():
            given = tree_leaves((leaves, batch, kwargs))
            refuse_differentiation([each for each in given if isinstance(each, Tensor)])
        if refuses_reentrant_checkpoints(_OWNER) and torch.is_grad_enabled():
            raise RuntimeError(
                "value_and_grad: a gradient synchronization cannot run inside the loss_fn of another one, because it "
                "has no derivative; if its results are constants, call it within torch.no_grad()"
            )
        with engines.alone(leaves, state) as engine, applying(engine):
            try:
                step = engine.begin(state)
                value, aux = _backward(loss_of, leaves, batch, has_aux, step)
                done = step.finish()
            except BaseException as error:
                engine.fail(error)
                raise
            given: Any = (value, aux) if has_aux else value
            return given, tree.unflatten(spec, done.of(leaves)), engine.release_state()

    return reporting(wire, run)


def _backward(
    loss_of: Callable[..., Any],
    leaves: Leaves,
    batch: tuple[Any, ...],
    has_aux: bool,
    step: Step,
) -> tuple[Tensor, Any]:
    """Return the loss and auxiliary data; pass gradients to `step` as they arrive."""
    task: int | None = None  # autograd's number for the backward of the loss

    def begin(_: Tensor) -> None:
        nonlocal task
        task = current_backward()

    def arrives(path: str, leaf: Tensor) -> None:
        if task is None:
            raise RuntimeError(
                f"value_and_grad: loss_fn itself runs a backward that reaches leaf {path!r}; return that loss "
                "instead, or use torch.autograd.grad in loss_fn"
            )
        if current_backward() != task:
            raise _made_in_another_backward(path)
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        if grad.layout != torch.strided:
            raise ValueError(
                f"value_and_grad: the gradient of leaf {path!r} has layout {grad.layout}, but only dense gradients "
                "can be synchronized; remove sparse=True from its layer"
            )
        if step.put(positions[path], grad):
            step.advance()

    with torch.enable_grad(), refuse_reentrant_checkpoints(_OWNER):
        variables = {path: leaf.requires_grad_() for path, leaf in leaves.items()}
        positions = {path: position for position, path in enumerate(variables)}
        for path, variable in variables.items():
            variable.register_post_accumulate_grad_hook(partial(arrives, path))
        first = next_node_number()  # older nodes belong to the caller's graph and must not run
        result = loss_of(variables, *batch)
    if has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
        raise TypeError(
            f"value_and_grad: with has_aux=True loss_fn must return (loss, aux), got a {type(result).__name__}"
        )
    loss, aux = result if has_aux else (result, None)
    if not isinstance(loss, Tensor) or loss.ndim > 0:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise TypeError(f"value_and_grad: loss_fn must return a scalar tensor, got {shown}; take its sum or mean")
    if loss.requires_grad:  # otherwise it depends on no parameter, and all gradients are zero
        # Without `inputs` torch would also accumulate gradients in the caller's leaves. The inputs include custom
        # functions, because autograd skips a node that leads to none of the inputs: its gradients would be zeros.
        inputs: list[Any] = [*variables.values(), *_custom_functions(loss, first)]
        with loss.register_hook(begin):
            torch.autograd.backward(loss, inputs=inputs)
        for path, leaf in variables.items():
            if leaf.grad is not None:  # a custom function wrote it
                raise _made_in_another_backward(path)
    return loss.detach(), tree.map_tensors(Tensor.detach, aux)


def _custom_functions(loss: Tensor, first: int) -> list[GradientEdge]:
    """Return the custom autograd functions in the graph of `loss`, among nodes with numbers from `first` on.

    If they are passed as `inputs` of backward, each of them runs, even if autograd sees no parameter that it leads to.
    """
    todo: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]  # None if the loss is a parameter
    found = set(todo)
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in found and node._sequence_nr() >= first:
                found.add(node)
                todo.append(node)
    return [GradientEdge(node, 0) for node in found if issubclass(type(node), BackwardCFunction)]


def _made_in_another_backward(path: str) -> RuntimeError:
    return RuntimeError(
        f"value_and_grad: the gradient of leaf {path!r} is computed by a custom autograd function that runs its own "
        "backward, such as a reentrant checkpoint; pass the parameter to the function as an input, or checkpoint "
        "with use_reentrant=False"
    )


def _checked(path: str, leaf: Tensor) -> Tensor:
    if not tree.is_inexact(leaf):
        raise TypeError(
            f"value_and_grad: leaf {path!r} is {leaf.dtype}, which has no gradient; params must be floating-point or "
            "complex: pass other tensors with the batch"
        )
    return leaf


class jit:
    """Run a pipeline through its plan: combined collectives, reused buffers, the same numbers as `sync` itself.

    Use it for gradients that are already complete, and call it as you call the pipeline. A plan is made at the first
    call for given shapes and phase. While backward is still computing gradients, use `value_and_grad`, `register` or
    `DistributedDataParallel`: they overlap the same plan with backward. Within torch.compile, `sync` itself runs.

    Args:
        sync: The pipeline, or its text. A pipeline that cannot be lowered runs as is.
        wire, backend: See `value_and_grad`.

    >>> from fnddp import allreduce, fp16
    >>> step = jit(fp16(allreduce))
    >>> grads = {"w": torch.tensor([1.0, 1 / 3])}
    >>> step(grads, step.init(grads))
    ({'w': tensor([1.0000, 0.3333])}, ())
    """

    def __init__(self, sync: Sync | str, *, wire: Wire = C10D, backend: str | None = None) -> None:
        self._sync = pipeline_of("jit: sync", sync)
        self._eager, self._wire, self._backend = over(wire, self._sync), wire, backend
        self._engines = Engines(self._sync, donation=Donation(), learns_order=False, wire=wire, backend=backend)

    @property
    def sync(self) -> Sync:
        """The pipeline that runs."""
        return self._sync

    def init(self, grads: Tree) -> State:
        """See `Sync.init`."""
        return over(self._wire, self.sync.init)(grads)

    @property
    def plan(self) -> Plan | None:
        """The plan of the last call; None before the first, and for a pipeline that cannot be lowered."""
        return None if self._engines.last is None else self._engines.last.plan

    def __call__(self, grads: T, state: State, *, weight: float | Tensor | None = None) -> tuple[T, State]:
        """See `Sync.__call__`.

        Raises:
            RuntimeError: Two threads call it at once, for leaves of the same shapes.
            StepFailedError: Another rank has failed in this step.
        """
        if torch.compiler.is_compiling() or is_transforming():
            return self._eager(grads, state, weight=weight)
        return reporting(self._wire, self._run)(grads, state, weight)

    def _run(self, grads: T, state: State, weight: float | Tensor | None) -> tuple[T, State]:
        leaves, spec = tree.flatten(grads)
        if is_forward_ad():
            refuse_differentiation(leaves.values())
        # Outside of inference mode, because plans and their memory outlive it.
        with torch.inference_mode(False), self._engines.alone(leaves, state) as engine, applying(engine):
            done = engine.run({path: leaf.detach() for path, leaf in leaves.items()}, state, weight=weight)
            return tree.unflatten(spec, done.of(leaves)), engine.release_state()

    def __reduce__(self) -> Any:  # a copy makes its own plans: streams and memory belong to a device
        return partial(jit, wire=self._wire, backend=self._backend), (self._sync,)

    def __repr__(self) -> str:
        return f"jit({self.sync!r})"

"""Turn backward passes of a wrapped module into steps of an engine.

A step synchronizes the gradients that a backward accumulates in the wrapped parameters. It begins when such a backward
reaches the output of a forward, or a parameter, and ends with that backward. Gradients from `torch.autograd.grad` are
not synchronized, as with torch's class.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from fnddp import torch_private
from fnddp.adapters.backward import (
    Backward,
    FastPath,
    RankWeight,
    WeakHook,
    accumulates,
    accumulates_in,
    as_trained,
    executes,
    nodes_behind,
)
from fnddp.adapters.module.outputs import tensors_in
from fnddp.adapters.module.promises import Promises
from fnddp.adapters.module.slots import OWNER, WrappedParameters
from fnddp.core.state import describe
from fnddp.run.engine import Engine
from fnddp.run.program import UnexpectedGradient
from fnddp.run.step import Step, Synchronized
from fnddp.run.vote import StepFailedError
from fnddp.torch_private import current_backward, optimizers_in_backward
from fnddp.wire.groups import Membership
from fnddp.wire.protocol import CollectiveError, Elastic

# Modules in the order of their last forward. A backward through several reaches them in the opposite order.
_forwarded: "weakref.WeakKeyDictionary[Steps, None]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Nodes(list[Any]):
    """A list of the graph nodes of an output, alive as long as its graph. Unlike a list it can be weakly referenced."""


@dataclass(eq=False)
class _Taken:
    """Facts about the backward of the open step.

    Attributes:
        task: autograd's number of the backward.
        added_to: Parameters that already have a gradient, so that the step adds to it.
        keeps_graph: True for a backward with `create_graph=True`, so that its gradients can be differentiated.
        sparse: Number of sparse dimensions of each sparse gradient, by parameter.
        deferred: Parameters with gradients that wait for the end of the step.
    """

    task: int
    added_to: set[str]
    keeps_graph: bool
    sparse: dict[str, int]
    deferred: set[str] = field(default_factory=set[str])


class Steps:
    """Put the gradients of a module into the steps of its own engine. `use` sets the engine.

    Args:
        promises: The user's promises about unused parameters. Each step checks them.

    Attributes:
        is_armed: True if the next backward synchronizes.
        scale: Factor that gradients are multiplied by before they are sent.
        unsynchronized: Parameters with gradients of backwards within `no_sync`, not synchronized by any step yet.
        awaits_commit: True if `settle_on` ends a step of one backward or several.
        futures: Futures of buffer hooks. The end of a backward waits for them.
    """

    engine: Engine
    backward: Backward
    needs_earlier_gradients: ClassVar[bool] = False
    """True if each step needs to know `.grad` before its backward, even if the step begins at a parameter."""

    def __init__(self, promises: Promises) -> None:
        self.promises = promises
        self.is_armed, self.awaits_commit, self.scale = False, False, 1.0
        self.weight = RankWeight()
        self.unsynchronized: set[str] = set()
        self._outputs: list[weakref.ref[_Nodes]] = []  # of the last forward
        self._thread = 0  # id of the thread of the last forward with a synchronizing backward
        self.futures: list[torch.futures.Future[Any]] = []
        self._fast = FastPath()
        self._hooks: list[Any] = []

    def use(
        self, engine: Engine, trained: WrappedParameters, sparse: Collection[nn.Parameter], world: Membership
    ) -> None:
        """Run the steps of `engine` from now on, for gradients of these parameters. If this raises, nothing changes.

        Args:
            sparse: Parameters with gradients that are sparse in one dimension, on all ranks, used or not.
            world: The process group that steps are for.
        """
        advance = weakref.WeakMethod(self._advance)
        before_accumulation = self.needs_earlier_gradients or isinstance(engine.wire, Elastic)
        hooks: list[Any] = []
        try:
            for name, position in engine.positions.items():
                hook = self._fast.hook(position, WeakHook(self, Steps._accumulated, name), advance)
                with as_trained(trained.parameters[name]) as parameter:
                    hooks.append(parameter.register_post_accumulate_grad_hook(hook))
                    if before_accumulation:
                        hooks.append(parameter.register_hook(WeakHook(self, Steps._arrives, name)))
        except BaseException:
            for hook in hooks:
                hook.remove()
            raise
        self.detach()
        self.engine, self.parameters, self._world, self._hooks = engine, trained.parameters, world, hooks
        self.backward = Backward(engine, undo=self._undo, named=self._named)
        self.promises.begin()
        self._always_sparse = {name: 1 for name, parameter in self.parameters.items() if parameter in sparse}
        self._taken: _Taken | None = None  # of the open step
        # On an elastic wire: gradients and `unsynchronized` before backwards, in case their step is rejected.
        self._before: tuple[dict[str, Tensor], set[str]] | None = None

    def detach(self) -> None:
        """Remove all hooks of parameters."""
        if self._hooks and self.engine.is_open:
            self.backward.fail(RuntimeError("the hooks were removed"))
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def require_same_world(self) -> None:
        """Raise a RuntimeError and remove all hooks if the process group is not the one that steps are for."""
        try:
            self._world.require_same()
        except RuntimeError:
            self.detach()  # the module may be wrapped again
            raise

    # Begin of a step

    def expect_backward(self, output: Any, *, synchronizes: bool) -> None:
        """Begin a step when a backward reaches `output`, the output of a forward, even if no parameter is used.

        Args:
            synchronizes: True to synchronize the gradients of this backward.
        """
        self.is_armed = synchronizes
        with _lock:
            _forwarded.pop(self, None)
            _forwarded[self] = None
        if not self.is_armed or torch_private.is_transforming():
            return
        self._outputs, self._thread = [], threading.get_ident()
        for tensor in (output,) if isinstance(output, Tensor) else tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:  # hooks on a leaf would outlive the graph
                behind = _Nodes(nodes_behind(tensor))
                self._outputs.append(weakref.ref(behind))
                tensor.register_hook(partial(self._reaches_output, behind))

    def _is_reached(self) -> bool:
        """Return whether the running backward goes through the last forward, so that it will begin a step."""
        behind = [node for nodes in self._outputs for node in nodes() or ()]
        return accumulates(self.parameters.values(), behind) and (not self._outputs or any(map(executes, behind)))

    @torch_private.skipped_by_dynamo
    def _reaches_output(self, behind: Sequence[Any], _: Tensor) -> None:
        """Begin a step when a backward reaches the output of a forward. `behind` holds graph nodes of that output."""
        if self._open() is None and accumulates(self.parameters.values(), behind):
            self._start()

    def _start(self, accumulated: str = "") -> _Taken:
        """Return the facts of the open step, and begin a step first if necessary.

        Args:
            accumulated: A parameter in which this backward has accumulated a gradient already, so that it is unknown
                whether there was one before.
        """
        taken = self._open()
        if taken is not None:
            return taken
        _refuse_compiled_autograd()
        # Earlier gradients belong to the user: this backward adds to them, and the step must not write over them.
        grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        if isinstance(self.engine.wire, Elastic) and (self._before is None or not self.awaits_commit):
            self._before = {name: grad.detach().clone() for name, grad in grads.items()}, self.unsynchronized.copy()
        self.backward.is_starting = True  # so that other threads do not take it for an unfinished step
        try:
            step = self._begin(self.weight.given)
            with _lock:
                others = [each for each in reversed([*_forwarded]) if each is not self and each.is_armed]
            reached = [each.backward for each in others if not each.engine.is_open and each._is_reached()]
            self.backward.end_with_autograds(self._finish, reached)
        finally:
            self.backward.is_starting = False
        task, keeps_graph = current_backward(), torch.is_grad_enabled()
        self._taken = taken = _Taken(task, set(grads), keeps_graph, self._always_sparse.copy())
        kept = grads.keys() - self.unsynchronized - {accumulated}
        sums = bool(kept) and "sum" in self.engine.sync.ops
        filled = {name: grad.any() for name, grad in grads.items() if sums and name in kept}
        if filled and torch.stack([*filled.values()]).any():  # stacked, so that the host waits for an accelerator once
            again = next(name for name, is_filled in filled.items() if is_filled)
            self._stop(
                f"parameter {again!r} already has a gradient summed over ranks, and {self.engine.sync!r} would sum it "
                "again together with this backward's; call optimizer.zero_grad() before each backward, or run all but "
                "the last within no_sync()"
            )
        if not keeps_graph:
            self._fast.open(step, task, {self.engine.positions[name] for name in grads})
        return taken

    def _open(self) -> _Taken | None:
        """Return the facts of the open step; None if no step is open, or its backward has raised."""
        return self._taken if self.backward.is_running() else None

    def _begin(self, weight: float | Tensor | None) -> Any:
        self.require_same_world()
        return self.backward.begin(weight=weight, scale=self.scale)

    # Gradients

    def _arrives(self, name: str, _: Tensor) -> None:
        """Begin a step before a gradient is accumulated in the parameter `name`, whether it has one already or not."""
        begins = self.is_armed and self._open() is None and accumulates_in([self.parameters[name]])
        if begins and not self._waits_for_outer_backward():
            self._start()

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        """Handle a gradient that autograd has accumulated in `parameter.grad`. It may be undefined."""
        if parameter.grad is None:
            return
        was_armed, taken = self.is_armed, self._open()
        if was_armed and taken is None and not self._waits_for_outer_backward():
            taken = self._start(name)
        if taken is None:
            self.unsynchronized.add(name)
        elif current_backward() != taken.task or name in taken.deferred:
            # An inner backward (reentrant checkpointing or another custom function): more may be added to it.
            taken.deferred.add(name)
            self._fast.excluded.add(self.engine.positions[name])
        else:
            self._take(taken, name)

    def _waits_for_outer_backward(self) -> bool:
        """Return True if the step must begin in the outer backward, because a reentrant checkpoint called this one.

        Only the outer backward has all gradients. Gradients that arrive before it continues count as if within no_sync.
        """
        nodes = torch_private.nodes_of_outer_backward()
        if nodes is None:
            return False
        if not nodes:
            error = RuntimeError(
                f"{OWNER}: a hook called backward within another backward before that one had computed a gradient, "
                "and the module's output contains no tensor that was found; return tensors in a list, dict or "
                "dataclass, or call backward outside of hooks"
            )
            self.backward.fail_next(error)
            raise error
        handles: list[Any] = []
        me = weakref.ref(self)

        @torch_private.skipped_by_dynamo
        def go_on(_: Any) -> None:
            for handle in handles:
                handle.remove()
            handles.clear()
            steps = me()
            if steps is not None and steps.is_armed:
                steps._start()

        handles += [node.register_prehook(go_on) for node in nodes]
        return True

    def _take(self, taken: _Taken, name: str) -> None:
        parameter = self.parameters[name]
        grad = parameter.grad
        assert grad is not None
        if grad.is_sparse:
            taken.sparse[name] = grad.sparse_dim()
            grad = grad.to_dense()
        is_kept = name in taken.added_to or grad.requires_grad
        if not is_kept:
            parameter.grad = None  # so that its memory is free once it has been sent
        self._feed(name, grad.data, keep=is_kept)  # a hook may hold `grad` itself: `.data` shares its storage

    def _feed(self, name: str, grad: Tensor, *, keep: bool) -> None:
        self._go_on(lambda step: step.feed(name, grad, keep=keep))

    def _advance(self) -> None:
        self._go_on(Step.advance)

    def _go_on(self, run: Callable[[Step], None]) -> None:
        if (step := self.engine.step) is not None:
            try:
                run(step)
            except UnexpectedGradient as error:
                self.backward.fail_all(named := self._named(error))
                raise named from None

    def _named(self, error: BaseException) -> BaseException:
        """Translate an UnexpectedGradient into an error about the module; return other errors unchanged."""
        if not isinstance(error, UnexpectedGradient):
            return error
        if not error.is_unlike:
            return RuntimeError(
                f"{OWNER}: the gradient of parameter {error.path!r} arrived twice in this step: a custom autograd "
                "function runs the module in its own backward, and the outer backward also reaches it elsewhere; "
                "call backward for each loss, or use checkpoint(..., use_reentrant=False)"
            )
        expected = self.engine.leaves[error.path]
        return ValueError(
            f"{OWNER}: parameter {error.path!r} was {expected} on {expected.device} when the module was wrapped, but "
            f"its gradient is now {describe(error.grad)} on {error.grad.device}; wrap the module again"
        )

    # End of a step

    def _finish(self) -> None:
        """End the step at the end of its backward, and write the means."""
        was_armed, taken = self.is_armed, self._taken
        if taken is None or self.engine.step is None:  # it failed together with another engine's step
            self.close()
            self.settle_on(is_committed=False)
            return
        try:
            done = self._end()
        except (CollectiveError, StepFailedError):
            if not isinstance(self.engine.wire, Elastic):
                raise
            # The remaining ranks continue with the gradients from before this backward.
            self.settle_on(is_committed=False)
            return
        self.close()
        is_empty = len(done.unused) == len(self.parameters)  # no parameter had a gradient on any rank
        self.is_armed = was_armed and (is_empty or taken.keeps_graph)  # a backward through these gradients may follow
        if is_empty:
            return
        self.unsynchronized = set()
        self._write(done, taken)
        self.wait_for_futures()

    def _take_late(self) -> None:
        """Take gradients that no hook could take: those of inner backwards, and those accumulated within no_sync."""
        self._fast.close()
        taken, step = self._taken, self.engine.step
        if taken is None or step is None or not (taken.deferred or self.unsynchronized or taken.added_to):
            return
        missing = step.missing
        # Include parameters that only backwards within no_sync have reached.
        for name in sorted(taken.deferred | (self.unsynchronized & missing)):
            if self.parameters[name].grad is None:
                continue
            if name in taken.deferred - missing:
                raise RuntimeError(
                    f"{OWNER}: parameter {name!r} is used both inside and outside a reentrant checkpoint (or another "
                    "custom autograd function that runs its own backward), and its gradient was synchronized before "
                    "that backward ran; checkpoint with use_reentrant=False, or pass the parameter to the function "
                    "as an input"
                )
            self._take(taken, name)
        # These hold the mean of an earlier backward. Other ranks add their gradients to it and send the sum. A frozen
        # parameter gets no mean, so its memory must not depend on what its `.grad` still holds.
        held = {name: self.parameters[name] for name in taken.added_to & step.missing}
        sent = [n for n, p in held.items() if p.requires_grad or not self.engine.sync.gives_later]
        dense = {n: grad.detach().to_dense() for n in sent if (grad := held[n].grad) is not None}
        step.substitutes = {name: grad for name, grad in dense.items() if self.engine.leaves[name].is_like(grad)}

    def _keeps_promises(self, unused: frozenset[str]) -> bool:
        """Check the promises, and return False if no parameter had a gradient on any rank."""
        if len(unused) == len(self.parameters):
            return False
        if unused != self.promises.first:
            self.promises.check(unused)
        return True

    def _end(self) -> Synchronized:
        learns = self.engine.learns_order
        # torch's name for it in profiles: here ranks learn which parameters none of them has used.
        with torch.autograd.profiler.record_function("search_unused_parameters"):
            done = self.backward.end(self._take_late, self._keeps_promises)
        if learns and self.promises.skips_unused and len(done.unused) < len(self.parameters):
            self.engine.drop(self.promises.first or frozenset())
        return done

    def _write(self, done: Synchronized, taken: _Taken) -> None:
        with torch.set_grad_enabled(taken.keeps_graph):
            for name, parameter in self.parameters.items():
                if done.unused and done.has_nothing_for(name, parameter):
                    continue
                if (mean := done.mean.get(name)) is None:
                    parameter.grad = None  # no update: optimizers must skip it
                else:
                    self._write_one(name, parameter, mean, taken)

    def _write_one(self, name: str, parameter: nn.Parameter, mean: Tensor, taken: _Taken) -> None:
        before, grad = parameter.grad, mean
        if before is not None and before.requires_grad:  # combine the mean with the graph of this rank's gradient
            grad = before.to_dense() if before.is_sparse else before.clone()
            grad.data.copy_(mean)
        if name in taken.sparse:
            grad = grad.to_sparse(taken.sparse[name])
        elif grad.stride() != parameter.stride():  # optimizers expect equal strides for a dense parameter
            grad = torch.empty_like(parameter, dtype=grad.dtype, requires_grad=False).copy_(grad)
        if name in taken.added_to and before is not None and not before.is_sparse and not grad.requires_grad:
            before.copy_(grad)  # in place: it may be part of a flat buffer
        else:
            parameter.grad = grad
        if optimizers := optimizers_in_backward(parameter):
            for optimizer in optimizers:
                optimizer.step()
            parameter.grad = None

    def wait_for_futures(self) -> None:
        if self.futures:
            futures, self.futures = self.futures, []
            torch.futures.wait_all(futures)

    def settle_on(self, is_committed: bool) -> None:
        """End the last step on an elastic wire. If it is not committed, restore the gradients from before it."""
        if self._before is not None and not is_committed:
            grads, self.unsynchronized = self._before
            for name, parameter in self.parameters.items():
                before, grad = grads.get(name), parameter.grad
                if before is None or grad is None or before.layout != grad.layout or before.is_sparse:
                    parameter.grad = before
                else:
                    grad.detach().copy_(before)  # in place: it may be part of a flat buffer
        self._before = None

    # Errors

    def settle(self) -> None:
        """Fail the open step if its backward did not finish; raise a RuntimeError if ranks may be desynchronized.

        A backward that is still running counts as unfinished, except in other threads than its forward's: raise there.
        (Not by autograd's thread: on an accelerator it may hold a backward that has raised for some time.)
        """
        if self.backward.step is not None and not self.backward.has_raised and self._thread != threading.get_ident():
            raise RuntimeError(f"{OWNER}: a backward of this model is running in another thread; wait until it ends")
        self.backward.require_idle()
        self._fast.close()  # still open if the step failed together with another engine's
        self.engine.refuse_after_failure()

    def _undo(self) -> None:
        if self._taken is not None:
            for name in self._taken.deferred - self._taken.added_to:  # not synchronized: drop it
                self.parameters[name].grad = None
        self.close()

    def _stop(self, message: str) -> NoReturn:
        """Raise an error with this message, and fail the open step with it."""
        error = RuntimeError(f"{OWNER}: {message}")
        self.backward.fail_all(error)
        raise error

    def close(self) -> None:
        self.is_armed, self._taken = False, None
        self._fast.close()

    # Steps outside of a backward

    def participate_with_zeros(self) -> None:
        """Take part in a step in which this rank has no gradients, and keep only the new state."""
        self._begin(0 if self.engine.sync.takes_weight else None)
        self._end()
        self.wait_for_futures()


def _refuse_compiled_autograd() -> None:
    if torch_private.is_compiled_autograd():
        raise RuntimeError(
            f"{OWNER}: gradients cannot be synchronized in a backward that compiled autograd runs; set "
            "torch._dynamo.config.compiled_autograd to False (torch.compile of the model works without it)"
        )

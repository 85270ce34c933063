"""Backward passes of a wrapped module as steps of an engine.

A step begins with the first gradient of a backward that is to synchronize, and ends with it. In between each parameter
hands its gradient over, in one of two ways: as `parameter.grad`, once it is accumulated; or, where
`torch.autograd.grad` asks for it, before that: autograd gets memory which is filled at the end.
"""

import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fnddp import torch_private
from fnddp.adapters.hooks import FastPath, WeakHook, accumulates, asked_for, end_with_backward, fail_unfinished
from fnddp.adapters.module.gradients import Gradients
from fnddp.adapters.module.promises import Promises
from fnddp.adapters.module.slots import OWNER, Trained
from fnddp.adapters.torch_compat.buffers import Futures
from fnddp.adapters.torch_compat.log import Log
from fnddp.core.state import describe
from fnddp.core.sync import State, Sync
from fnddp.core.tree import Leaves
from fnddp.ir.program import LeafSpec
from fnddp.plan.draft import Donation
from fnddp.run.engine import Engine
from fnddp.run.program import UnexpectedGradient
from fnddp.run.step import Step, Synchronized, in_profile
from fnddp.run.vote import StepFailedError
from fnddp.torch_private import has_other_hooks, optimizers_in_backward
from fnddp.wire.groups import Membership
from fnddp.wire.protocol import CollectiveError, Elastic, Wire
from fnddp.wire.weights import Weight


@dataclass(eq=False)
class Block:
    """A block in which this rank's gradients have a weight.

    Attributes:
        weight: How often this rank's gradients count.
        has_stepped: A step has begun in the block.
        may_step: A forward whose backward synchronizes has run in the block.
    """

    weight: Weight
    has_stepped: bool = False
    may_step: bool = False


@dataclass(eq=False)
class _Backward:
    """The backward of the open step.

    Attributes:
        task: autograd's number for it.
        asked: Parameters whose gradients torch.autograd.grad will return.
        has_prior_grad: Parameters with a gradient that the step adds to.
        sparse: Parameters whose gradients are sparse, and in how many dimensions.
        accumulates: Whether it accumulates gradients in all leaves that it reaches.
        is_plain: Whether gradients take the fast path.
        deferred: Parameters whose gradients wait for the end of the step.
        placeholders: What means are written to, where autograd goes on with it.
        ending: Returns None once it is known that the end of the backward will not come.
        together: Engines with a step in it.
        is_finishing: Whether it is at its end.
    """

    task: int
    asked: set[str]
    has_prior_grad: set[str]
    sparse: dict[str, int]
    accumulates: bool
    is_plain: bool = False
    deferred: set[str] = field(default_factory=set[str])
    placeholders: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    ending: Callable[[], object] = lambda: True
    together: list[Engine] = field(default_factory=list[Engine])
    is_finishing: bool = False


class Steps:
    """Puts the gradients of a module into the steps of an engine of its own.

    Args:
        trained: The module's parameters.
        pipeline: What runs.
        initial: The pipeline's state before the first step.
        bucket_caps: See `Engine`.
        group: Name of the process group.
        wire: Who moves bytes.
        promises: What is checked in each step.
        log: What is measured goes there.
        sparse: Parameters whose gradients are sparse in one dimension, on all ranks, used or not.
        futures: Of hooks of buffers, which the end of a backward waits for.

    Attributes:
        is_armed: Whether the next backward is one that synchronizes.
        scale: What gradients are multiplied by on their way.
        block: The block with a weight that runs now.
        forward_weight: The weight of the block in which the last forward ran.
        unsynchronized: Parameters with gradients that no step has synchronized yet: of backwards within `no_sync`.
    """

    def __init__(
        self,
        trained: Trained,
        pipeline: Sync,
        initial: State,
        *,
        bucket_caps: Sequence[float],
        group: str | None,
        wire: Wire,
        backend: str | None,
        promises: Promises,
        log: Log,
        sparse: Collection[str],
        futures: Futures,
    ) -> None:
        self.parameters = trained.parameters
        self.engine = Engine(
            pipeline,
            trained.leaves(),
            state=initial,
            donation=Donation(gradients="yes", state=True),
            bucket_caps=bucket_caps,
            learns_order=True,
            groups=[group],
            wire=wire,
            backend=backend,
        )
        self.is_armed = False
        self.scale = 1.0
        self.block: Block | None = None
        self.forward_weight: Weight | None = None
        self._weight: Weight | None = None  # of the step
        self.unsynchronized: set[str] = set()
        self._world = Membership(group, f"{OWNER}: the module was wrapped", "wrap the module again")
        self._wire, self._log = wire, log
        self._futures = futures
        self._promises = promises
        self._sums = "sum" in pipeline.ops
        self._always_sparse = dict.fromkeys(sparse, 1)
        self._backward: _Backward | None = None  # of the open step, or of the last one
        self._grads_before: Gradients | None = None  # by the last backward, where its step may turn out to be none
        self._successor: Steps | None = None
        self._fast = FastPath()
        self._returns = True  # the last backward has returned gradients, as far as is known
        self._begins_at_parameters = False  # a step has begun with a gradient that came before those of outputs
        self._early: dict[str, Any] = {}  # hooks of parameters that see gradients before they are accumulated
        advance = weakref.WeakMethod(self._advance)
        self._hooks = [
            self.parameters[name].register_post_accumulate_grad_hook(
                self._fast.hook(position, WeakHook(self, Steps._accumulated, name), advance)
            )
            for position, name in enumerate(self.engine.leaves)
        ]

    @property
    def sync(self) -> Sync:
        """The pipeline."""
        return self.engine.sync

    def settle(self) -> None:
        """End a step whose backward did not finish.

        Raises:
            RuntimeError: After this step, or an earlier one, ranks may be desynchronized.
        """
        if self.engine.is_open:
            self._fail_unfinished()
        self._fast.close()  # of a step that failed with another one's
        self.engine.refuse_after_failure()

    def leave_out(self, error: BaseException) -> None:
        """End the step that is open or comes next because of `error`, on all ranks, so that none waits for it."""
        with suppress(RuntimeError):  # in a step that cannot begin nobody waits for this rank
            self.engine.fail_next(error)
        self._close()

    def arm(self) -> None:
        """The next backward synchronizes, wherever it begins."""
        self.is_armed = True
        self._watch(self.parameters)

    def expect_backward(self, *, is_seen: bool) -> None:
        """Expect a backward; `is_seen` if the module has returned a tensor at which it is likely to begin.

        Hooks before accumulation take 1.6 ms of a backward of 28 with 384 leaves. Without them, a gradient that
        torch.autograd.grad returns is this rank's own if it is complete before the first one of what the module has
        returned: that of a parameter that the loss uses outside of the module only. So they are left out only after a
        backward that has returned no gradient.
        """
        # On an elastic wire gradients may be put back as they were before.
        if self._returns or self._begins_at_parameters or not is_seen or isinstance(self._wire, Elastic):
            self._watch(self.parameters)

    def _watch(self, names: Iterable[str]) -> None:
        """See gradients before they are accumulated, behind the hooks that are there, until a step ends."""
        for name in names:
            if name in self._early:
                torch_private.put_last(self.parameters[name], self._early[name])
            elif self.parameters[name].requires_grad:
                self._early[name] = self.parameters[name].register_hook(WeakHook(self, Steps._arrives, name))

    def start_of(self, forward_weight: Weight | None, behind: Sequence[Any], grad: Tensor) -> None:
        """Begin a step where a backward reaches what a forward has returned.

        Args:
            forward_weight: The weight of the block in which the forward ran.
            behind: The nodes that have made it.
            grad: Its gradient.
        """
        if self._successor is not None:
            self._successor.start_of(forward_weight, behind, grad)
            return
        self.start(forward_weight)
        if self.unsynchronized and self._backward is not None and not self._backward.accumulates:
            self._backward.accumulates = accumulates(behind)
        self._require_one_weight(forward_weight)

    def start(self, forward_weight: Weight | None, accumulated: str = "") -> None:
        """Begin a step, unless one is open.

        Args:
            forward_weight: The weight of the block in which the forward ran.
            accumulated: A parameter in which this backward has accumulated a gradient already: it is not known whether
                there was one before.
        """
        self._fail_if_stale()
        if self.engine.is_open:
            return
        _refuse_compiled_autograd()
        # What is there already is added to, and is the user's: it is not written over.
        prior = {name for name, parameter in self.parameters.items() if parameter.grad is not None}
        self._grads_before = (
            Gradients(self.parameters, self.unsynchronized) if isinstance(self._wire, Elastic) else None
        )
        asked = asked_for(self.parameters)
        task = torch_private.current_backward()
        self._backward = backward = _Backward(task, asked or set(), prior, dict(self._always_sparse), asked is None)
        self._returns = bool(asked)
        step = self._begin(forward_weight)
        self._require_summed_once(prior - {accumulated})
        if asked:
            self._watch(asked)
            if self.sync.skips:
                self._stop(_cannot_skip(self.sync, "torch.autograd.grad"))
        elif not torch.is_grad_enabled() and not any(map(has_other_hooks, self.parameters.values())):
            # Without create_graph, and without anybody who looks at a gradient that is not taken at once.
            backward.is_plain = True
            self._fast.open(step, task, {self.engine.positions[name] for name in prior})
        self._log.backward_starts()
        backward.ending, backward.together = end_with_backward(self.engine, self._finish)

    def fail(self, error: BaseException) -> None:
        """End an open step because of `error`."""
        self.engine.fail(error)
        if self._backward is not None:
            for name in self._backward.deferred - self._backward.has_prior_grad:  # this rank's own: not to be added to
                self.parameters[name].grad = None
        self._close()

    def _stop(self, error: Exception) -> NoReturn:
        """Raise `error`, which ends an open step."""
        self.fail(error)
        raise error

    def _fail_unfinished(self) -> None:
        if self._backward is not None:
            fail_unfinished(self.engine, self._backward.together)
        self.fail(RuntimeError("its backward did not finish"))

    def settle_on(self, is_committed: bool) -> None:
        """End the last step on an elastic wire: if it is not committed, put back the gradients from before it."""
        if self._grads_before is not None and not is_committed:
            self._grads_before.put_back()
            self.unsynchronized = self._grads_before.unsynchronized
        self._grads_before = None

    def participate_with_zeros(self) -> None:
        """Take part in a step in which this rank has no gradients, and keep nothing of it but the state."""
        self._step({}, None)
        self._wait_for_futures()

    def synchronize(self, grads: Mapping[str, Tensor], forward_weight: Weight | None) -> Leaves:
        """Return the means of gradients that are all there, of a step outside of backward's hooks; see `start_of`."""
        self._fail_if_stale()
        if self.engine.is_open:
            raise RuntimeError(
                f"{OWNER}: a backward through tensors that stand for parameters cannot be a part of one that "
                "synchronizes the parameters themselves; call backward for each of the two losses"
            )
        _refuse_compiled_autograd()
        if self.sync.skips:
            raise _cannot_skip(self.sync, "torch.func, and parameters that are not those that were wrapped")
        return self._step(grads, forward_weight).mean

    def _step(self, grads: Mapping[str, Tensor], forward_weight: Weight | None) -> Synchronized:
        self._begin(forward_weight)
        self._require_one_weight(forward_weight)
        try:
            for name in reversed(self.parameters):
                if name in grads:
                    self._require_unbatched(grads[name])
                    self._feed(name, grads[name].detach(), keep=True)
            return self._end()
        except BaseException as error:
            self.fail(error)
            raise

    def require_same_world(self) -> None:
        """Raise a RuntimeError, once and for all, if the process group is not the one that steps are for."""
        try:
            self._world.require_same()
        except RuntimeError:
            self.detach()  # the module may be wrapped again
            raise

    def _begin(self, forward_weight: Weight | None) -> Step:
        self.require_same_world()
        self._weight = forward_weight
        if self.block is not None:
            self._weight, self.block.has_stepped = self.block.weight, True
        with self._log.errors():
            return self.engine.begin(weight=self._weight, scale=self.scale)

    def _require_one_weight(self, forward_weight: Weight | None) -> None:
        """Fail the step, on all ranks, if a forward that is part of it ran in a block of another weight."""
        if forward_weight != self._weight and (forward_weight is not None or self.block is None):
            given = [weight.text for weight in (self._weight, forward_weight) if weight is not None]
            one = " and ".join(given) if len(given) > 1 else f"{given[0]} for some of its forward passes only"
            self._stop(
                RuntimeError(f"{OWNER}: a backward was given the weights {one}; put the backward into one block")
            )

    def detach(self, successor: "Steps | None" = None) -> None:
        """Remove all hooks of parameters; `successor`, if given, takes the gradients from now on."""
        if self.engine.is_open:
            self.fail(RuntimeError("its hooks were removed"))
        for hook in (*self._hooks, *self._early.values()):
            hook.remove()
        if successor is not None:
            self._successor = successor
            successor.is_armed, successor.scale = self.is_armed, self.scale
            successor.block, successor.forward_weight = self.block, self.forward_weight
            successor.unsynchronized |= self.unsynchronized
            successor._watch(self._early)
        self._hooks, self._early = [], {}

    def _arrives(self, name: str, grad: Tensor | None) -> Tensor | None:
        """Autograd has a gradient of a parameter, which it will accumulate or return."""
        if self.is_armed:  # otherwise of a step that began with what the module returned, or of a forward in no_sync
            if not self.engine.is_open and self._waits_for_outer_backward():
                return None
            is_late = not self.engine.is_open and torch_private.is_followed(self.parameters[name], self._early[name])
            self._begins_at_parameters |= not self.engine.is_open
            self.start(self.forward_weight)
            if is_late and self._backward is not None and name in self._backward.asked:
                self._stop(
                    RuntimeError(
                        f"{OWNER}: a hook was registered on parameter {name!r} after the module's forward, and "
                        "torch.autograd.grad would return what it makes of a gradient that is not synchronized yet; "
                        "register it before"
                    )
                )
        if not self.engine.is_open or self._backward is None or name not in self._backward.asked or grad is None:
            return None  # undefined: as if it were unused
        return self._feed_with_placeholder(name, grad)

    def _waits_for_outer_backward(self) -> bool:
        """Return whether a step is to begin in the backward around this one, which a reentrant checkpoint has called.

        Only that one has all gradients. Those that have arrived until then are as if no_sync had accumulated them.
        """
        nodes = torch_private.nodes_of_outer_backward()
        if nodes is None or asked_for(self.parameters):
            return False
        if not nodes:
            error = RuntimeError(
                f"{OWNER}: a hook within a backward has called another one, whose gradients are the first ones, and no "
                "tensor was found in what the module returned that would show the outer one; return tensors in a list, "
                "a dict or a dataclass, or call backward outside of hooks"
            )
            self.leave_out(error)
            raise error
        handles: list[Any] = []
        me = weakref.ref(self)

        def go_on(_: Any) -> None:
            for handle in handles:
                handle.remove()
            handles.clear()
            steps = me()
            if steps is not None and steps.is_armed:
                steps.start(steps.forward_weight)
                if steps._backward is not None:
                    steps._backward.accumulates = True

        handles += [node.register_prehook(go_on) for node in nodes]
        return True

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        """Autograd has accumulated a gradient in `parameter.grad`."""
        grad = parameter.grad
        if grad is None:  # an undefined one
            return
        was_armed = self.is_armed
        self._fail_if_stale()
        if was_armed and not self.engine.is_open and not self._waits_for_outer_backward():
            self._begins_at_parameters = True
            self.start(self.forward_weight, name)  # of a backward that has not begun with what the module returned
        backward = self._backward
        if not self.engine.is_open or backward is None:
            self.unsynchronized.add(name)
            return
        # A backward within the backward, of reentrant checkpointing or another custom function: more may be added.
        is_nested = torch_private.current_backward() != backward.task
        if (is_nested or name in backward.deferred) and not backward.is_finishing:
            backward.deferred.add(name)
            self._fast.excluded.add(self.engine.positions[name])
            return
        if grad.is_sparse:
            backward.sparse[name] = grad.sparse_dim()
            grad = grad.to_dense()
        if grad.requires_grad:  # backward(create_graph=True)
            self._feed_with_placeholder(name, grad)
            return
        has_prior_grad = name in backward.has_prior_grad
        if not has_prior_grad:
            parameter.grad = None  # so that its memory is free once it is on its way
            grad = grad.data  # a hook of the user may hold the other one, which only its own storage shows
        self._feed(name, grad, keep=has_prior_grad)

    def _feed_with_placeholder(self, name: str, grad: Tensor) -> Tensor:
        self._require_unbatched(grad)
        # With create_graph a derivative passes through as if this were the rank's own gradient; synchronized in its
        # turn, it is the one of the mean.
        placeholder = grad.to_dense() if grad.is_sparse else grad.clone()
        if self._backward is not None:
            self._backward.placeholders[name] = placeholder
        self._feed(name, placeholder.detach().clone(), keep=False)
        return placeholder

    def _require_unbatched(self, grad: Tensor) -> None:
        """Fail the step, on all ranks, if `grad` stands for several gradients."""
        if torch_private.is_batched(grad):
            self._stop(
                RuntimeError(
                    f"{OWNER}: one gradient at a time is synchronized, not a batch of them, as with "
                    "is_grads_batched=True or vectorize=True; leave that out, or differentiate the module itself, "
                    "model.module"
                )
            )

    def _feed(self, name: str, grad: Tensor, *, keep: bool) -> None:
        step = self.engine.step
        assert step is not None
        with self._named():
            step.feed(name, grad, keep=keep)
        self._log.fed(step)

    def _advance(self) -> None:
        step = self.engine.step
        if step is not None:
            with self._named():
                step.advance()
            self._log.fed(step)

    @contextmanager
    def _named(self) -> Generator[None]:
        """Raise, for an unexpected gradient, an error in terms of the module."""
        try:
            yield
        except UnexpectedGradient as error:
            if not error.is_unlike:
                raise RuntimeError(
                    f"{OWNER}: the gradient of parameter {error.path!r} has arrived already in this step: a custom "
                    "autograd function runs the module in its backward, and the same backward reaches it outside of "
                    "that; call backward for each of the two losses, or use checkpoint(..., use_reentrant=False)"
                ) from None
            raise _changed(error.path, error.grad, self.engine.leaves[error.path]) from None

    def _finish(self) -> None:
        """At the end of a backward."""
        self._log.backward_ends()
        was_armed, backward, step = self.is_armed, self._backward, self.engine.step
        if backward is None or step is None:  # it has failed with the step of another engine
            self._close()
            self.settle_on(is_committed=False)
            return
        try:
            backward.is_finishing = True
            self._fast.close()
            missing = step.missing if backward.deferred or self.unsynchronized else frozenset[str]()
            for name in sorted(self._waiting(backward, missing)):
                parameter = self.parameters[name]
                if name in backward.deferred and name not in missing and parameter.grad is not None:
                    raise _used_twice(name)
                self._accumulated(name, parameter)
            done = self._end()
        except BaseException as error:
            self.fail(error)
            if isinstance(self._wire, Elastic) and isinstance(error, CollectiveError | StepFailedError):
                self._wire.report(error)  # the ranks that are left go on, with the gradients from before this backward
                self.settle_on(is_committed=False)
                return
            raise
        self._close()
        if len(done.unused) == len(self.parameters):  # no parameter had a gradient on any rank
            self.is_armed = was_armed  # for a backward through the gradients of inputs that this one has made
            if was_armed:
                self._watch(self.parameters)
            return
        placeholders = backward.placeholders
        # With create_graph likewise: what follows is synchronized too.
        self.is_armed = was_armed and any(placeholder.requires_grad for placeholder in placeholders.values())
        if self.is_armed:
            self._watch(self.parameters)
        for name in placeholders.keys() & done.mean.keys():
            placeholders[name].data.copy_(done.mean[name])
        if backward.asked:
            self._require_returned(placeholders, done.unused)
        else:
            self.unsynchronized = set()
            self._write(done, backward)
        self._wait_for_futures()
        self._log.step_ends(self.engine, done.unused)

    def _wait_for_futures(self) -> None:
        if self._futures:
            self._futures.wait()

    def _write(self, done: Synchronized, backward: _Backward) -> None:
        """Write means to `.grad`."""
        is_plain = backward.is_plain and not (backward.has_prior_grad or backward.sparse or done.unused)
        for name, mean in done.mean.items():
            parameter = self.parameters[name]
            if is_plain and mean.stride() == parameter.stride():
                parameter.grad = mean
            elif name not in done.unused or (self._gives_later(parameter) and bool(mean.any())):
                self._set_grad(name, backward.placeholders.get(name, mean), backward)
        for name in self.parameters.keys() - done.mean.keys() - done.unused:  # no update: optimizers stand still
            self.parameters[name].grad = None

    def _waiting(self, backward: _Backward, missing: frozenset[str]) -> set[str]:
        """Return the parameters whose gradients are there but have not been fed."""
        missing = missing - backward.deferred
        if backward.asked or (len(missing) == len(self.parameters) and not backward.accumulates):
            return backward.deferred
        # What was accumulated within no_sync, of parameters that this backward has not reached.
        return (self.unsynchronized & missing) | backward.deferred

    def _gives_later(self, parameter: Tensor) -> bool:
        return self.engine.sync.gives_later and parameter.requires_grad

    def _set_grad(self, name: str, mean: Tensor, backward: _Backward) -> None:
        parameter = self.parameters[name]
        grad = parameter.grad
        if name in backward.sparse:
            mean = mean.to_sparse(backward.sparse[name])
        elif mean.stride() != parameter.stride():  # which optimizers expect of a dense parameter, as torch does
            mean = torch.empty_like(parameter, dtype=mean.dtype).copy_(mean)
        if name in backward.has_prior_grad and grad is not None and not grad.is_sparse and not mean.requires_grad:
            grad.copy_(mean)  # others may hold it, as a part of a flat buffer
        else:
            parameter.grad = mean
        optimizers = optimizers_in_backward(parameter)
        for optimizer in optimizers:
            optimizer.step()
        if optimizers:
            parameter.grad = None

    def _require_summed_once(self, prior: set[str]) -> None:
        """Fail the step, on all ranks, if it would add up once more what an earlier one has added up."""
        if not self._sums:
            return
        kept = prior - self.unsynchronized
        grads = {name: parameter.grad for name, parameter in self.parameters.items() if name in kept}
        again = [name for name, grad in grads.items() if grad is not None and bool(grad.any())]
        if again:
            self._stop(
                RuntimeError(
                    f"{OWNER}: parameter {again[0]!r} has a gradient that is a sum over ranks already, which "
                    f"{self.sync!r} would add up again with what this backward adds; call optimizer.zero_grad() before "
                    "each backward, or run all but the last within no_sync()"
                )
            )

    def _require_returned(self, returned: Collection[str], unused: Collection[str]) -> None:
        lost = [name for name in self.parameters if name not in returned and name not in unused]
        if lost:
            raise RuntimeError(
                f"torch.autograd.grad was asked on other ranks for {', '.join(lost)}, which this rank has not used or "
                "not asked for, so it cannot return their mean; use backward(), or the same parameters on all ranks"
            )

    def _end(self) -> Synchronized:
        """End the step, on all ranks alike."""
        step, learns = self.engine.step, self.engine.learns_order
        assert step is not None
        # So torch calls it in profiles: it is here that ranks learn what none of them has used.
        named = torch.autograd.profiler.record_function("search_unused_parameters")
        with self._named(), self._log.errors(), named, in_profile("end"):
            unused = step.agree()
            if len(unused) == len(self.parameters):
                step.give_up()
                return Synchronized({}, unused)
            if unused != self._promises.first:
                try:
                    self._promises.check(unused)
                except RuntimeError:  # on all ranks
                    step.give_up(failed=True)
                    raise
            done = step.commit()
        if learns and self._promises.skips_unused:
            self.engine.drop(unused)
        return done

    def _fail_if_stale(self) -> None:
        # Autograd forgets its callbacks when a backward raises.
        if self.engine.is_open and self._backward is not None and self._backward.ending() is None:
            self._fail_unfinished()

    def _close(self) -> None:
        self.is_armed, self._backward = False, None
        self._fast.close()
        for hook in self._early.values():
            hook.remove()
        self._early = {}


def take_over_optimizers(parameters: Iterable[nn.Parameter]) -> None:
    """Optimizers that run within backward run when gradients are synchronized, not when they are accumulated.

    They are those of `torch.distributed.optim._apply_optimizer_in_backward`. As in torch, gradients are None then.
    """
    theirs = [parameter for parameter in parameters if optimizers_in_backward(parameter)]
    if theirs:
        torch_private.take_over_optimizers_in_backward(theirs)


def _cannot_skip(sync: Sync, asking: str) -> RuntimeError:
    return RuntimeError(
        f"{OWNER}: {sync!r} has no update for some leaves in some steps, and {asking} cannot express that; use "
        "backward(), which leaves .grad None, or fnddp.value_and_grad"
    )


def _refuse_compiled_autograd() -> None:
    if torch_private.is_compiled_autograd():
        raise RuntimeError(
            f"{OWNER}: gradients are not synchronized in a backward that compiled autograd runs; turn "
            "torch._dynamo.config.compiled_autograd off (torch.compile of the model works without it)"
        )


def _used_twice(name: str) -> RuntimeError:
    return RuntimeError(
        f"{OWNER}: parameter {name!r} is used both inside and outside a reentrant checkpoint (or another custom "
        "autograd function whose backward runs a backward of its own), and its gradient was synchronized before that "
        "ran; checkpoint with use_reentrant=False, or pass the parameter to the function as an input"
    )


def _changed(name: str, grad: Tensor, expected: LeafSpec) -> ValueError:
    return ValueError(
        f"{OWNER}: parameter {name!r} was {expected} on {expected.device} when the module was wrapped, and its "
        f"gradient is {describe(grad)} on {grad.device} now; wrap the module again"
    )

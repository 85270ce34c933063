"""Backward passes of a wrapped module as steps of an engine.

A step begins with the first gradient of a backward that is to synchronize, and ends with it. In between each parameter
hands its gradient over, in one of two ways: as `parameter.grad`, once it is accumulated; or, where
`torch.autograd.grad` asks for it, before that: autograd gets memory which is filled at the end.
"""

import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fnddp import torch_private
from fnddp.adapters.ending import end_with_backward, fail_unfinished
from fnddp.adapters.module.autograd import Quick, Requests, WeakHook, accumulates
from fnddp.adapters.module.gradients import Gradients
from fnddp.adapters.module.promises import Promises
from fnddp.adapters.module.slots import OWNER, Trained
from fnddp.adapters.module.world import World
from fnddp.adapters.torch_compat.log import Log
from fnddp.core.state import describe
from fnddp.core.sync import State, Sync
from fnddp.core.tree import Leaves
from fnddp.ir.program import LeafSpec
from fnddp.plan.draft import Donation
from fnddp.plan.plan import Plan
from fnddp.run.engine import Engine, Synchronized
from fnddp.run.runner import UnexpectedGradient
from fnddp.run.vote import StepFailedError
from fnddp.torch_private import has_other_hooks, optimizers_in_backward
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


class Steps:
    """Feeds the gradients of a module to an engine of its own.

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
        at_end: Called when a step is over.

    Attributes:
        is_armed: Whether the next backward is one that synchronizes.
        scale: What gradients are multiplied by on their way.
        block: The block with a weight that runs now.
        told: The weight of the block in which the last forward ran.
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
        at_end: Callable[[], None],
    ) -> None:
        self.parameters = trained.parameters
        self.engine = Engine(
            pipeline,
            trained.leaves(),
            state=initial,
            donation=Donation(gradients="yes", state=True),
            bucket_caps=bucket_caps,
            learns_order=True,
            skips_unused=True,
            drops_unused=promises.skips_unused,
            check_unused=promises.check,
            groups=[group],
            wire=wire,
            backend=backend,
        )
        self.is_armed = False
        self.scale = 1.0
        self.block: Block | None = None
        self.told: Weight | None = None
        self._weight: Weight | None = None  # of the step
        self.unsynchronized: set[str] = set()
        self._world = World(group, f"{OWNER}: the module was wrapped", "wrap the module again")
        self._wire, self._log = wire, log
        self._at_end = at_end
        self._always_sparse = dict.fromkeys(sparse, 1)
        self._kept: set[str] = set()  # with a gradient that the step adds to
        self._late: set[str] = set()  # whose gradient waits for the end of the step
        self._found: Gradients | None = None  # by the last backward, where its step may turn out to be none
        self._sparse: dict[str, int] = {}
        self._requests = Requests(self.parameters)
        self._accumulates = False  # the backward of the step, in all leaves that it reaches
        self._asked: set[str] = set()  # whose gradients torch.autograd.grad will return
        self._placeholders: dict[str, Tensor] = {}  # what means are written to, where autograd goes on with it
        self._task = -1  # autograd's number for the backward of the step
        self._ending: Callable[[], object] | None = None
        self._together: list[Engine] = []  # engines with a step in that backward
        self._is_finishing = False
        self._successor: Steps | None = None
        self._quick = Quick([WeakHook(self, Steps._accumulated, name) for name in self.engine.leaves])
        carry_on = weakref.WeakMethod(self._carry_on)
        self._hooks: list[Any] = []
        self._before: dict[str, Any] = {}  # of those, which see gradients before they are accumulated
        for position, name in enumerate(self.engine.leaves):
            parameter = self.parameters[name]
            arrives = self._quick.before(WeakHook(self, Steps._arrives, name))
            accumulated = self._quick.after(position, carry_on)
            self._before[name] = parameter.register_hook(arrives)
            self._hooks += [
                self._before[name],
                parameter.register_post_accumulate_grad_hook(accumulated),
            ]

    @property
    def sync(self) -> Sync:
        """The pipeline."""
        return self.engine.sync

    @property
    def state(self) -> State:
        """The pipeline's state after the last step, which later steps do not write over."""
        return self.engine.state

    @state.setter
    def state(self, saved: State) -> None:
        self.engine.state = saved

    @property
    def plan(self) -> Plan | None:
        """What the last step ran."""
        return self.engine.plan

    @property
    def is_open(self) -> bool:
        """Whether a step has begun and not ended."""
        return self.engine.is_open

    def settle(self) -> None:
        """Ends a step whose backward did not finish.

        Raises:
            RuntimeError: Since this one, or an earlier one, ranks may be out of step.
        """
        if self.engine.is_open:
            fail_unfinished(self.engine, self._together)
            self.fail(RuntimeError("its backward did not finish"))
        self._quick.close()  # of a step that failed with another one's
        self.engine.refuse_after_failure()

    def refuse(self, error: BaseException) -> None:
        """No step is taken any more because of `error`, which leaves this rank out of step with the others."""
        self.engine.refuse_from_now_on(error)

    def leave_out(self, error: BaseException) -> None:
        """End the step that is open or comes next because of `error`, on all ranks, so that none waits for it."""
        with suppress(RuntimeError):  # in a step that cannot begin nobody waits for this rank
            self.engine.fail_next(error)
        self._close()

    def arm(self) -> None:
        """The next backward synchronizes."""
        self.is_armed = True

    def start_of(self, told: Weight | None, behind: Sequence[Any], grad: Tensor) -> None:
        """Begin a step where a backward reaches what a forward has returned.

        Args:
            told: The weight of the block in which the forward ran.
            behind: The nodes that have made it.
            grad: Its gradient.
        """
        if self._successor is not None:
            self._successor.start_of(told, behind, grad)
            return
        self.start(told)
        if self.unsynchronized and not self._accumulates:
            self._accumulates = accumulates(behind)
        self._require_one_weight(told)

    def start(self, told: Weight | None) -> None:
        """Begin a step, unless one is open; `told` is the weight of the block in which the forward ran, if any."""
        self._fail_if_stale()
        if self.engine.is_open:
            return
        _refuse_compiled_autograd()
        self._quick.close()
        # What is there already is added to, and is the user's: it is not written over.
        self._kept = {name for name, parameter in self.parameters.items() if parameter.grad is not None}
        self._sparse, self._placeholders, self._late = dict(self._always_sparse), {}, set()
        self._found = Gradients(self.parameters, self.unsynchronized) if isinstance(self._wire, Elastic) else None
        asked = self._requests.asked_for()
        self._accumulates, self._asked = asked is None, asked or set()
        self._task = torch_private.current_backward()
        self._begin(told)
        self._require_summed_once()
        if self._asked:
            for name in self._asked:  # so that what hooks of the user's make of a gradient is synchronized, too
                torch_private.put_last(self.parameters[name], self._before[name])
            self._require_updates("torch.autograd.grad")
        elif not torch.is_grad_enabled() and not any(map(has_other_hooks, self.parameters.values())):
            # Without create_graph, and without anybody who looks at a gradient that is not taken at once.
            self._quick.open(self._task, self.engine.inbox, {self.engine.positions[name] for name in self._kept})
        self._log.backward_starts()
        self._ending, self._together = end_with_backward(self.engine, self._finish)

    def fail(self, error: BaseException) -> None:
        """Ends an open step because of `error`."""
        self.engine.fail(error)
        for name in self._late - self._kept:  # this rank's own, which are not to be added to
            self.parameters[name].grad = None
        self._close()

    def settle_on(self, is_committed: bool) -> None:
        """On an elastic wire: says whether the last step is one. If not, gradients are what its backward found."""
        if self._found is not None and not is_committed:
            self._found.put_back()
            self.unsynchronized = self._found.unsynchronized
        self._found = None

    def shadow(self) -> None:
        """Takes part in a step in which this rank has no gradients, and keeps nothing of it but the state."""
        self._step({}, None)
        self._at_end()

    def synchronize(self, grads: Mapping[str, Tensor], told: Weight | None) -> Leaves:
        """The means of gradients that are all there, of a step outside of backward's hooks; see `start_of`."""
        self._fail_if_stale()
        if self.engine.is_open:
            raise RuntimeError(
                f"{OWNER}: a backward through tensors that stand for parameters cannot be a part of one that "
                "synchronizes the parameters themselves; call backward for each of the two losses"
            )
        _refuse_compiled_autograd()
        if self.sync.skips:
            raise _cannot_skip(self.sync, "torch.func, and parameters that are not those that were wrapped")
        return self._step(grads, told).mean

    def _step(self, grads: Mapping[str, Tensor], told: Weight | None) -> Synchronized:
        self._begin(told)
        self._require_one_weight(told)
        try:
            for name in reversed(self.parameters):
                if name in grads:
                    self._require_unbatched(grads[name])
                    self._feed(name, grads[name].detach(), keep=True)
            return self._run()
        except BaseException as error:
            self.fail(error)
            raise

    def require_same_world(self) -> None:
        """Raises a RuntimeError, once and for all, if the process group is not the one that steps are for."""
        try:
            self._world.require_same()
        except RuntimeError:
            self.detach()  # for who wraps the module again
            raise

    def _begin(self, told: Weight | None) -> None:
        self.require_same_world()
        self._weight = told
        if self.block is not None:
            self._weight, self.block.has_stepped = self.block.weight, True
        with self._log.errors():
            self.engine.start(weight=self._weight, scale=self.scale)

    def _require_one_weight(self, told: Weight | None) -> None:
        """Fails the step, on all ranks, if a forward that is part of it ran in a block of another weight."""
        if told != self._weight and (told is not None or self.block is None):
            given = [weight.text for weight in (self._weight, told) if weight is not None]
            one = " and ".join(given) if len(given) > 1 else f"{given[0]} for some of its forward passes only"
            error = RuntimeError(f"{OWNER}: a backward was given the weights {one}; put the backward into one block")
            self.fail(error)
            raise error

    def detach(self, successor: "Steps | None" = None) -> None:
        """Lets go of the parameters: from now on their gradients are nobody's, or those of `successor`."""
        if self.engine.is_open:
            self.fail(RuntimeError("its hooks were removed"))
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if successor is not None:
            self._successor = successor
            successor.is_armed, successor.scale = self.is_armed, self.scale
            successor.block, successor.told = self.block, self.told
            successor.unsynchronized |= self.unsynchronized

    def _arrives(self, name: str, grad: Tensor | None) -> Tensor | None:
        """Autograd has a gradient of a parameter, which it will accumulate or return."""
        if not self.engine.is_open and not self.is_armed:  # a forward within no_sync, or of the module itself
            return None
        if self.is_armed:  # or it began with what the module returned
            if not self.engine.is_open and self._waits_for_outer_backward():
                return None
            is_late = not self.engine.is_open and torch_private.is_followed(self.parameters[name], self._before[name])
            self.start(self.told)
            if is_late and name in self._asked:
                error = RuntimeError(
                    f"{OWNER}: a hook was registered on parameter {name!r} after the module was wrapped, and "
                    "torch.autograd.grad would return what it makes of a gradient that is not synchronized yet; "
                    "register it before the module is wrapped"
                )
                self.fail(error)
                raise error
        if name not in self._asked or not self.engine.is_open or grad is None:  # undefined: as if it were unused
            return None
        return self._feed_with_placeholder(name, grad)

    def _waits_for_outer_backward(self) -> bool:
        """Return whether a step is to begin in the backward around this one, which a reentrant checkpoint has called.

        Only that one has all gradients. Those that have arrived until then are as if no_sync had accumulated them.
        """
        nodes = torch_private.nodes_of_outer_backward()
        if nodes is None or self._requests.asked_for():
            return False
        if not nodes:
            error = RuntimeError(
                f"{OWNER}: a hook within a backward has called another one, whose gradients are the first ones, and no "
                "tensor was found in what the module returned that would have told of the outer one; return tensors in "
                "a list, a dict or a dataclass, or call backward outside of hooks"
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
                steps.start(steps.told)
                steps._accumulates = True

        handles += [node.register_prehook(go_on) for node in nodes]
        return True

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        """Autograd has accumulated a gradient in `parameter.grad`."""
        grad = parameter.grad
        if grad is None:  # an undefined one
            return
        self._fail_if_stale()
        if not self.engine.is_open:
            self.unsynchronized.add(name)
            return
        # A backward within the backward, of reentrant checkpointing or another custom function: more may be added.
        is_nested = torch_private.current_backward() != self._task
        if (is_nested or name in self._late) and not self._is_finishing:
            self._late.add(name)
            return
        if grad.is_sparse:
            self._sparse[name] = grad.sparse_dim()
            grad = grad.to_dense()
        if grad.requires_grad:  # backward(create_graph=True)
            self._feed_with_placeholder(name, grad)
            return
        if name not in self._kept:
            parameter.grad = None  # so that its memory is free once it is on its way
            grad = grad.data  # a hook of the user's may hold the other one, which only its own storage can tell
        self._feed(name, grad, keep=name in self._kept)

    def _feed_with_placeholder(self, name: str, grad: Tensor) -> Tensor:
        self._require_unbatched(grad)
        # With create_graph a derivative passes through as if this were the rank's own gradient; synchronized in its
        # turn, it is the one of the mean.
        self._placeholders[name] = placeholder = grad.to_dense() if grad.is_sparse else grad.clone()
        self._feed(name, placeholder.detach().clone(), keep=False)
        return placeholder

    def _require_unbatched(self, grad: Tensor) -> None:
        """Fail the step, on all ranks, if `grad` stands for several gradients."""
        if torch_private.is_batched(grad):
            error = RuntimeError(
                f"{OWNER}: one gradient at a time is synchronized, not a batch of them, as with is_grads_batched=True "
                "or vectorize=True; leave that out, or differentiate the module itself, model.module"
            )
            self.fail(error)
            raise error

    def _feed(self, name: str, grad: Tensor, *, keep: bool) -> None:
        with self._named():
            self.engine.feed(name, grad, keep=keep)
        self._log.fed(self.engine)

    def _carry_on(self) -> None:
        with self._named():
            self._quick.hand_over()
            self.engine.poll()
        self._log.fed(self.engine)

    @contextmanager
    def _named(self) -> Generator[None]:
        """Says of an unexpected gradient what the user of a module knows of it."""
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
        was_armed = self.is_armed
        try:
            self._is_finishing = True
            with self._named():
                self._quick.hand_over()
                waiting = sorted(self._waiting())
            missing = self.engine.missing if self._late else frozenset[str]()
            for name in waiting:
                if name in self._late and name not in missing and self.parameters[name].grad is not None:
                    raise _used_twice(name)
                self._accumulated(name, self.parameters[name])
            done = self._run()
        except BaseException as error:
            self.fail(error)
            if isinstance(self._wire, Elastic) and isinstance(error, CollectiveError | StepFailedError):
                self._wire.report(error)  # whoever is left goes on, with what was there before this backward
                self.settle_on(is_committed=False)
                return
            raise
        placeholders, was_quick = self._placeholders, self._quick.is_open
        self._close()
        if self._is_none(done):
            self.is_armed = was_armed  # for a backward through the gradients of inputs that this one has made
            return
        # With create_graph likewise: what follows is synchronized too.
        self.is_armed = was_armed and any(placeholder.requires_grad for placeholder in placeholders.values())
        for name in placeholders.keys() & done.mean.keys():
            placeholders[name].data.copy_(done.mean[name])
        if self._asked:
            self._require_returned(placeholders, done.unused)
        else:
            self.unsynchronized = set()
            is_plain = was_quick and not (self._kept or self._sparse or done.unused)
            for name, mean in done.mean.items():
                parameter = self.parameters[name]
                if is_plain and mean.stride() == parameter.stride():
                    parameter.grad = mean
                elif name not in done.unused or (self._gives_later(parameter) and bool(mean.any())):
                    self._set_grad(name, placeholders.get(name, mean))
            for name in self.parameters.keys() - done.mean.keys() - done.unused:  # no update: optimizers stand still
                self.parameters[name].grad = None
        self._at_end()
        self._log.step_ends(self.engine, done.unused)

    def _waiting(self) -> set[str]:
        """Parameters whose gradients are there but have not been fed."""
        missing = self.engine.missing - self._late
        if self._asked or (len(missing) == len(self.parameters) and not self._accumulates):
            return self._late
        # What was accumulated within no_sync, of parameters that this backward has not reached.
        return (self.unsynchronized & missing) | self._late

    def _gives_later(self, parameter: Tensor) -> bool:
        return self.engine.sync.gives_later and parameter.requires_grad

    def _set_grad(self, name: str, mean: Tensor) -> None:
        parameter = self.parameters[name]
        grad = parameter.grad
        if name in self._sparse:
            mean = mean.to_sparse(self._sparse[name])
        elif mean.stride() != parameter.stride():  # which optimizers expect of a dense parameter, as torch does
            mean = torch.empty_like(parameter, dtype=mean.dtype).copy_(mean)
        if name in self._kept and grad is not None and not grad.is_sparse and not mean.requires_grad:
            grad.copy_(mean)  # others may hold it, as a part of a flat buffer
        else:
            parameter.grad = mean
        optimizers = optimizers_in_backward(parameter)
        for optimizer in optimizers:
            optimizer.step()
        if optimizers:
            parameter.grad = None

    def _require_summed_once(self) -> None:
        """Fail the step, on all ranks, if it would add up once more what an earlier one has added up."""
        if "sum" not in self.sync.ops:
            return
        kept = self._kept - self.unsynchronized
        grads = {name: parameter.grad for name, parameter in self.parameters.items() if name in kept}
        again = [name for name, grad in grads.items() if grad is not None and bool(grad.any())]
        if again:
            error = RuntimeError(
                f"{OWNER}: parameter {again[0]!r} has a gradient that is a sum over ranks already, which {self.sync!r} "
                "would add up again with what this backward adds; call optimizer.zero_grad() before each backward, or "
                "run all but the last within no_sync()"
            )
            self.fail(error)
            raise error

    def _require_returned(self, returned: Collection[str], unused: Collection[str]) -> None:
        lost = [name for name in self.parameters if name not in returned and name not in unused]
        if lost:
            raise RuntimeError(
                f"torch.autograd.grad was asked on other ranks for {', '.join(lost)}, which this rank has not used or "
                "not asked for, so it cannot return their mean; use backward(), or the same parameters on all ranks"
            )

    def _require_updates(self, asking: str) -> None:
        """Fails the step, on all ranks, if some of what is asked for may have no update."""
        if self.sync.skips:
            error = _cannot_skip(self.sync, asking)
            self.fail(error)
            raise error

    def _run(self) -> Synchronized:
        # So torch calls it in profiles: it is here that ranks learn what none of them has used.
        with self._named(), self._log.errors(), torch.autograd.profiler.record_function("search_unused_parameters"):
            return self.engine.finish()

    def _is_none(self, done: Synchronized) -> bool:
        """Whether no parameter had a gradient on any rank."""
        return len(done.unused) == len(self.parameters)

    def _fail_if_stale(self) -> None:
        # Autograd forgets its callbacks when a backward raises.
        if self.engine.is_open and self._ending is not None and self._ending() is None:
            fail_unfinished(self.engine, self._together)
            self.fail(RuntimeError("its backward did not finish"))

    def _close(self) -> None:
        self.is_armed = self._is_finishing = False
        self._placeholders, self._late, self._ending, self._together = {}, set(), None, []
        self._quick.close()


def take_over_optimizers(parameters: Iterable[nn.Parameter]) -> None:
    """Optimizers that run within backward run when gradients are synchronized, not when they are accumulated.

    They are those of `torch.distributed.optim._apply_optimizer_in_backward`. As in torch, gradients are None then.
    """
    theirs = [parameter for parameter in parameters if optimizers_in_backward(parameter)]
    if theirs:
        torch_private.take_over_optimizers_in_backward(theirs)


def _cannot_skip(sync: Sync, asking: str) -> RuntimeError:
    return RuntimeError(
        f"{OWNER}: {sync!r} has no update for some leaves in some steps, and {asking} cannot be told so; use "
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

"""Begin, end and fail the steps of backwards, and provide the hooks by which gradients arrive.

No other file of adapters begins, ends or fails a step of a backward.

A `Backward` is idle at first. From the first gradient on it has an open step. It is idle again when the step has ended
on all ranks. An adapter only defines which gradients no hook has seen, the checks, and how to undo a failed step.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Set
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from fnddp import torch_private
from fnddp.core.sync import Sync, require_takes_weight
from fnddp.device import device_of
from fnddp.run.engine import Engine, begin_next
from fnddp.run.step import Step, Synchronized, applying, in_profile
from fnddp.torch_private import current_backward
from fnddp.wire.protocol import CollectiveError, Elastic

Owner = TypeVar("Owner")

UNFINISHED = "its backward did not finish"


def _nothing(*_: Any) -> None:
    pass


def _same(error: BaseException) -> BaseException:
    return error


class Backward:
    """The consecutive backwards of one adapter; each is a step of an engine.

    Args:
        engine: The engine. It may be replaced between two steps.
        undo: Callback for a step that failed: undoes the adapter's changes in it.
        named: Function that translates an error of the step into the one that the adapter raises.

    Attributes:
        failure: The first error of this rank in the open step, kept for its end.
        is_starting: True while a step begins that an autograd backward will end.
    """

    is_starting = False

    def __init__(
        self,
        engine: Engine,
        *,
        undo: Callable[[], object] = _nothing,
        named: Callable[[BaseException], BaseException] = _same,
    ) -> None:
        self.engine, self._undo, self._named = engine, undo, named
        self.failure: BaseException | None = None
        self._shared: _SharedBackward | None = None  # the steps of the autograd backward that has or will have this one

    @property
    def step(self) -> Any:
        """The open step; None while idle."""
        return self.engine.step

    def begin(self, **options: Any) -> Step:
        """Begin a step, and return it: see `Engine.begin`."""
        return self.engine.begin(**options)

    def end_with_autograds(self, end: Callable[[], None], reaches: "Iterable[Backward]" = ()) -> None:
        """Queue `end`, the function that ends the open step, as a final callback of the running autograd backward.

        Args:
            reaches: Other `Backward`s that are idle, and will begin a step in the same autograd backward.
        """
        with _lock:
            task = current_backward()
            ending = _endings.get(task)
            if ending is None:
                ending = _endings[task] = _Ending(task)
                torch_private.at_end_of_backward(ending)
            if self._shared is not None:  # of an earlier autograd backward that raised before it got here
                self._shared.awaited.pop(self, None)
            ending.ends[self] = end
            ending.shared.begun[self] = None
            for each in (self, *reaches):
                each._shared = ending.shared
                ending.shared.awaited[each] = None

    def is_running(self) -> bool:
        """Return True if a step is open. First fail it if its backward has raised: autograd does not report that."""
        if self.step is not None and self.has_raised:
            self.fail_all(_unfinished())
        return self.step is not None

    @property
    def has_raised(self) -> bool:
        """True if an autograd backward raised in which this one began a step, or would have begun one."""
        return self._broken_off is not None

    @property
    def is_in_progress(self) -> bool:
        """True while an autograd backward runs that ends this one's step. False if the adapter ends it by itself."""
        return self.is_starting or (self._shared is not None and not self._shared.has_raised)

    @property
    def _broken_off(self) -> "_SharedBackward | None":
        """The steps of the autograd backward, if it has raised."""
        shared = self._shared
        return shared if shared is not None and shared.has_raised else None

    def attempt(self, run: Callable[[], object]) -> None:
        """Call `run`, a part of the step, unless an earlier part failed; keep its error for `end`.

        Use it if an error must not be raised at once, because the caller has to run collectives of its own first.
        """
        if self.failure is None:
            try:
                run()
            except BaseException as error:
                self.keep(error)

    def keep(self, error: BaseException) -> None:
        """Keep the first error of this rank for `end`."""
        self.failure = self.failure or error

    def end(
        self, late: Callable[[], object] = _nothing, check: Callable[[frozenset[str]], object] = _nothing
    ) -> Synchronized:
        """End the step with the same outcome on all ranks, and return the means.

        Args:
            late: Function that puts gradients that no hook has seen into the step; may raise on this rank alone.
            check: Function of the leaves that no rank used, called when all ranks have agreed but nothing is written
                over yet. It may raise, then on all ranks, or return False, and then the step has no effect.

        Raises:
            StepFailedError: Another rank has failed.
            CollectiveError: A collective has failed.
            Exception: The error that was kept, or an error of `late` or `check`.
        """
        try:
            if self.failure is not None:
                raise self.failure
            step = self.step
            late()
            with in_profile("end"):
                unused = step.agree()
                try:
                    has_effect = check(unused)
                except Exception:  # raised on all ranks, unlike an interrupt
                    step.give_up(failed=True)
                    raise
                if has_effect is False:
                    step.give_up()
                    return Synchronized({}, unused)
                return step.commit()
        except BaseException as error:
            named = self._named(error)
            self.fail(named)
            if named is error:
                raise
            raise named from None
        finally:
            self._shared = None

    def fail(self, error: BaseException) -> None:
        """Fail the open step, if any, on all ranks, and undo the adapter's changes.

        On an elastic wire no rank applies the step, even if it has ended on this rank.
        """
        error, self.failure, self._shared = self.failure or error, None, None
        self.engine.fail(error)
        if isinstance(self.engine.wire, Elastic):
            self.engine.wire.report(error)
        self._undo()

    def fail_all(self, error: BaseException) -> None:
        """Fail all steps of the running autograd backward, or of one that raised, including those not yet begun."""
        if self._shared is not None:
            self._shared.fail(error)
        if self.step is not None:
            self.fail(error)

    def fail_next(self, error: BaseException) -> None:
        """Fail the open step, or else the next one, on all ranks, so that none of them waits for this rank."""
        if self._broken_off is not None:
            self.fail_all(error)
        else:
            if self.step is None:
                begin_next([self.engine])
            self.fail(error)

    @torch_private.untraced
    def require_idle(self) -> None:
        """Fail a step that is still open, on all ranks, without raising: its backward did not finish.

        Also fail the steps of other models whose backward raised in this thread, in the order in which other ranks wait
        in them. (On an accelerator autograd has threads of its own, so these steps are failed by their own models.)
        """
        with _lock:
            raised = [each for each in _shared if each.has_raised and each.thread == threading.get_ident()]
        for each in raised:
            each.fail(_unfinished())
        if self.step is not None or self.has_raised:
            self.fail_all(_unfinished())
        self._shared = self.failure = None


class RankWeight:
    """The weight of this rank in the backwards that begin in a block; None outside of one."""

    given: float | Tensor | None = None

    @contextmanager
    def block(self, sync: Sync, count: float | Tensor) -> Generator[None]:
        """Set the weight in the block. Raise a TypeError if `sync` takes no weight."""
        require_takes_weight(sync, count)
        before, self.given = self.given, count
        try:
            yield
        finally:
            self.given = before


def _unfinished() -> RuntimeError:
    """Return an error for a step after its backward has raised, with that exception if it is being handled."""
    cause = sys.exception()
    return RuntimeError(UNFINISHED if cause is None else f"{UNFINISHED}: {type(cause).__name__}: {cause}")


class _SharedBackward:
    """The steps of one autograd backward, on several engines. It outlives that backward if the backward raises.

    Attributes:
        begun, awaited: Ordered sets: `Backward`s with a step in this backward, and all that it reaches.
        thread: The thread in which autograd runs its hooks.
    """

    def __init__(self, ending: "_Ending") -> None:
        self._ending, self.thread = weakref.ref(ending), threading.get_ident()
        _shared[self] = None
        self.begun: dict[Backward, None] = {}
        self.awaited: dict[Backward, None] = {}

    @property
    def has_raised(self) -> bool:
        """True if the backward has raised, so that autograd will not call its final callback."""
        return self._ending() is None

    def fail(self, error: BaseException) -> None:
        """Fail all steps on all ranks because of `error`, including those not yet begun that other ranks wait for."""
        begun, awaited = self.begun, self.awaited
        self.begun, self.awaited = {}, {}
        begin_next(each.engine for each in awaited if each not in begun and each.step is None)
        for each in in_order({**awaited, **begun}):
            each.fail(error)


def in_order(backwards: Iterable[Backward]) -> list[Backward]:
    """Return `backwards` in the order in which their steps end. It is the same on all ranks.

    It is the order in which their lanes were created. Autograd may reach them in a different order on each rank. Steps
    without a plan come first, because they may fail on all ranks after they have voted.
    """
    return sorted(backwards, key=lambda each: (each.engine.plan is not None, each.engine.number))


class _Ending:
    """Callback at the end of a backward that ends its steps. It exists as long as that backward runs.

    Ending a step waits for other ranks, so steps must end in the same order on all ranks.
    """

    def __init__(self, task: int) -> None:
        self._task = task
        self.shared = _SharedBackward(self)
        self.ends: dict[Backward, Callable[[], None]] = {}

    @torch_private.skipped_by_dynamo
    def __call__(self) -> None:
        with _lock:
            _endings.pop(self._task, None)  # code that runs from now on may begin another one
        self.shared.awaited = {}
        backwards = in_order(self.ends) if len(self.ends) > 1 else [*self.ends]
        failure = self._known_failure(backwards) if len(backwards) > 1 else None
        for backward in backwards:
            try:
                with applying(backward.engine):
                    if (
                        failure is None
                        or isinstance(failure, CollectiveError)  # cannot be reported, as all errors on an accelerator
                        or device_of(backward.engine.device).is_asynchronous
                    ):
                        self.ends[backward]()
                    else:
                        backward.fail(failure)
            except BaseException as error:  # other ranks wait for the remaining steps, which fail with this one
                failure = failure or error
            finally:
                self.shared.begun.pop(backward, None)
        if failure is not None:
            raise failure

    def _known_failure(self, backwards: Iterable[Backward]) -> BaseException | None:
        """Return the error with which one of the steps will fail on this rank, as far as it is known before its end."""
        for each in backwards:
            try:
                if each.step is not None:
                    each.step.require_weight()
            except ValueError as error:
                return each.failure or error
        return next((each.failure for each in backwards if each.failure is not None), None)


_endings: "weakref.WeakValueDictionary[int, _Ending]" = weakref.WeakValueDictionary()  # by autograd's number
_shared: "weakref.WeakKeyDictionary[_SharedBackward, None]" = weakref.WeakKeyDictionary()  # in the order of creation
_lock = threading.Lock()  # autograd has a thread for each device


# Hooks of parameters (they keep nothing alive), and facts that autograd knows about the running backward.


def require_synchronized(owner: str, named: Iterable[tuple[str, Tensor]], known: Set[Tensor], fix: str) -> None:
    """Raise a RuntimeError if a parameter requires a gradient but is not in `known`, the parameters at set-up."""
    new = [name for name, parameter in named if parameter.requires_grad and parameter not in known]
    if new:
        raise RuntimeError(
            f"{owner}: {', '.join(new)} required no gradient, or did not exist, when it was called, so ranks would "
            f"not synchronize them; {fix}"
        )


def accumulates(parameters: Iterable[nn.Parameter], behind: Iterable[Any]) -> bool:
    """Return whether the running backward accumulates in one of `parameters`, or in all leaves after nodes `behind`.

    Args:
        behind: Graph nodes next to the module's outputs, for a forward on this rank that used none of `parameters`.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return accumulates_in(trained) or (bool(trained) and accumulates_all(behind))


def nodes_behind(output: Tensor) -> list[Any]:
    """Return the nodes that a backward reaches directly after the node that made `output`."""
    return [] if output.grad_fn is None else [node for node, _ in output.grad_fn.next_functions if node is not None]


def accumulates_in(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether the running backward accumulates a gradient in one of `parameters`. All must require a gradient.

    Return False within `torch.autograd.grad`, because it returns gradients instead.
    """
    for parameter in parameters:
        try:
            if torch_private.will_execute(get_gradient_edge(parameter).node):
                return True
        except RuntimeError:  # raised if torch.autograd.grad returns the gradient
            return False
    return False


def executes(node: Any) -> bool:
    """Return whether the running backward reaches `node`, or is a `torch.autograd.grad` with respect to it."""
    try:
        return torch_private.will_execute(node)
    except RuntimeError:  # raised if torch.autograd.grad returns the gradient
        return True


def accumulates_all(nodes: Iterable[Any]) -> bool:
    """Return whether the running backward accumulates gradients in all leaves that `nodes` of its graph lead to.

    Return False in `torch.autograd.grad`, and in a `backward(inputs=...)` that leaves out some of these leaves.
    """
    waiting, has_leaves = [*nodes], False
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):  # it accumulates a leaf's gradient
            try:
                if not torch_private.will_execute(node):
                    return False
            except RuntimeError:  # raised if torch.autograd.grad returns the gradient
                return False
            has_leaves = True
        behind = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= behind
        waiting += behind
    return has_leaves


@contextmanager
def as_trained(parameter: Tensor) -> Generator[Tensor]:
    """Let the block register hooks on `parameter` even if it is frozen; torch would refuse them."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_()
    try:
        yield parameter
    finally:
        parameter.requires_grad_(is_trained)


class FastPath:
    """A short cut for hooks: they put a gradient into the open step directly, instead of calling `take`.

    Hooks still call `take` if a gradient is added to an earlier one, is sparse, belongs to another backward, is seen by
    a hook of the user, or belongs to a leaf at one of the `excluded` positions.
    """

    __slots__ = ("excluded", "step", "task")

    def __init__(self) -> None:
        self.close()

    def open(self, step: Step, task: int, excluded: set[int]) -> None:
        """Send the gradients of the backward `task` to `step`."""
        self.step: Any = weakref.ref(step)  # parameters may outlive it
        self.task, self.excluded = task, excluded

    def close(self) -> None:
        """Send each gradient through `take`."""
        # Outside of a backward the task is -1, so -2 matches nothing.
        self.step, self.task, self.excluded = (lambda: None), -2, set[int]()

    def hook(
        self, position: int, take: Callable[[Tensor], Any], advance: Callable[[], Callable[[], None] | None]
    ) -> Callable[[Tensor], None]:
        """Return a hook for a parameter's accumulated gradient; `take` handles those that the short cut cannot.

        `advance` is a weak reference to the method to call when a segment is complete.
        """

        @torch_private.skipped_by_dynamo
        def accumulated(parameter: Tensor) -> None:
            step, grad = self.step(), parameter.grad
            if (
                step is None
                or not step.is_open
                or grad is None
                or self.task != current_backward()
                or position in self.excluded
                or grad.is_sparse
                or len(torch_private.post_accumulate_hooks(parameter)) > 1  # another than this one
            ):
                take(parameter)
            else:
                parameter.grad = None  # so that its memory is freed once it has been sent
                if step.put(position, grad) and (run := advance()) is not None:
                    run()

        return accumulated


class WeakHook(Generic[Owner]):
    """A hook of one parameter that calls `method(owner, name, tensor)`."""

    def __init__(self, owner: Owner, method: Callable[[Owner, str, Tensor], Any], name: str) -> None:
        self._owner = weakref.ref(owner)  # the garbage collector cannot see hooks of tensors
        self._method, self._name = method, name

    @torch_private.skipped_by_dynamo
    def __call__(self, tensor: Tensor) -> Any:
        owner = self._owner()
        return None if owner is None else self._method(owner, self._name, tensor)

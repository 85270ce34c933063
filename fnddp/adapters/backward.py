"""Backwards: their life, and the hooks by which they come here.

No other file of adapters begins, ends or fails a step of a backward.

A `Backward` is idle; open from the first gradient, with a step; and idle again, when the step has ended on all ranks
alike. Ways in say only what differs: which gradients no hook has seen, what is checked, and what is undone.
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
from fnddp.run.engine import Engine, begin_next
from fnddp.run.step import Step, Synchronized, applying, in_profile
from fnddp.torch_private import current_backward
from fnddp.wire.protocol import Elastic

Owner = TypeVar("Owner")

UNFINISHED = "its backward did not finish"


def _nothing(*_: Any) -> None:
    pass


def _same(error: BaseException) -> BaseException:
    return error


class Backward:
    """Backwards of one way in, one after the other, each a step of an engine.

    Args:
        engine: May be replaced between two steps.
        undo: Called for a step that has failed: takes back what this way in has done in it.
        named: Returns an error of the step as this way in raises it.

    Attributes:
        failure: The first error of this rank that was kept for the end of the open step.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        undo: Callable[[], object] = _nothing,
        named: Callable[[BaseException], BaseException] = _same,
    ) -> None:
        self.engine, self._undo, self._named = engine, undo, named
        self.failure: BaseException | None = None
        self._shared: _SharedBackward | None = None  # the steps of the autograd backward that has this one, or will

    @property
    def step(self) -> Any:
        """The open step; None while idle."""
        return self.engine.step

    def begin(self, **options: Any) -> Step:
        """Begin a step, and return it: see `Engine.begin`."""
        return self.engine.begin(**options)

    def end_with_autograds(self, end: Callable[[], None], reaches: "Iterable[Backward]" = ()) -> None:
        """Call `end` at the end of the backward that autograd runs, for the open step.

        Args:
            reaches: Others that are idle, and will begin in it.
        """
        with _lock:
            task = current_backward()
            ending = _endings.get(task)
            if ending is None:
                ending = _endings[task] = _Ending(task)
                torch_private.at_end_of_backward(ending)
            if self._shared is not None:  # of another backward, which has raised before it came here
                self._shared.awaited.pop(self, None)
            ending.ends[self] = end
            ending.shared.begun[self] = None
            for each in (self, *reaches):
                each._shared = ending.shared
                ending.shared.awaited[each] = None

    def is_running(self) -> bool:
        """Return True if a step is open; fail it if its backward has raised, which autograd does not report."""
        if self.step is not None and self.has_raised:
            self.fail_all(_unfinished())
        return self.step is not None

    @property
    def has_raised(self) -> bool:
        """True if the autograd backward in which this one has begun, or was to begin, has raised."""
        return self._broken_off is not None

    @property
    def _broken_off(self) -> "_SharedBackward | None":
        """The steps of that backward, if it has raised."""
        shared = self._shared
        return shared if shared is not None and shared.has_raised else None

    def attempt(self, run: Callable[[], object]) -> None:
        """Call `run`, a part of the step, unless one has failed; keep its error for `end`.

        For what must not raise at once, since what has called it has collectives of its own to run first.
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
        """End the step on all ranks alike, and return the means.

        Args:
            late: Puts gradients that no hook has seen; may raise on this rank alone.
            check: Called with the leaves that no rank has used, when all ranks have agreed and nothing is written over
                yet; may raise, on all ranks alike, or return False: then the step has no effect.

        Raises:
            StepFailedError: Another rank has failed.
            CollectiveError: A collective has failed.
            Exception: The error that was kept, or that of `late` or `check`.
        """
        self._shared = None
        try:
            if self.failure is not None:
                raise self.failure
            step = self.step
            late()
            with in_profile("end"):
                unused = step.agree()
                try:
                    has_effect = check(unused)
                except Exception:  # on all ranks, unlike an interrupt
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

    def fail(self, error: BaseException) -> None:
        """Fail the open step, if any, on all ranks, and undo what this way in has done.

        On an elastic wire no rank applies the step, even if it has ended on this one.
        """
        error, self.failure, self._shared = self.failure or error, None, None
        self.engine.fail(error)
        if isinstance(self.engine.wire, Elastic):
            self.engine.wire.report(error)
        self._undo()

    def fail_all(self, error: BaseException) -> None:
        """Fail all steps of the backward that autograd runs, or ran until it raised, also those to come."""
        if self._shared is not None:
            self._shared.fail(error)
        if self.step is not None:
            self.fail(error)

    def fail_next(self, error: BaseException) -> None:
        """Fail the step that is open or comes next, on all ranks, so that none waits for this one."""
        if self._broken_off is not None:
            self.fail_all(error)
        else:
            if self.step is None:
                begin_next([self.engine])
            self.fail(error)

    def require_idle(self) -> None:
        """Fail a step whose backward did not finish, as the next forward shows."""
        if self.step is not None or self.has_raised:
            self.fail_all(_unfinished())
        self._shared = self.failure = None


def _unfinished() -> RuntimeError:
    """Return the error of a step whose backward has raised, with what that was if the caller is handling it."""
    cause = sys.exception()
    return RuntimeError(UNFINISHED if cause is None else f"{UNFINISHED}: {type(cause).__name__}: {cause}")


class _SharedBackward:
    """The steps of one backward of autograd, on several engines. It outlives that backward if it raises.

    Attributes:
        begun, awaited: The ones that have begun, and those that the backward reaches: ordered sets.
    """

    def __init__(self, ending: "_Ending") -> None:
        self._ending = weakref.ref(ending)
        self.begun: dict[Backward, None] = {}
        self.awaited: dict[Backward, None] = {}

    @property
    def has_raised(self) -> bool:
        """True if the backward has raised, so that autograd will not call the callback at its end."""
        return self._ending() is None

    def fail(self, error: BaseException) -> None:
        """Fail all steps because of `error`, on all ranks: those to come, too, for which other ranks wait."""
        begun, awaited = self.begun, self.awaited
        self.begun, self.awaited = {}, {}
        begin_next(each.engine for each in awaited if each not in begun and each.step is None)
        for each in in_order({**awaited, **begun}):
            each.fail(error)


def in_order(backwards: Iterable[Backward]) -> list[Backward]:
    """Return `backwards` in the order in which their steps end, which is the same on all ranks.

    That is the order in which their lanes were made, unlike the order in which autograd reaches them.
    """
    return sorted(backwards, key=lambda each: each.engine.number)


class _Ending:
    """Callback at the end of a backward, which ends the steps in it. It lives as long as that backward runs.

    Ending a step waits for other ranks, so steps end in the same order on all of them.
    """

    def __init__(self, task: int) -> None:
        self._task = task
        self.shared = _SharedBackward(self)
        self.ends: dict[Backward, Callable[[], None]] = {}

    @torch_private.skipped_by_dynamo
    def __call__(self) -> None:
        with _lock:
            _endings.pop(self._task, None)  # what runs now may begin another one
        self.shared.begun, self.shared.awaited = {}, {}
        failure: BaseException | None = None
        for backward in in_order(self.ends) if len(self.ends) > 1 else self.ends:
            try:
                with applying(backward.engine):
                    self.ends[backward]()
            except BaseException as error:  # the other ranks wait for the steps that are left
                failure = failure or error
        if failure is not None:
            raise failure


_endings: "weakref.WeakValueDictionary[int, _Ending]" = weakref.WeakValueDictionary()  # by autograd's number
_lock = threading.Lock()  # autograd has a thread for each device


# Hooks of parameters, which keep nothing alive, and what autograd knows of the running backward.


def require_synchronized(owner: str, named: Iterable[tuple[str, Tensor]], known: Set[Tensor], fix: str) -> None:
    """Raise a RuntimeError if parameters require a gradient that are not `known`: those that did at the set-up."""
    new = [name for name, parameter in named if parameter.requires_grad and parameter not in known]
    if new:
        raise RuntimeError(
            f"{owner}: {', '.join(new)} did not require a gradient when it was called, or came later, so ranks would "
            f"train apart there; {fix}"
        )


def accumulates(parameters: Iterable[nn.Parameter], behind: Iterable[Any]) -> bool:
    """Return whether the running backward accumulates in one of `parameters`, or would if this rank had used one.

    Args:
        behind: The nodes behind outputs of the module, of which it accumulates in all leaves in the second case.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return accumulates_in(trained) or (bool(trained) and accumulates_all(behind))


def nodes_behind(output: Tensor) -> list[Any]:
    """Return the nodes that a backward reaches next after the one that has made `output`."""
    return [] if output.grad_fn is None else [node for node, _ in output.grad_fn.next_functions if node is not None]


def accumulates_in(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether the running backward accumulates a gradient in one of `parameters`, which require one.

    False if it is `torch.autograd.grad`, which returns gradients instead.
    """
    for parameter in parameters:
        try:
            if torch_private.will_execute(get_gradient_edge(parameter).node):
                return True
        except RuntimeError:  # raised if torch.autograd.grad returns the gradient
            return False
    return False


def executes(node: Any) -> bool:
    """Return whether the running backward reaches `node`, or returns what would be accumulated there."""
    try:
        return torch_private.will_execute(node)
    except RuntimeError:  # raised if torch.autograd.grad returns the gradient
        return True


def accumulates_all(nodes: Iterable[Any]) -> bool:
    """Return whether the running backward accumulates the gradients of all leaves behind `nodes` of its graph.

    False in `torch.autograd.grad`, and in a `backward(inputs=...)` that leaves out some of these leaves.
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
    """Let the block register hooks on `parameter`, which torch refuses where it is frozen for now."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_()
    try:
        yield parameter
    finally:
        parameter.requires_grad_(is_trained)


class FastPath:
    """Short cut: a hook puts its gradient into the open step directly, instead of calling `take`, the long way.

    `take` gets a gradient that is added to an earlier one, is sparse, belongs to another backward, or is seen by a hook
    of the user, and the gradients of leaves at `excluded` positions.
    """

    __slots__ = ("excluded", "step", "task")

    def __init__(self) -> None:
        self.close()

    def open(self, step: Step, task: int, excluded: set[int]) -> None:
        """Let the gradients of the backward `task` go to `step`."""
        self.step: Any = weakref.ref(step)  # parameters may outlive it
        self.task, self.excluded = task, excluded

    def close(self) -> None:
        """Let each gradient take the long way."""
        # Outside of a backward the task is -1.
        self.step, self.task, self.excluded = (lambda: None), -2, set[int]()

    def hook(
        self, position: int, take: Callable[[Tensor], Any], advance: Callable[[], Callable[[], None] | None]
    ) -> Callable[[Tensor], None]:
        """Return a hook of a parameter whose gradient has been accumulated; `take` is the long way.

        `advance` is a weak reference to the method that is called when a segment is complete.
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
                or torch_private.has_other_hooks(parameter)
            ):
                take(parameter)
            else:
                parameter.grad = None  # so that its memory is free once it has been sent
                if step.put(position, grad) and (run := advance()) is not None:
                    run()

        return accumulated


class WeakHook(Generic[Owner]):
    """A hook of one parameter: calls `method(owner, name, tensor)`."""

    def __init__(self, owner: Owner, method: Callable[[Owner, str, Tensor], Any], name: str) -> None:
        self._owner = weakref.ref(owner)  # the garbage collector does not see hooks of tensors
        self._method, self._name = method, name

    @torch_private.skipped_by_dynamo
    def __call__(self, tensor: Tensor) -> Any:
        owner = self._owner()
        return None if owner is None else self._method(owner, self._name, tensor)

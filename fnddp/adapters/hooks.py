"""Hooks of parameters, which keep nothing alive, and the end of a backward, which several models may share."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from fnddp import torch_private
from fnddp.run.engine import Engine, fail_next
from fnddp.run.step import Step
from fnddp.torch_private import current_backward

Owner = TypeVar("Owner")


def asked_for(parameters: Mapping[str, nn.Parameter]) -> set[str] | None:
    """Return the parameters whose gradients torch.autograd.grad will return; None if one is accumulated instead."""
    asked: set[str] = set()
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        try:
            if torch_private.will_execute(get_gradient_edge(parameter).node):
                return None
        except RuntimeError:  # raised if torch.autograd.grad returns the gradient
            asked.add(name)
    return asked


def accumulates(nodes: Iterable[Any]) -> bool:
    """Return whether the running backward accumulates the gradients of all leaves behind `nodes` of its graph.

    False in `torch.autograd.grad`, and in a `backward(inputs=...)` that leaves out some of these leaves.
    """
    waiting, has_leaves = [*nodes], False
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):  # it accumulates a leaf's gradient
            try:
                if not torch_private.will_execute(node):
                    return False
            except RuntimeError:  # raised if torch.autograd.grad returns the gradient
                return False
            has_leaves = True
        behind = {following for following, _ in node.next_functions} - seen
        seen |= behind
        waiting += behind
    return has_leaves


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

        def accumulated(parameter: Tensor) -> None:
            step, grad = self.step(), parameter.grad
            if (
                step is None
                or not step.is_open
                or grad is None
                or self.task != current_backward()
                or position in self.excluded
                or grad.is_sparse
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

    def __call__(self, tensor: Tensor) -> Any:
        owner = self._owner()
        return None if owner is None else self._method(owner, self._name, tensor)


class Together:
    """The steps of one backward, on several engines. It outlives the backward if that raises.

    Attributes:
        fails: Engines whose step has begun, with the function that fails it.
        awaited: The same of engines whose step has not begun, though the backward will reach them.
    """

    def __init__(self) -> None:
        self.fails: dict[Engine, Callable[[BaseException], None]] = {}
        self.awaited: dict[Engine, Callable[[BaseException], None]] = {}

    def fail(self, error: BaseException) -> None:
        """Fail all steps because of `error`, on all ranks: those to come, too, for which other ranks wait.

        One that other ranks give up, since it waits for another on its process group, is given up here, too.
        """
        fails, awaited = self.fails, self.awaited
        self.fails, self.awaited = {}, {}
        begun = fail_next({each: error for each in awaited if each not in fails and not each.is_open})
        fails |= {engine: awaited[engine] for engine in begun}
        for engine in in_order(fails):
            fails[engine](error)


def in_order(engines: Iterable[Engine]) -> Iterator[Engine]:
    """Yield `engines` in the order in which their steps end, which is the same on all ranks.

    That is the order in which they were made, unlike the order in which backward reaches them. On one process group,
    the step that began first goes first.
    """
    waiting = sorted(engines, key=lambda engine: engine.number)
    while waiting:
        engine = next((each for each in waiting if each.step is None or not each.step.is_held), waiting[0])
        waiting.remove(engine)
        yield engine


class Ending:
    """Callback at the end of a backward, which ends the steps in it. It lives as long as that backward runs.

    Ending a step waits for other ranks, so steps end in the same order on all of them.
    """

    def __init__(self, task: int) -> None:
        self._task = task
        self.together = Together()
        self.ends: dict[Engine, Callable[[], None]] = {}

    def __call__(self) -> None:
        with _lock:
            _endings.pop(self._task, None)  # what runs now may begin another one
        self.together.fails, self.together.awaited = {}, {}
        failure: BaseException | None = None
        for engine in in_order(self.ends):
            try:
                self.ends[engine]()
            except BaseException as error:  # the other ranks wait for the steps that are left
                failure = failure or error
        if failure is not None:
            raise failure


_endings: "weakref.WeakValueDictionary[int, Ending]" = weakref.WeakValueDictionary()  # by autograd's number
_lock = threading.Lock()  # autograd has a thread for each device


def end_with_backward(
    engine: Engine, end: Callable[[], None], fail: Callable[[BaseException], None]
) -> "tuple[weakref.ref[Ending], Together]":
    """Call `end` at the end of the running backward, for the open step of `engine`.

    Args:
        fail: Fails that step.

    Returns:
        A reference that is dead once it is known that the backward has raised, and `end` will not be called; and the
        steps in that backward.
    """
    with _lock:
        task = torch_private.current_backward()
        ending = _endings.get(task)
        if ending is None:
            ending = _endings[task] = Ending(task)
            torch_private.at_end_of_backward(ending)
        ending.ends[engine] = end
        ending.together.fails[engine] = fail
    return weakref.ref(ending), ending.together

"""The end of a backward, which several models may share."""

import threading
import weakref
from collections.abc import Callable

from fnddp import torch_private
from fnddp.run.engine import Engine


class Ending:
    """The callback at the end of a backward: ends the steps in it. It lives as long as that backward is going on.

    A step that ends waits for other ranks. So that no two ranks wait for each other's, steps end in the order in which
    their engines were made, which is the same on all ranks; that of the backward is not.
    """

    def __init__(self, task: int) -> None:
        self._task = task
        self._steps: list[tuple[Engine, Callable[[], None]]] = []
        self.engines: list[Engine] = []  # of the steps, for those that outlive a backward that has raised

    def add(self, engine: Engine, end: Callable[[], None]) -> None:
        """Have `end` called for the open step of `engine`."""
        self._steps.append((engine, end))
        self.engines.append(engine)

    def __call__(self) -> None:
        with _lock:
            _endings.pop(self._task, None)  # what runs now may begin another one
        waiting = sorted(self._steps, key=lambda step: step[0].number)
        failure: BaseException | None = None
        while waiting:
            # On one process group, the step that began first goes first.
            step = next((step for step in waiting if not step[0].is_held), waiting[0])
            waiting.remove(step)
            try:
                step[1]()
            except BaseException as error:  # the other ranks wait for the steps that are left
                failure = failure or error
        if failure is not None:
            raise failure


_endings: "weakref.WeakValueDictionary[int, Ending]" = weakref.WeakValueDictionary()  # by autograd's number
_lock = threading.Lock()  # autograd has a thread for each device


def end_with_backward(engine: Engine, end: Callable[[], None]) -> "tuple[weakref.ref[Ending], list[Engine]]":
    """Have `end` called at the end of the backward that is running, for the open step of `engine`.

    Returns:
        A reference that is dead once it is known that `end` will not be called, because the backward has raised; and
        the engines that have a step in that backward.
    """
    with _lock:
        task = torch_private.current_backward()
        ending = _endings.get(task)
        if ending is None:
            ending = _endings[task] = Ending(task)
            torch_private.at_end_of_backward(ending)
        ending.add(engine, end)
    return weakref.ref(ending), ending.engines


def fail_unfinished(engine: Engine, together: list[Engine]) -> None:
    """Fail the open steps of the engines that share a backward with `engine`, which raised, and end before its own."""
    for other in sorted(together, key=lambda each: each.number):
        if other.number < engine.number:
            other.fail(RuntimeError("its backward did not finish"))

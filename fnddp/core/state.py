"""States as flat, marked dicts: to save them, to resume from them, and to compare them between ranks."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.sync import LOCAL, REPLICATED, State
from fnddp.torch_private import is_foreign

AFTER_ALL_WARM_UPS = 2**40
"""A step that no training run reaches."""

FEW = 3  # keys that an error names


class Part(NamedTuple):
    """One leaf of a state: "replicated" (equal on all ranks) or "local" (this rank's own), a tensor or a Python int.

    Its path is its position in the state, for example `residual.fc.weight`; compiling a module does not change it.
    """

    kind: str
    path: str
    value: Any

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.path}"


def parts(state: State) -> Iterator[Part]:
    """Yield the leaves of `state`, each with its path and its kind.

    The kind is the annotation (`Replicated[...]` or `Local[...]`) of the field that holds the leaf, local without one.

    Raises:
        ValueError: Two leaves have the same path.

    >>> from fnddp import allreduce, bf16, error_feedback
    >>> state = error_feedback(bf16(allreduce)).init({"fc.weight": torch.ones(2)})
    >>> [part.key for part in parts(state)]
    ['local/residual.fc.weight']
    """
    seen: set[str] = set()
    for path, annotations, value in tree.annotated_items(state):
        path = tree.without_wrappers(path)
        if path in seen:
            raise ValueError(f"two parts of the state have the path {path!r}; rename one of the keys that lead to them")
        seen.add(path)
        kinds = [mark for mark in annotations if mark in (REPLICATED, LOCAL)]
        yield Part(kinds[0] if kinds else LOCAL, path, value)


def state_dict(state: State) -> dict[str, Tensor | int]:
    """Return a flat dict of a pipeline's state, for `torch.save` and `torch.load(weights_only=True)`.

    Keys are `replicated/<path>` for parts that are equal on all ranks (one rank may save them) and `local/<path>` for
    this rank's own parts (each rank must save them). Tensors are detached but not copied.

    Raises:
        TypeError: `state` contains anything but tensors and numbers; for a wrapped model pass `model.sync_state`.

    >>> from fnddp import allreduce, warmup
    >>> state_dict(warmup(allreduce, steps=3).init({}))
    {'replicated/step': 0}
    """
    found = _saved_parts("state_dict", state)
    return {part.key: part.value.detach() if isinstance(part.value, Tensor) else part.value for part in found}


def _saved_parts(caller: str, state: State) -> list[Part]:
    found = list(parts(state))
    for part in found:
        if not isinstance(part.value, Tensor | int | float):
            at = f" at {part.path!r}" if part.path else ""
            raise TypeError(
                f"{caller}: expected a state of tensors and numbers, got {type(part.value).__name__}{at}; pass "
                "model.sync_state of a wrapped model or handle, or sync.init(params)"
            )
    return found


def load_state_dict(state_template: State, saved: Mapping[str, Any]) -> State:
    """Return the state in `saved`, bit for bit, in the tree of `state_template` and on its devices.

    Args:
        state_template: A state of the same pipeline and parameters, such as `sync.init(params)`. It is not changed.
        saved: From `state_dict`. Its tensors are copied.

    Raises:
        TypeError: `state_template` is no state, as for `state_dict`.
        ValueError: Keys, shapes or dtypes differ. The error names the paths.

    >>> from fnddp import allreduce, warmup
    >>> load_state_dict(warmup(allreduce, steps=3).init({}), {"replicated/step": 2})
    WarmupState(step=2, before=(), inner=())
    """
    wanted = {part.key: part for part in _saved_parts("load_state_dict", state_template)}
    if wanted.keys() != saved.keys():
        raise ValueError(
            f"load_state_dict: {differing(saved, wanted)}: the state was saved by another pipeline or for other "
            "parameters; build the template with the init of the pipeline that saved it"
        )
    return tree.replace_leaves(state_template, [_loaded(part, saved[key]) for key, part in wanted.items()])


def differing(have: Collection[str], want: Collection[str]) -> str:
    """Describe the missing and the unexpected keys, a few of each."""

    def some(keys: list[str]) -> str:
        more = f" and {len(keys) - FEW} more" if len(keys) > FEW else ""
        return f"{keys[:FEW]}{more}"

    missing, unexpected = [key for key in want if key not in have], sorted(set(have) - set(want))
    return f"missing {some(missing)}, unexpected {some(unexpected)}"


def _loaded(part: Part, value: Any) -> Any:
    if describe(value) != describe(part.value):
        raise ValueError(
            f"load_state_dict: {part.key!r} was saved as {describe(value)}, but this pipeline expects "
            f"{describe(part.value)}; the parameters or the pipeline's options have changed"
        )
    if isinstance(part.value, Tensor):
        # Copied into the template's layout: a saved view must not keep its whole storage alive.
        return torch.empty_like(part.value).copy_(value.detach())
    return value


def require_like(owner: str, state: State, template: State) -> State:
    """Return `shared(state)` if it has the structure, shapes, dtypes and devices of `template`; else raise.

    Tensors in memory of another library are copied, because plans cannot see that library's references.

    >>> from fnddp import allreduce, error_feedback
    >>> template = error_feedback(allreduce).init({"w": torch.ones(2)})
    >>> require_like("error_feedback(allreduce)", template._replace(residual={"w": torch.ones(3)}), template)
    Traceback (most recent call last):
        ...
    ValueError: the state of error_feedback(allreduce) for this model has float32[2] on cpu as 'residual.w', got
    float32[3] on cpu; load a saved one with fnddp.load_state_dict(<the current state>, saved)
    """
    want, have = [{part.path: placed(part.value) for part in parts(s)} for s in (template, state)]
    differ = [path for path in dict.fromkeys([*want, *have]) if want.get(path) != have.get(path)]
    problem = ""
    if differ:
        path = differ[0]
        problem = f"has {want.get(path, 'nothing')} as {path!r}, got {have.get(path, 'nothing')}"
    elif tree.structure(state) != tree.structure(template):
        problem = f"is a {tree.structure(template)}, got {tree.structure(state)}"
    if problem:
        raise ValueError(
            f"the state of {owner} for this model {problem}; load a saved one with fnddp.load_state_dict(<the current "
            "state>, saved)"
        )
    return tree.map_tensors(lambda part: part.clone() if is_foreign(part) else part.data, state)


def continued(fresh: State, before: State) -> State:
    """Return `fresh`, a state for other leaves, with the values of those parts of `before` that have the same shape."""
    held = {part.path: part.value for part in parts(before)}

    def value(part: Part) -> Any:
        old, new = held.get(part.path), part.value
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            return old.to(new) if old.shape == new.shape else new
        return old if describe(old) == describe(new) else new

    return tree.replace_leaves(fresh, [value(part) for part in parts(fresh)])


def shared(state: State) -> State:
    """Return views of the tensors of `state`: reference counts of the originals show whether a caller still holds them.

    Plans overwrite the memory of a state that only an engine holds (`fnddp.torch_private.storage_use_count`).
    """
    return tree.map_tensors(lambda part: part.data, state)


def placed(value: Any) -> str:
    """Return `describe` of a value, with a tensor's device."""
    return f"{describe(value)} on {value.device}" if isinstance(value, Tensor) else describe(value)


def on_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict with copies of the tensors of `values` on the CPU."""
    return {key: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v for key, v in values.items()}


def describe(value: Any) -> str:
    """Return the type of `value`, or dtype and shape of a tensor.

    >>> describe(torch.ones(2, 3)), describe(7)
    ('float32[2, 3]', 'int')
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def at_step(step: int, state: State) -> State:
    """Return `state` with all its counters at `step`: for plans of a later phase."""
    values, structure = tree.flatten_any(state)
    return tree.unflatten_any(structure, [each if isinstance(each, Tensor) else step for each in values])

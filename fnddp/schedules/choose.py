"""Choice of the pipeline of each leaf and each step."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from fnmatch import translate
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.options import at_least, checked_int, checked_pairs
from fnddp.core.sync import Exchange, Replicated, State, Sync, transform
from fnddp.core.tree import Leaves, Tree, paired, replaced, without_wrappers
from fnddp.reducers.all_reduce import allreduce

MAX_PATTERN = 1000  # characters: patterns may come from hostile text, and compile in more than linear time


class PartitionState(NamedTuple):
    """`rules`: the state of each pattern's pipeline, by pattern."""

    rules: dict[str, State]


@transform
class partition(Sync):
    """Give each leaf the pipeline of the first pattern that matches the leaf's path.

    Patterns are those of `fnmatch`, case-sensitive: `*.bias`, `layer4.*`, `*`. `init` and `exchange` raise a ValueError
    if a leaf matches no pattern, or if a pattern gets no leaf, because that is probably a typo.

    Args:
        rules: Pipelines by pattern; the first match wins.

    >>> from fnddp import allreduce, fp16
    >>> sync = partition({"*.bias": allreduce, "*": fp16(allreduce)})
    >>> sync
    partition({'*.bias': allreduce, '*': fp16(allreduce)})
    >>> sync.init({"fc.weight": torch.ones(2, 2)})
    Traceback (most recent call last):
        ...
    ValueError: partition: pattern '*.bias' gets none of the leaves ['fc.weight']; correct, move or remove it
    """

    rules: Mapping[str, Sync] | tuple[tuple[str, Sync], ...]
    _compiled: dict[str, re.Pattern[str]] = field(init=False, repr=False, compare=False)

    wraps_skipping: ClassVar[bool] = True
    tables = frozenset({"rules"})

    def __post_init__(self) -> None:
        rules = checked_pairs("partition: rules must be a dict of pipelines by pattern", self.rules, Sync, str)
        object.__setattr__(self, "rules", rules)
        if not rules:
            raise ValueError("partition: no rules; write partition({'*': allreduce})")
        for pattern, _ in rules:
            if len(pattern) > MAX_PATTERN:
                raise ValueError(f"partition: a pattern has {len(pattern)} characters, more than {MAX_PATTERN}")
        if len(dict(rules)) < len(rules):
            raise ValueError(f"partition: a pattern occurs twice in {[pattern for pattern, _ in rules]}")
        # Compiled here: Dynamo can trace a match, but not the translation of a pattern.
        object.__setattr__(self, "_compiled", compiled_patterns(dict(rules)))
        super().__post_init__()

    def split(self, leaves: Leaves) -> dict[str, Leaves]:
        """Return the leaves of each pattern."""
        return split_by_pattern("partition", leaves, self._compiled)

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        parts = self.split(leaves)
        return PartitionState({pattern: sync.init(parts[pattern]) for pattern, sync in dict(self.rules).items()})

    def exchange(self, leaves: Leaves, state: PartitionState) -> Exchange:
        parts = self.split(leaves)
        done = {
            pattern: sync.exchange(parts[pattern], state.rules[pattern]) for pattern, sync in dict(self.rules).items()
        }
        owner = {path: pattern for pattern, part in parts.items() for path in part}
        return Exchange(
            mean={path: done[owner[path]].mean[path] for path in leaves if path in done[owner[path]].mean},
            sent={path: done[owner[path]].sent[path] for path in leaves},
            state=PartitionState({pattern: exchange.state for pattern, exchange in done.items()}),
        )

    def rule_of(self, path: str) -> Sync | None:
        """Return the pipeline of the leaf `path`; None if no pattern matches it."""
        path = without_wrappers(path)
        return next((sync for pattern, sync in dict(self.rules).items() if self._compiled[pattern].match(path)), None)

    def reduces(self, path: str) -> bool:
        rule = self.rule_of(path)
        return rule is None or rule.reduces(path)


def compiled_patterns(patterns: Iterable[str]) -> dict[str, re.Pattern[str]]:
    """Return compiled patterns for `split_by_pattern`, by pattern."""
    return {pattern: re.compile(translate(without_wrappers(pattern))) for pattern in patterns}


def split_by_pattern(owner: str, leaves: Leaves, patterns: Mapping[str, re.Pattern[str]]) -> dict[str, Leaves]:
    """Return the leaves of each pattern, the first one that matches their path: see `partition`."""
    parts: dict[str, Leaves] = {pattern: {} for pattern in patterns}
    for path, leaf in leaves.items():
        for pattern, compiled in patterns.items():
            if compiled.match(without_wrappers(path)):
                parts[pattern][path] = leaf
                break
        else:
            raise ValueError(
                f"{owner}: leaf {path!r} matches none of the patterns {list(parts)}; add one, or '*' at the end"
            )
    for pattern, part in parts.items():
        if leaves and not part:  # on a tree without leaves no pattern matches
            raise ValueError(
                f"{owner}: pattern {pattern!r} gets none of the leaves {list(leaves)}; correct, move or remove it"
            )
    return parts


class WarmupState(NamedTuple):
    """`step`: exchanges done so far, at most the number of warm-up steps."""

    step: Replicated[int]
    before: State
    inner: State


@transform
class warmup(Sync):
    """Run `before` for the first `steps` exchanges, then `inner`.

    The first steps of a training tolerate compression badly (torch's `start_powerSGD_iter`). Put memory inside,
    `warmup(error_feedback(...), 100)`, unless `before` is lossy as well.

    >>> from fnddp import fp16
    >>> sync = warmup(fp16(allreduce), steps=1)
    >>> grads = {"w": torch.tensor([1 + 2**-20])}
    >>> first, state = sync(grads, sync.init(grads))
    >>> second, state = sync(grads, state)
    >>> bool(first["w"] == grads["w"]), second["w"].item(), state.step
    (True, 1.0, 1)
    """

    inner: Sync
    steps: int
    before: Sync = allreduce

    wraps_skipping: ClassVar[bool] = True
    limits: ClassVar = {"steps": at_least(0)}

    def init(self, grads: Tree) -> State:
        return WarmupState(0, self.before.init(grads), self.inner.init(grads))

    def exchange(self, leaves: Leaves, state: WarmupState) -> Exchange:
        if state.step < self.steps:
            before = self.before.exchange(leaves, state.before)
            return replaced(before, state=WarmupState(state.step + 1, before.state, state.inner))
        inner = self.inner.exchange(leaves, state.inner)
        return replaced(inner, state=WarmupState(state.step, state.before, inner.state))


class SwitchState(NamedTuple):
    """`step`: exchanges done, at most the first step of the last stage. `stages`: states of stages, by first step.

    None replaces a tensor that is stored in the state of an earlier stage.
    """

    step: Replicated[int]
    stages: dict[str, State]


@transform
class switch(Sync):
    """Run another pipeline from given steps on: `switch({0: ..., 1000: ...})`.

    Use it for ranks, ratios and precisions that change during training; for a first phase alone `warmup` is shorter. A
    stage inherits tensors of the stage before if they have the same position in a state of the same class, and the same
    shape, dtype and device. So a residual survives a change of PowerSGD's rank, and is stored once; queries of another
    rank and counters start anew. Memory outside, `error_feedback(switch({...}))`, needs no inheritance. The wrong
    choice for changes in every step: each stage is a phase with its own plan, and adapters keep at most 8 plans.

    Args:
        stages: Pipelines by their first step, counted in exchanges; one begins at 0.

    >>> from fnddp import allreduce, fp16
    >>> sync = switch({0: allreduce, 1: fp16(allreduce)})
    >>> grads = {"w": torch.tensor([1 + 2**-20])}
    >>> first, state = sync(grads, sync.init(grads))
    >>> second, state = sync(grads, state)
    >>> bool(first["w"] == grads["w"]), second["w"].item(), state.step
    (True, 1.0, 1)
    """

    stages: Mapping[int, Sync] | tuple[tuple[int, Sync], ...]

    wraps_skipping: ClassVar[bool] = True
    tables = frozenset({"stages"})

    def __post_init__(self) -> None:
        pairs = checked_pairs("switch: stages must be a dict of pipelines by step", self.stages, Sync)
        steps = [checked_int("switch: a step", step) for step, _ in pairs]
        if not steps or min(steps) != 0 or len(set(steps)) < len(steps):
            raise ValueError(f"switch: the first stage must begin at step 0 and others later, got the steps {steps}")
        by_step = dict(zip(steps, (sync for _, sync in pairs), strict=True))
        object.__setattr__(self, "stages", tuple((step, by_step[step]) for step in sorted(by_step)))
        super().__post_init__()

    def init(self, grads: Tree) -> State:
        stages: dict[str, State] = {}
        whole: State = None
        for step, sync in dict(self.stages).items():
            stages[str(step)] = paired(_none_where_same, sync.init(grads), whole)
            whole = paired(_or_before, stages[str(step)], whole)
        return SwitchState(0, stages)

    def exchange(self, leaves: Leaves, state: SwitchState) -> Exchange:
        begun = [(str(step), sync) for step, sync in dict(self.stages).items() if state.step >= step]
        whole: State = None
        for name, _ in begun:
            whole = paired(_or_before, state.stages[name], whole)
        inner = begun[-1][1].exchange(leaves, whole)
        stages, rest = dict(state.stages), inner.state
        for name, _ in reversed(begun):  # each part goes to the stage that stores it
            own = stages[name]
            stages[name] = paired(_replaced, own, rest)
            rest = paired(lambda mine, following: following if mine is None else None, own, rest)
        step = state.step + 1 if state.step < max(dict(self.stages)) else state.step
        return replaced(inner, state=SwitchState(step, stages))


def _none_where_same(own: Any, before: Any) -> Any:
    same = (
        isinstance(own, Tensor)
        and isinstance(before, Tensor)
        and (own.shape, own.dtype, own.device) == (before.shape, before.dtype, before.device)
    )
    return None if same else own


def _or_before(own: Any, before: Any) -> Any:
    return before if own is None else own


def _replaced(own: Any, following: Any) -> Any:
    return following if _is_part(own) and _is_part(following) else own


def _is_part(value: Any) -> bool:
    return value is not None and not isinstance(value, tuple | list | dict)  # of a state of another structure


class EveryState(NamedTuple):
    """`step`: steps since the last exchange, below n."""

    step: Replicated[int]
    inner: State


@transform
class every(Sync):
    """Exchange in every n-th step; in the other steps, no leaf has an update.

    In the other steps the pipeline returns None for the leaves, and adapters leave `.grad` None on all ranks, so that
    Adam's moments and weight decay do not change.

    By itself it **loses** the gradients of the other steps. With memory outside they add up, and the n-th step sends
    the sum: `error_feedback(every(4, topk(allgather, ratio=0.01)))`. The update is then about n times as large. The
    wrong choice if the loop can accumulate gradients (`no_sync`): that has the same effect without memory.

    Args:
        n: Exchange in the steps n, 2 n, 3 n, ...; at least 1.

    Source: the period of communication of Qsparse-local-SGD (Basu et al., NeurIPS 2019, Algorithm 1) with one set of
    parameters; here these do not change in between.

    >>> from fnddp import allreduce, error_feedback
    >>> sync = error_feedback(every(2, allreduce))
    >>> grads = {"w": torch.ones(2)}
    >>> first, state = sync(grads, sync.init(grads))
    >>> second, state = sync(grads, state)
    >>> first, second
    ({'w': None}, {'w': tensor([2., 2.])})
    """

    n: int
    inner: Sync

    wraps_skipping: ClassVar[bool] = True
    limits: ClassVar = {"n": at_least(1)}

    @property
    def skips(self) -> bool:
        return self.n > 1 or super().skips

    @property
    def hides_nonfinite(self) -> bool:  # in steps without an exchange; memory outside keeps them
        return self.n > 1 or super().hides_nonfinite

    def init(self, grads: Tree) -> State:
        return EveryState(0, self.inner.init(grads))

    def exchange(self, leaves: Leaves, state: EveryState) -> Exchange:
        if state.step + 1 < self.n:
            nothing = {path: torch.zeros_like(leaf) for path, leaf in leaves.items()}
            return Exchange({}, nothing, EveryState(state.step + 1, state.inner))
        inner = self.inner.exchange(leaves, state.inner)
        return replaced(inner, state=EveryState(0, inner.state))

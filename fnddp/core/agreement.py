"""Comparison of the pipelines, leaves and states of ranks: on a difference, every rank raises the same error."""

import hashlib
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.expression import Expression
from fnddp.core.group import Group, group_name
from fnddp.core.parse import pipeline_of
from fnddp.core.state import describe, parts, require_like
from fnddp.core.sync import REPLICATED, State
from fnddp.core.tree import Leaves, Tree
from fnddp.wire import control
from fnddp.wire.c10d import C10D
from fnddp.wire.protocol import CollectiveError, Elastic, Wire


class RankMismatchError(ValueError):
    """Ranks disagree about what they are going to synchronize. All of them raise it, with the first difference."""


def verify(sync: Expression | str, grads: Tree, state: State | None = None, *, group: Group = None) -> None:
    """Check that all ranks run the same pipeline on the same tree from the same state. Call it once, after `init`.

    It compares the pipeline, the leaves' paths, shapes, dtypes and kinds of device, the state's structure and
    the values of its replicated parts. Every rank must call it: it costs one all-gather of 32 bytes, and one of the
    descriptions if they differ. Adapters such as `register` call it themselves.

    Args:
        sync: The pipeline, or its text; or an outer step; its state also shows whether ranks begin with the same
            parameters. Names of process groups are not compared, because they differ in a device mesh.
        grads: Gradients, or parameters.
        state: From `sync.init`; None compares no state.
        group: The ranks that must agree; None for the default group.

    Raises:
        RankMismatchError: On all ranks, naming the first difference and each rank's part in it.

    >>> from fnddp import allreduce
    >>> verify(allreduce, {"w": torch.ones(2)})
    """
    read = partial(pipeline_of, "verify: sync", sync) if isinstance(sync, str) else lambda: sync
    agree(lambda: description(read(), tree.flatten(grads)[0], state), group, call="fnddp.verify")


def agree(
    describe_rank: Callable[[], dict[str, str]], group: Group, wire: Wire = C10D, *, call: str = "this call"
) -> None:
    """Raise a RankMismatchError on all ranks of `group` unless `describe_rank` returns the same on all.

    `describe_rank` returns lines that must be equal, by subject, in the order of comparison. If it raises on a rank,
    that rank raises the same error. If some ranks do not make the `call`, the others raise a CollectiveError.
    """
    name = group_name(group)
    wire.size(name)  # raises if there ought to be a process group
    failure: Exception | None = None
    try:
        mine = {"set-up": "done", **describe_rank()}
    except Exception as error:
        failure, mine = error, {"set-up": f"failed with {type(error).__name__}: {error}"}
    digest = hashlib.sha256(repr(list(mine.items())).encode()).digest()
    try:
        digests = control.all_gather_bytes(digest, name, wire)
        if failure is None and len(set(digests)) == 1:
            return
        everyone = dict(control.all_gather_object((wire.rank(None), mine), name, wire))
    except RuntimeError as error:
        raise CollectiveError(
            f"{call} could not compare settings with the other ranks: {error}. All ranks must make this call, between "
            "steps; another rank has failed, has left, or has not made the call"
        ) from error
    raise RankMismatchError(first_difference([*everyone.values()], [*everyone])) if failure is None else failure


def agree_over(
    describe_rank: Callable[[], dict[str, str]],
    groups: Iterable[Group],
    others: Iterable[Group] = (),
    within: Mapping[str, Collection[Group]] | None = None,
    wire: Wire = C10D,
    *,
    call: str = "this call",
) -> None:
    """Run `agree` over each of `groups`; raise a failure in one in all of them and in `others` (these compare nothing).

    `within` has the groups that compare a subject, if not all groups do; `describe_rank` may fill it.
    """
    failure: Exception | None = None
    lines: dict[str, str] = {}
    try:
        lines = describe_rank()
    except Exception as error:
        failure = error
    known = {} if within is None else within
    of_groups = [(group, {s: line for s, line in lines.items() if group in known.get(s, (group,))}) for group in groups]
    for group, compared in [*of_groups, *((group, dict[str, str]()) for group in others)]:
        try:
            agree(partial(reraise, failure) if failure is not None else compared.copy, group, wire, call=call)
        except Exception as error:  # ranks of the next group must learn of it
            failure = failure or error
    if failure is not None:
        raise failure


def agreed_state(
    sync: Expression,
    before: State,
    read: Callable[[], State],
    groups: Iterable[Group],
    wire: Wire = C10D,
    within: Mapping[str, Collection[Group]] | None = None,
    others: Iterable[Group] = (),
) -> State:
    """Return the state that `read` returns, to be set; raise on all ranks unless its replicated parts are the same.

    Replicated parts such as counters decide which collectives run. All ranks call this, even if their state does not
    change. They compare states if `before` has replicated parts. On an elastic wire nothing is compared, because
    replicas agree in each quorum.

    Args:
        before: The present state, with the same structure.
        within, others: See `agree_over`; subjects are those of `replicated`.

    Raises:
        CollectiveError: Another rank has not set its state within the group's timeout.
        RankMismatchError: On all ranks.
        ValueError: The state is of another pipeline or other leaves.
    """
    states: list[State] = []

    def described() -> dict[str, str]:
        states.append(require_like(repr(sync), read(), before))
        return replicated(states[0])

    if isinstance(wire, Elastic) or not any(part.kind == REPLICATED for part in parts(before)):
        described()
    else:
        agree_over(described, groups, others, within, wire, call=f"setting the state of {sync!r}")
    return states[0]


@contextmanager
def fails_alike(group: Group, *, enabled: bool = True) -> Generator[None]:
    """Report an error of the block to the other ranks: their next `agree` raises; `enabled` says if they call it."""
    try:
        yield
    except Exception as error:
        if enabled:
            agree(partial(reraise, error), group)
        raise


def reraise(error: BaseException) -> Any:
    """Raise `error`, as a callback."""
    raise error


def description(sync: Expression, leaves: Leaves, state: State | None) -> dict[str, str]:
    """Return the lines that must be equal on all ranks, by subject; they include the order of `leaves`.

    Raises:
        TypeError, ValueError: A leaf is not dense, or a DTensor.
    """
    tree.require_leaves(type(sync).__name__, leaves)
    of_leaves = {f"leaf {path!r}": f"{describe(leaf)} on {leaf.device.type}" for path, leaf in leaves.items()}
    of_state = {f"state {part.path!r}": describe(part.value) for part in parts(state)}
    return {"pipeline": repr(sync.over(None)), **of_leaves, **of_state, **replicated(state)}


def first_difference(everyone: list[dict[str, str]], ranks: Sequence[int] | None = None) -> str:
    """Return the message about the first line in which ranks differ, with each rank's line.

    >>> of_ranks = [{"leaf 'w'": "float32[2]"}, {"leaf 'w'": "float32[3]"}, {"leaf 'w'": "float32[2]"}]
    >>> print(first_difference(of_ranks, [0, 2, 4]))
    ranks disagree about leaf 'w': ranks 0, 4: float32[2]; rank 2: float32[3]
    """
    for lines in zip_longest(*(ranks_lines.items() for ranks_lines in everyone)):
        if len(set(lines)) == 1:
            continue
        about = next(line[0] for line in lines if line is not None)
        holders: dict[str, list[int]] = {}
        for rank, line in zip(ranks or range(len(lines)), lines, strict=True):
            said = "nothing" if line is None else line[1] if line[0] == about else f"{line[0]} in its place, {line[1]}"
            holders.setdefault(said, []).append(rank)
        texts = [f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {said}" for said, who in holders.items()]
        return f"ranks disagree about {about}: {'; '.join(texts)}"
    raise AssertionError("digests differ but descriptions do not")


def replicated(state: State) -> dict[str, str]:
    """Return a line for each replicated part of `state`, by subject: these parts must be equal on all ranks."""
    shared = [(part.path, part.value) for part in parts(state) if part.kind == REPLICATED]
    return {f"state {path!r}": describe(value) + _value(value) for path, value in shared}


def _value(value: Tensor | int) -> str:
    if not isinstance(value, Tensor):
        return f" = {value}"
    return "" if value.is_meta else f" with digest {digest_of([value])}"


def digest_of(tensors: Iterable[Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        # A single element may have any stride, and a view as bytes needs a last one of 1.
        whole.update(plain.reshape(-1).unsqueeze(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]

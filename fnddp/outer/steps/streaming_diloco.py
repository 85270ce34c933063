"""Streaming DiLoCo: ranks exchange fragments of the model in turn while they train."""

import copy
from collections.abc import Mapping
from typing import NamedTuple, Self, TypeAlias

import torch

from fnddp.core.options import checked_int
from fnddp.core.sync import Local, Replicated, State, Sync
from fnddp.core.tree import Leaves, Tree, ordered, replaced
from fnddp.outer.contract import Exchanges, outer, require_options
from fnddp.outer.steps.diloco import Descending, outer_gradient
from fnddp.schedules.choose import compiled_patterns, split_by_pattern

Fragments: TypeAlias = int | tuple[str, ...]


class StreamingDiLoCoState(NamedTuple):
    """`step`: local steps so far. `anchor`, `velocity`: see `DiLoCoState`.

    `pending`: by fragment, the differences sent in its open exchange, or zeros without one. Empty without a delay.
    `inner`: the pipeline's state, by fragment.
    """

    step: Replicated[int]
    anchor: Replicated[Leaves]
    velocity: Replicated[Leaves]
    pending: Local[dict[str, Leaves]]
    inner: dict[str, State]


@outer
class streaming_diloco(Descending):
    """Run DiLoCo on fragments of the model: exchange each once every `every` steps, in turn, over `delay` steps.

    The exchange of a fragment sends the differences at one call and ends `delay` calls later. With `attach`, its
    collectives overlap with the steps in between. Without it, the whole exchange runs where it ends, with the same
    numbers. `fnddp.outer.lower` prints the starts and ends.

    After an exchange, the fragment is (1 - alpha) * its anchor (bit-identical on all ranks) + alpha * this rank's
    parameters. With `alpha=0` the local steps since the start of the exchange are discarded, and the fragment is equal
    on all ranks. The paper uses 0.5 with a delay.

    It stores two copies of the parameters, and a third with a delay. The wrong choice if messages are small, because
    each fragment pays the link's latency.

    Args:
        sync: The pipeline that averages the differences.
        every: Local steps from one exchange of a fragment to its next (the paper's H).
        fragments: Number of fragments: consecutive leaves in the order of their paths, of about the same total size. Or
            a sequence of patterns of leaf paths, one for each fragment.
        delay: Local steps from the start of an exchange to its end, below `every`.
        alpha: Weight of a rank's own parameters after an exchange, in [0, 1).
        lr, momentum, nesterov: Options of the outer optimizer: see `diloco`.

    Raises:
        TypeError: `sync` does not average every leaf, or (`init`) a leaf is an integer or a boolean.
        ValueError: An option is out of range, or (`init`) there are fewer leaves than fragments.

    Source: Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, Algorithm 2. For its
    4-bit payloads use `quantize(two_shot, bits=4)`. With one fragment and no delay it equals `diloco`.

    >>> from fnddp import quantize, two_shot
    >>> streaming_diloco(quantize(two_shot, bits=4), every=100, fragments=4, delay=5)
    streaming_diloco(quantize(two_shot, bits=4), every=100, fragments=4, delay=5)
    """

    sync: Sync
    every: int
    fragments: Fragments
    delay: int = 0
    alpha: float = 0.0
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    named = frozenset({"every", "fragments"})
    _sizes = None  # of whole leaves, if the leaves are shards

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = "streaming_diloco"
        require_options(self, delay=0)
        self._check_fragments()
        if self.every < self._number:
            steps = f"{self._number} fragments in every={self.every!r} steps"
            raise ValueError(f"{owner}: {steps} leave some without a step; use fewer fragments, or more steps")
        if self.delay >= self.every:
            raise ValueError(f"{owner}: delay must be below every={self.every!r}, got {self.delay!r}")

    def init(self, params: Tree) -> State:
        anchor, velocity = self.anchored(params)
        fragments = {str(i): leaves for i, leaves in enumerate(divided(anchor, self.fragments, self._sizes))}
        return StreamingDiLoCoState(
            step=0,
            anchor=anchor,
            velocity=velocity,
            pending={name: _zeros(leaves) for name, leaves in fragments.items() if self.delay},
            inner={name: self.sync.init(leaves) for name, leaves in fragments.items()},
        )

    def step(self, params: Leaves, state: StreamingDiLoCoState, exchanges: Exchanges) -> tuple[Leaves, State]:
        self.require_own(params, state, StreamingDiLoCoState)
        state = replaced(state, step=state.step + 1)
        for i in self._due(state.step):
            delta = outer_gradient(divided(state.anchor, self.fragments, self._sizes)[i], params)
            state = replaced(state, pending={**state.pending, str(i): delta})
            exchanges.begin(str(i), self.sync, delta, state.inner[str(i)])
        for i in self._due(state.step - self.delay):
            name, delta = str(i), state.pending[str(i)]
            params, state, inner = self.ended(name, delta, params, state, state.inner[name], exchanges)
            pending = {**state.pending, name: _zeros(delta)} if self.delay else {}
            state = replaced(state, pending=pending, inner={**state.inner, name: inner})
        return params, state

    def sized(self, sizes: Mapping[str, int]) -> Self:
        made = copy.copy(self)
        object.__setattr__(made, "_sizes", dict(sizes))
        return made

    def _check_fragments(self) -> None:
        what, given = "streaming_diloco: fragments", self.fragments
        if not isinstance(given, list | tuple):
            if checked_int(what, given) < 1:
                raise ValueError(f"{what} must be at least 1, got {given!r}")
            object.__setattr__(self, "fragments", checked_int(what, given))
            return
        if not all(isinstance(pattern, str) for pattern in given):
            raise TypeError(f"{what} must be a number, or patterns of leaf paths, got {given!r}")
        if not given or len(set(given)) < len(given):
            raise ValueError(f"{what} must have at least one pattern, all different, got {given!r}")
        object.__setattr__(self, "fragments", tuple(given))

    @property
    def _number(self) -> int:
        return self.fragments if isinstance(self.fragments, int) else len(self.fragments)

    def _due(self, step: int) -> list[int]:
        """Return the fragment (or none) that starts its exchange with local step `step`, counted from 1."""
        n = self._number
        return [i for i in range(n) if step > 0 and step % self.every == self.every * (i + 1) // n % self.every]


def _zeros(leaves: Leaves) -> Leaves:
    return {path: torch.zeros_like(leaf) for path, leaf in leaves.items()}


def divided(leaves: Leaves, fragments: Fragments, sizes: Mapping[str, int] | None = None) -> list[Leaves]:
    """Return the leaves of each fragment: runs of about the same size, or the leaves of each pattern.

    `sizes`: numbers of elements of whole leaves, if `leaves` are shards.
    """
    owner, leaves = "streaming_diloco", ordered(leaves)
    if not isinstance(fragments, int):
        return list(split_by_pattern(owner, leaves, compiled_patterns(fragments)).values())
    if len(leaves) < fragments:
        raise ValueError(f"{owner}: {len(leaves)} leaves cannot form {fragments} fragments; use fewer")
    sizes = {path: leaf.numel() for path, leaf in leaves.items()} if sizes is None else sizes
    runs: list[Leaves] = []
    paths, left = list(leaves), sum(sizes[path] for path in leaves)
    for later in reversed(range(fragments)):  # runs after this one
        run, size, target = list[str](), 0, left / (later + 1)
        while len(paths) > later:
            following = sizes[paths[0]]
            if run and later and size + following - target > target - size:
                break
            run.append(paths.pop(0))
            size += following
        runs.append({path: leaves[path] for path in run})
        left -= size
    return runs

"""A pipeline on n virtual ranks, in one process, as one `torch.func.vmap` over ranks."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnddp.core import collectives, tree
from fnddp.core.options import checked_int
from fnddp.core.parse import pipeline_of
from fnddp.core.state import Part, parts
from fnddp.core.sync import REPLICATED, Exchange, State, Sync, parts_of, require_takes_weight
from fnddp.core.tree import Leaves, Tree
from fnddp.torch_private import is_mapped, reads_values, reinterpreted, without_autocast
from fnddp.wire.groups import World, within
from fnddp.wire.simulated import Division, SimulatedRanks
from fnddp.wire.weights import Weight, require_weights


def simulate(sync: Sync | str, world_size: int, *, groups: Mapping[str, Division] | None = None) -> "Simulation":
    """Return a simulation of `sync` on `world_size` virtual ranks, a function of the stacked gradients of all ranks.

    The pipeline's own Python runs once, under a vmap over ranks: no processes, no threads, and no process group. Sums
    are in rank order, so carriers (`allgather`, `two_shot`) and their codecs return the same bits as on `world_size`
    real ranks. Results of `allreduce` and of matrix products (`powersgd`) are equal up to rounding, because a real ring
    adds in its own order, and products are computed for all ranks at once: see `docs/simulate.md`. The wrong choice to
    measure time: see `fnddp.lower(...).estimate(link)`.

    Args:
        sync: The pipeline, or its text. It must not read values of tensors (`sync.traceable`).
        world_size: The number of ranks, n. Memory and time grow with n, because all ranks are computed at once.
        groups: For pipelines over named process groups, such as a hierarchy's: the division of ranks by each name,
            `{"node": ((0, 1), (2, 3)), "rail": ((0, 2), (1, 3))}`; groups of one name have equal sizes.

    Raises:
        ValueError: The pipeline reads values or runs foreign code; a group is unknown, or divides other ranks; or the
            pipeline does not reduce over any of `groups`.

    >>> from fnddp import allgather, error_feedback, topk
    >>> sim = simulate(error_feedback(topk(allgather, k=1)), world_size=2)
    >>> grads = {"w": torch.tensor([[3.0, 1.0], [0.0, -4.0]])}  # a row for each rank
    >>> mean, state = sim(grads, sim.init(grads))
    >>> mean["w"], state.residual["w"]
    (tensor([ 1.5000, -2.0000]), tensor([[0., 1.],
            [0., 0.]]))
    """
    sync = pipeline_of("simulate: sync", sync)
    made = Simulation(sync, world_size, dict(groups or {}))
    if groups and not (sync.groups or frozenset()).intersection(groups):
        raise ValueError(
            f"simulate: {sync!r} does not reduce over any of the groups {list(groups)}; name one in the pipeline, "
            f"such as all_reduce({next(iter(groups))!r}), or remove groups"
        )
    return made


@dataclass(frozen=True)
class Simulation:
    """A pipeline on n virtual ranks: see `simulate`. Call it like the pipeline, with gradients `[n, *shape]`.

    States are those of the pipeline, but `Local` tensors are `[n, *shape]`, a row for each rank. `Replicated` parts and
    Python ints are as on a single rank.
    """

    sync: Sync
    world_size: int
    groups: Mapping[str, Division] = field(default_factory=dict[str, Division])

    def __post_init__(self) -> None:
        if checked_int("simulate: world_size", self.world_size) < 1:
            raise ValueError(f"simulate: world_size must be at least 1, got {self.world_size!r}")
        if not self.sync.traceable:
            raise self._refusal("reads values of tensors or runs foreign code (`traceable` is False)")
        for name, division in self.groups.items():
            ranks = sorted(rank for members in division for rank in members)
            if ranks != list(range(self.world_size)) or len({len(members) for members in division}) > 1:
                raise ValueError(
                    f"simulate: group {name!r} must divide the ranks 0 to {self.world_size - 1} into groups of equal "
                    f"size, got {division!r}"
                )
        for name in self.sync.groups or ():
            self._ranks(torch.zeros((), dtype=torch.int64, device="cpu")).division(name)

    def _refusal(self, why: str) -> ValueError:
        return ValueError(
            f"simulate: {self.sync!r} {why}, so it cannot run for all ranks at once; run it on threads, "
            "fnddp.simulation.ranks.run_threads"
        )

    def init(self, grads: Tree) -> State:
        """Return the initial state for a tree like all ranks' gradients; their values are not read."""
        leaves, spec = tree.flatten(grads)
        require_rows(leaves, self.world_size)
        first = tree.unflatten(spec, {path: leaf[0] for path, leaf in leaves.items()})
        with within(World(simulated=self._ranks(torch.zeros((), dtype=torch.int64, device="cpu")))):
            state = self.sync.init(first)
        return with_rows(state, self.world_size)

    def exchange(self, leaves: Leaves, state: State, *, weight: Sequence[float] | Tensor | None = None) -> Exchange:
        """Return an exchange on all ranks.

        Args:
            leaves: All ranks' gradients by leaf path: `[n, *shape]`.
            state: From `init` or the previous exchange.
            weight: For `weighted`, a number for each rank.

        Returns:
            `mean` as on a single rank, `[*shape]` (`[n, *shape]` if it differs between ranks: `none`), without leaves
            that have no update in this step; `sent`, a row for each rank; and the next state.

        Raises:
            ValueError: A leaf or a part of the state lacks a row for each rank; the pipeline reads values of tensors;
                or a part marked `Replicated` is not the same on all ranks.
            RuntimeError: Within torch.func.grad or jvp.
        """
        collectives.refuse_differentiation(leaves.values())
        require_rows(leaves, self.world_size)
        named, structure = list(parts(state)), tree.structure(state)
        # Row-major: under vmap a tensor cannot be asked for another memory format.
        values = [part.value.contiguous() if isinstance(part.value, Tensor) else part.value for part in named]
        rows = {i: value for i, (part, value) in enumerate(zip(named, values, strict=True)) if _is_local(part)}
        require_rows({named[i].path: rows[i] for i in rows}, self.world_size, "simulate: part {!r} of the state")
        noted: list[tuple[bool | None, Any]] = []  # whether a value is mapped, None unless it is a tensor; the value

        def of_a_rank(rank: Tensor, leaves: Leaves, rows: dict[int, Tensor], weight: Tensor | None) -> list[Tensor]:
            own = [rows.get(i, value) for i, value in enumerate(values)]
            with within(World(simulated=self._ranks(rank), weight=weight)):
                done = self.sync.exchange(leaves, tree.unflatten_any(structure, own))
            given = [*(done.mean.get(path) for path in leaves), *(done.sent[path] for path in leaves)]
            given += parts_of(self.sync, done.state, structure)
            noted.extend((is_mapped(each), None) if isinstance(each, Tensor) else (None, each) for each in given)
            return [each for each in given if isinstance(each, Tensor)]

        weights = self._given(weight)
        ranks = torch.arange(self.world_size, device=next((leaf.device for leaf in leaves.values()), None))
        dense = {path: leaf.contiguous() for path, leaf in leaves.items()}
        with torch.no_grad(), without_autocast(), warnings.catch_warnings():
            # An operation without a rule for vmap (PowerSGD's segment_reduce) runs rank by rank.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            try:
                made = iter(
                    torch.func.vmap(of_a_rank, (0, 0, 0, None if weights is None else 0))(ranks, dense, rows, weights)
                )
            except RuntimeError as error:
                if reads_values(error):
                    raise self._refusal(
                        f"reads values of tensors, so its `traceable` must be False, or it reads a rank ({error})"
                    ) from error
                raise
        results: list[tuple[bool, Any]] = []
        for mapped, plain in noted:  # vmap does not change a number, or None for no update
            value = plain if mapped is None else next(made)
            results.append((bool(mapped), value.contiguous() if mapped else value if mapped is None else value[0]))
        n = len(leaves)
        means, sents, following = results[:n], results[n : 2 * n], results[2 * n :]
        state_after: list[Any] = []
        for part, (mapped, value) in zip(named, following, strict=True):
            if _is_local(part):
                value = value if mapped else value.expand(self.world_size, *value.shape).clone()
            elif mapped:
                value = self._agreed(part.path, value)
            state_after.append(value)
        return Exchange(
            {path: mean for path, (_, mean) in zip(leaves, means, strict=True) if mean is not None},
            {
                path: sent if mapped else sent.expand(self.world_size, *sent.shape)
                for path, (mapped, sent) in zip(leaves, sents, strict=True)
            },
            tree.unflatten_any(structure, state_after),
        )

    def __call__(
        self, grads: Tree, state: State, *, weight: Sequence[float] | Tensor | None = None
    ) -> tuple[Tree, State]:
        """Return the mean of all ranks' gradients, `[n, *shape]` in any pytree, as on one rank; and the next state.

        `weight` has a number for each rank: see `Sync.__call__`. For errors see `Sync.__call__` and `exchange`.
        """
        leaves, spec = tree.flatten(grads)
        done = self.exchange(leaves, state, weight=weight)
        return tree.unflatten(spec, {path: done.mean.get(path) for path in leaves}), done.state

    def of_rank(self, state: State, rank: int) -> State:
        """Return the state that `rank` would have: a real rank can continue from it, and `fnddp.lower` takes it."""
        return of_rank(state, rank)

    def of_ranks(self, states: Sequence[State]) -> State:
        """Combine the states of real ranks into a state of this simulation."""
        values = list(zip(*[[part.value for part in parts(state)] for state in states], strict=True))
        stacked = [
            torch.stack(value) if _is_local(part) else value[0]
            for part, value in zip(parts(states[0]), values, strict=True)
        ]
        return tree.replace_leaves(states[0], stacked)

    def _given(self, weight: Sequence[float] | Tensor | None) -> Tensor | None:
        require_takes_weight(self.sync, weight)
        if not self.sync.takes_weight:
            return None
        given = [Weight.of(each) for each in ([None] * self.world_size if weight is None else weight)]
        if len(given) != self.world_size:
            raise ValueError(f"simulate: weight needs one entry for each of {self.world_size} ranks, got {len(given)}")
        require_weights(given)
        return torch.tensor([each.number for each in given], dtype=torch.float64)

    def _ranks(self, rank: Tensor) -> SimulatedRanks:
        return SimulatedRanks(self.world_size, rank, self.groups)

    def _agreed(self, path: str, rows: Tensor) -> Tensor:
        if not torch.equal(_bits(rows), _bits(rows[:1].expand_as(rows))):
            raise ValueError(
                f"simulate: {self.sync!r} gives each rank a different {path!r}, but its state marks that part as "
                "Replicated; mark it Local, or compute it only from values that are equal on all ranks"
            )
        return rows[0]


def with_rows(state: State, n: int) -> State:
    """Return the state of one rank as a state of `n` ranks: local parts get a row for each rank."""
    every = [
        part.value.expand(n, *part.value.shape).clone() if _is_local(part) else part.value for part in parts(state)
    ]
    return tree.replace_leaves(state, every)


def of_rank(state: State, rank: int) -> State:
    """Return the state that `rank` would have, from a state with rows."""
    return tree.replace_leaves(state, [part.value[rank] if _is_local(part) else part.value for part in parts(state)])


def require_rows(leaves: Mapping[Any, Tensor], n: int, what: str = "simulate: leaf {!r}") -> None:
    """Raise a ValueError that names the first leaf without a row for each of `n` ranks."""
    for path, leaf in leaves.items():
        if (shape := tuple(getattr(leaf, "shape", ())))[:1] != (n,):
            raise ValueError(
                f"{what.format(path)} has shape {shape}, but needs a row for each of {n} ranks: torch.stack(rows)"
            )


def _is_local(part: Part) -> bool:
    return isinstance(part.value, Tensor) and part.kind != REPLICATED


def _bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return reinterpreted(real.contiguous().unsqueeze(-1), torch.uint8)

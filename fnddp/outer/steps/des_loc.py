"""DES-LOC: ranks average their parameters and the moments of their optimizers, each with its own period."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.options import checked_pairs
from fnddp.core.sync import State, Sync, require_state
from fnddp.core.tree import Leaves, Tree
from fnddp.outer.contract import Exchanges, Outer, outer

Trees: TypeAlias = Mapping[str, Outer] | tuple[tuple[str, Outer], ...]


class DesLocState(NamedTuple):
    """`trees`: the state of each tree's outer step, by its name."""

    trees: dict[str, State]


@outer
class des_loc(Outer):
    """Run one outer step for the parameters, and one for each moment of the local optimizer.

    Call it with a tree of trees, `{"params": ..., "exp_avg": ..., "exp_avg_sq": ...}`; `attach` finds the moments in
    its optimizer by these names. Each tree is sent in its own messages. The wrong choice if ranks can keep their own
    moments: `diloco` does not send them at all.

    Args:
        trees: The outer step of each tree, by its name.

    Raises:
        TypeError: `trees` is not a dict of outer steps by name.
        ValueError: `trees` is empty, or a name is empty or has a dot; at the call: a tree is missing.

    Source: Iacob et al., "DES-LOC: Desynced low communication adaptive optimizers", arXiv 2505.22549, Algorithm 1:
    parameters, first and second moments every K, 3 K and 6 K steps.

    >>> from fnddp.outer import local_sgd
    >>> des_loc({"params": local_sgd(every=2), "exp_avg": local_sgd(every=6)})
    des_loc({'params': local_sgd(every=2), 'exp_avg': local_sgd(every=6)})
    """

    trees: Trees

    wants_moments: ClassVar[bool] = True
    tables = frozenset({"trees"})

    def __post_init__(self) -> None:
        super().__post_init__()
        pairs = checked_pairs("des_loc: trees must be a dict of outer steps by name", self.trees, Outer, str)
        names = [name for name, _ in pairs]
        if not names or len(set(names)) < len(names) or any(not name or "." in name for name in names):
            raise ValueError(f"des_loc: trees must have at least one name, all different and without dots, got {names}")
        object.__setattr__(self, "trees", pairs)

    @property
    def period(self) -> int:
        return math.lcm(*(step.period for step in dict(self.trees).values()))

    @property
    def lead(self) -> int:
        return max(step.lead for step in dict(self.trees).values())

    def leaves_of(self, params: Leaves, moments: Mapping[str, Mapping[str, Any]] | None) -> Leaves:
        return {
            f"{tree}.{name}": p if tree == "params" else _moment(tree, name, p, moments)
            for tree in dict(self.trees)
            for name, p in params.items()
        }

    def anchors(self, state: DesLocState) -> Leaves:
        found = {name: step.anchors(state.trees[name]) for name, step in dict(self.trees).items()}
        return {f"{name}.{path}": leaf for name, leaves in found.items() for path, leaf in leaves.items()}

    def init(self, params: Tree) -> State:
        leaves, _ = tree.flatten(params)
        return DesLocState({name: step.init(_of(name, leaves)) for name, step in dict(self.trees).items()})

    def step(self, params: Leaves, state: DesLocState, exchanges: Exchanges) -> tuple[Leaves, State]:
        require_state("des_loc", state, DesLocState)
        stepped, states = dict(params), dict(state.trees)
        for name, step in dict(self.trees).items():
            leaves, states[name] = step.step(_of(name, params), state.trees[name], _OfTree(name, exchanges))
            stepped.update({f"{name}.{path}": leaf for path, leaf in leaves.items()})
        return stepped, DesLocState(states)


def _of(name: str, leaves: Leaves) -> Leaves:
    prefix = f"{name}."
    found = {path.removeprefix(prefix): leaf for path, leaf in leaves.items() if path.startswith(prefix)}
    if not found:
        has = sorted({path.partition(".")[0] for path in leaves})
        raise ValueError(f"des_loc: there is no tree {name!r} among {has}; pass it, or remove it from the step")
    return found


def _moment(tree: str, name: str, p: Tensor, moments: Mapping[str, Mapping[str, Any]] | None) -> Tensor:
    if moments is None:
        return torch.zeros_like(p)
    found = {key: m for key, m in moments.get(name, {}).items() if isinstance(m, Tensor) and m.shape == p.shape}
    if tree not in found:
        raise ValueError(
            f"des_loc: the optimizer has no state {tree!r} in the shape of parameter {name!r}, only {[*found]}; name "
            "one of these, or freeze the parameter if it gets no gradients"
        )
    return found[tree]


class _OfTree(Exchanges):
    """Exchanges of one of several trees: prefixes the names of exchanges with the name of the tree."""

    def __init__(self, name: str, exchanges: Exchanges) -> None:
        self._name, self._exchanges = name, exchanges

    def begin(self, name: str, sync: Sync, leaves: Leaves, state: State) -> None:
        self._exchanges.begin(f"{self._name}/{name}", sync, leaves, state)

    def end(self, name: str, sync: Sync, leaves: Leaves, state: State) -> tuple[Leaves, State]:
        return self._exchanges.end(f"{self._name}/{name}", sync, leaves, state)

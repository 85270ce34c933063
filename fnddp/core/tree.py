"""Pytree policy: how a tree of gradients becomes named leaves and back.

The only file that imports optree. A tree is any optree pytree: dicts, lists, tuples, named tuples, `None` (a node
without leaves), and classes registered with optree globally or in the namespace `"fnddp"`. Inside a transform a tree
is a `Leaves`: a plain dict from leaf path to tensor, in the order of `ordered`, the same on all ranks. The order of a
tree may differ between ranks: dicts are often made from sets of names.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from numbers import Number
from typing import Any, NamedTuple, TypeAlias, TypeVar, get_type_hints

import optree
import torch
from torch import Tensor

from fnddp.torch_private import WRAPPERS, constant_for_dynamo

NAMESPACE = "fnddp"

Tree: TypeAlias = Any
"""Any optree pytree of tensors."""

Leaves: TypeAlias = dict[str, Tensor]
"""Tensors by leaf path."""


class Spec(NamedTuple):
    """The structure of a tree: the paths of its leaves in its own order, and optree's; None for a dict by name."""

    paths: tuple[str, ...]
    node: optree.PyTreeSpec | None


T = TypeVar("T")
N = TypeVar("N", bound=NamedTuple)


def ordered(leaves: Mapping[str, T]) -> dict[str, T]:
    """Return `leaves` in the order of their paths, with numbers by value: the same order on all ranks.

    >>> list(ordered(dict.fromkeys(["h.10.w", "h.9.w", "h.9.b", "h"])))
    ['h', 'h.9.b', 'h.9.w', 'h.10.w']
    """
    return {path: leaves[path] for path in _in_order(tuple(leaves))}


@constant_for_dynamo
def _in_order(paths: tuple[str, ...]) -> tuple[str, ...]:
    return _sorted(paths)


@lru_cache  # the same in each step, and for each transform of a pipeline
def _sorted(paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(paths, key=lambda path: (_place(without_wrappers(path)), path)))


def _place(path: str) -> list[str | tuple[int, str]]:
    """Return the texts of a path and the numbers between them, alternately, as a sort key."""
    parts = re.split(r"(\d+)", path)
    return [(int(part), part) if i % 2 else part for i, part in enumerate(parts)]


def flatten(tree: Tree) -> tuple[Leaves, Spec]:
    """Return the leaves of `tree` by path, in the order of `ordered`, and its structure.

    The path of a leaf has the keys that lead to it, joined by dots: `{"encoder": [w]}` has the leaf `encoder.0`, and
    `dict(module.named_parameters())` has the parameter names. The path of a bare tensor is the empty string.

    Raises:
        TypeError: A leaf is not a tensor, or a DTensor.
        ValueError: Two leaves have the same path, or a leaf is not dense.

    >>> leaves, spec = flatten({"layer": {"weight": torch.ones(2)}, "scale": (torch.ones(()), None)})
    >>> list(leaves)
    ['layer.weight', 'scale.0']
    >>> unflatten(spec, {path: leaf + 1 for path, leaf in leaves.items()})
    {'layer': {'weight': tensor([2., 2.])}, 'scale': (tensor(2.), None)}
    """
    values, spec = _named_values(tree)
    leaves: Leaves = {}
    for path, leaf in values:
        if not isinstance(leaf, Tensor):
            fix = "give dicts, lists and tuples of tensors, or register its class with optree, namespace 'fnddp'"
            if isinstance(leaf, torch.nn.Module | Iterator):  # such as module.parameters()
                fix = "give dict(module.named_parameters())"
            elif isinstance(leaf, Number) or hasattr(leaf, "__array__"):
                fix = "wrap it with torch.as_tensor"
            raise TypeError(f"leaf {path!r} is a {type(leaf).__name__}, not a tensor; {fix}")
        _require_plain(path, leaf)
        if path in leaves:
            raise ValueError(f"two leaves have the path {path!r}; rename one of the keys that lead to them")
        leaves[path] = leaf
    return ordered(leaves), Spec(tuple(leaves), spec)


def require_leaves(owner: str, leaves: Any) -> None:
    """Raise a TypeError unless `leaves` is a plain dict of tensors by leaf path, a ValueError if one is not dense."""
    problem = "" if isinstance(leaves, dict) else f"got a {type(leaves).__name__}"
    for path, leaf in leaves.items() if not problem else ():
        if not isinstance(leaf, Tensor) or not isinstance(path, str):
            problem = problem or f"and {path!r} is a {type(leaf).__name__}"
        else:
            _require_plain(path, leaf)
    if problem:
        raise TypeError(
            f"{owner}: exchange takes a dict of tensors by leaf path, {problem}; call the pipeline, "
            "sync(grads, state), or flatten first: leaves, spec = fnddp.tree.flatten(grads)"
        )


def unflatten(spec: Spec, leaves: Mapping[str, Any]) -> Tree:
    """Return the tree of structure `spec` with the values of `leaves`, by path."""
    values = [leaves[path] for path in spec.paths]
    return dict(zip(spec.paths, values, strict=True)) if spec.node is None else optree.tree_unflatten(spec.node, values)


def annotated_items(tree: Tree) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Yield path, annotations and value of every leaf of any type.

    Annotations, `Annotated[..., these]`, are of named-tuple and dataclass fields on the way to the leaf, from outside.
    """
    values, spec = optree.tree_flatten(tree, namespace=NAMESPACE)
    for accessor, value in zip(spec.accessors(), values, strict=True):
        annotations: list[Any] = []
        for entry in accessor:
            if isinstance(entry, optree.NamedTupleEntry | optree.DataclassEntry):
                hint = get_type_hints(entry.type, include_extras=True)[_name(entry)]
                annotations.extend(getattr(hint, "__metadata__", ()))
        yield _path(accessor), tuple(annotations), value


def without_wrappers(path: str) -> str:
    """Return the path of a leaf without the names that module wrappers such as `torch.compile` add.

    So a compiled run can continue a run that was not compiled.

    >>> without_wrappers("_orig_mod.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return ".".join([part for part in path.split(".") if part not in WRAPPERS])


def flatten_any(tree: Tree) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves of `tree`, of any type, and its structure."""
    return optree.tree_flatten(tree, namespace=NAMESPACE)


def unflatten_any(spec: optree.PyTreeSpec, values: list[Any]) -> Tree:
    return optree.tree_unflatten(spec, values)


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    return optree.tree_map(lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf, tree, namespace=NAMESPACE)  # pyright: ignore


def paired(fn: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """Apply `fn` to the parts at the same positions in two states; return a state with the structure of the first.

    Where their structures differ, the parts are whole subtrees. In plain Python, so that Dynamo can trace it.

    >>> paired(lambda a, b: (a, b), {"x": [1, 2], "y": 3}, {"x": [4, 5]})
    {'x': [(1, 4), (2, 5)], 'y': (3, None)}
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: paired(fn, value, other.get(key)) for key, value in one.items()}
    if isinstance(one, tuple | list) and type(one) is type(other) and len(one) == len(other):
        values = [paired(fn, a, b) for a, b in zip(one, other, strict=True)]
        return type(one)(*values) if hasattr(one, "_fields") else type(one)(values)
    return fn(one, other)


def structure(tree: Tree) -> optree.PyTreeSpec:
    return optree.tree_structure(tree, namespace=NAMESPACE)


def replace_leaves(tree: Tree, values: list[Any]) -> Tree:
    return optree.tree_unflatten(structure(tree), values)


def map_leaves(fn: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Return `tree` with `fn` applied to every leaf."""
    leaves, spec = flatten(tree)
    return unflatten(spec, {path: fn(leaf) for path, leaf in leaves.items()})


def replaced(record: N, **changes: Any) -> N:
    """Return `record._replace(**changes)`; torch.compile 2.11 would turn that call into an empty tuple.

    >>> from fnddp.core.sync import Exchange
    >>> replaced(Exchange({}, {}, state=0), state=1).state
    1
    """
    made: Any = type(record)
    return made(*[changes.get(name, value) for name, value in zip(record._fields, record, strict=True)])


def is_inexact(leaf: Tensor) -> bool:
    """Return True for floating-point and complex leaves: these can be cast, compressed and remembered."""
    return leaf.is_floating_point() or leaf.is_complex()


def is_compressible(leaf: Tensor) -> bool:
    """Return True for floating-point and complex leaves with elements."""
    return is_inexact(leaf) and leaf.numel() > 0


def changed(now: Leaves, before: Leaves) -> list[str]:
    """Return the paths of leaves with different values in `now` and `before`. It waits for the device once.

    >>> changed({"a": torch.ones(2), "b": torch.ones(3)}, {"a": torch.ones(2), "b": torch.zeros(3)})
    ['b']
    """
    if not now:
        return []
    pairs = [(leaf, before[name]) for name, leaf in now.items()]
    differs = torch.stack([((a != b) & ~(a.isnan() & b.isnan())).any() for a, b in pairs]).tolist()
    return [name for name, is_other in zip(now, differs, strict=True) if is_other]


def check_entries(
    owner: str, entries: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], made_for: str = "another tree"
) -> None:
    """Raise a ValueError about the first leaf with an entry in the state of `owner` that lacks the shape in `shapes`.

    `made_for` is the error's guess at the tree or the ranks that the state was made for.
    """
    problem = ""
    for path, shape in shapes.items():
        if not problem and (path not in entries or entries[path].shape != shape):
            has = f"an entry of shape {tuple(entries[path].shape)}" if path in entries else "no entry"
            problem = f"{has} for leaf {path!r}, which needs one of shape {tuple(shape)}"
    for path in entries:
        if not problem and path not in shapes:
            problem = f"an entry for {path!r}, which is not a leaf that needs one"
    if problem:
        raise ValueError(f"{owner}: the state has {problem}; it was made for {made_for}: call init on this one")


def _require_plain(path: str, leaf: Tensor) -> None:
    if leaf.layout != torch.strided:
        raise ValueError(f"leaf {path!r} has layout {leaf.layout}; synchronize leaf.to_dense() instead")
    if hasattr(leaf, "to_local"):  # DTensor takes long to import
        raise TypeError(
            f"leaf {path!r} is a {type(leaf).__name__}, so each rank has only a part; synchronize leaf.to_local(), or "
            "wrap the model in DistributedDataParallel(model, device_mesh=mesh['dp']), which makes all leaves local"
        )


def _named_values(tree: Tree) -> tuple[list[tuple[str, Any]], optree.PyTreeSpec | None]:
    # The usual tree. Without optree's path objects (2 us a leaf), and its Python: torch 2.11 cannot trace optree 0.20.
    if _is_plain(tree):
        return list(tree.items()), None
    values, spec = optree.tree_flatten(tree, namespace=NAMESPACE)
    return [(_path(accessor), value) for accessor, value in zip(spec.accessors(), values, strict=True)], spec


def _is_plain(tree: Tree) -> bool:
    return type(tree) is dict and all(isinstance(key, str) and isinstance(leaf, Tensor) for key, leaf in tree.items())


def _path(accessor: optree.PyTreeAccessor) -> str:
    return ".".join([_name(entry) for entry in accessor])


def _name(entry: optree.PyTreeEntry) -> str:
    if isinstance(entry, optree.NamedTupleEntry):
        return entry.field
    if isinstance(entry, optree.DataclassEntry):
        return entry.name
    return str(entry.entry)

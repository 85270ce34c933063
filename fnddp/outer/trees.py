"""The trees that an outer step is called with: parameters, and for some the moments of their optimizer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fnddp.outer.contract import Outer
from fnddp.outer.des_loc import des_loc
from fnddp.tree import Leaves

PARAMS = "params"


def leaves_of(outer: Outer, params: Leaves, moments: Mapping[str, Mapping[str, Any]] | None) -> Leaves:
    """What `outer` is called with, by leaf path.

    Args:
        outer: The outer step.
        params: Parameters by name.
        moments: The optimizer's state of each parameter, by its name; None before there is any: moments are zeros.

    Raises:
        ValueError: The optimizer keeps no such moment for a parameter, or one of another shape.
    """
    if not isinstance(outer, des_loc):
        return params
    return {
        f"{tree}.{name}": p if tree == PARAMS else _moment(tree, name, p, moments)
        for tree, _ in outer.pairs
        for name, p in params.items()
    }


def _moment(tree: str, name: str, p: Tensor, moments: Mapping[str, Mapping[str, Any]] | None) -> Tensor:
    if moments is None:
        return torch.zeros_like(p)
    of_parameter = moments.get(name, {})
    moment = of_parameter.get(tree)
    if not isinstance(moment, Tensor) or moment.shape != p.shape:
        has = [key for key, value in of_parameter.items() if isinstance(value, Tensor) and value.shape == p.shape]
        raise ValueError(
            f"des_loc: the optimizer keeps no {tree!r} like parameter {name!r}, but {has}; name one of these, or "
            "freeze a parameter that gets no gradients"
        )
    return moment

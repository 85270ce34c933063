"""The two hops of sharded optimizers: the owner of each parameter, and what travels to owners and back."""

import functools
import math
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fnddp import torch_private
from fnddp.core.codec import Codec
from fnddp.core.parse import pipeline_of
from fnddp.core.state import describe, on_cpu
from fnddp.core.sync import Sync, all_in
from fnddp.plan.lower import lower
from fnddp.plan.plan import Plan
from fnddp.reducers.carriers import all_gather, two_shot_mean
from fnddp.reducers.halves import Owners, to_all, to_owners, with_halves
from fnddp.run.choose import AUTO
from fnddp.schedules.choose import partition, warmup
from fnddp.transforms.cast import cast
from fnddp.transforms.memory import ef21, error_feedback
from fnddp.transforms.weighted import weighted

ELEMENTWISE = frozenset(
    {
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
        *(torch.optim.Adamax, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop),
        torch.optim.ASGD,
    }
)
"""Optimizers that compute each element by itself, so that a leaf may have several owners, of rows."""

CUT = 2**14
"""Elements from which a leaf is cut by rows."""


def several(optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return a list of what is one optimizer, or several. (Anything with a `step` may be one.)"""
    return list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]


def wrap_step(optimizer: torch.optim.Optimizer, stepped: Callable[..., Any]) -> None:
    """Let `optimizer.step` call `stepped` with the step of before, its positional arguments, and those by name."""
    step = optimizer.step

    @functools.wraps(step)
    def wrapped(_: Any, *args: Any, **kwargs: Any) -> Any:
        return stepped(step, args, kwargs)

    optimizer.step = MethodType(wrapped, optimizer)  # a method, as schedulers expect it, which wrap it in turn


def refuse_closure(who: str, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise a TypeError if an optimizer's step has got a closure; Accelerate gives None."""
    if any(each is not None for each in (*args, kwargs.get("closure"))):
        raise TypeError(
            f"{who}: {type(optimizer).__name__}.step got a closure, which may evaluate the model between updates that "
            "other ranks do not have yet; call backward(), then step()"
        )


@contextmanager
def groups_of(optimizer: torch.optim.Optimizer, own: Mapping[Any, Tensor]) -> Generator[None]:
    """Let the groups of an optimizer have `own[p]` for each parameter p in it, and no others, for the block.

    Groups without any are left out. So an optimizer may stack the gradients of a group.
    """
    groups = [*optimizer.param_groups]
    held = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [own[p] for p in group["params"] if p in own]
    optimizer.param_groups[:] = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        optimizer.param_groups[:] = groups
        for group, params in zip(groups, held, strict=True):
            group["params"] = params


def named_groups(optimizer: torch.optim.Optimizer, name_of: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the groups of an optimizer as torch saves them, with names of parameters by their ids, on the CPU."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        names = [name_of[id(p)] for p in group["params"] if id(p) in name_of]
        groups.append({**on_cpu({key: value for key, value in group.items() if key != "params"}), "params": names})
    return groups


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for torch's Muon, and for others by their name."""
    return "muon" in type(optimizer).__name__.lower()


def parameters_of(
    who: str, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> list[dict[str, nn.Parameter]]:
    """Return the parameters of each optimizer that require a gradient, by name, in the order of the model."""
    _require_plain(who, model)
    if not optimizers:
        raise ValueError(f"{who}: there is no optimizer; give one, or several")
    of = require_ownable(who, model, optimizers)
    named: list[dict[str, nn.Parameter]] = [{} for _ in optimizers]
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if id(p) not in of:
            raise ValueError(f"{who}: {name!r} is in no optimizer, so no rank would update it; add it, or freeze it")
        named[of[id(p)]][name] = p
    for optimizer, each in zip(optimizers, named, strict=True):
        if not each:
            raise ValueError(
                f"{who}: {type(optimizer).__name__} has no parameter that requires a gradient; leave it out"
            )
    return named


def require_ownable(who: str, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, int]:
    """Return the number of the optimizer of each parameter, by the parameter's id; raise unless they can have owners.

    Raises:
        TypeError: An optimizer mixes leaves, has owners already, or runs in backward.
        ValueError: A parameter is not the model's, or in two optimizers.
    """
    of: dict[int, int] = {}
    names = {id(p): name for name, p in model.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(f"{who}: LBFGS evaluates a closure, and mixes all leaves; there is no owner of one leaf")
        if (owner := owner_of(optimizer)) is not None:
            raise TypeError(f"{who}: {kind} has owners already ({owner}); make another optimizer")
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if id(p) not in names:
                raise ValueError(
                    f"{who}: {kind} has a parameter of shape {tuple(p.shape)} that is not the model's; make the "
                    f"optimizer of model.parameters(), before {who}, and after fully_shard where that is called"
                )
            if id(p) in of:
                raise ValueError(
                    f"{who}: {names[id(p)]!r}, a parameter of shape {tuple(p.shape)}, is in two optimizers, of which "
                    "each would update it; leave it in one"
                )
            if torch_private.optimizers_in_backward(p):
                raise TypeError(
                    f"{who}: {names[id(p)]!r} has an optimizer that runs in backward, before a mean is there; leave it "
                    "out"
                )
            of[id(p)] = i
    return of


def options_of(which: str, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return lines about the options of an optimizer, which must be the same on all ranks."""
    groups = optimizer.param_groups
    options = [{k: v for k, v in each.items() if k not in ("params", "param_names", "lr", OWNED)} for each in groups]
    return {which: str(options), f"rates of {which}": str([float(each["lr"]) for each in groups if "lr" in each])}


def require_same_parameters(who: str, optimizer: torch.optim.Optimizer, known: Iterable[Tensor]) -> None:
    """Raise a RuntimeError if an optimizer with owners has got a parameter that is none of those it `known` had."""
    ids = {*map(id, known)}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.requires_grad and id(p) not in ids:
            raise RuntimeError(
                f"{who}: {type(optimizer).__name__} has got a parameter of shape {tuple(p.shape)} since it was given "
                f"to {who}, which has no owner; add it before"
            )


def require_same_groups(saved: Sequence[Mapping[str, Any]], mine: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ValueError unless groups of parameters that were saved have the names of those that are here."""
    if [set(group["params"]) for group in saved] != [set(group["params"]) for group in mine]:
        raise ValueError(
            f"load_optimizer_state_dict: the groups of parameters are {[len(g['params']) for g in saved]} parameters "
            f"long, and those here {[len(g['params']) for g in mine]}, or have other names; load it with the same "
            "optimizers, in the same order"
        )


def _require_plain(who: str, model: nn.Module) -> None:
    for name, part in model.named_modules():
        if isinstance(part, TorchDDP):
            which = f"the part {name!r} of the model" if name else "the model"
            raise TypeError(
                f"{who}: {which} is wrapped in DistributedDataParallel, which would reduce twice; unwrap it"
            )
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            raise TypeError(
                f"{who}: {name!r} is a DTensor, of which each rank has its shard and the state of that; "
                "leave own out, or fully_shard"
            )


def owners_of(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    n: int,
    cost: Callable[[str, nn.Parameter], float] | None = None,
    cut: bool = True,
) -> Owners:
    """Return the owners of the parameters of one optimizer; see `own` for `cost` and `cut`."""
    if cost is not None:
        costs = {name: float(cost(name, p)) for name, p in parameters.items()}
        for name, each in costs.items():
            if not 0 <= each < math.inf:
                raise ValueError(f"own: the cost of {name!r} is {each}; return a number that is not negative")
    else:
        costs = {
            name: float(p.numel() * (min(p.shape) if is_muon(optimizer) and p.ndim == 2 else 1))
            for name, p in parameters.items()
        }
    apart: set[str] = set()
    if cut and n > 1 and type(optimizer) in ELEMENTWISE:
        for name, p in parameters.items():
            if p.ndim and p.numel() >= CUT and -p.shape[0] % n <= p.shape[0] / 16:
                apart.add(name)
    return Owners.in_order(parameters, n, costs, apart)


OWNED = "owned"
"""In groups of the `state_dict` of an optimizer with owners, and so in those of one without that has loaded it: the
rows that the rank which made it owns, by leaf."""

Rows: TypeAlias = Mapping[str, Sequence[int]]
"""Begin and end of the rows of leaves, by name."""

_owning: "weakref.WeakKeyDictionary[torch.optim.Optimizer, str]" = weakref.WeakKeyDictionary()


def owner_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Return what has given the state of `optimizer` to owners, if any: "own" or "own_matrices"."""
    return _owning.get(optimizer)


def owned_in(groups: Iterable[Mapping[str, Any]]) -> Rows | None:
    """Return the rows that a rank owned whose optimizer's `state_dict` has been loaded into `groups`, if it was so."""
    return next((group[OWNED] for group in groups if OWNED in group), None)


def unmark(optimizer: torch.optim.Optimizer) -> None:
    """Remove what `owned_in` returns."""
    for group in optimizer.param_groups:
        group.pop(OWNED, None)


def require_own_state(
    who: str, optimizer: torch.optim.Optimizer, theirs: Rows | None, owners: Owners, rank: int
) -> None:
    """Raise a ValueError if a state is what another rank owned: `theirs` are not the rows of `rank`, nor all rows."""
    mine = _rows_of(owners, rank)
    whole = {name: [0, shape[0] if shape else 1] for name, shape in owners.shapes if shape.numel()}
    if theirs is not None and theirs not in (mine, whole):
        raise ValueError(
            f"{who}: this state of {type(optimizer).__name__} is that of the leaves {_some(theirs)}, which the rank "
            f"that saved it owned; this one owns {_some(mine)}. Let each rank load its own, or save with "
            "optimizer_state_dict() and load with load_optimizer_state_dict, for any number of ranks"
        )


def _rows_of(owners: Owners, rank: int) -> dict[str, list[int]]:
    rows = {name: [*owners.rows(name, rank)] for name, shape in owners.shapes if shape.numel()}
    return {name: [begin, end] for name, (begin, end) in rows.items() if begin < end}


def require_shapes(
    who: str, optimizer: torch.optim.Optimizer, name: str, shapes: Sequence[torch.Size], state: Mapping[str, Any]
) -> None:
    """Raise a ValueError if the state of a leaf has a tensor of another shape, in an optimizer where none has."""
    if type(optimizer) not in ELEMENTWISE | {torch.optim.Muon}:
        return
    for key, value in state.items():
        if isinstance(value, DTensor) or (
            isinstance(value, Tensor) and value.numel() != 1 and value.shape not in shapes
        ):
            raise ValueError(
                f"{who}: {key!r} of {name!r} in the state of {type(optimizer).__name__} is {describe(value)}, a "
                f"{type(value).__name__}, and the leaf is of shape {list(shapes[0])}: the state is of another model, "
                "or what one rank had of it; load a whole one with load_optimizer_state_dict"
            )


def mark_states(
    who: str, optimizer: torch.optim.Optimizer, owners: Owners, rank: int, leaves: Mapping[str, Tensor]
) -> None:
    """Let `optimizer.state_dict` say what this rank owns, and `load_state_dict` refuse what another rank did.

    Indices of parameters, by which torch stores states, are the same on all ranks, so nothing else would tell. In the
    state of leaves that other ranks own, tensors have no elements: an optimizer without owners that has loaded them
    fails in its first step, where it would train on without what is missing.

    Args:
        leaves: The parameters of the optimizer, by name: what this rank owns, and what stands for the leaves of others.
    """
    mine = _rows_of(owners, rank)
    name_of = {id(p): name for name, p in leaves.items()}
    _owning[optimizer] = who
    unmark(optimizer)

    def names_in(groups: Iterable[Mapping[str, Any]]) -> list[str | None]:
        return [name_of.get(id(p)) for group in groups for p in group["params"]]

    def mark(of: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        like = next(iter(saved["state"].values()), {})
        empty = {key: v.new_empty(0) if isinstance(v, Tensor) and v.ndim else v for key, v in like.items()}
        for i, name in enumerate(names_in(of.param_groups)):
            if empty and name is not None and name not in mine:
                saved["state"][i] = empty
        for group in saved["param_groups"]:
            group[OWNED] = mine

    def check(of: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        theirs = owned_in([*saved["param_groups"], saved])  # beside the groups in files of before
        require_own_state(who, of, theirs, owners, rank)
        indices = [i for group in saved["param_groups"] for i in group["params"]]
        for i, name in zip(indices, names_in(of.param_groups), strict=False):  # torch compares their numbers
            if name in mine:
                require_shapes(who, of, name, [owners.shape(name), leaves[name].shape], saved["state"].get(i, {}))

    def forget_others(of: torch.optim.Optimizer) -> None:
        unmark(of)
        for name, p in leaves.items():
            if name not in mine:
                of.state.pop(p, None)

    optimizer.register_state_dict_post_hook(mark)
    optimizer.register_load_state_dict_pre_hook(check)
    optimizer.register_load_state_dict_post_hook(forget_others)


def _some(owned: Rows) -> str:
    names = [f"{name!r} (rows {begin} to {end - 1})" for name, (begin, end) in owned.items()]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"


def to_their_owners(leaves: Mapping[str, Tensor], owners: Sequence[Owners]) -> to_owners:
    """Return the first half of a mean of all leaves, which `owners` have: those of each optimizer."""
    shapes = tuple((path, leaf.shape) for path, leaf in leaves.items())
    return to_owners(owners=Owners(owners[0].n, shapes, tuple(pair for each in owners for pair in each.whole)))


def first_hop(who: str, gradients: str | Sync) -> Sync:
    """Return the pipeline of gradients on their way to owners; raise a TypeError if it cannot end there."""
    if gradients == AUTO:
        raise TypeError(
            f"{who}: gradients='auto' measures pipelines that give every rank a mean; name one yourself, such as those "
            "of fnddp.choose_owned, for a link that is written down"
        )
    sync = pipeline_of(f"{who}: gradients", gradients)
    for each in all_in(sync):
        is_plain = isinstance(each, two_shot_mean) and not each.server_memory
        if not (
            is_plain or _is_codec(each) or isinstance(each, error_feedback | partition | warmup | weighted | to_owners)
        ):
            raise TypeError(
                f"{who}: gradients={sync!r} cannot end at the owners, because of {each!r}; give two_shot, with codecs "
                "around it and error_feedback around these: 'error_feedback(quantize(two_shot, bits=4))'"
            )
    return sync


def second_hop(who: str, weights: str | Sync, what: str = "weights") -> Sync:
    """Return the pipeline of weights on their way from owners; raise a TypeError if `what` cannot travel by it."""
    sync = pipeline_of(f"{who}: {what}", weights)
    inner = codecs_of(sync)
    for each in all_in(inner):
        if not (isinstance(each, all_gather) or _is_codec(each)):
            raise TypeError(
                f"{who}: {what}={sync!r} cannot travel between owners and others, because of {each!r}; give "
                "allgather, with codecs around it and ef21 around these: 'ef21(quantize(allgather, bits=4))'"
            )
    if isinstance(sync, ef21) and (sync.eta != 1 or isinstance(inner, all_gather)):
        raise TypeError(f"{who}: {what}={sync!r}: ef21 sends differences through codecs here, without an average (eta)")
    return sync


def _is_codec(sync: Sync) -> bool:
    return isinstance(sync, Codec) or (isinstance(sync, cast) and sync.carries)


def codecs_of(weights: Sync) -> Sync:
    """Return the pipeline that encodes on the second hop: without `ef21`, by which owners send differences."""
    return weights.inner if isinstance(weights, ef21) else weights


def default_cap_mb(n: int) -> float:
    """Return the size of buckets on both hops in MiB: rows for owners are padded to the longest in a bucket."""
    return max(25.0, 12.5 * n)


def plan_of_gradients(gradients: Sync, leaves: Mapping[str, Tensor], owners: Sequence[Owners]) -> Plan:
    """Return the plan of the first hop of `own`, of all leaves."""
    return _planned(with_halves(gradients, to_their_owners(leaves, owners)), leaves, owners[0].n)


def plan_of_weights(weights: Sync, leaves: Mapping[str, Tensor], owners: Owners) -> Plan:
    """Return the plan of the second hop of `own`, of the leaves of one optimizer."""
    sent = {path: torch.empty(owners.sent_shape(path), dtype=p.dtype, device=p.device) for path, p in leaves.items()}
    return _planned(with_halves(codecs_of(weights), to_all(owners=owners)), sent, owners.n)


def _planned(sync: Sync, leaves: Mapping[str, Tensor], n: int) -> Plan:
    cap = default_cap_mb(n)
    return lower(sync, leaves, world_size=n, bucket_cap_mb=cap, first_bucket_mb=cap)

"""The two hops of sharded optimizers: the owner of each parameter, and the pipelines to owners and back."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fnddp import torch_private
from fnddp.core.codec import Codec
from fnddp.core.options import checked_float
from fnddp.core.parse import pipeline_of
from fnddp.core.state import describe
from fnddp.core.sync import Sync, all_in
from fnddp.plan.lower import lower
from fnddp.plan.plan import Plan
from fnddp.reducers.carriers import all_gather, two_shot_mean
from fnddp.reducers.halves import Owners, to_all, to_owners, with_halves
from fnddp.run.choose import AUTO
from fnddp.schedules.choose import partition, warmup
from fnddp.transforms.cast import cast, refuse_check
from fnddp.transforms.memory import ef21, error_feedback
from fnddp.transforms.weighted import weighted

ELEMENTWISE = frozenset(
    {
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
        *(torch.optim.Adamax, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop),
        torch.optim.ASGD,
    }
)
"""Optimizers that update each element by itself, so that several ranks may own rows of a leaf."""

CUT = 2**14
"""Number of elements from which on a leaf is cut by rows."""


def several(optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return a list of optimizers, given one or several. Any object with a `step` counts as an optimizer."""
    return list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for torch's Muon, and for other optimizers with Muon in their name."""
    return "muon" in type(optimizer).__name__.lower()


def parameters_of(
    who: str, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> list[dict[str, nn.Parameter]]:
    """Return the parameters of each optimizer that require a gradient, by name, in the order of the model."""
    _require_plain(who, model)
    if not optimizers:
        raise ValueError(f"{who}: no optimizer was given; pass one or several")
    of = require_ownable(who, model, optimizers)
    named: list[dict[str, nn.Parameter]] = [{} for _ in optimizers]
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if id(p) not in of:
            raise ValueError(f"{who}: {name!r} is in no optimizer, so no rank would update it; add or freeze it")
        named[of[id(p)]][name] = p
    for optimizer, each in zip(optimizers, named, strict=True):
        if not each:
            raise ValueError(
                f"{who}: {type(optimizer).__name__} has no parameter that requires a gradient; do not pass it"
            )
    return named


def require_ownable(who: str, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, int]:
    """Return the index of each parameter's optimizer, by the parameter's id; raise unless all can have owners.

    Raises:
        TypeError: An optimizer is none, mixes leaves, has owners already, or runs in backward.
        ValueError: A parameter is not the model's, or is in two optimizers.
    """
    of: dict[int, int] = {}
    names = {id(p): name for name, p in model.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"{who}: expected an optimizer, such as torch.optim.AdamW(...), got {optimizer!r}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(f"{who}: LBFGS evaluates a closure and mixes all leaves; use another optimizer")
        if (owner := owner_of(optimizer)) is not None:
            raise TypeError(f"{who}: {kind} is already used by {owner}; make another optimizer")
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if id(p) not in names:
                raise ValueError(
                    f"{who}: {kind} has a parameter of shape {tuple(p.shape)} that is not the model's; make the "
                    f"optimizer from model.parameters(), before {who}, and after fully_shard if you call it"
                )
            if id(p) in of:
                raise ValueError(
                    f"{who}: {names[id(p)]!r}, a parameter of shape {tuple(p.shape)}, is in two optimizers, and both "
                    "would update it; put it in only one"
                )
            if torch_private.optimizers_in_backward(p):
                raise TypeError(
                    f"{who}: {names[id(p)]!r} has an optimizer that runs in backward, before the mean is known; "
                    "remove that optimizer"
                )
            of[id(p)] = i
    return of


def options_of(which: str, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return descriptions of those options of an optimizer that must be the same on all ranks."""
    groups = optimizer.param_groups
    options = [{k: v for k, v in each.items() if k not in ("params", "param_names", "lr", OWNED)} for each in groups]
    return {which: str(options), f"rates of {which}": str([float(each["lr"]) for each in groups if "lr" in each])}


def _require_plain(who: str, model: nn.Module) -> None:
    for name, part in model.named_modules():
        if isinstance(part, TorchDDP):
            which = f"the part {name!r} of the model" if name else "the model"
            raise TypeError(
                f"{who}: {which} is wrapped in DistributedDataParallel, so gradients would be reduced twice; unwrap it"
            )
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            raise TypeError(
                f"{who}: {name!r} is a DTensor, so each rank already keeps its shard and the optimizer state of that "
                "shard; use own or fully_shard, not both"
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
        costs = {name: checked_float(f"own: the cost of {name!r}", cost(name, p)) for name, p in parameters.items()}
        for name, each in costs.items():
            if each < 0:
                raise ValueError(f"own: the cost of {name!r} is {each}; return a number of at least 0")
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
"""Key in the groups of an optimizer's `state_dict`, saved where leaves have owners: the rows of each leaf that the
saving rank owned. It is also in the groups of an optimizer without owners that has loaded such a `state_dict`."""

Rows: TypeAlias = Mapping[str, Sequence[int]]
"""The first row and the end of the rows of each leaf, by name."""

_owning: "weakref.WeakKeyDictionary[torch.optim.Optimizer, str]" = weakref.WeakKeyDictionary()


def owner_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the function that divided the state of `optimizer` among owners: "own", "own_matrices", or None."""
    return _owning.get(optimizer)


def owned_in(groups: Iterable[Mapping[str, Any]]) -> Rows | None:
    """Return the rows that the saving rank owned, if `groups` come from a `state_dict` with owners; None otherwise."""
    return next((group[OWNED] for group in groups if OWNED in group), None)


def mark_owner(optimizer: torch.optim.Optimizer, who: str) -> None:
    """Let `owner_of` return `who`, the function that divides the state of `optimizer` among owners."""
    _owning[optimizer] = who
    unmark(optimizer)


def unmark(optimizer: torch.optim.Optimizer) -> None:
    """Remove the entry that `owned_in` returns."""
    for group in optimizer.param_groups:
        group.pop(OWNED, None)


def require_own_state(
    who: str, optimizer: torch.optim.Optimizer, theirs: Rows | None, owners: Owners, rank: int
) -> None:
    """Raise a ValueError if another rank saved its part of the state: `theirs` are neither this rank's nor all rows."""
    mine = owned_rows(owners, rank)
    whole = {name: [0, shape[0] if shape else 1] for name, shape in owners.shapes if shape.numel()}
    if theirs is not None and theirs not in (mine, whole):
        raise ValueError(
            f"{who}: this state of {type(optimizer).__name__} is for the leaves {_some(theirs)}, owned by the rank "
            f"that saved it, but this rank owns {_some(mine)}. Load each rank's own state on that rank, or save with "
            "optimizer_state_dict() and load with load_optimizer_state_dict, for any number of ranks"
        )


def owned_rows(owners: Owners, rank: int) -> dict[str, list[int]]:
    """Return the rows that `rank` owns, for the entry `OWNED`."""
    rows = {name: [*owners.rows(name, rank)] for name, shape in owners.shapes if shape.numel()}
    return {name: [begin, end] for name, (begin, end) in rows.items() if begin < end}


def require_shapes(
    who: str, optimizer: torch.optim.Optimizer, name: str, shapes: Sequence[torch.Size], state: Mapping[str, Any]
) -> None:
    """Raise a ValueError if a leaf's state has a tensor not of `shapes`; only for torch's elementwise ones and Muon."""
    if type(optimizer) not in ELEMENTWISE | {torch.optim.Muon}:
        return
    for key, value in state.items():
        if isinstance(value, DTensor) or (
            isinstance(value, Tensor) and value.numel() != 1 and value.shape not in shapes
        ):
            raise ValueError(
                f"{who}: {key!r} of {name!r} in the state of {type(optimizer).__name__} is {describe(value)}, a "
                f"{type(value).__name__}, but the leaf has the shape {list(shapes[0])}: the state is of another "
                "model, or is only one rank's part; load a whole state with load_optimizer_state_dict"
            )


def _some(owned: Rows) -> str:
    names = [f"{name!r} (rows {begin} to {end - 1})" for name, (begin, end) in owned.items()]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"


def to_their_owners(leaves: Mapping[str, Tensor], owners: Sequence[Owners]) -> to_owners:
    """Return the first half of a mean, from all ranks to the owners of all leaves; `owners` has one per optimizer."""
    shapes = tuple((path, leaf.shape) for path, leaf in leaves.items())
    return to_owners(owners=Owners(owners[0].n, shapes, tuple(pair for each in owners for pair in each.whole)))


def first_hop(who: str, gradients: str | Sync) -> Sync:
    """Return the pipeline that sends gradients to owners; raise a TypeError if `gradients` cannot end at owners."""
    if gradients == AUTO:
        raise TypeError(
            f"{who}: gradients='auto' can only measure pipelines that give every rank a mean; name a pipeline, for "
            "example the one that fnddp.choose_owned returns for a given link"
        )
    sync = pipeline_of(f"{who}: gradients", gradients)
    refuse_check(f"{who}: gradients", sync)
    for each in all_in(sync):
        is_plain = isinstance(each, two_shot_mean) and not each.server_memory
        if not (
            is_plain or _is_codec(each) or isinstance(each, error_feedback | partition | warmup | weighted | to_owners)
        ):
            raise TypeError(
                f"{who}: gradients={sync!r} cannot send to owners, because of {each!r}; use two_shot, optionally in "
                "codecs, and these in error_feedback: 'error_feedback(quantize(two_shot, bits=4))'"
            )
    return sync


def second_hop(who: str, weights: str | Sync, what: str = "weights") -> Sync:
    """Return the pipeline that sends weights from owners; raise a TypeError, naming `what`, if it cannot do so."""
    sync = pipeline_of(f"{who}: {what}", weights)
    refuse_check(f"{who}: {what}", sync)
    inner = codecs_of(sync)
    for each in all_in(inner):
        if not (isinstance(each, all_gather) or _is_codec(each)):
            raise TypeError(
                f"{who}: {what}={sync!r} cannot send from owners to other ranks, because of {each!r}; use allgather, "
                "optionally in codecs, and these in ef21: 'ef21(quantize(allgather, bits=4))'"
            )
    if isinstance(sync, ef21) and (sync.eta != 1 or isinstance(inner, all_gather)):
        raise TypeError(f"{who}: {what}={sync!r}: ef21 sends differences through codecs here, without an average (eta)")
    return sync


def _is_codec(sync: Sync) -> bool:
    return isinstance(sync, Codec) or (isinstance(sync, cast) and sync.carries)


def codecs_of(weights: Sync) -> Sync:
    """Return the encoding part of the second hop's pipeline, without `ef21`: that only makes owners send changes."""
    return weights.inner if isinstance(weights, ef21) else weights


def default_cap_mb(n: int) -> float:
    """Return the size of buckets on both hops in MiB. Rows for owners are padded to the longest in a bucket."""
    return max(25.0, 12.5 * n)


def plan_of_gradients(gradients: Sync, leaves: Mapping[str, Tensor], owners: Sequence[Owners]) -> Plan:
    """Return the plan of the first hop of `own`, for all leaves."""
    return _planned(with_halves(gradients, to_their_owners(leaves, owners)), leaves, owners[0].n)


def plan_of_weights(weights: Sync, leaves: Mapping[str, Tensor], owners: Owners) -> Plan:
    """Return the plan of the second hop of `own`, for the leaves of one optimizer."""
    sent = {path: torch.empty(owners.sent_shape(path), dtype=p.dtype, device=p.device) for path, p in leaves.items()}
    return _planned(with_halves(codecs_of(weights), to_all(owners=owners)), sent, owners.n)


def _planned(sync: Sync, leaves: Mapping[str, Tensor], n: int) -> Plan:
    cap = default_cap_mb(n)
    return lower(sync, leaves, world_size=n, bucket_cap_mb=cap, first_bucket_mb=cap)

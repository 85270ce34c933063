"""The two hops of sharded optimizers: the owner of each parameter, and what travels to owners and back."""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fnddp import torch_private
from fnddp.core.codec import Codec
from fnddp.core.parse import pipeline_of
from fnddp.core.sync import Sync, all_in
from fnddp.plan.lower import lower
from fnddp.plan.plan import Plan
from fnddp.reducers.carriers import all_gather, two_shot_mean
from fnddp.reducers.halves import Owners, to_all, to_owners, with_halves
from fnddp.run.choose import AUTO
from fnddp.schedules.choose import partition, warmup
from fnddp.transforms.cast import cast
from fnddp.transforms.memory import ef21, error_feedback

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


def has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if an optimizer's step has got a closure; Accelerate gives None."""
    return any(each is not None for each in (*args, kwargs.get("closure")))


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
    of: dict[int, int] = {}
    model_has = {id(p) for p in model.parameters()}
    for i, optimizer in enumerate(optimizers):
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(f"{who}: LBFGS evaluates a closure, and mixes all leaves; there is no owner of one leaf")
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in model_has:
                    raise ValueError(
                        f"{who}: {type(optimizer).__name__} has a parameter of shape {tuple(p.shape)} that is not the "
                        "model's; make the optimizer of model.parameters(), before own"
                    )
                if id(p) in of:
                    raise ValueError(
                        f"{who}: a parameter of shape {tuple(p.shape)} is in two optimizers, of which each would "
                        "update it; leave it in one"
                    )
                of[id(p)] = i
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
        if torch_private.optimizers_in_backward(p):
            raise TypeError(
                f"{who}: {name!r} has an optimizer that runs in backward, before a mean is there; leave it out"
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
"""In the `state_dict` of an optimizer with owners: the rows that the rank which made it owns, by leaf."""


_owning: "weakref.WeakKeyDictionary[torch.optim.Optimizer, str]" = weakref.WeakKeyDictionary()


def owner_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Return what has given the state of `optimizer` to owners, if any: "own" or "own_matrices"."""
    return _owning.get(optimizer)


def mark_states(who: str, optimizer: torch.optim.Optimizer, owned: Mapping[str, tuple[int, int]]) -> None:
    """Let `optimizer.state_dict` say what this rank owns, and `load_state_dict` refuse what another rank did.

    Indices of parameters, by which torch stores states, are the same on all ranks, so nothing else would tell.
    """
    mine = {name: list(rows) for name, rows in owned.items()}
    _owning[optimizer] = who

    def mark(_: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        saved[OWNED] = mine

    def check(of: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        theirs = saved.get(OWNED, mine)
        if theirs != mine:
            raise ValueError(
                f"{who}: this state of {type(of).__name__} is that of the leaves {_some(theirs)}, which the rank that "
                f"saved it owned; this one owns {_some(mine)}. Let each rank load its own, or save with "
                "optimizer_state_dict() and load with load_optimizer_state_dict, for any number of ranks"
            )

    optimizer.register_state_dict_post_hook(mark)
    optimizer.register_load_state_dict_pre_hook(check)


def _some(owned: Mapping[str, list[int]]) -> str:
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
        if not (is_plain or _is_codec(each) or isinstance(each, error_feedback | partition | warmup | to_owners)):
            raise TypeError(
                f"{who}: gradients={sync!r} cannot end at the owners, because of {each!r}; give two_shot, with codecs "
                "around it and error_feedback around these: 'error_feedback(quantize(two_shot, bits=4))'"
            )
    return sync


def second_hop(who: str, weights: str | Sync) -> Sync:
    """Return the pipeline of weights on their way to all ranks; raise a TypeError if they cannot come by it."""
    sync = pipeline_of(f"{who}: weights", weights)
    inner = codecs_of(sync)
    for each in all_in(inner):
        if not (isinstance(each, all_gather) or _is_codec(each)):
            raise TypeError(
                f"{who}: weights={sync!r} cannot come from the owners, because of {each!r}; give allgather, with "
                "codecs around it and ef21 around these: 'ef21(quantize(allgather, bits=4))'"
            )
    if isinstance(sync, ef21) and (sync.eta != 1 or isinstance(inner, all_gather)):
        raise TypeError(
            f"{who}: weights={sync!r}: ef21 sends differences through codecs here, without an average (eta)"
        )
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

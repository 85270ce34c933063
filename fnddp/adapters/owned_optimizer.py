"""An optimizer for the parameters that a rank owns, and the second hop that sends their new weights."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fnddp.adapters.owned_gradient import OwnedGradient
from fnddp.core import collectives
from fnddp.core.sync import Sync
from fnddp.core.tree import Leaves, changed
from fnddp.ir.program import LeafSpec
from fnddp.plan.draft import Donation
from fnddp.reducers.carriers import all_gather
from fnddp.reducers.halves import Owners, to_all, with_halves
from fnddp.run.engine import Engine
from fnddp.run.hops import codecs_of, groups_of, mark_states, require_same_parameters
from fnddp.run.lane import Lane
from fnddp.torch_private import without_step_hooks
from fnddp.transforms.memory import ef21


class OwnedOptimizer:
    """One optimizer for the parameters that this rank owns. The second hop sends their new weights to all ranks.

    Attributes:
        own: The parts that this rank owns, by name: parameters that share memory with the model's, or have their own.
        has_own_memory: True if the owner's weights are in separate memory, not in the model's.
        others: A substitute of one element for each leaf of other ranks. The first one's gradient is 0 or NaN, so that
            a loss scaler sees overflow on a rank that owns no gradient. Optimizer steps do not see it.
        placeholders: The objects in `.grad` of those parameters of the model that have a gradient at their owners.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        owners: Owners,
        weights: Sync,
        group: str | None,
        dtype: torch.dtype | None,
        bucket_caps: Sequence[float],
        lane: Lane,
    ) -> None:
        self.optimizer, self.parameters, self.owners = optimizer, dict(parameters), owners
        self.rank = collectives.rank(group)
        self.sends_differences = isinstance(weights, ef21)
        codecs = codecs_of(weights)
        self._is_exact = isinstance(codecs, all_gather)  # the second hop is lossless
        self.has_own_memory = not (self._is_exact and dtype in (None, *{p.dtype for p in self.parameters.values()}))
        self.own: dict[str, nn.Parameter] = {}
        self.others: dict[str, nn.Parameter] = {}
        self.placeholders: dict[str, OwnedGradient] = {}
        self.zeroed: set[str] = set()  # leaves of other ranks with gradients set to zero
        self._seen: Leaves = {}  # the model's values after the last step, if owners have separate memory
        self._take(dtype)
        sync = with_halves(codecs, to_all(owners=owners)).over(group, unnamed_only=True)
        like = {name: self._sent_like(name, device="meta") for name in self.parameters}
        specs = {name: LeafSpec.of(self._sent_like(name)) for name in self.parameters}
        self.engine = Engine(
            sync,
            specs,
            state=sync.init(like),
            bucket_caps=bucket_caps,
            donation=Donation(),
            learns_order=False,
            groups=[group],
            lane=lane,
        )
        self.engine.connect()

    def _sent_like(self, name: str, device: str | None = None) -> Tensor:
        p = self.parameters[name]
        dtype = p.dtype if self._is_exact and not self.sends_differences else self._dtypes[name]
        return torch.empty(self.owners.sent_shape(name), dtype=dtype, device=device or p.device)

    def _take(self, dtype: torch.dtype | None) -> None:
        """Replace the optimizer's parameters by the parts that this rank owns, and cut its state accordingly."""
        optimizer, before = self.optimizer, {id(p): name for name, p in self.parameters.items()}
        self._dtypes = {name: dtype or p.dtype for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            rows = self._rows(name)
            if rows.numel():
                memory = rows.to(self._dtypes[name], copy=True) if self.has_own_memory else rows
                self.own[name] = nn.Parameter(memory)
                if self.has_own_memory:
                    self._seen[name] = rows.clone()
            state = optimizer.state.pop(p, None)
            if state and name in self.own:
                optimizer.state[self.own[name]] = {key: self.own_part(name, value) for key, value in state.items()}
        for name, p in self.parameters.items():
            if name not in self.own:
                self.others[name] = nn.Parameter(torch.zeros((1,) * p.ndim, dtype=self._dtypes[name], device=p.device))
        places = {**self.own, **self.others}
        for each in optimizer.param_groups:
            each["params"] = [places.get(before.get(id(p), ""), p) for p in each["params"]]
        mark_states("own", optimizer, self.owners, self.rank, places)
        optimizer.register_load_state_dict_post_hook(self._divide_loaded)

    def _divide_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep this rank's part of a state that `optimizer.load_state_dict` has loaded, for example a complete one."""
        for name, p in self.own.items():
            state = optimizer.state.get(p, {})
            state.update({key: self.own_part(name, value) for key, value in state.items()})

    def own_part(self, name: str, value: Any) -> Any:
        """Return a copy of this rank's part of a value in the optimizer's state: its rows of a value like the leaf."""
        if not isinstance(value, Tensor):
            return value
        is_whole = value.shape == self.owners.shape(name)
        return (self.owners.own(name, value, self.rank) if is_whole else value).clone()

    def require_same_parameters(self) -> None:
        """Raise a RuntimeError if the optimizer has new parameters."""
        known = *self.own.values(), *self.others.values(), *self.parameters.values()
        require_same_parameters("own", self.optimizer, known)

    def check(self) -> None:
        """Check gradients and parameters before a step, and copy changes of the model's parameters: see `follow`.

        Raises:
            RuntimeError: A gradient was never synchronized, or the optimizer has new parameters.
        """
        self.follow_cleared()
        self.require_same_parameters()
        for name, p in self.parameters.items():
            if (p.grad.added if isinstance(p.grad, OwnedGradient) else p.grad) is not None:
                raise RuntimeError(
                    f"own: {name!r} has a gradient that no backward has synchronized, of a backward within no_sync, or "
                    "of the module itself; run the last backward of a step outside of no_sync, on the wrapped model"
                )
        self.follow()

    def _rows(self, name: str) -> Tensor:
        return self.owners.own(name, self.parameters[name].detach(), self.rank)

    def written(self) -> Leaves:
        """Return this rank's rows of the model's weights, if owners have separate memory and these rows were changed.

        Values are compared, because an evaluation may swap averaged weights in, and then the training weights again.
        """
        rows = {name: self._rows(name) for name in self._seen}
        return {name: rows[name].to(self._dtypes[name], copy=True) for name in changed(rows, self._seen)}

    def follow(self, *, everything: bool = False) -> None:
        """Copy to the owned weights what was written to the model's since the last step; `everything` copies all."""
        for name, own in self.own.items():
            if not self.has_own_memory and own.data_ptr() != (rows := self._rows(name)).data_ptr():
                own.data = rows  # the model's `.data` was replaced
        for name in self._seen if everything else self.written():
            for each in (self.own[name].detach(), self._seen[name]):
                each.copy_(self._rows(name))

    def follow_cleared(self) -> None:
        """Clear the gradients of parameters without their placeholder, for example after the module's `zero_grad`."""
        zeroed = [name for name, each in self.placeholders.items() if self.parameters[name].grad is not each]
        for name in zeroed:
            del self.placeholders[name]
            if name in self.own:
                self.own[name].grad = None
        if zeroed and not self.others.keys() & self.placeholders.keys():
            for p in self.others.values():
                p.grad = None

    def clear(self, name: str) -> None:
        """Record that the gradient of another rank's leaf is zero. Once all are zero, zero the substitute's too."""
        self.zeroed.add(name)
        if self.others.keys() & self.placeholders.keys() <= self.zeroed:
            for p in self.others.values():
                if p.grad is not None:
                    p.grad.zero_()

    def remove_placeholders(self) -> None:
        """Remove placeholders from the model's parameters, because a backward accumulates there."""
        self.follow_cleared()
        for name, each in self.placeholders.items():
            self.parameters[name].grad, each.added = each.added, None

    def restore_placeholders(self) -> None:
        """Restore the placeholders that `remove_placeholders` removed; they keep unsynchronized gradients."""
        for name, each in self.placeholders.items():
            p = self.parameters[name]
            if p.grad is not each:
                p.grad, each.added = each, p.grad

    @torch.inference_mode(False)  # plans keep memory, so it must not be made in inference mode
    @torch.no_grad()
    def send(self) -> None:
        """Send the weights that this rank owns, and write those of all owners to the model."""
        leaves: Leaves = {}
        for name, p in self.parameters.items():
            like = self.owners.sent_shape(name)
            own = self.own.get(name)
            if own is None:
                is_like = self.owners.owner(name) is not None and self._sent_like(name, "meta").dtype == p.dtype
                leaves[name] = p.detach() if is_like else self._sent_like(name)
                continue
            value = own.detach()
            if self.sends_differences:
                value = value - self._rows(name).to(value.dtype)
            elif self._is_exact:
                value = value.to(p.dtype)
            if value.shape != like:
                value = torch.cat([value, value.new_zeros(like[0] - value.shape[0], *like[1:])])
            leaves[name] = value
        mean = self.engine.run(leaves).mean
        for name, value in mean.items():
            p = self.parameters[name]
            if self.sends_differences:
                p.add_(value)
            elif self.has_own_memory or self.owners.owner(name) != self.rank:
                p.copy_(value)
        for name, seen in self._seen.items():
            seen.copy_(self._rows(name))

    def alone(self) -> AbstractContextManager[None]:
        """Leave only this rank's own parameters in the optimizer's groups in the block."""
        return groups_of(self.optimizer, {p: p for p in self.own.values()})

    @contextmanager
    def filled(self) -> Generator[None]:
        """Create a state in the block, by a step with learning rate 0, for an optimizer without one: to load into.

        After the block it has no state again. The step would otherwise count: Adam's next step would be its second.
        """
        if self.optimizer.state or not self.own:
            yield
            return
        groups = self.optimizer.param_groups
        rates, grads = [group["lr"] for group in groups], {name: p.grad for name, p in self.own.items()}
        try:
            for group in groups:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
            for p in self.own.values():
                p.grad = torch.zeros_like(p)
            with self.alone(), without_step_hooks([self.optimizer]):
                type(self.optimizer).step(self.optimizer)
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            for name, p in self.own.items():
                p.grad = grads[name]
            self.optimizer.state.clear()

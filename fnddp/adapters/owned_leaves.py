"""The optimizers of `own`: parameters that a rank owns, and the second hop that sends their new weights."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fnddp.adapters.owned_gradient import OwnedGradient
from fnddp.adapters.owned_optimizer import OwnedOptimizer
from fnddp.core.state import load_state_dict, state_dict
from fnddp.core.sync import Sync
from fnddp.core.tree import Leaves, changed
from fnddp.ir.program import LeafSpec
from fnddp.plan.draft import Donation
from fnddp.reducers.carriers import all_gather
from fnddp.reducers.halves import Owners, to_all, with_halves
from fnddp.run.engine import Engine, begin_next
from fnddp.run.hops import codecs_of
from fnddp.run.lane import Lane
from fnddp.run.vote import StepFailedError
from fnddp.transforms.memory import ef21


class OwnedLeaves(OwnedOptimizer):
    """One optimizer for the parameters that this rank owns. The second hop sends their new weights to all ranks.

    Attributes:
        own: The parts that this rank owns, by name: parameters that share memory with the model's, or have their own.
        keeps_weights: True if the owner's weights are in separate memory, not in the model's.
        others: A substitute of one element for each leaf of other ranks. The first one's gradient is 0 or NaN, so that
            a loss scaler sees overflow on a rank that owns no gradient. Optimizer steps do not see it.
        placeholders: The objects in `.grad` of those parameters of the model that have a gradient at their owners.
    """

    who = "own"

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        owners: Owners,
        weights: Sync,
        group: str | None,
        dtype: torch.dtype | None,
        bucket_caps: Sequence[float],
        lane: Lane,
        begins: Callable[["OwnedLeaves"], None],
    ) -> None:
        super().__init__(model, optimizer, parameters, owners, group)
        self._lane, self._begins = lane, begins
        self.sends_differences = isinstance(weights, ef21)
        codecs = codecs_of(weights)
        self._is_exact = isinstance(codecs, all_gather)  # the second hop is lossless
        self.keeps_weights = not (self._is_exact and dtype in (None, *{p.dtype for p in self.parameters.values()}))
        self.others: dict[str, nn.Parameter] = {}
        self.placeholders: dict[str, OwnedGradient] = {}
        self.zeroed: set[str] = set()  # leaves of other ranks with gradients set to zero
        self._seen: Leaves = {}  # the model's values after the last step, if owners have separate memory
        self._take(dtype)
        sync = with_halves(codecs, to_all(owners=owners)).over(group, unnamed_only=True)
        like = {name: self._sent_like(name, device="meta") for name in self.parameters}
        specs = {name: LeafSpec.of(self._sent_like(name)) for name in self.parameters}
        plans: Any = {"bucket_caps": bucket_caps, "donation": Donation(), "learns_order": False}
        self.engine = Engine(sync, specs, state=sync.init(like), groups=[group], lane=lane, **plans)
        self.engine.connect()
        zero_grad = optimizer.zero_grad

        @functools.wraps(zero_grad)
        def zeroed(*args: Any, **kwargs: Any) -> None:
            zero_grad(*args, **kwargs)
            self.placeholders.clear()
            for p in self.parameters.values():
                p.grad = None

        optimizer.zero_grad = zeroed  # pyright: ignore[reportAttributeAccessIssue]
        self.take_over()

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
                memory = rows.to(self._dtypes[name], copy=True) if self.keeps_weights else rows
                self.own[name] = nn.Parameter(memory)
                if self.keeps_weights:
                    self._seen[name] = rows.clone()
            state = optimizer.state.pop(p, None)
            if state and name in self.own:
                optimizer.state[self.own[name]] = {key: self.own_part(name, value) for key, value in state.items()}
        for name, p in self.parameters.items():
            if name not in self.own:
                self.others[name] = nn.Parameter(torch.zeros((1,) * p.ndim, dtype=self._dtypes[name], device=p.device))
        self.leaves = {**self.own, **self.others}
        for each in optimizer.param_groups:
            each["params"] = [self.leaves.get(before.get(id(p), ""), p) for p in each["params"]]

    # Steps

    def begin(self) -> None:
        super().begin()
        self._begins(self)

    def update(self, step: Callable[[], Any]) -> Any:
        self._require_synchronized()
        self.follow()
        with self.alone():
            done = step()
        self.is_over = True
        try:
            self.send()
        except StepFailedError as error:
            named = StepFailedError(
                f"{type(self.optimizer).__name__}.step failed on another rank, so no rank has its weights: "
                f"{str(error).split('. State and')[0]}. Owners have updated theirs: restart from a checkpoint"
            )
            self._end_by(named)
            raise named from error
        except BaseException as error:
            self._end_by(error)
            raise
        return done

    def fail(self, error: BaseException) -> None:  # the other ranks wait for this rank's weights
        begin_next([self.engine])
        self.engine.fail(error)
        self._end_by(error)

    def _end_by(self, error: BaseException) -> None:
        """Refuse later steps and checkpoints: some owners have updated their leaves, and others have not."""
        self._lane.broken = self.failure = error

    def _require_synchronized(self) -> None:
        """Raise a RuntimeError if a gradient was never synchronized."""
        self.follow_cleared()
        for name, p in self.parameters.items():
            if (p.grad.added if isinstance(p.grad, OwnedGradient) else p.grad) is not None:
                raise RuntimeError(
                    f"own: the gradient of {name!r} is not synchronized: its backward ran within no_sync, or on the "
                    "module itself; run the last backward of a step outside of no_sync, on the wrapped model"
                )

    def _rows(self, name: str) -> Tensor:
        return self.owners.own(name, self.parameters[name].detach(), self.rank)

    def _written(self) -> Leaves:
        """Return this rank's rows of the model's weights, if owners have separate memory and these rows were changed.

        Values are compared, because an evaluation may swap averaged weights in, and then the training weights again.
        """
        rows = {name: self._rows(name) for name in self._seen}
        return {name: rows[name].to(self._dtypes[name], copy=True) for name in changed(rows, self._seen)}

    def weights(self) -> Leaves:
        return {**self.own, **self._written()}

    def follow(self, *, everything: bool = False) -> None:
        for name, own in self.own.items():
            if not self.keeps_weights and own.data_ptr() != (rows := self._rows(name)).data_ptr():
                own.data = rows  # the model's `.data` was replaced
        for name in self._seen if everything else self._written():
            for each in (self.own[name].detach(), self._seen[name]):
                each.copy_(self._rows(name))

    @property
    def codecs(self) -> dict[str, Any]:
        return state_dict(self.engine.state)

    @codecs.setter
    def codecs(self, state: Mapping[str, Any]) -> None:
        self.engine.state = load_state_dict(self.engine.state, state)

    # Gradients

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
            elif self.keeps_weights or self.owners.owner(name) != self.rank:
                p.copy_(value)
        for name, seen in self._seen.items():
            seen.copy_(self._rows(name))

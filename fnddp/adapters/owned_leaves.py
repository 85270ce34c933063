"""The optimizers of `own`: parameters that a rank owns, and the second hop that sends their new weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fnddp.adapters.owned_gradient import OwnedGradient
from fnddp.adapters.owned_optimizer import OwnedOptimizer
from fnddp.core.state import load_state_dict, state_dict
from fnddp.core.sync import Sync
from fnddp.core.tree import Leaves
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
    """One optimizer for the parameters that this rank owns. The second hop sends their new weights to all ranks."""

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
        # Of owners' weights, by name.
        self.dtypes = {x: dtype if dtype and p.is_floating_point() else p.dtype for x, p in self.parameters.items()}
        self.keeps_weights = not (self._is_exact and all(p.dtype == self.dtypes[x] for x, p in self.parameters.items()))
        self.removed: dict[str, OwnedGradient] = {}  # placeholders taken out of `.grad` during a backward, by name
        for name, p in self.parameters.items():
            rows, state = self._rows(name), optimizer.state.pop(p, None)
            if rows.numel() or owners.owner(name) == self.rank:
                self.own[name] = nn.Parameter(rows.to(self.dtypes[name], copy=True) if self.keeps_weights else rows)
                self._loaded[name] = state or {}
        sync = with_halves(codecs, to_all(owners=owners)).over(group, unnamed_only=True)
        like = {name: self._sent_like(name, device="meta") for name in self.parameters}
        specs = {name: LeafSpec.of(self._sent_like(name)) for name in self.parameters}
        plans: Any = {"bucket_caps": bucket_caps, "donation": Donation(), "learns_order": False}
        self.engine = Engine(sync, specs, state=sync.init(like), groups=[group], lane=lane, **plans)
        self.engine.connect()
        self.note()
        self.take_over()

    def _sent_like(self, name: str, device: str | None = None) -> Tensor:
        p = self.parameters[name]
        dtype = p.dtype if self._is_exact and not self.sends_differences else self.dtypes[name]
        return torch.empty(self.owners.sent_shape(name), dtype=dtype, device=device or p.device)

    # Steps

    def begin(self) -> None:
        super().begin()
        self._begins(self)

    def update(self, step: Callable[[], Any]) -> Any:
        self._require_synchronized()
        self.follow()
        for name, own in self.own.items():
            own.grad = self.part_of_gradient(name)
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
        for name, p in self.parameters.items():
            if (p.grad.added if isinstance(p.grad, OwnedGradient) else p.grad) is not None:
                raise RuntimeError(
                    f"own: the gradient of {name!r} is not synchronized: its backward ran within no_sync, or on the "
                    "module itself; run the last backward of a step outside of no_sync, on the wrapped model"
                )

    def _rows(self, name: str) -> Tensor:
        return self.owners.own(name, self.parameters[name].detach(), self.rank)

    def held(self) -> Leaves:
        return {name: self._rows(name) for name in self.own} if self.keeps_weights else {}

    def of_model(self, name: str) -> Tensor:
        return self._rows(name).to(self.dtypes[name], copy=True)

    def follow(self, *, everything: bool = False) -> None:
        for name, own in ({} if self.keeps_weights else self.own).items():
            if own.data_ptr() != (rows := self._rows(name)).data_ptr():
                own.data = rows  # the model's `.data` was replaced
        super().follow(everything=everything)

    @property
    def codecs(self) -> dict[str, Any]:
        return state_dict(self.engine.state)

    @codecs.setter
    def codecs(self, state: Mapping[str, Any]) -> None:
        self.engine.state = load_state_dict(self.engine.state, state)

    # Gradients

    def part_of_gradient(self, name: str) -> Tensor | None:
        """Return the part of a gradient that this rank owns, if any."""
        grad = self.parameters[name].grad
        return grad.part if isinstance(grad, OwnedGradient) else None

    def remove_placeholders(self) -> None:
        """Remove placeholders from the model's parameters, because a backward accumulates there."""
        for name, p in self.parameters.items():
            if isinstance(each := p.grad, OwnedGradient):
                self.removed[name] = each
                p.grad, each.added = each.added, None

    def restore_placeholders(self) -> None:
        """Restore the placeholders that `remove_placeholders` removed; they keep unsynchronized gradients."""
        for name, each in self.removed.items():
            p = self.parameters[name]
            p.grad, each.added = each, p.grad
        self.removed.clear()

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
        self.note()

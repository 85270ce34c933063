"""A wire that is no process group: what an engine asks of one, and nothing else; and engines for tests."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fnddp.core.sync import Sync
from fnddp.ir.program import LeafSpec
from fnddp.plan.draft import Donation
from fnddp.run.engine import Engine
from fnddp.wire.kinds import Kind


class ReadyWork:
    """What is complete at once, as all is to the host where streams order it."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


class LostWork(ReadyWork):
    """What has lost a rank, and says so with an error, or else returns False."""

    def __init__(self, how: str = "") -> None:
        self.how = how

    def wait(self) -> bool:
        if self.how == "silently":
            return False
        raise RuntimeError("connection closed")


class AloneWire:
    """One rank of a world in which all ranks hand over the same: every work is ready, and what is launched recorded."""

    def __init__(self, ranks: int = 2) -> None:
        self.ranks = ranks
        self.log: list[str] = []
        self.started = Counter[str]()  # collectives of a step, by kind

    def size(self, group: str | None) -> int:
        return self.ranks

    def rank(self, group: str | None) -> int:
        return 0

    def start(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None, group: str | None) -> ReadyWork:
        self.log.append(f"{kind.name} {self.started[kind.name]}")
        self.started[kind.name] += 1
        together = kind.together(torch.stack([send] * self.size(group)), op)
        receive.copy_(together[0].clone().reshape(receive.shape))
        return ReadyWork()

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, ReadyWork]:
        self.log.append("vote")
        self.started.clear()
        return torch.stack([flags] * self.size(group)), ReadyWork()


def engine_for(sync: Sync, grads: Mapping[str, Tensor], **options: Any) -> Engine:
    """An engine for such gradients; it does not learn their order, unless `options` say so."""
    specs = {path: LeafSpec.of(leaf) for path, leaf in grads.items()}
    return Engine(sync, specs, **{"donation": Donation(), "learns_order": False, **options})

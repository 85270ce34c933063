"""A wire that is no process group: what an engine asks of one, and nothing else."""

from collections import Counter

import torch
from torch import Tensor

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
        together = kind.together(torch.stack([send] * self.ranks), op)
        receive.copy_(together[0].clone().reshape(receive.shape))
        return ReadyWork()

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, ReadyWork]:
        self.log.append("vote")
        self.started.clear()
        return torch.stack([flags] * self.ranks), ReadyWork()

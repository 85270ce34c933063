"""The executor: runs a plan while gradients arrive."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp import collectives
from fnddp.plan.emit import buffer_name
from fnddp.plan.ir import Collective
from fnddp.plan.plan import Plan
from fnddp.tree import Leaves


class Buffers:
    """The flat buffers of a plan's collectives. They persist, but a buffer that somebody holds is not written again."""

    def __init__(self) -> None:
        self._pool: dict[int, list[_Buffer]] = {}

    def take(self, collective: Collective) -> "_Buffer":
        pool = self._pool.setdefault(collective.index, [])
        for buffer in pool:
            if not buffer.is_held():
                return buffer
        buffer = _Buffer(collective)
        self._pool[collective.index] = [*pool[-1:], buffer]  # what is held longer than a step is its holder's
        return buffer


class _Buffer:
    def __init__(self, collective: Collective) -> None:
        self.flat = torch.empty(collective.numel, dtype=collective.dtype, device=collective.device)
        self.parts = {
            buffer_name(collective, i): self.flat[payload.offset : payload.offset + payload.numel].view(payload.shape)
            for i, payload in enumerate(collective.payloads)
        }
        self._own_uses = self._uses()

    def is_held(self) -> bool:
        return self._uses() > self._own_uses

    def _uses(self) -> int:
        return torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata)


class Executor:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._buffers = Buffers()
        self._index = {i: part for i, part in enumerate(plan.state_names)}

    def start(self, parts: list[Any]) -> None:
        plan = self.plan
        self._values: dict[str, Any] = {**plan.constants, **dict(zip(plan.state_names, parts, strict=True))}
        self._flat = {}
        for collective in plan.collectives:
            buffer = self._buffers.take(collective)
            self._values.update(buffer.parts)
            self._flat[collective.index] = buffer.flat
        self._works: dict[int, dist.Work] = {}
        self._next = 0

    def feed(self, path: str, grad: Tensor) -> None:
        self._values[self.plan.leaf_names[path]] = grad
        self._advance(block=False)

    def finish(self) -> tuple[Leaves, list[Any]]:
        for path, name in self.plan.leaf_names.items():
            if name not in self._values and False:
                pass
        self._advance(block=True)
        values = self._values
        means = {path: values[name] for path, name in self.plan.means.items()}
        return means, [values[part] if isinstance(part, str) else part for part in self.plan.state]

    def _advance(self, block: bool) -> None:
        steps, values = self.plan.steps, self._values
        while self._next < len(steps):
            step = steps[self._next]
            for name in step.needs:
                if name not in values:
                    return
            for index in step.waits:
                work = self._works.get(index)
                if work is not None:
                    if not block and not work.is_completed():
                        return
                    work.wait()
                    del self._works[index]
            self._next += 1
            made = step.run(*[values[name] for name in step.inputs])
            for name, value in zip(step.outputs, made):
                values[name] = value
            for name in step.frees:
                del values[name]
            if step.launches is not None:
                c = step.launches
                self._works[c.index] = collectives.start_all_reduce(self._flat[c.index], c.op, c.group)

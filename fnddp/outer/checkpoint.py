"""An outer step's state on one worker for torch.distributed.checkpoint: any number of shards can load it."""

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fnddp.adapters.checkpoint import BEGIN_ANEW, Checkpoint
from fnddp.core.state import differing, load_state_dict, parts
from fnddp.core.sync import State
from fnddp.core.tree import without_wrappers
from fnddp.outer.shards import local

_PARTS, _OUTER, _UNSENT = "parts", "outer step", "tokens since exchanges"


class OuterCheckpoint(Checkpoint):
    """The state of `owner` as a `Stateful`; the ranks of one worker save and load it.

    State in the shape of a parameter (anchors, velocities, residuals) is a DTensor sharded like it; any number of
    shards can load it. Other state (PowerSGD's queries) belongs to a shard; only the same number of shards can load it.
    """

    def __init__(self, owner: Any, parameters: Mapping[str, nn.Parameter], place: str, others: Collection[int]) -> None:
        self._others = {*others}  # ranks of other workers
        named = {without_wrappers(name): p for name, p in parameters.items()}  # as `parts` names them
        self._attached, self._parameters = owner, dict(sorted(named.items(), key=lambda each: -len(each[0])))
        self._place = f"shard {place}/" if place else ""  # in keys; empty for a rank with whole parameters
        whole = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in parameters.items()}
        fresh = owner.outer.init(owner.outer.leaves_of(whole, None))
        # Also by the shape that whole parameters would have: it is the same on all ranks.
        self._whole = {part.key: part.value.shape for part in parts(fresh) if isinstance(part.value, Tensor)}

    def state_dict(self) -> dict[str, Any]:
        saved = {self._key(part): self._placed(part) for part in parts(self._attached.state)}
        return {**saved, **self.about()}

    def about(self) -> dict[str, Any]:
        return {
            _PARTS: [part.key for part in parts(self._attached.state)],
            _OUTER: repr(self._attached.outer.over(None)),
            _UNSENT: json.dumps(self._attached.unsent),  # as one value: DCP would save and load a dict by its keys
        }

    def require_alone(self, ranks: Collection[int]) -> None:
        """Raise a ValueError if one of the `ranks` that save together belongs to another worker."""
        if found := sorted(self._others.intersection(ranks)):
            raise ValueError(
                f"ranks {found} belong to other workers of {self._attached.outer}, and parameters of workers differ "
                "between exchanges: save one checkpoint for each worker, in its own folder, with "
                'group=mesh["shard"].get_group(), or, if each worker is one rank, group=dist.new_subgroups(1)[0]'
            )

    def saved_by(self, saved: Mapping[str, Any]) -> int:
        """Return 1: the number of workers that saved it."""
        return 1

    def adopt_pipeline(self, saved: Mapping[str, Any]) -> None:
        """Do nothing: no outer step is chosen by measuring."""

    def require_fitting(self, saved: Mapping[str, Any]) -> None:
        """Raise a ValueError if `saved` is of another outer step or other parameters."""
        mine = self.about()
        if set(saved[_PARTS]) != set(mine[_PARTS]):
            raise ValueError(
                f"the checkpoint has the state of {saved[_OUTER]}, which does not fit {mine[_OUTER]} for this model: "
                f"{differing(saved[_PARTS], mine[_PARTS])}; use that step to continue, or {BEGIN_ANEW}"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        def read() -> State:
            self.require_fitting(state_dict)
            values = {part.key: state_dict[self._key(part)] for part in parts(self._attached.state)}
            merged = {key: local(each) if isinstance(each, Tensor) else each for key, each in values.items()}
            return load_state_dict(self._attached.state, merged)

        self._attached.prepare_state(read)()
        self._attached.unsent = json.loads(state_dict[_UNSENT])

    def _like(self, part: Any) -> DTensor | None:
        """Return the sharded parameter that `part` matches element for element; None if there is none."""
        if not isinstance(part.value, Tensor):
            return None
        for name, p in self._parameters.items():
            if part.path == name or part.path.endswith(f".{name}"):
                has_shape = self._whole[part.key] == p.shape and part.value.shape == local(p).shape
                return p if has_shape and isinstance(p, DTensor) else None
        return None

    def _key(self, part: Any) -> str:
        is_own = isinstance(part.value, Tensor) and self._like(part) is None
        return f"{self._place if is_own else ''}{part.key}"

    def _placed(self, part: Any) -> Any:
        p, value = self._like(part), part.value
        if not isinstance(value, Tensor):
            return value
        if p is None:
            return value.clone()
        return DTensor.from_local(
            value.clone(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )

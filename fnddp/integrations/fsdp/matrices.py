"""Muon on FSDP2's shards: owners have whole matrices during a step; after it, matrices are shards again."""

import math
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, zip_longest
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import pad

from fnddp.adapters.owned_optimizer import OwnedOptimizer, OwnedStates
from fnddp.adapters.torch_compat.arguments import bucket_caps
from fnddp.core import collectives, layout
from fnddp.core.agreement import agree_over
from fnddp.core.codec import Encoded, Key, Layer, Layers, Payload, encode
from fnddp.core.group import group_name
from fnddp.core.state import describe
from fnddp.core.sync import Sync
from fnddp.core.table import Cut, Hop, Table
from fnddp.core.tree import Leaves, without_wrappers
from fnddp.integrations.fsdp.replicas import replicas_of
from fnddp.integrations.fsdp.unit import layers_of
from fnddp.outer.shards import groups_of_mesh
from fnddp.reducers.halves import Owners, to_all
from fnddp.run.hops import options_of, owners_of, require_ownable, second_hop
from fnddp.run.vote import StepFailedError
from fnddp.transforms.memory import ef21
from fnddp.wire import control


class Matrices(OwnedOptimizer, OwnedStates):
    """The whole matrices that this rank owns, and the steps of their optimizer: see `own_matrices`.

    Attributes:
        owners: The owner of each matrix, by the name of its parameter.
        optimizer: The optimizer; only the owner of a matrix has its state.
    """

    who = "own_matrices"

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, Any],
        group: str | None,
        gradients: Sync,
        weights: Sync,
        bucket_cap: float,
    ) -> None:
        n = collectives.world_size(group)
        owners = owners_of(parameters, optimizer, n, lambda _, p: p.numel() * min(p.shape), cut=False)
        super().__init__(model, optimizer, parameters, owners, group)
        self._shards = Owners(n, owners.shapes, ())  # rows of each matrix, as FSDP cuts it
        sizes = {name: self._shards.sent_shape(name).numel() for name in parameters}
        self._table = Table(n, {name: Cut(sizes[name], sizes[name], owners.owner(name)) for name in parameters})
        self._gradients, self._weights = layers_of(gradients), layers_of(weights)
        self._sends_differences, self.keeps_weights = isinstance(weights, ef21), bool(self._weights)
        self._seen: Leaves = {}  # their values in the shards, for differences
        self._rounds = self._rounds_of(bucket_cap)
        self._steps = 0  # by which codecs draw random numbers
        for name, p in self.parameters.items():
            state = {key: self.whole(name, value) for key, value in optimizer.state.pop(p, {}).items()}  # of shards
            if owners.owner(name) == self.rank:
                self.own[name] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=p.device))
                self._loaded[name] = state
        self.follow(everything=True)
        self._error: BaseException | None = None  # of this rank, until it has sent the messages of the step
        self.owned = [self]
        self.take_over()

    def _rounds_of(self, cap: float) -> list[list[str]]:
        """Return the matrices of each message of at most `cap` bytes; each owner's costliest matrices come first."""
        of_owner: list[list[list[str]]] = [[[]] for _ in range(self.owners.n)]
        sizes = [0.0] * self.owners.n
        for name, owner in self.owners.whole:
            nbytes = self.owners.n * self._row_bytes(name)
            if of_owner[owner][-1] and sizes[owner] + nbytes > cap:
                of_owner[owner].append([])
                sizes[owner] = 0
            of_owner[owner][-1].append(name)
            sizes[owner] += nbytes
        return [[*chain.from_iterable(row)] for row in zip_longest(*of_owner, fillvalue=[])]

    def _row_bytes(self, name: str) -> int:
        return self._table.cuts[name].width * self.parameters[name].element_size()

    def whole(self, name: str, value: Any) -> Any:
        """Return a whole matrix, or a whole value of its optimizer state. All ranks must call it.

        It does not use `full_tensor`: torch's functional all_gather may crash a rank on gloo, see `fnddp.wire.c10d`.
        """
        if not isinstance(value, DTensor):
            return value
        mean, _ = to_all(group=self.group, owners=self._shards)({name: value.to_local().detach()}, ())
        return mean[name]

    @torch.no_grad()
    def held(self) -> Leaves:
        return {name: p.to_local() for name, p in self.parameters.items()}

    def of_model(self, name: str) -> Tensor:
        return self.whole(name, self.parameters[name])

    def take(self, name: str, value: Tensor) -> None:
        super().take(name, value)
        if name in self.own and self._sends_differences:
            self._seen[name] = value.clone()

    # A step

    def update(self, step: Callable[[], Any]) -> Any:
        replaced = [name for name, p in self.parameters.items() if self._model.get_parameter(name) is not p]
        if replaced:
            raise RuntimeError(
                f"own_matrices: {replaced[0]!r} was replaced in the model, and the optimizer does not have the new "
                "parameter; load_state_dict without assign=True, or make the optimizer and call own_matrices after it"
            )
        self.follow()
        done = None
        try:
            for names in self._exchanges():
                if self._error is None:  # otherwise the other ranks still wait for messages
                    with self.alone(names), self._keeping_errors():
                        done = step()
            what = "failed, and owners have updated theirs: restart from a checkpoint"
            self._agree(what, failed=self._error is not None)
        except BaseException as error:
            self.failure = self._error or error
            with torch.no_grad():
                for name, shard in self.held().items():
                    shard.copy_(self._noted[name])
            raise self.failure from None
        self.note()
        self._steps += 1
        return done

    @contextmanager
    def _keeping_errors(self) -> Generator[None]:
        try:
            yield
        except BaseException as error:
            self._error = error

    def fail(self, error: BaseException) -> None:
        with suppress(Exception):  # there is one already
            self._agree("", failed=True)

    def written(self) -> list[str]:
        mine = super().written()
        self.is_over = True  # this message reports the errors of all ranks
        return self._agree("refused to begin, and nothing has changed", mine)

    def _agree(self, what: str, changed: Collection[str] = (), *, failed: bool = False) -> list[str]:
        """Return the matrices that have changed on some rank; raise on all ranks if one has `failed`."""
        with_gradient = [name for name, p in self.parameters.items() if p.grad is not None]
        digest = crc32(repr(([*self.parameters], with_gradient)).encode())  # another optimizer has other matrices
        has_failed, last, first, has_changes = self._highest([int(failed), digest, -digest, len(changed)])
        if has_failed:
            raise StepFailedError(f"{type(self.optimizer).__name__}.step on another rank {what}; see its own error")
        if last != -first:
            raise RuntimeError(
                "own_matrices: ranks have gradients of different matrices, or step different optimizers, and "
                f"nothing has changed; this rank has gradients of {with_gradient}. Step optimizers in one order on "
                "all ranks, and clear gradients on all ranks, or on none"
            )
        if not has_changes:
            return []
        flags = self._highest([int(name in changed) for name in self.parameters])
        return [name for name, is_changed in zip(self.parameters, flags, strict=True) if is_changed]

    def _highest(self, values: list[int]) -> list[int]:
        for group in _groups_of_all(self._model, self.parameters.values()):  # replicas may be new
            values = control.highest_of(values, group)
        return values

    def _exchanges(self) -> Generator[list[str]]:
        """Yield the matrices of each round when their owners have the gradients; then send the matrices back.

        While a round is computed, the gradients of the next round and the weights of the last one are being sent.
        """
        arriving, returning = self._receive(self._rounds[0]), None
        for names, following in zip_longest(self._rounds, self._rounds[1:]):
            arrived, arriving = arriving, None if following is None else self._receive(following)
            assert arrived is not None
            arrived()
            del arrived  # and with it the memory of its messages
            yield names
            if returning is not None:
                returning()
            returning = self._send(names)
        if returning is not None:
            returning()

    @torch.no_grad()
    def _receive(self, names: list[str]) -> Callable[[], None]:
        """Start to send gradient shards to the owners; return a function that waits for the matrices of this rank."""
        rows: Leaves = {}
        for name in names:
            grad = self.parameters[name].grad
            if grad is None:
                continue  # no rank has used this matrix
            assert isinstance(grad, DTensor)
            shard = grad.to_local()
            missing = self._shards.sent_shape(name)[0] - shard.shape[0]
            rows[name] = pad(shard, (0, 0, 0, missing)).reshape(1, -1)
        hop = Hop.of(self._table, self._layers(self._gradients), rows, self.rank, encoded=self._encoded)
        wait = collectives.start_all_to_all(hop.to_each(), self.group)

        @torch.no_grad()
        def received() -> None:
            moved = wait()
            for name in [each for each in hop.encoded if each in self.own]:
                whole = hop.encoded[name].decode(hop.payload(moved, name))  # [n, rows of a shard]
                own, shape = self.own[name], self.owners.shape(name)
                own.grad = whole.reshape(-1, *shape[1:])[: shape[0]].to(own.dtype).contiguous()

        return received

    @torch.no_grad()
    def _send(self, names: list[str]) -> Callable[[], None]:
        """Start to send rows of matrices from their owners; return a function that writes them to the shards."""
        layers, device = self._layers(self._weights), next(iter(self.parameters.values())).device
        likes: Leaves = {}
        for name in names:
            width, p = self._table.cuts[name].width, self.parameters[name]
            likes[name] = torch.empty(1, width, dtype=p.dtype, device="meta")
        hop = Hop.of(self._table, layers, likes, 0)
        mine: dict[str, Payload] = {}
        for name in [each for each in hop.encoded if each in self.own]:
            own = self.own[name].detach()
            value = own - self._seen[name] if self._sends_differences else own
            rows = layout.in_rows(value, self.owners.n).flatten(1)
            encoded = self._encoded(layers, rows, Key(f"{name} again", self.rank))
            mine[name] = encoded.payload
            if self._sends_differences:
                self._seen[name] += encoded.decode(encoded.payload).reshape(-1, value.shape[1])[: value.shape[0]]
        wait = collectives.start_all_to_all(hop.of_each(self.rank, mine, device), self.group)

        @torch.no_grad()
        def returned() -> None:
            moved = wait()
            for name, each in hop.encoded.items():
                local = self.parameters[name].to_local()
                rows = each.decode(hop.payload(moved, name, of_owner=True)).reshape(-1, *local.shape[1:])
                row = rows[: local.shape[0]]
                local.add_(row) if self._sends_differences else local.copy_(row)

        return returned

    def _encoded(self, layers: Layers, x: Tensor, key: Key, _: Tensor | None = None) -> Encoded:
        """Return `x` encoded, or zeros of that form after an error, because other ranks wait for the message."""
        if self._error is None:
            with self._keeping_errors():
                return encode(layers, x, key)
        like = encode(layers, torch.empty_like(x, device="meta"), key)
        return Encoded(
            {part: torch.zeros_like(each, device=x.device) for part, each in like.payload.items()}, like.decode
        )

    def _layers(self, layers: Layers) -> Layers:
        return tuple(Layer(each.codec, each.seed, self._steps) for each in layers)

    @property
    def sent_bytes(self) -> int:
        """The bytes that a rank passes to the collectives of each hop of a step, without codecs, including padding."""
        n, total = self.owners.n, 0
        for names in self._rounds:
            rows = (sum(self._row_bytes(x) for x in names if self.owners.owner(x) == rank) for rank in range(n))
            total += n * max(rows)
        return total

    @property
    def codecs(self) -> dict[str, Any]:
        draws = any(getattr(each.codec, "draws", False) for each in (*self._gradients, *self._weights))
        return {"replicated/step": self._steps} if draws else {}  # as `own` names it

    @codecs.setter
    def codecs(self, state: Mapping[str, Any]) -> None:
        self._steps = state.get("replicated/step", 0)


def own_matrices(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    gradients: str | Sync = "allgather",
    weights: str | Sync = "allgather",
    *,
    bucket_cap_mb: float | None = None,
) -> Matrices:
    """Run an optimizer of whole matrices, such as Muon, on a model that FSDP2 shards. All ranks must call it.

    `optimizer.step()` sends the shards of each gradient to the rank that owns the matrix, in one all_to_all for several
    matrices. The owner runs the optimizer on the whole matrix, and another all_to_all sends the rows back as shards.
    While the optimizer runs on the matrices of one message, those of the next and the last message are being sent.
    Owners are balanced by rows x columns x the smaller of both. Before the step everything is as in FSDP: gradients are
    shards, so clipping and loss scalers work as with any DTensor. An owner stores its matrices and their optimizer
    state, 1 / n of all, in addition to its shards. Each rank copies its shards, to detect values loaded into them, and
    to restore them if a step fails. With HSDP or `compress_replicas` each replica does so too. Step hooks see shards.

    The wrong choice for optimizers that compute each element independently: they can run on shards.

    Args:
        model: A model after `fully_shard`.
        optimizer: An optimizer of matrices of the model only, such as `torch.optim.Muon`; use another one for other
            parameters. State that it already has is moved to the owners.
        gradients: `allgather` with codecs around it, or its text, for messages to owners.
        weights: The same for messages from owners; with `ef21` around them, differences to the shards are sent.
        bucket_cap_mb: Size of a message in MiB, without codecs. None for 25 with `torch.optim.Muon`, and for a single
            message with other optimizers: their step is called for each message, so an optimizer that counts steps for
            all parameters together would count every call.

    Raises:
        RankMismatchError: On all ranks, if they disagree about pipelines, parameters or options.
        TypeError: A parameter is not a matrix, or not sharded by rows over one mesh; a pipeline does not fit; the
            optimizer evaluates closures, or has owners already.
        ValueError: A parameter does not belong to the model; or `bucket_cap_mb` is not a positive, finite number.
    """
    made: list[tuple[dict[str, DTensor], str | None, Sync, Sync, float]] = []

    def set_up() -> dict[str, str]:
        read = second_hop("own_matrices", gradients, "gradients"), second_hop("own_matrices", weights)
        if isinstance(read[0], ef21):
            raise TypeError("own_matrices: gradients that ef21 compares need a memory at owners; leave it out")
        parameters, group = _matrices(model, optimizer)
        is_whole = bucket_cap_mb is None and type(optimizer) is not torch.optim.Muon
        made.append((parameters, group, *read, math.inf if is_whole else bucket_caps(bucket_cap_mb, None)[-1]))
        kind = type(optimizer).__name__
        lines = {x: f"{describe(p)} in {kind}, {_state_of(x, p, optimizer)}" for x, p in parameters.items()}
        lines |= options_of(kind, optimizer)
        return {"gradients": repr(read[0]), "weights": repr(read[1]), "bucket_cap_mb": str(bucket_cap_mb)} | lines

    theirs = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
    agree_over(set_up, _groups_of_all(model, [*theirs, *model.parameters()]), call="own_matrices")
    return Matrices(model, optimizer, *made[-1])


def _groups_of_all(model: nn.Module, parameters: Iterable[Tensor]) -> list[str | None]:
    """Return the groups that, one after the other, spread an error of one rank to all shards and replicas."""
    mesh = next((p.device_mesh for p in parameters if isinstance(p, DTensor)), None)
    return [*([None] if mesh is None else groups_of_mesh(mesh)), *(each.group for each in replicas_of(model))]


def _state_of(name: str, p: DTensor, optimizer: torch.optim.Optimizer) -> str:
    """Describe the optimizer's existing state of shards; it is moved to the owner."""
    state: dict[str, Any] = optimizer.state.get(p, {})
    for key, value in state.items():
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.numel() != 1:
            raise TypeError(
                f"own_matrices: {key!r} of {name!r} is a tensor of shape {tuple(value.shape)} in the optimizer's "
                "state, not a DTensor, so it cannot be put together; call own_matrices before the first step, and load "
                "a checkpoint with load_optimizer_state_dict"
            )
    return f"with a state of {sorted(key for key, value in state.items() if isinstance(value, DTensor))}"


def _matrices(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, DTensor], str | None]:
    """Return the parameters of the optimizer by name, in the order of the model, and the group of their shards."""
    theirs = require_ownable("own_matrices", model, [optimizer])
    found: dict[str, DTensor] = {}
    groups: dict[str, None] = {}
    for name, p in model.named_parameters():
        if id(p) not in theirs:
            continue
        placements = p.placements if isinstance(p, DTensor) else ()
        sharded = [dim for dim, placement in enumerate(placements) if placement == Shard(0)]
        is_plain = all(placement == Replicate() for dim, placement in enumerate(placements) if dim not in sharded)
        if not isinstance(p, DTensor) or p.ndim != 2 or len(sharded) != 1 or not is_plain:
            raise TypeError(
                f"own_matrices: {name!r} is {describe(p)} with placements {placements}, and not a matrix that FSDP2 "
                "shards by rows over one mesh; call fully_shard first, and give other parameters another optimizer"
            )
        found[without_wrappers(name)] = p  # as torch saves it
        groups[group_name(p.device_mesh.get_group(sharded[0])) or ""] = None
    if not found:
        raise ValueError(f"own_matrices: {type(optimizer).__name__} has no parameter; give it matrices of the model")
    if len(groups) > 1:
        raise TypeError("own_matrices: matrices are sharded over several meshes; give those of each another optimizer")
    return found, next(iter(groups)) or None

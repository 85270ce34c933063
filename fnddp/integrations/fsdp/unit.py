"""A group of parameters that FSDP2 gathers and reduces together: the codecs and the bytes of its messages."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fnddp.core import collectives
from fnddp.core.codec import Carrier, Key, Layer, Layers
from fnddp.core.group import group_name
from fnddp.core.state import describe
from fnddp.core.sync import State, Sync
from fnddp.core.tree import replaced
from fnddp.device import device_of
from fnddp.integrations.fsdp.rows import Rows, rows_to_all, rows_to_owners
from fnddp.reducers.halves import with_halves
from fnddp.torch_private import FSDPGroup, is_within_backward
from fnddp.transforms.memory import ef21, error_feedback
from fnddp.transforms.weighted import weighted
from fnddp.wire.c10d import C10D, C10d, start_into
from fnddp.wire.groups import World, within
from fnddp.wire.kinds import ALL_TO_ALL, Kind, Work, waited

Messages: TypeAlias = tuple[tuple[str, int, int], ...]
"""Collectives: the kind of each, the bytes that one rank contributes, and the number of ranks."""


class Traffic(NamedTuple):
    """Collectives of one group of parameters in a step; `regathered`: the gathers of weights repeated in backward."""

    gradients: Messages
    weights: Messages
    regathered: Messages


UNSCALED = float("1")
"""The divisor passed to FSDP, compared by identity: any other object was set by the user later."""


_UNCHANGED, _CHANGED, _REPLACED = range(3)  # what a rank says about its weights; the highest of all ranks counts


class DecodedWeights:
    """The weights that all ranks have decoded, for `ef21`: they follow every change of the owners' rows.

    A step of an optimizer is sent as a difference. Loaded weights, weights after a much larger change than the last
    one, and NaN or infinite weights are sent themselves. If no rank's weights have changed, nothing is sent, so a
    backward finds the weights of its forward, even after other forwards.
    """

    def __init__(self, device: torch.device, group: str | None) -> None:
        self.known: Tensor | None = None  # [ranks, width]
        self._device, self._group = device_of(device), group
        self._row = torch.empty(0)  # this rank's, when it was sent
        self._largest = torch.tensor(math.nan, device=device)  # the largest change that counts as a step

    def follow(self, row: Tensor, gathered: Callable[[Tensor, bool], Tensor]) -> None:
        """Send `row: [width]` to all ranks with `gathered`, whole or as a difference. All ranks must call it."""
        wide = torch.promote_types(row.dtype, torch.float32)
        with torch.inference_mode(False), torch.no_grad():  # for tensors that a later training step may write to
            change = (row - self._row).norm(dtype=wide) if self.known is not None else None
            said = self._said(row, change)
            if said == _UNCHANGED:
                return
            if said == _REPLACED or self.known is None:
                self.known = gathered(row, True).clone()
                at_first = _LARGE * row.norm(dtype=wide)
                has_seen_steps = self._largest.isfinite() & (self._largest > 0)
                self._largest = torch.where(has_seen_steps, 2 * self._largest, at_first)  # if steps have become larger
            else:
                assert change is not None
                self.known += gathered(row - self.known[collectives.rank(self._group)], False)
                self._largest = torch.where(change > 0, _SEVERAL * change, self._largest)
            self._row = row.clone()

    def _said(self, row: Tensor, change: Tensor | None) -> int:
        """Return the highest of all ranks' reports about their weights: unchanged, changed or replaced."""
        self._device.refuse_capture("with `ef21`, ranks agree on the weights that they send")
        if self.known is None or change is None:
            mine = self._device.of_host([_REPLACED], torch.uint8)
        else:
            difference = row - self.known[collectives.rank(self._group)]
            is_step = difference.isfinite().all() & (change <= self._largest)
            mine = torch.where(is_step, torch.where(change == 0, _UNCHANGED, _CHANGED), _REPLACED).to(torch.uint8)
        flags, work = C10D.vote(mine.view(1), self._group)
        waited(work)
        return int(flags.amax())


_SEVERAL = 8.0  # steps of an optimizer, in a change that may still be one of them
_LARGE = 0.25  # of the norm of weights, before the first step


class Sending(C10d):
    """torch.distributed for the messages of one reduction; it records the messages that this rank has started."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[torch.Size] = []  # of the messages: [ranks, bytes]
        self._works: list[list[Work]] = []  # a list for each message: empty until it is started
        self._next = 0

    def begin_again(self) -> None:
        """Go back to the first message; `start` then skips messages that were started."""
        self._next = 0

    def start(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None, group: str | None) -> Work:
        at, self._next = self._next, self._next + 1
        if not (at < len(self._works) and self._works[at]):
            works: list[Work] = []
            self._works[at:], self.sizes[at:] = [works], [send.shape]
            start_into(works, partial(super().start, kind, send, receive, op, group))
        return self._works[at][0]

    def wait(self) -> None:
        """Wait for all messages."""
        for works in self._works:
            waited(works[0])


class Unit:
    """A group of parameters, named in FSDP's order, with its pipelines."""

    def __init__(
        self, name: str, parameters: Sequence[str], fsdp: FSDPGroup, gradients: Sync | None, weights: Sync | None
    ) -> None:
        assert fsdp.shards is not None
        self.name, self.fsdp, self.group = name, fsdp, group_name(fsdp.shards)
        self.n = fsdp.shards.size()
        ranks = self.n * (1 if fsdp.replicas is None else fsdp.replicas.size())
        self._divisor = ranks if fsdp.divide_factor is None else fsdp.divide_factor
        self._names, self._present = list(parameters), tuple(parameters)
        # Tensor parallelism replicates some parameters and shards others: encoded together, a block with elements of
        # both would round the replicated ones differently on its ranks.
        layouts = {(p.device_mesh, p.placements) for p in fsdp.parameters if isinstance(p, DTensor)}
        self._encodes_apart = len(layouts) > 1
        self.gradients, self._rows = gradients, self._rows_of(self._present)
        self._pipelines: dict[tuple[str, ...], tuple[Sync, Rows]] = {}
        self._sizes: dict[tuple[str, ...], list[torch.Size]] = {}  # of the messages of a `reduce`
        self.weights, self._layers = weights, layers_of(weights)
        self._seen = DecodedWeights(fsdp.device, self.group)  # for `ef21`

    @property
    def trained(self) -> list[str]:
        """Names of the parameters that require a gradient."""
        return [name for name, p in zip(self._names, self.fsdp.parameters, strict=True) if p.requires_grad]

    def init(self) -> State:
        assert self.gradients is not None
        like = torch.empty((), dtype=self.fsdp.reduced_dtype, device=self.fsdp.device)
        return self.gradients.init({name: like.expand(self._rows.shapes[name]) for name in self.trained})

    @property
    def groups(self) -> list[str | None]:
        """The process groups that reduce its gradients."""
        return [group_name(group) for group in (self.fsdp.shards, self.fsdp.replicas) if group is not None]

    def describe(self) -> dict[str, str]:
        """Return a line for each subject that ranks must agree on."""
        dtype = describe(torch.empty((), dtype=self.fsdp.reduced_dtype))
        return {f"parameter {name!r}": f"{list(shape)} of {dtype}" for name, shape in self._rows.shapes.items()}

    def traffic(self) -> Traffic:
        again = None if self.fsdp.regathering is None else self.fsdp.regathering.size()
        dtypes = self.fsdp.reduced_dtype, self.fsdp.gathered_dtype
        trained = self._rows_of(self.trained)
        return traffic_of(trained, self._rows, self.gradients, self.weights, dtypes, again)

    def note(self, positions: list[int]) -> None:
        """Set which parameters have a gradient in the next reduction."""
        self._present = tuple(self._names[position] for position in positions)

    def reduce(self, buffer: Tensor, state: State, messages: Sending) -> tuple[Tensor, State]:
        """Return the mean of this rank's row of `buffer: [n, width]` over ranks, and the next state."""
        with within(World(messages)):
            mean, after = self._reduced(buffer, state)
        self._sizes[self._present] = messages.sizes
        return mean, after

    def _reduced(self, buffer: Tensor, state: State) -> tuple[Tensor, State]:
        sync, rows = self._pipeline()
        if not isinstance(sync, error_feedback):
            done = sync.exchange({"": buffer}, state)
            return self._divided(done.mean[""]), done.state
        leaves = rows.unpack(buffer)
        new = sync.init({name: leaf for name, leaf in leaves.items() if name not in state.residual})  # frozen until now
        held = {field: {**getattr(state, field), **getattr(new, field)} for field in ("residual", "scale")}
        some = {field: {name: x for name, x in all_of.items() if name in leaves} for field, all_of in held.items()}
        done = sync.exchange(leaves, replaced(state, **some))
        after = {field: {**all_of, **getattr(done.state, field)} for field, all_of in held.items()}
        return self._divided(done.mean[""]), replaced(done.state, **after)

    def reduce_nothing(self, buffer: Tensor, messages: Sending) -> None:
        """Send zeros in the messages that a failed `reduce` has not started, and wait for all messages."""
        messages.begin_again()
        if self._present in self._sizes:
            for size in self._sizes[self._present]:
                zeros = torch.zeros(size, dtype=torch.uint8, device=buffer.device)
                messages.start(ALL_TO_ALL, zeros, torch.empty_like(zeros), None, group_name(self.fsdp.reducing))
        else:  # before any has succeeded
            sync, _ = self._pipeline()
            sync = sync.inner if isinstance(sync, error_feedback) else sync
            with within(World(messages)):
                sync.exchange({"": torch.zeros_like(buffer)}, sync.init({}))
        messages.wait()

    def gather(self, row: Tensor) -> Tensor:
        """Send this rank's `row: [width]`, and return the decoded rows of all owners: `[n, width]`."""
        if not isinstance(self.weights, ef21):
            return self._gathered(row, self._layers)
        if self._seen.known is None or not is_within_backward():  # backward uses the weights of its forward
            self._seen.follow(row, lambda row, is_whole: self._gathered(row, () if is_whole else self._layers))
        assert self._seen.known is not None
        return self._seen.known

    def forget(self, *_: Any) -> None:
        """Send whole weights in the next gather, not differences to weights sent before."""
        self._seen.known = None

    def _gathered(self, row: Tensor, layers: Layers) -> Tensor:
        return rows_to_all(layers, row, self._rows, self.name, self.group)

    def _divided(self, total: Tensor) -> Tensor:
        # If the user has set a factor since, FSDP divides by it.
        return total / self._divisor if self.fsdp.divide_factor is UNSCALED else total

    def _pipeline(self) -> tuple[Sync, Rows]:
        if self._present not in self._pipelines:
            assert self.gradients is not None
            rows = self._rows_of(self._present)
            carrier = rows_to_owners(group_name(self.fsdp.reducing), self.name, rows)
            self._pipelines[self._present] = with_halves(self.gradients, carrier), rows
        return self._pipelines[self._present]

    def _rows_of(self, names: Sequence[str]) -> Rows:
        at = {name: self._names.index(name) for name in names}
        shapes = {name: self.fsdp.shapes[i] for name, i in at.items()}
        return Rows(shapes, {name: self.fsdp.dims[i] for name, i in at.items()}, self.n, self._encodes_apart)


def require_codecs(what: str, sync: Sync, memory: type[Sync], carrier: Sync) -> None:
    """Raise a TypeError unless `sync` is `carrier`, optionally in codecs, and these optionally in `memory`."""
    inner: Any = next(sync.children()) if isinstance(sync, memory) else sync
    codecs: list[Any] = []
    while inner.carries and not isinstance(inner, Carrier):
        codecs.append(inner)
        inner = inner.inner
    fitting = f"codecs around {carrier!r}, such as quantize({carrier!r}, bits=4), and {memory.__name__} around them"
    if not inner.carries:
        raise TypeError(
            f"compress_shards: {what}={sync!r}: {type(inner).__name__} does not fit the flat buffers that FSDP sends, "
            f"which have a row for each owner; use {fitting}, or call compress_replicas to compress between replicas "
            "of the model"
        )
    if inner != carrier:
        raise TypeError(
            f"compress_shards: {what}={sync!r}: FSDP sends {what} over its own group, as {carrier!r} does and "
            f"{inner!r} does not; use {fitting}"
        )
    if what == "weights" and any(codec.draws for codec in codecs):
        raise TypeError(
            f"compress_shards: weights={sync!r}: it rounds at random, so backward and forward would gather different "
            "weights; round to the nearest"
        )


def traffic_of(
    trained: Rows,
    rows: Rows,
    gradients: Sync | None,
    weights: Sync | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    again: int | None,
) -> Traffic:
    """Return the messages of a group of parameters, measured by encoding tensors without values.

    `trained` is the layout of gradients, `rows` of weights; `dtypes` are those of FSDP's reductions and gathers;
    `again` is the number of ranks over which backward gathers weights again, None if they stay whole.
    """

    def sent(kind: str, layers: Layers, rows: Rows, dtype: torch.dtype, row: int | None = None) -> Messages:
        if not (rows.n > 1 and rows.width):
            return ()
        like = torch.empty(rows.n if row is None else 1, rows.width, dtype=dtype, device="meta")
        encoded = rows.encode(layers, like, Key("", 0), row).encoded
        return tuple((kind, part.nbytes, rows.n) for each in encoded.values() for part in each.payload.values())

    reduce = "reduce_scatter" if gradients is None else "all_to_all"
    reduced = sent(reduce, layers_of(gradients), trained, dtypes[0])
    gathered = sent("all_gather", layers_of(weights), rows, dtypes[1], 0)
    regathered: Messages = ()
    if again == rows.n and not isinstance(weights, ef21):
        regathered = gathered
    elif again not in (None, 1, rows.n):  # fewer ranks have a larger part each
        regathered = (("all_gather", rows.n // again * rows.width * dtypes[1].itemsize, again),)
    return Traffic(reduced, gathered, regathered)


def layers_of(sync: Sync | None) -> Layers:
    """Return the codecs of a pipeline, as in its first exchange."""
    inner: Any = sync
    layers: list[Layer] = []
    while not (inner is None or isinstance(inner, Carrier)):
        if not isinstance(inner, weighted | ef21 | error_feedback):
            layers.append(Layer(inner, getattr(inner, "seed", 0)))
        inner = inner.inner
    return tuple(layers)

"""Codecs: pairs of functions on rows that encode gradients before they are sent and decode received payloads.

A codec encodes `[rows, n]` numbers as a payload, a dict of tensors with rows as their first dimension, and decodes
payloads with any number of rows. It never communicates: a carrier sends payloads and adds the decoded values, so
payloads need not add. Read `topk(fp16(allgather), ratio=0.01)` from the outside in: select the largest elements of a
leaf, send their values as float16, and gather them.
"""

import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fnddp.core import collectives, layout, random
from fnddp.core.expression import CHECKS
from fnddp.core.group import group_name
from fnddp.core.opaque import rounded
from fnddp.core.sync import Exchange, Reducer, Replicated, State, Sync, require_state, require_sync
from fnddp.core.tree import Leaves, Tree, is_compressible, is_inexact, replaced

Payload: TypeAlias = dict[str, Tensor]
"""Encoded rows: tensors with rows as their first dimension."""


@dataclass(frozen=True)
class Key:
    """The key of a codec's random numbers, different for every use: see `fnddp.core.random`.

    Attributes:
        name: Names the leaf, the hop, and the part of a payload that is encoded again.
        rank: Rank in the carrier's group. Ranks of a group draw different numbers. (Equal ranks of several groups draw
            the same, because they may do the same exchange and must get the same mean.)
        seed, step: The seed of the codec, and the number of its exchange.
    """

    name: str
    rank: Any
    seed: int = 0
    step: Any = 0

    def uniform(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return numbers in (0, 1), in float32, on the device of `like`; they differ between ranks."""
        return random.uniform(shape, name=self.name, seed=self.seed, step=self.step, rank=self.rank, device=like.device)

    def integers(self, shape: tuple[int, ...], bits: int, like: Tensor) -> Tensor:
        """Draw integers in [0, 2 ** bits), in int32, on the device of `like`; they differ between ranks."""
        name, seed, step, rank = self.name, self.seed, self.step, self.rank
        return random.integers(shape, bits=bits, name=name, seed=seed, step=step, rank=rank, device=like.device)


class Form(NamedTuple):
    """The kernel that encodes a codec's blocks, its name in `fnddp.kernels.formats`, and what it depends on.

    `bits` is the size of an element. `scale` is "none" if blocks have no scale; other scales and `option` are the
    codec's own. A payload has scales first, then codes.
    """

    codec: str
    bits: int
    scale: str = "float32"
    option: Any = None


class Layer(NamedTuple):
    """A codec in an exchange, with its seed. If it draws random numbers, `step` counts its exchanges."""

    codec: Any
    seed: int = 0
    step: Any = 0


Layers: TypeAlias = tuple[Layer, ...]
"""Codecs around a carrier, the outermost first: each encodes the floating-point parts of the payload before it."""


class Encoded(NamedTuple):
    """Encoded rows, and the function that decodes payloads of any number of rows, such as those of all ranks."""

    payload: Payload
    decode: Callable[[Payload], Tensor]


def encode(layers: Layers, x: Tensor, key: Key, length: Tensor | None = None) -> Encoded:
    """Return `x: [rows, n]`, or `[rows, pieces, n]`, encoded by the codecs of `layers` in turn.

    `length` is the number of elements in each row that are not padding, `[rows, 1]`; None for all of them.
    """
    if not layers:
        return Encoded({"": x}, _only)
    layer, inner = layers[0], layers[1:]
    codec: Any = layer.codec
    n = x.shape[-1]
    lengths: dict[str, Tensor] = {}
    if any(each.codec.averages for each in inner):
        lengths = codec.lengths(n, torch.full((1, 1), n, device=x.device) if length is None else length)
    drawn = (replace(key, seed=layer.seed, step=layer.step),) if codec.draws else ()
    counted = {"length": length} if codec.averages else {}
    parts: Payload = codec.encode(x, *drawn, **counted)
    _require_rows(codec, parts, x)
    encoded: dict[str, Encoded] = {}
    for name, part in parts.items():
        encoded[name] = _encode_part(
            inner, part, x.ndim - 1, replace(key, name=f"{key.name}/{name}"), lengths.get(name)
        )
    payload = {f"{name}/{of}": part for name, each in encoded.items() for of, part in each.payload.items()}

    def decode(payload: Payload) -> Tensor:
        read: Payload = {}
        for name, each in encoded.items():
            read[name] = each.decode({of: payload[f"{name}/{of}"] for of in each.payload})
        decoded: Tensor = codec.decode(read, n)
        rows = tuple(next(iter(read.values())).shape[: x.ndim - 1])
        if getattr(decoded, "shape", None) != (*rows, n):
            got = tuple(decoded.shape) if isinstance(decoded, Tensor) else type(decoded).__name__
            raise ValueError(f"{codec!r}: decode must return rows of {n} numbers, got {got} from {rows} rows")
        return decoded

    return Encoded(payload, decode)


def _require_rows(codec: Any, parts: Any, x: Tensor) -> None:
    """Raise unless `parts`, the result of `encode(x)`, is a dict of tensors with the rows of `x`."""
    is_dict = isinstance(parts, dict)
    for name, part in parts.items() if is_dict and parts else [("", parts)]:
        if not (is_dict and isinstance(part, Tensor)):
            got = f"{name!r}: {type(part).__name__}" if is_dict else type(parts).__name__
            raise TypeError(f"{codec!r}: encode must return a dict of tensors by name, got {got}")
        if part.shape[: x.ndim - 1] != x.shape[:-1]:
            raise ValueError(
                f"{codec!r}: encode must return tensors of rows, but for input of shape {tuple(x.shape)} it returned "
                f"{name!r} of shape {tuple(part.shape)}; reduce each row: x.abs().amax(-1, keepdim=True)"
            )


def unit_of(layers: Layers, n: int, *, is_alone: bool = False) -> int | None:
    """Return the number of elements of a row of `n` that are encoded independently, 1 without codecs: `Codec.unit`.

    None if they cannot be: random numbers depend on the leaf, so only if it `is_alone` may the outermost codec draw.
    """
    draws = [each.codec.draws and not (is_alone and i == 0) for i, each in enumerate(layers)]
    units = [
        None if drawn or each.codec.averages else each.codec.unit(n) for drawn, each in zip(draws, layers, strict=True)
    ]
    if None in units:
        return None
    return units[0] if layers and all(unit == 1 for unit in units[1:]) else n if layers else 1


def takes_averages(inner: Any) -> bool:
    """Return True if `inner` or a codec in it averages over rows, and so must know the length of padding."""
    return not isinstance(inner, Carrier) and (inner.averages or takes_averages(inner.inner))


def _encode_part(layers: Layers, part: Tensor, dims: int, key: Key, length: Tensor | None) -> Encoded:
    """Return a part of a payload, with rows in its first `dims` dimensions, encoded by the codecs inside."""
    if not part.is_floating_point() or not layers:
        return Encoded({"": part}, _only)
    inner = encode(layers, part.reshape(*part.shape[:dims], -1), key, length)

    def decode(payload: Payload) -> Tensor:
        return rounded(inner.decode(payload), part.dtype).reshape(-1, *part.shape[1:])

    return Encoded(inner.payload, decode)


def _only(payload: Payload) -> Tensor:
    return payload[""]


class Carrying(Sync):
    """A pipeline that codecs may wrap: a carrier, or a codec or cast around one."""

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        return self.carry((), leaves, state)

    def carry(self, layers: Layers, leaves: Leaves, state: State) -> Exchange:
        """Exchange `leaves`, encoded by `layers` and then by this codec, over the pipeline inside it."""
        if not self.carries:
            return super().carry(layers, leaves, state)
        codec: Any = self
        if not codec.draws:
            return codec.inner.carry((*layers, Layer(codec)), leaves, state)
        require_state(type(self).__name__, state, CodecState)
        inner = codec.inner.carry((*layers, Layer(codec, getattr(codec, "seed", 0), state.step)), leaves, state.inner)
        return replaced(inner, state=CodecState(state.step + 1, inner.state))


CHECKS["Carrying"] = require_sync


class Carrier(Reducer, Carrying):
    """A reducer that sends encoded payloads, and takes the mean of the decoded ones.

    It sums in float32 or wider, in rank order, so the bits of its mean do not depend on the layout of messages.
    Integer leaves and leaves without elements are reduced as by `allreduce`.
    """

    ops: ClassVar[Any] = frozenset({"mean"})
    nests: ClassVar[Any] = frozenset({"around"})

    def carry(self, layers: Layers, leaves: Leaves, state: State) -> Exchange:
        group = group_name(self.group)
        whole = {path: leaf for path, leaf in leaves.items() if not is_compressible(leaf)}
        wires = {path: layout.to_wire(leaf) for path, leaf in leaves.items() if path not in whole}
        mean, sent = collectives.all_reduce(whole, "mean", group), dict(whole)
        means, sents, state = self.carry_flat(layers, {path: wire.reshape(-1) for path, wire in wires.items()}, state)
        for path, wire in wires.items():
            for into, value in ((mean, means[path]), (sent, sents[path])):
                into[path] = layout.from_wire(rounded(value, wire.dtype).view(wire.shape), leaves[path])
        return Exchange({path: mean[path] for path in leaves}, {path: sent[path] for path in leaves}, state)

    @abc.abstractmethod
    def carry_flat(self, layers: Layers, leaves: Leaves, state: State) -> tuple[Leaves, Leaves, State]:
        """Return mean, sent and next state of flat, real, non-empty floating-point leaves."""


class CodecState(NamedTuple):
    """`step`: exchanges done, so that each step draws different random numbers."""

    step: Replicated[int]
    inner: State


class Codec(Carrying):
    """Two functions on rows around `inner`: a carrier, or a codec for the floating-point parts of the payload.

    Derive a class with `@fnddp.transform`, a first field `inner: Carrying`, and pure and traceable methods `encode` and
    `decode`. A codec that draws random numbers sets `draws`, has a field `seed: int`, and takes a `Key` in `encode`;
    ranks, leaves and steps draw different numbers. A codec that averages over a row sets `averages`, and takes a
    `length` in `encode`, as described there.

    Codecs with a scale for each block send scales as `[rows, blocks]` in float32 or wider (`lloyd_max` as bytes, each a
    fraction of a float of the row; `fp8` as exponents, if asked for), and elements of b bits as `[rows, blocks,
    ceil(block * b / 8)]` bytes; the last block of a row is padded with zeros that are sent.

    Raises:
        TypeError: `inner` does not carry payloads.
        ValueError: An option is out of range.

    >>> import fnddp
    >>> fnddp.topk(fnddp.allreduce)
    Traceback (most recent call last):
        ...
    TypeError: topk: allreduce cannot carry encoded payloads, and those of topk cannot be summed; give it a carrier,
    topk(allgather) or topk(two_shot), and put other transforms outside: bucketize(topk(allgather))
    """

    inner: Carrying

    draws: ClassVar[bool] = False
    averages: ClassVar[bool] = False
    nests: ClassVar[Any] = frozenset({"around", "inside"})
    form: ClassVar[Form | None] = None  # if `fnddp.kernels.blocks` encodes its blocks

    @property
    def hides_nonfinite(self) -> bool:  # a step finds no NaN in integer payloads
        return "inside" not in self.nests or super().hides_nonfinite

    def __post_init__(self) -> None:
        super().__post_init__()
        name, inner = type(self).__name__, self.inner
        if isinstance(inner, Codec) and not inner.carries and "inside" in inner.nests:
            raise TypeError(
                f"{name}: {type(inner).__name__} needs unencoded gradients, so a codec cannot enclose it; put {name} "
                f"inside, {type(inner).__name__}({name}(allgather))"
            )
        if not inner.carries:
            raise TypeError(
                f"{name}: {inner!r} cannot carry encoded payloads, and those of {name} cannot be summed; give it a "
                f"carrier, {name}(allgather) or {name}(two_shot), and put other transforms outside: "
                f"bucketize({name}(allgather))"
            )
        if not ("inside" in self.nests or isinstance(self.inner, Carrier)):
            raise TypeError(
                f"{name}: its payload has no floating-point numbers for {self.inner!r} to encode; give it only a "
                f"carrier, {name}(allgather) or {name}(two_shot)"
            )

    @abc.abstractmethod
    def encode(self, x: Tensor) -> Payload:
        """Return the payload of `x: [rows, n]`, each row encoded independently. `x` has the gradients' dtype.

        `two_shot` pads rows with zeros to one length. A codec with `averages = True` also gets `length=`: the number of
        elements in each row that are not padding, `[rows, 1]` in int64, or None if there is no padding.
        """

    def lengths(self, n: int, length: Tensor) -> dict[str, Tensor]:
        """Return how many elements in each row of a floating-point payload tensor are not padding, by tensor name.

        A codec around this one's payload needs it if it averages over rows. Padding must come last in a row. A tensor
        that is not in the result has no padding.

        Args:
            n: Number of elements in a row that was passed to `encode`.
            length: How many of these are not padding: `[rows, 1]`, or `[1, 1]` if the same in all rows, in int64.
        """
        return {}

    def unit(self, n: int) -> int | None:
        """Return the size of the pieces of a row that are encoded independently, for example a block with a scale.

        Plans use it to encode several leaves in one call. `encode` and `decode` must then also take `[rows, pieces,
        unit]`, with the last piece padded with zeros, and give the same bits as for whole rows. Return `n` if only rows
        are independent; None, the default, if the bits of a row also depend on the number of rows.
        """
        return None

    @abc.abstractmethod
    def decode(self, payload: Payload, n: int) -> Tensor:
        """Return the decoded rows of `payload`: `[rows, n]`."""

    def init(self, grads: Tree) -> State:
        inner = self.inner.init(grads)
        return CodecState(0, inner) if self.draws else inner


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which decoded payloads are added: float32, or `dtype` itself if it is wider."""
    return torch.promote_types(dtype, torch.float32)


def wide_zeros(leaves: Leaves) -> Leaves:
    """Return zeros for a memory of inexact `leaves`, in float32 or wider, because sums in 16 bits stall."""
    return {path: torch.zeros_like(leaf, dtype=wide(leaf.dtype)) for path, leaf in leaves.items() if is_inexact(leaf)}

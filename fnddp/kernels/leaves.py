"""Operators of carriers on all leaves of a bucket, each a single operation of a plan: encode, reduce, decode, sent.

With residuals of error feedback they are encode_sum, which adds them first, and residual, which makes the next ones.

A payload is a list of parts, `[ranks, ...]`, with the blocks of all leaves; rows may have gaps between them. The
references join leaves with blocks of one size, and call the codecs. Kernels compute the same bits without joining.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnddp.core.codec import Codec, Encoded, Key, Layers, Payload, encode, unit_of, wide
from fnddp.core.opaque import rounded
from fnddp.core.random import key_of
from fnddp.core.table import Batch, Cut, Table, added_up
from fnddp.core.tree import Leaves
from fnddp.device import device_of
from fnddp.kernels.int8 import blocks_of, decoded, encoded
from fnddp.kernels.keep import KEEP, KEEP_INTO
from fnddp.kernels.operator import list_operator, sample, takes_operators, works
from fnddp.torch_private import foreach_copy, without_modes
from fnddp.wire.groups import current

_LAYERS: dict[str, Layers] = {}  # by the text of the outermost codec: an argument of an operator is text
KEY = Key("", 0)


class Group(NamedTuple):
    """Leaves that the reference encodes together, by index, as tensors without values."""

    batch: Batch
    table: Table
    like: Encoded


def batches_for_operators(layers: Layers, leaves: Leaves) -> dict[str, Leaves]:
    """Return the leaves that operators process together, by the first path; none unless operators can take them all."""
    bucket_of = current().bucket_of
    if not layers or bucket_of is None:
        return {}
    made: dict[Any, Leaves] = {}
    for path, leaf in leaves.items():
        if not takes_operators(leaf) or unit_of(layers, leaf.numel(), is_alone=True) is None:
            return {}
        bucket = bucket_of(path)
        made.setdefault((path if bucket is None else bucket, leaf.dtype, leaf.device), {})[path] = leaf
    return {next(iter(batch)): batch for batch in made.values()}


def text_of(layers: Layers) -> str:
    """Return the text that replaces `layers` in the arguments of operators."""
    text = repr(layers[0].codec)
    _LAYERS[text] = tuple(layer._replace(step=0) for layer in layers)  # it is an argument of its own
    return text


@lru_cache(maxsize=1024)
def _groups(codec: str, counts: tuple[int, ...], n: int, dtype: torch.dtype, device: torch.device) -> tuple[Group, ...]:
    """Return leaves in groups by the size of their blocks.

    Large leaves are alone, because joining them costs more, and so are those of a codec that draws random numbers.
    """
    layers, cuts = _LAYERS[codec], [Cut(count, -(-count // n)) for count in counts]
    members: dict[Any, dict[str, Cut]] = {}
    for i, cut in enumerate(cuts):
        is_alone = layers[0].codec.draws or cut.count * dtype.itemsize > device_of(device).light_bytes
        unit = unit_of(layers, cut.width, is_alone=True)
        members.setdefault((unit, i if is_alone else None), {})[str(i)] = cut
    made: list[Group] = []
    for (unit, _), of_group in members.items():
        with without_modes():
            rows = {i: torch.empty(n, cut.width, dtype=dtype, device="meta") for i, cut in of_group.items()}
            batch = Batch(rows, unit)
            made.append(Group(batch, Table(n, of_group), encode(layers, batch.x, KEY)))
    return tuple(made)


def _parts(groups: Sequence[Group], payload: Sequence[Tensor]) -> Iterator[tuple[Group, Payload]]:
    named = dict(zip(groups[0].like.payload, payload, strict=True))
    at = dict.fromkeys(named, 0)
    for group in groups:
        parts: Payload = {}
        for name, like in group.like.payload.items():
            size = like[0].numel()
            parts[name] = named[name][:, at[name] : at[name] + size].reshape(-1, *like.shape[1:])
            at[name] += size
        yield group, parts


def _joined(payloads: Sequence[Payload]) -> list[Tensor]:
    parts = [[each[name].flatten(1) for each in payloads] for name in payloads[0]]
    return [torch.cat(part, 1) if len(part) > 1 else part[0] for part in parts]


def _leaves(group: Group, x: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    for i, rows in group.batch.split(x).items():
        yield int(i), rounded(rows.reshape(-1)[: group.table.cuts[i].count], dtype)


def _mean(group: Group, payload: Payload, rank: int, ranks: int) -> Tensor:
    """Return the mean of decoded rows, `[1, pieces, unit]`, with zeros for padding."""
    total = added_up(group.like.decode, payload, group.table.n, group.batch.x[0])
    lengths = {path: group.table.count(path, rank) for path in group.batch.paths}
    return group.batch.cleared((total / ranks).unsqueeze(0), lengths, is_kept=True)


def _encoded(codec: str, group: Group, x: Tensor, rank: int, step: Tensor | None, names: Sequence[str]) -> Payload:
    first, *others = _LAYERS[codec]
    if step is None:
        return encode((first, *others), x, KEY).payload
    (leaf,) = map(int, group.batch.paths)
    return encode((first._replace(step=step), *others), x, Key(names[leaf], rank)).payload


def _encode_leaves(
    codec: str, x: list[Tensor], counts: list[int], n: int, dtype: torch.dtype, rank: int = 0,
    step: Tensor | None = None, names: Sequence[str] = (),
) -> list[Tensor]:  # fmt: skip
    payloads: list[Payload] = []
    for group in _groups(codec, tuple(counts), n, dtype, x[0].device):
        rows = group.table.rows({i: x[int(i)] for i in group.batch.paths})
        payloads.append(_encoded(codec, group, group.batch.join(rows), rank, step, names))
    return _joined(payloads)


def _reduce_leaves(
    codec: str, payload: list[Tensor], counts: list[int], n: int, dtype: torch.dtype, rank: int, ranks: int,
    step: Tensor | None = None, names: Sequence[str] = (),
) -> list[Tensor]:  # fmt: skip
    payloads: list[Payload] = []
    for group, parts in _parts(_groups(codec, tuple(counts), n, dtype, payload[0].device), payload):
        mean = rounded(_mean(group, parts, rank, ranks), dtype)
        payloads.append(_encoded(codec, group, mean, rank, step, names))
    return _joined(payloads)


def _decode_leaves(codec: str, payload: list[Tensor], counts: list[int], n: int, dtype: torch.dtype) -> list[Tensor]:
    groups = _groups(codec, tuple(counts), n, dtype, payload[0].device)
    found = dict(
        leaf for group, parts in _parts(groups, payload) for leaf in _leaves(group, group.like.decode(parts), dtype)
    )
    return [found[i] for i in range(len(counts))]


def _sent_leaves(
    codec: str, payload: list[Tensor], moved: list[Tensor], again: list[Tensor], counts: list[int], n: int,
    dtype: torch.dtype, rank: int, ranks: int,
) -> list[Tensor]:  # fmt: skip
    groups = _groups(codec, tuple(counts), n, dtype, payload[0].device)
    found: dict[int, Tensor] = {}
    for (group, mine), (_, parts), (_, of_mean) in zip(
        *(_parts(groups, each) for each in (payload, moved, again)), strict=True
    ):
        lost = group.like.decode(of_mean) - _mean(group, parts, rank, ranks)
        owned = torch.arange(n, device=lost.device).view(n, 1, 1) == rank
        found |= _leaves(group, group.like.decode(mine) + torch.where(owned, ranks * lost, 0), dtype)
    return [found[i] for i in range(len(counts))]


def _sums(x: list[Tensor], residual: list[Tensor], factor: list[Tensor], decay: float) -> list[Tensor]:
    """Return leaves plus residuals, which are in int8 if there are factors of them."""
    residual = [decoded(q, scale) for q, scale in zip(residual, factor, strict=True)] if factor else residual
    return [leaf + (each if decay == 1 else decay * each) for leaf, each in zip(x, residual, strict=True)]


def _encode_sum(
    codec: str, x: list[Tensor], residual: list[Tensor], factor: list[Tensor], counts: list[int], n: int,
    dtype: torch.dtype, decay: float, *draws: Any,
) -> list[Tensor]:  # fmt: skip
    sums = [rounded(each, dtype) for each in _sums(x, residual, factor, decay)]
    return _encode_leaves(codec, sums, counts, n, dtype, *draws)


def _residuals(
    codec: str, payload: list[Tensor], moved: list[Tensor], again: list[Tensor], x: list[Tensor],
    residual: list[Tensor], factor: list[Tensor], counts: list[int], n: int, dtype: torch.dtype, rank: int, ranks: int,
    decay: float, nonfinite: Tensor,
) -> list[Tensor]:  # fmt: skip
    sent = _sent_leaves(codec, payload, moved, again, counts, n, dtype, rank, ranks)
    following = [total - each for total, each in zip(_sums(x, residual, factor, decay), sent, strict=True)]
    if factor:
        stored = [encoded(each) for each in following]
        following = [each[i] for i in range(2) for each in stored]
    is_kept = nonfinite.to(x[0].device)
    before = [*residual, *factor]
    return [torch.where(is_kept, old, new) for old, new in zip(before, following, strict=True)]


@lru_cache(maxsize=1024)
def _kernel(
    codec: str, counts: tuple[int, ...], n: int, dtype: torch.dtype, device: torch.device, names: tuple[str, ...]
) -> Any:
    """Return the form of blocks and the place of each leaf, for kernels; None if the codec has none."""
    from fnddp.kernels.blocks import Place  # needs Triton

    layers, found, block, byte = _LAYERS[codec], dict[int, Place](), 0, 0
    form = layers[0].codec.form if isinstance(layers[0].codec, Codec) and len(layers) == 1 else None
    if form is None:
        return None
    for group in _groups(codec, counts, n, dtype, device):
        for i in map(int, group.batch.paths):
            width = -(-counts[i] // n)
            unit = unit_of(layers, width, is_alone=True) or width
            key = key_of(names[i], layers[0].seed) if names else 0
            found[i] = Place(counts[i], width, unit, block, byte, key)
            block += -(-width // unit)
            byte += -(-width // unit) * -(-unit * form.bits // 8)
    return form, tuple(found[i] for i in range(len(counts)))


class LeavesOperator:
    """An operator on lists of tensors: `default` makes its results, and `out` writes them to existing tensors.

    Its arguments are the codec's text, lists of tensors, the number of elements of each leaf, the number of ranks, and
    the dtype of leaves; with `moved` also this rank and the divisor of the mean; with `residual` its decay; and for
    the next residual also a scalar, true if it must be the old one. If it encodes with random numbers, this rank, the
    number of the exchange, and the names of leaves.

    Args:
        name: The name of the operator.
        lists: The names of the lists.
        makes: The name of the result: leaves "x", a "payload" with a row for each rank, one row, "again", or residuals,
            "following", which may be written over the "residual" of the arguments. Residuals in int8 have scales, the
            list "factor"; they follow those of the result.
        run: The reference.
    """

    def __init__(self, name: str, lists: tuple[str, ...], makes: str, run: Callable[..., list[Tensor]]) -> None:
        self.name, self.run, self._lists, self._makes = name, run, lists, makes
        schema = f"str codec, {', '.join(f'Tensor[] {each}' for each in lists)}, int[] counts, int n, ScalarType dtype"
        numbers = ["int rank", "SymInt ranks"] if "moved" in lists else []
        numbers += ["float decay"] if "residual" in lists else []
        numbers += ["Tensor nonfinite"] if makes == "following" else []
        numbers += ["int rank=0"] if makes == "payload" else []
        numbers += ["Tensor? step=None", "str[]? names=None"] if makes in ("payload", "again") else []
        self._numbers = [each.split()[-1].split("=")[0] for each in numbers]
        schema = ", ".join([schema, *numbers])
        self.default, self.out = list_operator(name, schema, self.like, self._copied, self._by_kernel)

    def like(self, codec: str, *arguments: Any) -> list[Tensor]:
        """Return tensors like the results, with arbitrary values."""
        first, (counts, n, dtype) = arguments[0][0], arguments[len(self._lists) :][:3]
        if self._makes == "x":
            return [first.new_empty(count, dtype=dtype) for count in counts]
        if self._makes == "following":
            if not arguments[self._lists.index("factor")]:
                return [first.new_empty(count, dtype=wide(dtype)) for count in counts]
            made = [first.new_empty(count, dtype=torch.int8) for count in counts]
            return made + [first.new_empty(blocks_of(count), dtype=wide(dtype)) for count in counts]
        payloads = [group.like.payload for group in _groups(codec, tuple(counts), n, dtype, first.device)]
        widths = {name: sum(each[name][0].numel() for each in payloads) for name in payloads[0]}
        rows = n if self._makes == "payload" else 1
        return [first.new_empty((rows, width), dtype=payloads[0][name].dtype) for name, width in widths.items()]

    def kernel(self, codec: str, *arguments: Any, out: list[Tensor]) -> bool:
        """Write the results to `out` by a kernel; return False if there is none."""
        from fnddp.kernels import blocks  # needs Triton

        counts, n, dtype, *rest = arguments[len(self._lists) :]
        numbers: dict[str, Any] = dict(zip(self._numbers, rest, strict=False))
        found: Any = _kernel(codec, tuple(counts), n, dtype, out[0].device, tuple(numbers.pop("names", None) or ()))
        given = dict(zip(self._lists, arguments, strict=False)) | {self._makes: out}
        return found is not None and blocks.run(self.name, found[0], found[1], given, n, dtype, **numbers)

    def _copied(self, *arguments: Any, out: list[Tensor]) -> None:
        foreach_copy(out, self.run(*arguments))

    def _by_kernel(self, codec: str, *arguments: Any, out: list[Tensor]) -> None:
        with device_of(out[0].device).selected():
            dtype = arguments[len(self._lists) + 2]
            if not (_works(codec, dtype, out[0].device) and self.kernel(codec, *arguments, out=out)):
                self._copied(codec, *arguments, out=out)


ENCODE = LeavesOperator("encode_leaves", ("x",), "payload", _encode_leaves)
REDUCE = LeavesOperator("reduce_leaves", ("moved",), "again", _reduce_leaves)
DECODE = LeavesOperator("decode_leaves", ("payload",), "x", _decode_leaves)
SENT = LeavesOperator("sent_leaves", ("payload", "moved", "again"), "x", _sent_leaves)
ENCODE_SUM = LeavesOperator("encode_sum_leaves", ("x", "residual", "factor"), "payload", _encode_sum)
RESIDUAL = LeavesOperator(
    "residual_leaves", ("payload", "moved", "again", "x", "residual", "factor"), "following", _residuals
)
OUT = {each.default: each.out for each in (ENCODE, REDUCE, DECODE, SENT, ENCODE_SUM, RESIDUAL)} | {KEEP: KEEP_INTO}
"""Operators on lists, and their forms that write to existing tensors."""


@cache
def _works(codec: str, dtype: torch.dtype, device: torch.device) -> bool:
    return works(f"the kernels of {codec}", device, lambda: samples(codec, dtype, device))


def samples(codec: str, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, Any]]:
    """Yield results of each kernel and of its reference; None for the first without a kernel."""
    x = [sample(device, count).to(dtype) for count in (3000, 7, 130)]
    given: Any = [each.numel() for each in x], 3, dtype
    draws = (torch.full((), 5, device=device), ["a", "b", "c"]) if _LAYERS[codec][0].codec.draws else ()
    payload = ENCODE.run(codec, x, *given, 1, *draws)
    again = REDUCE.run(codec, payload, *given, 1, 3, *draws)
    residual = [each.flip(0).to(wide(dtype)) for each in x]
    stored = [encoded(each.nan_to_num()) for each in residual]
    small, factor = ([each[i] for each in stored] for i in range(2))
    finite = [each.nan_to_num() for each in x]  # NaN in int8 is any number
    calls = (
        (ENCODE, [x], (1, *draws)),
        (REDUCE, [payload], (1, 3, *draws)),
        (DECODE, [payload], ()),
        (SENT, [payload] * 2 + [again], (1, 3)),
        *((ENCODE_SUM, [x, *of], (0.9, 1, *draws)) for of in ([residual, []], [small, factor])),
        *(
            (RESIDUAL, [*[payload] * 2, again, *of], (1, 3, 0.9, torch.tensor(is_kept, device=device)))
            for is_kept in (False, True)
            for of in ([x, residual, []], [finite, small, factor])
        ),
    )
    for operator, lists, numbers in calls:
        out = operator.like(codec, *lists, *given, *numbers)
        is_made = operator.kernel(codec, *lists, *given, *numbers, out=out)
        yield out if is_made else None, operator.run(codec, *lists, *given, *numbers)

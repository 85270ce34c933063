"""Codecs: what each promises of its own error, its bytes against the papers, and what may stand inside what."""

import math
from itertools import pairwise, product
from statistics import NormalDist

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

import fnddp
from fnddp import allgather, two_shot
from fnddp.codecs.lloyd_max import LEVELS
from fnddp.codecs.packing import in_blocks, pack, pack_indices, unpack, unpack_indices
from fnddp.codecs.topk import cosines
from fnddp.core.codec import Codec, Key, Layer, encode, unit_of
from fnddp.core.random import lots
from fnddp.laws import bits, gather
from fnddp.simulation.ranks import run_threads
from tests import pipelines
from tests.pipelines import layers_of
from tests.ranks import on_ranks

CODECS = [text.format("allgather") for text in pipelines.CODECS]
UNBIASED = {  # and the bound on the variance, relative to the square of the norm, for d elements
    "quantize(allgather, bits=8, block=None, rounding='stochastic')": lambda d: d / 4 / 127**2,
    "quantize(allgather, bits=2, block=None, rounding='stochastic')": lambda d: d / 4,
    "qsgd(allgather, levels=1, block=None)": lambda d: d**0.5,
    "qsgd(allgather, levels=7, block=None)": lambda d: min(d / 7**2, d**0.5 / 7),
    "qsgd(allgather, levels=100, block=None)": lambda d: d / 100**2,
    "terngrad(allgather)": lambda d: d**0.5,
    "natural(allgather)": lambda d: 1 / 8,
}
# Products of matrices are rounded as their shapes will have it.
ROUNDING = {text: 1e-5 if "dct" in text else 0.0 for text in CODECS}
AWKWARD = [1, 2, 7, 65, 4096, 4097]

rows_of = st.builds(
    lambda rows, n, seed, size: size * torch.randn(rows, n, generator=torch.Generator().manual_seed(seed)),
    st.integers(1, 3),
    st.one_of(st.integers(1, 70), st.sampled_from([4095, 4096, 4097])),
    st.integers(0, 1000),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e20]),
)


def codec_of(text: str) -> Codec:
    codec = fnddp.parse(text)
    assert isinstance(codec, Codec)
    return codec


def encoded(codec: Codec, x: Tensor, step: int = 0) -> dict[str, Tensor]:
    return codec.encode(x, Key("w", 0, seed=1, step=step)) if codec.draws else codec.encode(x)


def coded(codec: Codec, x: Tensor, step: int = 0) -> Tensor:
    return codec.decode(encoded(codec, x, step), x.shape[1])


# What every codec keeps.

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NO_ZERO = "scale='none'"  # plain signs


@pytest.mark.parametrize("text", CODECS)
def test_rows_come_back_from_payloads_whose_shapes_do_not_depend_on_values(text):
    codec = codec_of(text)
    for number, n in enumerate(AWKWARD, start=CODECS.index(text)):
        x = torch.randn(3, n).to(DTYPES[number % 4])
        payload = encoded(codec, x)
        for other in torch.zeros_like(x), torch.empty_like(x, device="meta"):
            specs = {name: (part.shape, part.dtype) for name, part in encoded(codec, other).items()}
            assert specs == {name: (part.shape, part.dtype) for name, part in payload.items()}
        assert all(part.shape[0] == 3 for part in payload.values())
        assert codec.decode(payload, n).shape == (3, n)
        # Any number of rows: those of all ranks.
        twice = {name: torch.cat([part, part]) for name, part in payload.items()}
        torch.testing.assert_close(
            codec.decode(twice, n)[3:], codec.decode(payload, n), rtol=ROUNDING[text], atol=ROUNDING[text]
        )


@given(text=st.sampled_from(CODECS), x=rows_of)
@settings(max_examples=300)
def test_a_row_does_not_depend_on_others_and_what_is_encoded_by_itself_on_the_rest_of_its_row(text, x):
    """Pieces of one row after the other have the bytes of the rows."""
    codec, n = codec_of(text), x.shape[1]
    other = encoded(codec, torch.cat([x[:1], 3 * x[1:].flip(1)]))
    assert all(torch.equal(part[0], other[name][0]) for name, part in encoded(codec, x).items())
    unit = unit_of((Layer(codec),), n)
    if unit is None:
        return
    pieces = pad(x, (0, -n % unit)).unflatten(1, (-1, unit))
    whole, apart = encoded(codec, x), encoded(codec, pieces)
    assert all(torch.equal(part.reshape(len(x), -1), whole[name].reshape(len(x), -1)) for name, part in apart.items())
    assert torch.equal(codec.decode(apart, unit).flatten(1)[:, :n], codec.decode(whole, n))


@pytest.mark.parametrize("text", CODECS)
def test_zeros_stay_zeros_and_what_is_not_finite_shows(text):
    codec = codec_of(text)
    for n, value in zip(AWKWARD, [torch.nan, torch.inf, -torch.inf] * 2, strict=True):
        read = coded(codec, torch.stack([torch.zeros(n), torch.randn(n)]))
        assert read.isfinite().all()
        if NO_ZERO in text:
            continue
        assert not read[0].any()
        x = torch.randn(2, n)
        x[1, n // 2] = value
        read = coded(codec, x)
        assert not read[1].isfinite().all()
        assert read[0].isfinite().all()


@pytest.mark.parametrize("text", [text for text in CODECS if NO_ZERO not in text and text[:8] != "majority"])
def test_subnormal_numbers_stay_as_small_as_they_are(text):
    for size in 1e-45, 1e-42, 1e-39, 2e-38:
        x = size * torch.linspace(-1, 1, 66).unflatten(0, (2, 33))
        x[:, ::3] = 0
        read = coded(codec_of(text), x)
        assert read.isfinite().all()
        assert read.abs().max() <= 2**-126 + 2 * x.double().norm()
        if not text.startswith(("sign", "dct", "natural", "lloyd")):  # in whose payloads zeros are not zeros
            assert not read[:, ::3].any()


# Contractions. A part in 1e5 for roundings of float32.


def contraction(x: Tensor, read: Tensor) -> Tensor:
    x = x.double()
    return (x - read.double()).square().sum(1) / x.square().sum(1)


@given(x=rows_of)
def test_scaled_signs_contract_exactly_as_the_paper_says(x):
    d, wide = x.shape[1], x.double()
    want = 1 - wide.abs().sum(1).square() / (d * wide.square().sum(1))
    assert torch.allclose(contraction(x, coded(fnddp.sign(allgather), x)), want, atol=1e-5)


@given(x=rows_of, bits=st.sampled_from([8, 4, 2]), block=st.sampled_from([4, 32, None]))
def test_quantize_errs_by_at_most_half_a_step(x, bits, block):
    read = coded(fnddp.quantize(allgather, bits=bits, block=block), x)
    largest = x.abs().amax(1, keepdim=True) if block is None else x.abs().amax()
    assert ((x - read).abs() <= largest / (2 ** (bits - 1) - 1) / 2 * (1 + 1e-5)).all()


@given(x=rows_of, format=st.sampled_from([("e4m3", 2**-4, 2**-14), ("e5m2", 2**-3, 2**-29), ("e2m1", 1 / 4, 1 / 6)]))
def test_fp8_errs_by_at_most_half_a_unit(x, format):
    name, relative, range_of_block = format
    read = coded(fnddp.fp8(allgather, name, block=None), x)
    largest = x.abs().amax(1, keepdim=True)
    allowed = torch.maximum(x.abs(), largest * range_of_block) * relative
    assert ((x - read).abs() <= allowed * (1 + 1e-5)).all()


# OCP Microscaling Formats 1.0: bits of exponent and of fraction, the bias, and the largest number and power of two.
OCP = {"e4m3": (4, 3, 7, 448, 8), "e5m2": (5, 2, 15, 57344, 15), "e2m1": (2, 1, 1, 6, 2)}


def table(format: str) -> dict[float, int]:
    """All numbers of the format that are not negative, and their codes, from the definitions of section 5.3."""
    of_exponent, of_fraction, bias, largest, _ = OCP[format]
    numbers: dict[float, int] = {}
    for exponent, fraction in product(range(1 << of_exponent), range(1 << of_fraction)):
        whole, power = (1, exponent - bias) if exponent else (0, 1 - bias)
        number = (whole + fraction / (1 << of_fraction)) * 2.0**power
        if number <= largest:
            numbers[number] = exponent << of_fraction | fraction
    return numbers


def in_mx(block: list[float], format: str) -> tuple[int, list[int], list[float]]:
    """The exponent of the scale, codes, and numbers of a block as section 6.3 has them, one number after the other."""
    of_exponent, of_fraction, _, largest, top = OCP[format]
    numbers = table(format)
    shared = max(math.frexp(max(map(abs, block)))[1] - 1 - top, -127) if any(block) else -127
    codes, read = [], []
    for number in block:
        size = min(abs(number) / 2.0**shared, largest)
        nearest = min(numbers, key=lambda each: (abs(each - size), numbers[each] % 2))
        codes.append(numbers[nearest] | (math.copysign(1, number) < 0) << of_exponent + of_fraction)
        read.append(math.copysign(nearest * 2.0**shared, number))
    return shared + 127, codes, read


@given(data=st.data(), format=st.sampled_from(list(OCP)))
@settings(max_examples=200)
def test_blocks_of_power_of_two_scales_are_those_of_the_ocp_specification(data, format):
    """Of any float32, of numbers of the format, and of those in the middle between two of them."""
    codec = fnddp.fp8(allgather, format, block=32, scale="e8m0")
    numbers = sorted(table(format))
    places = [*numbers, *((lower + upper) / 2 for lower, upper in pairwise(numbers)), 1.01 * numbers[-1]]
    of_format = st.builds(lambda size, power: size * 2.0**power, st.sampled_from(places), st.integers(-102, -98))
    of_any = st.floats(width=32, allow_nan=False, allow_infinity=False)
    elements = data.draw(st.sampled_from([of_format | of_format.map(lambda x: -x), of_any]))
    x = torch.tensor([data.draw(st.lists(elements, min_size=32, max_size=32))])
    payload = codec.encode(x)
    scale, codes, read = in_mx(x[0].tolist(), format)
    got = payload["q"].flatten().tolist()
    if format == "e2m1":
        got = [code >> shift & 15 for code in got for shift in (0, 4)]
    assert (payload["scale"].tolist(), got) == ([[scale]], codes)
    decoded = codec.decode(payload, 32)
    assert torch.equal(decoded, torch.tensor([read]))
    assert torch.equal(decoded.signbit(), x.signbit())


NORMAL = NormalDist()
LOST = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}  # of the variance: Max 1960, table 1


@pytest.mark.parametrize("bits", LOST)
def test_levels_are_the_means_of_their_cells_of_a_normal_distribution(bits):
    levels = LEVELS[bits]
    ends = [0.0, *((lower + upper) / 2 for lower, upper in pairwise(levels)), 40.0]
    for level, (low, high) in zip(levels, pairwise(ends), strict=True):
        share = NORMAL.cdf(-low) - NORMAL.cdf(-high)
        assert abs(level - (NORMAL.pdf(low) - NORMAL.pdf(high)) / share) < 2e-6


@pytest.mark.parametrize("bits", LOST)
def test_of_normal_numbers_levels_lose_what_the_paper_says(bits):
    """Of a million, whose squared errors have a mean within a part in 300; a scale in 8 bits adds 0.0007 at most."""
    x = torch.randn(1, 1 << 20, generator=torch.Generator().manual_seed(0))
    for block, more in (None, 0), (128, 0.0007):
        lost = contraction(x, coded(fnddp.lloyd_max(allgather, bits=bits, block=block), x)).item()
        assert abs(lost - LOST[bits]) < 0.01 * LOST[bits] + more
    if bits in (2, 4):
        assert lost < contraction(x, coded(fnddp.quantize(allgather, bits=bits), x)).item()


@given(x=rows_of, power=st.sampled_from([1, 3, 9]), bits=st.sampled_from(list(LOST)), block=st.sampled_from([8, 1024]))
def test_levels_contract_whatever_the_elements_are(x, power, bits, block):
    """Up to the rounding of scales to three bits of a fraction, by a 16th at most."""
    x = x / x.abs().max() if power > 1 else x
    x = x.sign() * x.abs() ** power
    blocks = in_blocks(x, block).double()
    errors = (in_blocks(coded(fnddp.lloyd_max(allgather, bits=bits, block=block), x), block) - blocks).square().sum(-1)
    signs = blocks.sign() * blocks.abs().sum(-1, keepdim=True) / (blocks != 0).sum(-1, keepdim=True).clamp(min=1)
    assert (errors <= blocks.square().sum(-1)).all()
    if bits == 1:  # the scale of signs that errs least is the mean magnitude
        best = (blocks - signs).square().sum(-1)
        assert (errors <= best + signs.square().sum(-1) / 16**2 + 1e-6 * blocks.square().sum()).all()


def test_a_block_that_is_padded_is_scaled_by_its_own_elements():
    x = torch.cat([torch.full((1, 16), 5.0), torch.tensor([[-3.0, 3.0]])], 1)
    for number in LOST:
        read = coded(fnddp.lloyd_max(allgather, bits=number, block=16), x)
        torch.testing.assert_close(read, x, rtol=1 / 16, atol=0)


@given(st.integers(-30, 0), st.floats(1, 1.99))
def test_scales_in_a_byte_err_by_a_sixteenth_over_31_octaves_and_are_zero_below(exponent, fraction):
    codec = fnddp.lloyd_max(allgather, bits=1, block=8)
    x = torch.tensor([[2.0] * 8 + [fraction * 2.0**exponent] * 8 + [2.0**-34] * 8])
    read = coded(codec, x)[0, ::8]
    assert abs(read[1] / x[0, 8] - 1) <= 1 / 16 + 1e-6
    assert (read[0], read[2]) == (2, 0)


# Unbiased ones.


@pytest.mark.parametrize("text", UNBIASED)
def test_random_rounding_is_unbiased_within_its_variance(text):
    """2,000 draws, a row each. Their mean errs by the standard deviation / sqrt(2000), of which 6 are allowed.

    The measured one is 0 where rounding up is so rare that it never came: as unlikely as e ** -10, if it were in 200.
    """
    draws, codec = 2000, codec_of(text)
    for x in torch.full((1,), 4 / 3), torch.randn(10), torch.linspace(-1, 1, 60) ** 5:
        d = len(x)
        read = coded(codec, x.expand(draws, d)).double()
        variance = (read - x).square().sum(1).mean()
        bound = UNBIASED[text](d) * x.double().square().sum()
        assert variance <= bound * 1.1 + 1e-9
        rare = read.abs().max() / 200
        assert ((read.mean(0) - x).abs() <= 6 * read.std(0) / draws**0.5 + rare).all()


@pytest.mark.parametrize("text", ["random_k(allreduce, k=5", "random_block(allreduce, block=5"])
def test_random_k_sends_k_elements_and_is_unbiased_if_scaled(text):
    """An element's mean over 500 steps errs by |x| sqrt((d / k - 1) / 500), of which 6 are allowed."""
    plain, sync, x = fnddp.parse(f"{text})"), fnddp.parse(f"{text}, unbiased=True)"), {"w": torch.randn(20)}
    state, total = sync.init(x), torch.zeros(20)
    for _ in range(500):
        assert plain({"w": torch.ones(20)}, state)[0]["w"].sum() == 5  # k elements, each once: exactly 1 - k / d
        mean, state = sync(x, state)
        total += mean["w"] / 500
    assert ((total - x["w"]).abs() <= 6 * x["w"].abs() * (3 / 500) ** 0.5).all()


@pytest.mark.parametrize("step", [0, 3])
def test_random_priorities_have_no_ties(step):
    """So that the largest k of them are the same on all devices, in the same order."""
    assert len(lots(1 << 20, name="w", seed=7, step=step).unique()) == 1 << 20


def test_ranks_leaves_hops_and_steps_draw_other_numbers():
    codec, x = fnddp.natural(allgather), torch.full((1, 200), 1.5)
    keys = [Key("w", 0), Key("w", 1), Key("v", 0), Key("w again", 0), Key("w", 0, step=1), Key("w", 0, seed=1)]
    read = [tuple(codec.decode(codec.encode(x, key), 200).flatten().tolist()) for key in keys]
    assert len(set(read)) == len(keys)
    for inner in "natural(allgather)", "allreduce", "two_shot":
        sync, leaf = fnddp.parse(f"cast({inner}, 'bfloat16', rounding='stochastic')"), {"w": 1.001 * x}
        mine = run_threads(2, lambda rank, sync=sync, leaf=leaf: sync.exchange(leaf, sync.init(leaf)).sent["w"])
        assert not torch.equal(*mine)


@pytest.mark.parametrize("carrier", [allgather, two_shot])
@pytest.mark.parametrize("shard", [False, True])
@on_ranks(4, threads=True)
def test_what_is_drawn_across_nodes_is_the_same_on_all_ranks_of_a_node(rank, carrier, shard):
    """Without shards, ranks of a node do the same exchange, each in a group of its own."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    sync = fnddp.hierarchical(fnddp.natural(carrier).over(across), intra=inside, shard=shard)
    grads = {"w": torch.randn(100, generator=torch.Generator().manual_seed(rank))}
    mean = bits(sync(grads, sync.init(grads))[0])
    assert gather(mean) == [mean] * 4


# Padding, which is no number of a gradient's.


# Codecs within which an average is taken, of blocks' scales or of chosen values.
OF_PARTS = [
    *("{}", "fp16({})", "sign({}, chunk=8)", "quantize({}, block=4)", "quantize({}, bits=4, block=6)"),
    *("fp8({}, block=5)", "qsgd({}, levels=5, block=3)", "terngrad({}, block=4)", "topk({}, k=3, chunk=8)"),
    *("topk(bf16(quantize({}, block=3)), k=6, chunk=7)", "dct_topk({}, chunk=3, k=4)"),
]
AVERAGES = [
    *("sign(allgather)", "sign(allgather, chunk=8)", "terngrad(allgather, clip=0.7)"),
    "quantize(sign(allgather), block=2)",
]


@given(
    of=st.sampled_from(OF_PARTS),
    average=st.sampled_from(AVERAGES),
    elements=st.integers(1, 40),
    padding=st.integers(1, 40),
    some_zeros=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=300)
def test_averages_of_a_payload_leave_out_its_padding(of, average, elements, padding, some_zeros, seed):
    n = max(elements, 9 if "dct" in of else 1)  # or its tile is another one
    x = 10 * torch.randn(1, n, generator=torch.Generator().manual_seed(seed))
    if some_zeros:
        x[:, ::3] = 0
    layers, key = layers_of(of.format(average)), Key("w", 0)
    alone, padded = encode(layers, x, key), encode(layers, pad(x, (0, padding)), key, torch.tensor([[n]]))
    want, got = alone.decode(alone.payload), padded.decode(padded.payload)[:, :n]
    counts = x != 0  # zeros and padding are equally large for top-k, which takes the one or the other
    torch.testing.assert_close(got[counts], want[counts], rtol=1e-4, atol=1e-4)  # sums of other lengths round otherwise


def test_averages_leave_out_the_padding_of_a_codecs_own_chunks():
    x = torch.tensor([[4.0] * 8 + [7.0, 0.0, 2.0]])  # of the second chunk six are sent: three, and three that pad
    for inner, scales in (
        ("sign(allgather)", [(6 * 4 + 7 + 2 + 0) / 9]),
        ("sign(allgather, chunk=8)", [(6 * 4 + 7 + 2) / 8, 0.0]),
    ):
        payload = encode(layers_of(f"topk({inner}, k=6, chunk=8)"), x, Key("w", 0)).payload
        torch.testing.assert_close(payload["values/scale/"], torch.tensor([scales]))


@pytest.mark.parametrize(
    "text", ["sign({}, chunk=8)", "fp8(sign({}, chunk=8), block=3)", "topk(sign({}), k=2, chunk=4)"]
)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_padding_does_not_change_a_two_shot_mean(text, n):
    grads, layers = torch.randn(n, 37), layers_of(text.format("allgather"))
    got, _ = fnddp.simulate(fnddp.parse(text.format("two_shot")), n)({"w": grads}, ())

    def read(row: Tensor) -> Tensor:
        encoded = encode(layers, row.unsqueeze(0), Key("w", 0))
        return encoded.decode(encoded.payload)[0].float()

    want = [read(sum(map(read, part)) / n) for part in grads.split(-(-37 // n), dim=1)]
    torch.testing.assert_close(got["w"], torch.cat(want), rtol=1e-4, atol=1e-4)


# Exactness.


@given(x=rows_of)
def test_sending_all_elements_is_exact(x):
    n = x.shape[1]
    assert torch.equal(coded(fnddp.topk(allgather, k=n), x), x)
    for inner in "random_k", "random_block":
        mean, _ = (sync := fnddp.parse(f"{inner}(allreduce, ratio=1)"))({"w": x}, sync.init({"w": x}))
        assert torch.equal(mean["w"], x)


@given(st.lists(st.integers(-120, 120), min_size=1, max_size=70))
def test_natural_is_exact_for_powers_of_two(exponents):
    x = torch.tensor([[2.0**e for e in exponents], [-(2.0**e) for e in exponents]])
    assert torch.equal(coded(fnddp.natural(allgather), x), x)


@given(st.lists(st.integers(-7, 7), min_size=1, max_size=70), st.booleans())
def test_quantize_is_exact_for_multiples_of_its_step(numbers, stochastic):
    x = torch.tensor([[7, *numbers]]).float()
    rounding = "stochastic" if stochastic else "nearest"
    assert torch.equal(coded(fnddp.quantize(allgather, bits=4, block=None, rounding=rounding), x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_natural_keeps_to_the_range_of_the_dtype(dtype):
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    x = torch.tensor([[largest, -largest, smallest, smallest / 4]] * 50, dtype=dtype)
    x = x.clamp(-3e38, 3e38) if dtype == torch.float64 else x
    assert coded(fnddp.natural(allgather), x).to(dtype).isfinite().all()


# Packing.


@given(st.data(), st.sampled_from([8, 4, 3, 2, 1]))
def test_packed_integers_come_back(data, bits):
    half = 1 << bits - 1
    q = torch.tensor([data.draw(st.lists(st.integers(-half, half - 1), min_size=1, max_size=40))] * 2)
    packed = pack(q.to(torch.int8), bits)
    assert torch.equal(unpack(packed, bits, q.shape[1]), q.to(torch.int8))
    if q.shape[1] % 8 == 0:
        assert packed.shape == (2, q.shape[1] * bits // 8)


INDEX_BYTES = [(256, 2), (4096, 1.5), (4097, 2), (1 << 15, 2), ((1 << 15) + 1, 4), (1 << 31, 4), ((1 << 31) + 1, 8)]


@given(st.data(), st.sampled_from(INDEX_BYTES))
def test_packed_indices_come_back(data, among_and_bytes):
    among, each = among_and_bytes
    pairs = data.draw(st.lists(st.tuples(*[st.integers(0, among - 1)] * 2), max_size=20))
    indices = torch.tensor([*pairs, (0, among - 1)]).flatten()
    packed = pack_indices(indices, among)
    assert packed.nbytes == each * len(indices)
    assert torch.equal(unpack_indices(packed).flatten(), indices)


# DCT.


def test_dct_topk_is_that_of_each_tile_of_a_matrix():
    matrix = torch.randn(20, 2, 8)  # [20, 16]: three by two tiles of 8, the last row of them padded
    mean, _ = fnddp.dct_topk(allgather, chunk=8, k=5)({"w": matrix}, ())
    n, k = np.arange(8), np.arange(8)[:, None]
    basis = np.where(k == 0, np.sqrt(1 / 8), np.sqrt(2 / 8)) * np.cos(np.pi * k * (2 * n + 1) / 16)  # of DCT-II
    padded, want = np.zeros((24, 16)), np.zeros((24, 16))
    padded[:20] = matrix.reshape(20, 16).double().numpy()
    for row in range(0, 24, 8):
        for column in 0, 8:
            there = slice(row, row + 8), slice(column, column + 8)
            coefficients = basis @ padded[there] @ basis.T
            kth = np.sort(np.abs(coefficients).flatten())[-5]
            want[there] = basis.T @ np.where(np.abs(coefficients) >= kth, coefficients, 0) @ basis
    np.testing.assert_allclose(mean["w"].reshape(20, 16).numpy(), want[:20], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [8, 80])  # 80 * 80 places do not fit 12 bits: neighbours are told apart by nothing
def test_dct_topk_takes_the_first_of_equal_coefficients(dtype, chunk):
    places = torch.arange(7, chunk * chunk, chunk * chunk // 12)
    coefficients = torch.zeros(chunk * chunk, dtype=dtype)
    coefficients[places] = torch.tensor([3.0, -3.0] * (len(places) // 2) + [3.0] * (len(places) % 2), dtype=dtype)
    coefficients[places[-1]] = -4.0
    basis = cosines(chunk, coefficients)
    payload = fnddp.dct_topk(allgather, chunk=chunk, k=5, index="int64").encode(
        (basis.mT @ coefficients.view(chunk, chunk) @ basis).reshape(1, -1)
    )
    assert sorted(payload["indices"].flatten().tolist()) == [*places[:4].tolist(), places[-1].item()]


# Majority vote.

BALLOTS = torch.tensor(
    [[1.0, 1.0, -2.0, 0.0, 0.5], [3.0, -1.0, -0.1, 0.0, 0.0], [0.1, -9.0, 4.0, -1.0, 0.0], [2.0, 0.3, -5.0, 0.0, -7.0]]
)


@pytest.mark.parametrize(("carrier", "n"), [*zip(pipelines.CARRIERS, (2, 3, 4), strict=True), ("two_shot", 4)])
def test_the_majority_wins_and_zeros_and_ranks_of_weight_zero_abstain(carrier, n):
    sync = fnddp.parse(f"majority_vote({carrier})")

    def body(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        grads = {"w": BALLOTS[rank]}
        done = sync.exchange(grads, sync.init(grads))
        weighted, _ = fnddp.weighted(sync)(grads, sync.init(grads), weight=float(rank != n - 1))
        return done.mean["w"], done.sent["w"], weighted["w"]

    done = run_threads(n, body)
    want = BALLOTS[:n].sign().sum(0).sign()
    assert all(torch.equal(mean, want) for mean, _, _ in done)
    assert all(torch.equal(weighted, BALLOTS[: n - 1].sign().sum(0).sign()) for _, _, weighted in done)
    if sync.sent_is_exact:
        torch.testing.assert_close(sum(sent for _, sent, _ in done) / n, want)


# Bytes.

BYTES = [  # of 2 ** 20 elements
    ("natural(allgather)", (1 << 20) * 9 // 8),
    ("quantize(allgather, block=128)", (1 << 20) + 4 * (1 << 13)),
    ("quantize(allgather, bits=4, block=128)", (1 << 19) + 4 * (1 << 13)),
    ("quantize(bf16(allgather), bits=4, block=128)", (1 << 19) + 2 * (1 << 13)),
    ("quantize(allgather, bits=2, block=None)", (1 << 18) + 4),
    ("fp8(allgather, block=128)", (1 << 20) + 4 * (1 << 13)),
    *((f"lloyd_max(allgather, bits={bits})", bits * (1 << 17) + (1 << 13) + 4) for bits in (1, 2, 3, 4)),
    ("fp8(allgather, block=32, scale='e8m0')", (1 << 20) + (1 << 15)),  # MXFP8
    ("fp8(allgather, format='e2m1', block=32, scale='e8m0')", (1 << 19) + (1 << 15)),  # MXFP4
    ("sign(allgather)", (1 << 17) + 4),
    ("qsgd(allgather, levels=7, block=512)", (1 << 19) + 4 * (1 << 11)),
    ("terngrad(allgather)", (1 << 18) + 4),
    ("majority_vote(allgather)", 1 << 18),
    ("random_k(allreduce, ratio=0.01)", 4 * 10_486),
    ("random_block(fp16(allreduce), ratio=0.01)", 2 * 10_486),
    # SparseLoCo: 12 + 2 bits for 64 of 4,096, 146.29 times less than float32 without the one scale of the leaf.
    ("topk(quantize(allgather, bits=2, block=None), k=64, chunk=4096)", 256 * 64 * 14 // 8 + 4),
    # DeMo: 8 of 64 x 64 as int64 and float32, 85.33 times less than 16 bits; and in 12 and 16 bits, 292.57 times.
    ("dct_topk(allgather, k=8, index='int64')", 256 * 8 * 12),
    ("dct_topk(bf16(allgather), k=8)", 256 * 28),
]


@pytest.mark.parametrize(("text", "want"), BYTES)
def test_bytes_of_a_million_elements(text, want):
    plan = fnddp.lower(fnddp.parse(text), {"w": torch.empty(1024, 1024, device="meta")}, world_size=8)
    assert plan.wire_bytes == want


@pytest.mark.usefixtures("own_transforms")
@pytest.mark.parametrize(
    ("encode", "error", "message"),
    [
        (lambda x: {"v": x, "twice": x.tile(1, 2)}, ValueError, r"rows of 6 numbers, got \(2, 6\) from \(1,\) rows"),
        (lambda x: x, TypeError, "encode must return a dict of tensors by name, got Tensor"),
        (lambda x: {"v": x, "n": 3}, TypeError, "encode must return a dict of tensors by name, got 'n': int"),
        (lambda x: {"v": x, "s": x.amax()}, ValueError, r"of shape \(1, 6\) it returned 's' of shape \(\); reduce"),
        (lambda x: {"v": x}, ValueError, r"decode must return rows of 6 numbers, got \(1, 5\)"),
    ],
)
def test_a_codec_that_gives_something_else_than_rows_is_named(encode, error, message):
    members = {
        "__annotations__": {"inner": fnddp.Carrying},
        "encode": lambda self, x: encode(x),
        "decode": lambda self, payload, n: payload["twice"].view(2, n) if "twice" in payload else payload["v"][:, 1:],
    }
    wrong = fnddp.transform(type("wrong", (fnddp.Codec,), members))
    with pytest.raises(error, match=rf"wrong\(allgather\): .*{message}"):
        wrong(fnddp.allgather)({"w": torch.ones(2, 3)}, ())


def test_tiles_of_matrices_are_refused_where_a_rank_owns_rows() -> None:
    with pytest.raises(TypeError, match=r"dct_topk: it needs whole matrices, but to_owners\(\) gives each rank"):
        fnddp.parse("dct_topk(to_owners())")
    with pytest.raises(TypeError, match="use topk"):
        fnddp.parse("dct_topk(bf16(to_all()))")
    fnddp.parse("dct_topk(bf16(two_shot))")

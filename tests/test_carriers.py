"""Carriers: exact means in rank order, whatever the layout, and what their two hops account for."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fnddp
from fnddp import allgather, bucketize, fp16, lower, parse, quantize, sign, two_shot
from fnddp.core.collectives import sum_in_rank_order
from fnddp.laws import bits
from fnddp.simulation.ranks import RankFailed, run_threads
from tests.ranks import on_ranks

SHAPES = {"w": (9, 7), "b": (5,), "one": (), "wide": (3, 400)}


def grads(rank: int, step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {path: torch.randn(shape, generator=generator) * 10 for path, shape in SHAPES.items()}


@pytest.mark.parametrize("carrier", [allgather, two_shot], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@on_ranks(1, 3, threads=True)
def test_a_mean_is_the_float32_sum_in_rank_order_divided_afterwards_in_buckets_too(rank, dtype, carrier):
    plain, n = fnddp.cast(carrier, dtype), dist.get_world_size()
    mean, in_buckets = (sync(grads(rank), ())[0] for sync in (plain, bucketize(plain, cap_mb=0.001)))
    assert bits(mean) == bits(in_buckets)
    for path in SHAPES:
        total = functools.reduce(torch.add, [grads(rank)[path].to(dtype).float() for rank in range(n)])
        assert torch.equal(mean[path], (total / n).to(dtype if carrier is two_shot else total.dtype).float())


def test_server_memory_of_another_number_of_ranks_is_named():
    sync = sign(two_shot(server_memory=True))
    state = run_threads(2, lambda rank: sync.init({"w": torch.empty(20)}))[0]
    message = r"two_shot: the state has an entry of shape \(10,\) for leaf 'w', .*\(7,\).* another number of ranks"
    with pytest.raises(RankFailed, match=message):
        run_threads(3, lambda rank: sync({"w": torch.ones(20)}, state))


@pytest.mark.parametrize("n", [2, 8, 1024])
def test_bytes_of_both_hops_are_exact(n):
    elements, block = 4096 * 128 + 1, 128
    like = {"w": torch.empty(elements, device="meta")}
    chunk = -(-elements // n)
    row = -(-chunk // block) * (block + 4)  # a byte for each element of whole blocks, and their scales
    assert lower(quantize(two_shot), like, world_size=n).wire_bytes == n * row + row
    assert lower(quantize(allgather), like, world_size=n).wire_bytes == -(-elements // block) * (block + 4)
    assert lower(fp16(two_shot), like, world_size=n).wire_bytes == 2 * (n * chunk + chunk)


def test_sums_in_rank_order_are_the_same_in_any_layout():
    rows = torch.randn(5, 7, 33)
    want = functools.reduce(torch.add, rows.unbind())
    assert torch.equal(sum_in_rank_order(rows), want)
    assert torch.equal(sum_in_rank_order(rows.transpose(1, 2).contiguous().transpose(1, 2)), want)
    assert torch.equal(torch.func.vmap(sum_in_rank_order, in_dims=1)(rows), want)
    onto = torch.randn(7, 33)
    want = functools.reduce(torch.add, [onto, *rows.unbind()])
    assert torch.equal(sum_in_rank_order(rows, onto), want)
    assert torch.equal(torch.func.vmap(sum_in_rank_order, in_dims=(1, 0))(rows, onto), want)
    assert torch.equal(torch.func.vmap(sum_in_rank_order, in_dims=(None, 0))(rows[:, 0], onto)[0], want[0])
    assert torch.equal(torch.func.vmap(sum_in_rank_order, in_dims=(1, None))(rows, onto[0])[0], want[0])
    for given in (rows,), (rows, onto):
        torch.library.opcheck(torch.ops.fnddp.sum_in_rank_order.default, given)


@pytest.mark.parametrize("text", ["fp16(allgather)", "quantize(allgather, bits=4, block=8)", "topk(allgather, k=3)"])
def test_blocks_of_ranks_add_up_to_the_same_bits(text, monkeypatch):
    sync = parse(text)

    def body(rank: int) -> list:
        plain, lowered = sync(grads(rank), sync.init(grads(rank))), fnddp.jit(sync)(grads(rank), sync.init(grads(rank)))
        return [bits(plain[0]), bits(lowered[0])]

    want = run_threads(4, body)
    for elements, most in ((1, 16), (1, 2), (63, 16)):  # a rank, two of them, one or all of them at a time
        monkeypatch.setattr(fnddp.core.table, "BLOCK", elements)
        monkeypatch.setattr(fnddp.core.table, "MOST_BLOCKS", most)
        assert run_threads(4, body) == want
        assert want[0][0] == want[0][1]


@pytest.mark.parametrize("text", ["quantize(allgather)", "topk(allgather, ratio=0.01)", "fp16(allgather)"])
def test_no_leaf_is_decoded_for_all_ranks_at_once(text):
    """What a step takes grows by what is received, and by a copy of that, and not by a decoded leaf for each rank."""
    leaf = {"w": torch.empty(1 << 23, device="meta")}
    few, many = (lower(parse(text), leaf, world_size=n) for n in (4, 12))
    received = many.wire_bytes * (12 - 4)
    assert many.peak_bytes - few.peak_bytes <= 2 * received + leaf["w"].nbytes / 2

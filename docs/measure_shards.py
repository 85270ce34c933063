"""Measures what codecs on FSDP2's shards do to a loss and to the time of a step, and prints docs/fsdp.md's tables.

python docs/measure_shards.py loss [--steps 400] [--seeds 3] [--ranks 4]     # the character model of the other studies
sudo python docs/measure_shards.py time [--hosts 2] [rate ...]               # 200mbit 1gbit: a rank on each host
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fnddp import WireCounter
from fnddp.cli.characters import characters, windows
from fnddp.cli.launch import run_ranks
from fnddp.cli.network import INTERFACE, sent_bytes, shaped_hosts
from fnddp.integrations.fsdp import compress_shards

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

NATIVE = "FSDP2"
IN_16_BITS = "FSDP2, reduce_dtype=bfloat16"
GRADIENTS = ("two_shot", "bf16(two_shot)", "quantize(two_shot)", "quantize(two_shot, bits=4)")
WITH_MEMORY = "error_feedback(quantize(two_shot, bits=4))"
WEIGHTS = ("quantize(allgather)", "quantize(allgather, bits=4)", "ef21(quantize(allgather, bits=4))")
ARMS: dict[str, tuple[str | None, str | None]] = {
    NATIVE: (None, None),
    IN_16_BITS: (None, None),
    **{text: (text, None) for text in (*GRADIENTS, WITH_MEMORY)},
    **{f"weights: {text}": (None, text) for text in WEIGHTS},
    **{f"{GRADIENTS[-1]}, weights: {text}": (GRADIENTS[-1], text) for text in (WEIGHTS[0], WEIGHTS[2])},
}
CONTEXT, SEQUENCES, LEARNING_RATE = 32, 32, 3e-3
WIDTH, LAYERS, BATCH = 512, 12, 32
WARM_UP, STEPS = 3, 7


def shard(model: nn.Module, layers: list[nn.Module], arm: str) -> Any:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) if arm == IN_16_BITS else MixedPrecisionPolicy()
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    gradients, weights = ARMS[arm]
    if gradients or weights:
        compress_shards(model, gradients, weights)
    return model


def rank_trains(arm: str, seed: int, steps: int) -> Iterator[tuple[float, int]]:
    """The validation loss, with exact weights, and the bytes that a rank gave to collectives in a step."""
    from convergence import Characters  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    plain: Any = Characters()
    torch.manual_seed(seed)
    made: Any = Characters()
    model = shard(made, [made.qkv, made.out, made.up, made.down], arm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    train, validation = (data := characters()).tensor_split([len(data) * 9 // 10])
    generator, n = torch.Generator().manual_seed(seed), dist.get_world_size()
    sent = 0
    for _ in range(steps):
        starts = torch.randint(len(train) - CONTEXT, (n, SEQUENCES // n), generator=generator)[dist.get_rank()]
        with WireCounter() as counter:
            loss_of(model, train, starts).backward()
        sent = counter.wire_bytes
        optimizer.step()
        optimizer.zero_grad()
    plain.load_state_dict({name: p.full_tensor() for name, p in model.named_parameters()})
    with torch.no_grad():
        yield loss_of(plain, validation, torch.arange(0, len(validation) - CONTEXT, 2 * CONTEXT)).item(), sent


def loss_of(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    x, y = windows(text, starts, CONTEXT)
    return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def losses(ranks: int, seeds: int, steps: int, arms: list[str]) -> None:
    print(f"| {ranks} ranks, {steps} steps, {seeds} seeds | loss | above {NATIVE}'s | bytes of a step |")
    print("|---|--:|--:|--:|")
    native: list[float] = []
    for arm in arms:
        results = [next(iter(run_ranks(ranks, rank_trains, arm, seed, steps))) for seed in range(seeds)]
        found = [loss for loss, _ in results]
        native = native or found
        above = [one - other for one, other in zip(found, native, strict=True)]
        shown = f"{statistics.mean(above):+.4f} ({min(above):+.4f} to {max(above):+.4f})"
        print(f"| `{arm}` | {statistics.mean(found):.4f} | {shown} | {results[0][1]:,} |", flush=True)


def rank_steps(arms: list[str]) -> Iterator[tuple[str, float, int]]:
    torch.set_num_threads(1)
    models: dict[str, Any] = {}
    for arm in arms:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
        models[arm] = shard(nn.Sequential(*layers), layers, arm)
    x = torch.randn(BATCH, WIDTH)
    for number in range(WARM_UP + STEPS):
        for arm, model in models.items():  # in turn, so that what else runs here meets all alike
            dist.barrier()
            sent, begun = sent_bytes(INTERFACE), time.perf_counter()
            model(x).square().mean().backward()
            dist.barrier()
            if number >= WARM_UP:
                yield arm, time.perf_counter() - begun, sent_bytes(INTERFACE) - sent
            model.zero_grad()


def times(hosts: int, rates: list[str], arms: list[str]) -> None:
    arms = [IN_16_BITS, *(arm for arm in arms if arm != IN_16_BITS)]
    measured: dict[tuple[str, str], list[Any]] = {}
    for rate in rates:
        with shaped_hosts(hosts, rate) as each:
            for arm, took, sent in run_ranks(hosts, rank_steps, arms, hosts=each):
                measured.setdefault((rate, arm), []).append((took, sent))
    print(f"| {hosts} hosts | {' | '.join(f'{r}: ms/step | of 16 bits | MB sent' for r in rates)} |")
    print(f"|---|{'--:|' * 3 * len(rates)}")
    for arm in arms:
        cells: list[str] = []
        for rate in rates:
            both = zip(measured[rate, arm], measured[rate, IN_16_BITS], strict=True)
            ratio = statistics.median(took / native for (took, _), (native, _) in both)
            took, sent = (statistics.median(values) for values in zip(*measured[rate, arm], strict=True))
            cells.append(f"{1000 * took:,.0f} | {ratio:.2f} | {sent / 1e6:.2f}")
        print(f"| `{arm}` | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["loss", "time"])
    parser.add_argument("rates", nargs="*", default=["200mbit", "1gbit"])
    for name, default in (("ranks", 4), ("seeds", 3), ("steps", 400), ("hosts", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    given = parser.parse_args()
    study = partial(losses, given.ranks, given.seeds, given.steps) if given.what == "loss" else None
    (study or partial(times, given.hosts, given.rates))(given.arms)


if __name__ == "__main__":
    main()

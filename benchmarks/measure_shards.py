"""Measures what codecs on FSDP2's shards do to a loss and to the time of a step, and prints fsdp-runs.md's tables.

python benchmarks/measure_shards.py loss [--rate 0.02] [--steps 400] [--seeds 3] [--ranks 4]  # of a character model
python benchmarks/measure_shards.py time [--hosts 2] [rate ...]               # 200mbit 1gbit: a rank on each host
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from convergence import Characters  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call, grad, vmap

import fnddp
from fnddp.cli.characters import characters, windows
from fnddp.cli.launch import run_ranks
from fnddp.cli.network import INTERFACE, sent_bytes, shaped_hosts
from fnddp.core.codec import Key
from fnddp.core.collectives import sum_in_rank_order
from fnddp.integrations.fsdp import compress_shards
from fnddp.integrations.fsdp.rows import Rows
from fnddp.integrations.fsdp.unit import code_of
from fnddp.transforms.memory import ef21, error_feedback

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
CONTEXT, SEQUENCES = 32, 32
WIDTH, LAYERS, BATCH = 512, 12, 32
WARM_UP, STEPS = 3, 7
TRAIN, VALIDATION = (_data := characters()).tensor_split([len(_data) * 9 // 10])


def shard(model: nn.Module, layers: list[nn.Module], arm: str) -> Any:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) if arm == IN_16_BITS else MixedPrecisionPolicy()
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    gradients, weights = ARMS[arm]
    if gradients or weights:
        compress_shards(model, gradients, weights)
    return model


def rank_trains(arm: str, seed: int, steps: int, rate: float) -> Iterator[float]:
    """The validation loss, with exact weights, of a rank of FSDP2."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    made: Any = Characters()
    model = shard(made, [made.qkv, made.out, made.up, made.down], arm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for starts in batches(dist.get_world_size(), seed, steps):
        loss_of(model, starts[dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
    plain: Any = Characters()
    plain.load_state_dict({name: p.full_tensor() for name, p in model.named_parameters()})
    yield validation_loss(plain)


def simulated(n: int, arm: str, seed: int, steps: int, rate: float) -> float:
    """The same, of what `n` ranks do, in this process: each row is encoded and decoded as there."""
    torch.manual_seed(seed)
    owned = Characters()  # the weights of owners; `computing` has those with which all compute
    optimizer = torch.optim.AdamW(owned.parameters(), lr=rate)
    gradients, weights = (None if text is None else fnddp.parse(text) for text in ARMS[arm])
    # In FSDP's order, where the root's own come last.
    exact = dict(sorted(owned.named_parameters(), key=lambda item: "." not in item[0]))
    groups: dict[str, dict[str, torch.Size]] = {}
    for name, p in exact.items():
        block = name.split(".")[0]
        groups.setdefault(block if block in ("qkv", "out", "up", "down") else "", {})[name] = p.shape
    layouts = {group: Rows(shapes, dict.fromkeys(shapes, 0), n) for group, shapes in groups.items()}
    seen: dict[str, Tensor] = {}
    residual: dict[str, Tensor] = {}

    def loss(computing: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(owned, computing, (x,)).flatten(0, -2), y.flatten())

    gradient_of_each = vmap(grad(loss), in_dims=(None, 0, 0))
    for starts in batches(n, seed, steps):
        computing: dict[str, Tensor] = {}
        with torch.no_grad():
            for group, rows in layouts.items():
                now = rows.pack(exact)
                if weights is None or (isinstance(weights, ef21) and group not in seen):
                    seen[group] = now
                elif isinstance(weights, ef21):
                    seen[group] = seen[group] + received(rows, weights, now - seen[group])
                else:
                    seen[group] = received(rows, weights, now)
                computing |= rows.unpack(seen[group])
        own = gradient_of_each({name: p.detach() for name, p in computing.items()}, *windows(TRAIN, starts, CONTEXT))
        for group, rows in layouts.items():
            x = torch.cat([rows.pack({name: own[name][rank] for name in rows.shapes}) for rank in range(n)])
            x = x + residual.get(group, 0)
            got = x if gradients is None else received(rows, gradients, x)
            if isinstance(gradients, error_feedback):
                residual[group] = x - got
            for name, mean in rows.unpack(sum_in_rank_order(got.view(n, n, -1)) / n).items():
                exact[name].grad = mean
        optimizer.step()
    return validation_loss(owned)


def received(rows: Rows, sync: fnddp.Sync, x: Tensor) -> Tensor:
    """What becomes of rows; none of the arms draws at random."""
    decoded = rows.encode(code_of(sync), x, Key("", 0)).decoded()
    return torch.cat([*decoded.values()], 1).to(x.dtype)


def batches(n: int, seed: int, steps: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randint(len(TRAIN) - CONTEXT, (n, SEQUENCES // n), generator=generator)


def validation_loss(model: nn.Module) -> float:
    with torch.no_grad():
        return loss_of(model, torch.arange(0, len(VALIDATION) - CONTEXT, 2 * CONTEXT), VALIDATION).item()


def loss_of(model: nn.Module, starts: Tensor, text: Tensor = TRAIN) -> Tensor:
    x, y = windows(text, starts, CONTEXT)
    return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def losses(ranks: int, seeds: int, steps: int, rate: float, is_real: bool, arms: list[str]) -> None:
    arms = [NATIVE, *(arm for arm in arms if arm not in (NATIVE, IN_16_BITS))]
    print(f"| {ranks} ranks, {steps} steps, {seeds} seeds, rate {rate:g} | loss | above {NATIVE}'s |")
    print("|---|--:|--:|")
    native: list[float] = []
    for arm in arms:
        found: list[float] = []
        for seed in range(seeds):
            if is_real:
                found.append(next(iter(run_ranks(ranks, rank_trains, arm, seed, steps, rate))))
            else:
                found.append(simulated(ranks, arm, seed, steps, rate))
        native = native or found
        above = [one - other for one, other in zip(found, native, strict=True)]
        shown = f"{statistics.mean(above):+.4f} ({min(above):+.4f} to {max(above):+.4f})"
        print(f"| `{arm}` | {statistics.mean(found):.4f} | {shown} |", flush=True)


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
    parser.add_argument("--rate", type=float, default=2e-2)
    parser.add_argument("--real", action="store_true", help="train on processes, not on simulated ranks")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    given = parser.parse_args()
    study = (
        partial(losses, given.ranks, given.seeds, given.steps, given.rate, given.real) if given.what == "loss" else None
    )
    (study or partial(times, given.hosts, given.rates))(given.arms)


if __name__ == "__main__":
    main()

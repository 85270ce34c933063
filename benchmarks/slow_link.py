"""Train over a slow link: loss against minutes, with torch's DDP, its fp16 hook, and pipelines of fnddp. Needs root.

python benchmarks/slow_link.py train     # on ranks in network namespaces of this machine; writes results/slow-link.json
python benchmarks/slow_link.py report    # the table, which README shows too, and the picture, from that file
python benchmarks/slow_link.py --quick   # both in a minute, into a temporary folder

The model is the study's transformer of characters (convergence.py), wider. All arms start with the same parameters, see
the same batches, and take turns every few steps, so that what else the machine does slows all of them alike. The clock
of an arm stands still while the others train and while losses are measured.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from convergence import Characters, scheduled
from figures import INK, save
from matplotlib.figure import Figure
from measured import NAMES
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import fnddp
from fnddp.cli import characters, picture
from fnddp.cli.launch import run_ranks
from fnddp.cli.network import sent_bytes, shaped_hosts

RESULTS, ASSETS = Path(__file__).parent / "results", Path(__file__).parent.parent / "docs" / "assets"
NAME = "slow-link"  # of the files
DDP, HOOK, AUTO = "ddp", "fp16_hook", "auto"
ARMS = (DDP, HOOK, AUTO, "error_feedback(powersgd(bf16(allreduce), rank=8))")
HEAD = 64  # the width of an attention head
MARGIN = 0.005  # nats: curves cross the loss that all reach, and do not touch it


def wrapped(arm: str, module: nn.Module) -> nn.Module:
    if arm not in (DDP, HOOK):
        return fnddp.DistributedDataParallel(module, sync=arm)
    model = nn.parallel.DistributedDataParallel(module)
    if arm == HOOK:
        model.register_comm_hook(None, fp16_compress_hook)
    return model


def unwatched(step: int, params: list[torch.Tensor]) -> None:
    """Losses are measured behind each turn."""


def train(width: int, size: int, steps: int, section: int, rate: float) -> Iterator[dict[str, Any]]:
    """Train all arms on this rank, and yield for each what it is, then its loss, seconds and bytes after each turn."""
    torch.set_num_threads(1)
    rank, ranks, interface = dist.get_rank(), dist.get_world_size(), os.environ["GLOO_SOCKET_IFNAME"]
    make = partial(Characters, width, characters.CONTEXT, width // HEAD)
    problem = characters.problem(size, make)
    models, optimizers = {}, {}
    for arm in ARMS:
        module = problem.make(0)
        models[arm] = model = wrapped(arm, module)
        optimizers[arm] = scheduled(partial(torch.optim.AdamW, lr=rate), steps, unwatched, list(module.parameters()))
        took = str(model.sync) if isinstance(model, fnddp.DistributedDataParallel) else arm
        yield {"arm": arm, "took": took, "parameters": sum(p.numel() for p in module.parameters())}
        yield {"arm": arm, "step": 0, "loss": quality(problem, model), "seconds": 0.0, "bytes": 0}
    for first in range(0, steps, section):
        for arm, model in models.items():
            dist.barrier()
            begin, sent = time.perf_counter(), sent_bytes(interface)
            for step in range(first, first + section):
                batch = problem.batch(rank, ranks, torch.Generator().manual_seed(step * ranks + rank))
                problem.loss(model, batch).backward()
                optimizers[arm].step()
                optimizers[arm].zero_grad()
            dist.barrier()
            seconds, sent = time.perf_counter() - begin, sent_bytes(interface) - sent
            loss = quality(problem, model)
            yield {"arm": arm, "step": first + section, "loss": loss, "seconds": seconds, "bytes": sent}


def quality(problem: Any, model: Any) -> float:
    """Return the loss on held-out data, on the first rank alone: all have the same parameters."""
    with torch.no_grad():
        return problem.quality(model.module) if dist.get_rank() == 0 else 0.0


def run(out: Path, link: str, ranks: int, **options: Any) -> None:
    """Train, and write what is there after each turn."""
    found: dict[str, Any] = {
        "link": link,
        "ranks": ranks,
        **options,
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load_at_start": os.getloadavg()[0],
        "arms": {arm: {"curve": []} for arm in ARMS},
    }
    with shaped_hosts(ranks, link) as hosts, closing(run_ranks(ranks, train, *options.values(), hosts=hosts)) as events:
        for event in events:
            arm = found["arms"][event.pop("arm")]
            if "took" in event:
                arm |= event
                continue
            before = arm["curve"][-1] if arm["curve"] else {"seconds": 0, "bytes": 0}
            summed = {key: before[key] + event[key] for key in ("seconds", "bytes")}
            arm["curve"].append(event | summed | {"load": os.getloadavg()[0]})
            print(json.dumps(arm["curve"][-1]), flush=True)
            (out / f"{NAME}.json").write_text(json.dumps(found, indent=1) + "\n")


def reached(curve: list[dict[str, float]], loss: float) -> float:
    """Return the seconds after which a curve, straight between its points, is down at a loss."""
    after = next(i for i, point in enumerate(curve) if point["loss"] <= loss)
    here, before = curve[after], curve[max(after - 1, 0)]
    share = (before["loss"] - loss) / (before["loss"] - here["loss"]) if here is not before else 0.0
    return before["seconds"] + share * (here["seconds"] - before["seconds"])


def common(found: dict[str, Any]) -> float:
    """Return the least loss that all arms have reached."""
    return max(min(point["loss"] for point in arm["curve"]) for arm in found["arms"].values()) + MARGIN


def name_of(arm: str, took: str) -> str:
    return NAMES.get(arm) or (f'`sync="auto"`: `{took}`' if arm == AUTO else f"`{took}`")


def table(found: dict[str, Any]) -> str:
    """Return a row for each arm."""
    target = common(found)
    dense = reached(found["arms"][DDP]["curve"], target)
    lines = [
        f"| training with | minutes to a loss of {target:.3f} | of DDP's time "
        f"| loss after {found['steps']} steps | GB sent by each rank |",
        "|---|--:|--:|--:|--:|",
    ]
    for arm, what in found["arms"].items():
        last, seconds = what["curve"][-1], reached(what["curve"], target)
        lines.append(
            f"| {name_of(arm, what['took'])} | {seconds / 60:.1f} | {seconds / dense:.2f} | {last['loss']:.3f} "
            f"| {last['bytes'] / 1e9:.2f} |"
        )
    return "\n".join(lines) + "\n"


def draw(found: dict[str, Any]) -> Figure:
    """Draw the loss against minutes, and what all have reached."""
    figure = Figure(figsize=(5.8, 3.9), layout="constrained")
    axes = figure.subplots()
    target = common(found)
    axes.axhline(target, color=INK, linewidth=0.8, linestyle=":")
    for colour, (arm, what) in zip(picture.COLOURS, found["arms"].items(), strict=False):
        minutes = [point["seconds"] / 60 for point in what["curve"]]
        name = f'sync="auto": {what["took"]}' if arm == AUTO else name_of(arm, what["took"]).replace("`", "")
        axes.plot(minutes, [point["loss"] for point in what["curve"]], color=colour, linewidth=1.8, label=name)
        axes.plot(reached(what["curve"], target) / 60, target, "o", color=colour, markersize=5)
    picture.dress(axes)
    early = max(what["curve"][1]["loss"] for what in found["arms"].values())  # the rest is flat beside the first steps
    axes.set(xlabel="minutes", ylabel="loss on held-out text, nats", xlim=(0, None), ylim=(None, early + 0.1))
    figure.legend(loc="outside upper left", frameon=False, fontsize=9)
    return figure


def report(results: Path, assets: Path) -> None:
    found = json.loads((results / f"{NAME}.json").read_text())
    (results / f"{NAME}.md").write_text(table(found))
    save(partial(draw, found), assets / f"{NAME}.svg")
    print(table(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["train", "report"], default="train")
    parser.add_argument("--quick", action="store_true", help="a few steps of a small model, into a temporary folder")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the results")
    parser.add_argument("--link", default="200mbit")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512, help="of the model: a multiple of 64")
    parser.add_argument("--size", type=int, default=4, help="windows of 64 characters in a batch of a rank")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--section", type=int, default=15, help="steps of a turn")
    parser.add_argument("--rate", type=float, default=1e-3, help="the highest learning rate")
    given = parser.parse_args()
    options = {name: getattr(given, name) for name in ("width", "size", "steps", "section", "rate")}
    if given.quick:
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder), "1gbit", 2, **options | {"width": 64, "steps": 8, "section": 2})
            report(Path(folder), Path(folder))
    elif given.command == "train":
        run(given.out, given.link, given.ranks, **options)
    else:
        report(given.out, ASSETS if given.out == RESULTS else given.out)


if __name__ == "__main__":
    main()

"""What pipelines do to a loss: many of them, on 8 and on 64 virtual ranks, on images and on text, with several seeds.

    python examples/convergence.py train     # one line of json for each run, into docs/assets/; skips what is there
    python examples/convergence.py report    # costs, tables and plots of the lines that there are
    python examples/convergence.py --quick   # both in a minute, into a temporary folder

A run is one process's: the ranks are simulated (`fnddp.simulate_training`). What it found is in docs/convergence.md.
"""

import argparse
import hashlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call

import fnddp
from fnddp import Link
from fnddp.cli import characters, digits, models, picture
from fnddp.plan.period import Recurring, period

ASSETS = Path(__file__).parent.parent / "docs" / "assets"

# To add a pipeline, add its text.
PIPELINES = [
    "allreduce",
    "bf16(allreduce)",
    "bf16(two_shot)",
    # Blocks and chunks want long rows: leaves are laid out in buckets before they are cut into a row for each rank.
    "bucketize(quantize(two_shot))",
    "bucketize(quantize(two_shot, bits=4))",
    "bucketize(quantize(two_shot, bits=4, rounding='stochastic'))",
    "error_feedback(bucketize(quantize(two_shot, bits=4)))",
    "error_feedback(bucketize(quantize(two_shot, bits=2, block=64)))",
    "error_feedback(bucketize(sign(two_shot, chunk=256)))",
    "error_feedback(sign(allgather))",
    "topk(allgather, ratio=0.01)",
    "error_feedback(topk(allgather, ratio=0.01))",
    "error_feedback(topk(bf16(allgather), ratio=0.05))",
    "powersgd(allreduce, rank=4)",
    "error_feedback(powersgd(allreduce, rank=1))",
    "error_feedback(powersgd(allreduce, rank=4))",
    "error_feedback(powersgd(bf16(allreduce), rank=8))",
    "warmup(error_feedback(powersgd(allreduce, rank=4)), steps=20)",
    "error_feedback(powersgd(allreduce, rank=4), decay=0.9)",
]
EXACT, SIXTEEN_BITS = "allreduce", "bf16(allreduce)"  # the mean, and what there is to beat
RATES = ("100mbit", "1gbit", "10gbit", "100gbit")
LATENCY = "20us"
COSTED = "transformer"  # of fnddp.cli.models: 10.3 M parameters; the tasks' own are too small for a rate to matter

Batches = Iterator[tuple[Tensor, ...]]


@dataclass(frozen=True)
class Task:
    """Something to train.

    Attributes:
        make: A new module, a function of torch's global seed.
        loss: `loss(module, params, x, y)`.
        batches: `batches(n, seed, steps)`: a row for each rank.
        optimizer: For a list of tensors.
        quality: What is compared, of `(module, params)`.
        measure: What that is.
        steps: By the number of ranks.
    """

    make: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    batches: Callable[[int, int, int], Batches]
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
    quality: Callable[[nn.Module, dict[str, Tensor]], float]
    measure: str
    steps: dict[int, int]


# Digits: a small network, SGD with momentum.


def make_network(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def digits_task() -> Task:
    train, test = digits.load()

    def test_loss(model: nn.Module, params: dict[str, Tensor]) -> float:
        with torch.no_grad():
            return digits.loss(model, params, test.x, test.y).item()

    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return Task(
        make_network,
        digits.loss,
        partial(images, train),
        optimizer,
        test_loss,
        "test loss",
        {8: 150, 64: 100},
    )


def images(train: digits.Digits, n: int, seed: int, steps: int) -> Batches:
    """8 random ones of each rank's own share."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        drawn = [train.shard(rank, n).batch(8, generator) for rank in range(n)]
        yield torch.stack([each.x for each in drawn]), torch.stack([each.y for each in drawn])


# Characters: a transformer of one block, AdamW, on text that ships with Python.

TEXT = characters.text()
SYMBOLS = sorted(set(TEXT))


class Characters(nn.Module):
    def __init__(self, width: int = 48, context: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(len(SYMBOLS), width)
        self.place = nn.Parameter(0.02 * torch.randn(context, width))
        self.before, self.between, self.after = (nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, len(SYMBOLS))
        self.register_buffer("later", torch.ones(context, context, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, characters: Tensor) -> Tensor:  # [batch, context] -> [batch, context, symbols]
        x = self.embed(characters) + self.place
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for part in self._qkv(x))
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(self.later, -1e9)
        x = x + self.out((scores.softmax(-1) @ v).transpose(-3, -2).flatten(-2))
        x = x + self.down(nn.functional.gelu(self.up(self.between(x))))
        return self.head(self.after(x))

    def _qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(self.before(x)).chunk(3, dim=-1)


def characters_task(context: int = 32, sequences: int | None = None) -> Task:
    """On batches of so many sequences a rank; None for 32 in all."""
    data = characters.characters()
    train, validation = data.tensor_split([len(data) * 9 // 10])

    cut = partial(characters.windows, context=context)

    def loss(model: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, params, (x,)).flatten(0, -2), y.flatten())

    def batches(n: int, seed: int, steps: int) -> Batches:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            yield cut(
                train, torch.randint(len(train) - context, (n, sequences or max(1, 32 // n)), generator=generator)
            )

    def validation_loss(model: nn.Module, params: dict[str, Tensor]) -> float:
        with torch.no_grad():
            starts = torch.arange(0, len(validation) - context, 2 * context)
            return loss(model, params, *cut(validation, starts)).item()

    optimizer = partial(torch.optim.AdamW, lr=3e-3)
    return Task(Characters, loss, batches, optimizer, validation_loss, "validation loss", {8: 200, 64: 60})


TASKS = {"digits": digits_task, "characters": characters_task}


# Runs.


def train(out: Path, pipelines: list[str], ranks: list[int], seeds: list[int], steps: int | None = None) -> None:
    """Runs what has no line in `out` yet, seed by seed."""
    there = {(line["task"], line["pipeline"], line["n"], line["seed"]) for line in lines_of(out)}
    tasks = {name: make() for name, make in TASKS.items()}
    for seed in seeds:
        for n in ranks:
            for name, task in tasks.items():
                for text in pipelines:
                    if (name, text, n, seed) not in there:
                        line = run(name, task, text, n, seed, steps or task.steps.get(n, 100))
                        with out.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(line) + "\n")


def run(name: str, task: Task, text: str, n: int, seed: int, steps: int) -> dict[str, Any]:
    """Trains once. Pipelines get the same initial parameters and batches; seeds others."""
    sync = fnddp.parse(text)
    torch.manual_seed(seed)
    model = task.make()
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    begin = time.process_time()
    done = fnddp.simulate_training(
        partial(task.loss, model),
        params,
        task.batches(n, seed, steps),
        sync,
        world_size=n,
        optimizer=task.optimizer,
    )
    seconds = time.process_time() - begin
    wire_bytes = round(mean(period(sync, params, world_size=n), lambda plan: plan.wire_bytes))
    line = {
        "task": name,
        "pipeline": text,
        "n": n,
        "seed": seed,
        "steps": steps,
        "parameters": sum(p.numel() for p in params.values()),
        "quality": task.quality(model, done.params),
        "measure": task.measure,
        "training_loss": done.losses[-10:].mean().item(),
        "wire_bytes": wire_bytes,
        "cpu_seconds": round(seconds, 2),
    }
    print(
        f"{name:10} n={n:<2} seed {seed}  {line['quality']:.4f}  {wire_bytes:9,} B  {seconds:5.1f} s  {text}",
        flush=True,
    )
    return line


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


# Costs, of a model that is large enough.


def costs(pipelines: list[str], ranks: list[int], model: str, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bytes and communication times of a step, on each link, nothing hidden behind backward; those known are kept."""
    params = models.parameters(model)
    there = {(x["pipeline"], x["n"], x["model"]): x for x in known}
    found: list[dict[str, Any]] = []
    for text in pipelines:
        for n in ranks:
            if (text, n, model) in there:
                found.append(there[text, n, model])
                continue
            sync = fnddp.parse(text)
            repeated = period(sync, params, world_size=n)
            seconds: dict[str, float] = {}
            for rate in RATES:
                link = Link.parse(f"{rate}:{LATENCY}")
                seconds[rate] = mean(repeated, lambda plan, on=link: plan.estimate(on).communication_seconds)
            bytes_of = {
                "wire_bytes": round(mean(repeated, lambda plan: plan.wire_bytes)),
                "link_bytes": round(mean(repeated, lambda plan: plan.estimate(Link.parse("1gbit")).link_bytes)),
            }
            found.append({"pipeline": text, "n": n, "model": model, **bytes_of, "seconds": seconds})
    return found


def mean(repeated: Sequence[Recurring], of: Callable[[fnddp.Plan], float]) -> float:
    """Over the steps that a pipeline repeats."""
    return statistics.fmean((of(each.plan) for each in repeated), [each.steps for each in repeated])


# Sums in 16 bits.


def accumulation(sizes: list[int], elements: int = 1024) -> list[dict[str, Any]]:
    """The relative error of a mean of n gradients that are half signal, half noise."""
    found: list[dict[str, Any]] = []
    for text in ("bf16(allreduce)", "bf16(two_shot)", "fp16(allreduce)", "fp16(two_shot)"):
        for n in sizes:
            generator = torch.Generator().manual_seed(n)
            signal = torch.randn(elements, generator=generator)
            grads = {"w": signal + torch.randn(n, elements, generator=generator)}
            simulation = fnddp.simulate(fnddp.parse(text), n)
            done, _ = simulation(grads, simulation.init(grads))
            exact = grads["w"].double().mean(0)
            error = ((done["w"].double() - exact).norm() / exact.norm()).item()
            found.append({"pipeline": text, "n": n, "relative_error": error})
    return found


# Reports.


def summary(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and spread over seeds of each pipeline, and how far it is from the mean gradient's, seed by seed."""
    exact = {(x["task"], x["n"], x["seed"]): x["quality"] for x in lines if x["pipeline"] == EXACT}
    runs: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for line in lines:
        runs.setdefault((line["task"], line["n"], line["pipeline"]), []).append(line)
    found: list[dict[str, Any]] = []
    for (task, n, text), of in runs.items():
        quality = [x["quality"] for x in of]
        gaps = [x["quality"] - exact[task, n, x["seed"]] for x in of if (task, n, x["seed"]) in exact]
        found.append(
            {
                "task": task,
                "n": n,
                "pipeline": text,
                "seeds": len(of),
                "steps": of[0]["steps"],
                "quality": statistics.fmean(quality),
                "spread": statistics.stdev(quality) if len(of) > 1 else 0.0,
                "gap": statistics.fmean(gaps) if gaps else math.nan,
                "gap_spread": statistics.stdev(gaps) if len(gaps) > 1 else 0.0,
                "wire_bytes": of[0]["wire_bytes"],
            }
        )
    return found


def report(out: Path, folder: Path, pipelines: list[str], ranks: list[int], sizes: list[int], model: str) -> None:
    lines, file = lines_of(out), folder / "convergence.json"
    known = json.loads(file.read_text())["costs"] if file.exists() else []
    found = {
        "text_sha256": hashlib.sha256(TEXT.encode()).hexdigest(),
        "results": summary(lines),
        "costs": costs(pipelines, ranks, model, known),
        "accumulation": accumulation(sizes),
    }
    file.write_text(json.dumps(found, indent=1) + "\n")
    picture.save(partial(draw_convergence, found["results"]), folder / "convergence.svg")
    picture.save(partial(draw_accumulation, found["accumulation"]), folder / "accumulation.svg")
    print(tables(found))


def tables(found: dict[str, Any]) -> str:
    parts: list[str] = []
    for task, n in dict.fromkeys((x["task"], x["n"]) for x in found["results"]):
        rows = sorted((x for x in found["results"] if (x["task"], x["n"]) == (task, n)), key=lambda x: x["quality"])
        parts.append(f"\n{task}, {n} ranks, {rows[0]['steps']} steps\n")
        parts.append("| pipeline | loss | above the mean's, same seed | B a step |\n| --- | --: | --: | --: |")
        for x in rows:
            loss, gap = f"{x['quality']:.3f} ± {x['spread']:.3f}", f"{x['gap']:+.4f} ± {x['gap_spread']:.4f}"
            parts.append(f"| `{x['pipeline']}` | {loss} | {gap} | {x['wire_bytes']:,} |")
    for n in dict.fromkeys(x["n"] for x in found["costs"]):
        parts.append(f"\ncommunication of a step, {n} ranks\n")
        parts.append(f"| pipeline | MB handed over | MB on the link | {' | '.join(RATES)} |")
        parts.append(f"| --- | --: | --: |{' --: |' * len(RATES)}")
        for x in found["costs"]:
            if x["n"] == n:
                times = " | ".join(f"{x['seconds'][rate] * 1e3:.1f} ms" for rate in RATES)
                sizes = f"{x['wire_bytes'] / 1e6:.2f} | {x['link_bytes'] / 1e6:.2f}"
                parts.append(f"| `{x['pipeline']}` | {sizes} | {times} |")
    return "\n".join(parts)


def draw_convergence(results: list[dict[str, Any]]) -> Figure:
    panels = sorted({(x["task"], x["n"]) for x in results})
    order = list(dict.fromkeys(x["pipeline"] for x in results))
    rows = math.ceil(len(panels) / 2)
    figure = Figure(figsize=(12, 4 * rows + 3), layout="constrained")
    for i, (task, n) in enumerate(panels):
        axes = figure.add_subplot(rows, 2, i + 1)
        for x in (x for x in results if (x["task"], x["n"]) == (task, n)):
            j = order.index(x["pipeline"])
            marker = "osD^vP*X<>"[j // 10 % 10]
            axes.errorbar(
                x["wire_bytes"], x["quality"], yerr=x["spread"], fmt=marker, color=f"C{j % 10}", label=x["pipeline"]
            )
        axes.set(xscale="log", xlabel="wire bytes a step and rank", ylabel="final loss", title=f"{task}, {n} ranks")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize="small")
    return figure


def draw_accumulation(found: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for text in dict.fromkeys(x["pipeline"] for x in found):
        of = [x for x in found if x["pipeline"] == text]
        axes.plot([x["n"] for x in of], [x["relative_error"] for x in of], "o-", label=text)
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="ranks", ylabel="relative error of the mean")
    axes.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["train", "report"], default="train")
    parser.add_argument("--quick", action="store_true", help="a few runs of a few steps, into a temporary folder")
    parser.add_argument(
        "--out", type=Path, default=ASSETS / "convergence.jsonl", help="lines of json, one for each run"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"text: {len(TEXT):,} characters, sha256 {hashlib.sha256(TEXT.encode()).hexdigest()}")
    if arguments.quick:
        with tempfile.TemporaryDirectory() as folder:
            out, some = (
                Path(folder) / "convergence.jsonl",
                [EXACT, "error_feedback(bucketize(sign(two_shot, chunk=256)))"],
            )
            train(out, some, [4], [0], steps=3)
            train(out, some, [4], [0], steps=3)  # resumes: nothing is left to do
            report(out, Path(folder), some, [4], [2, 8], COSTED)
            print(f"{len(lines_of(out))} runs")
    elif arguments.command == "train":
        train(arguments.out, PIPELINES, arguments.ranks, arguments.seeds)
    else:
        sizes = [2**i for i in range(1, 11)]
        report(arguments.out, arguments.out.parent, PIPELINES, arguments.ranks, sizes, COSTED)


if __name__ == "__main__":
    main()

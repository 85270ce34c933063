"""What pipelines do to a loss: two models, SGD with momentum and AdamW, 8 and 64 virtual ranks, several seeds.

    python benchmarks/convergence.py train     # one line of json for each run, into results/; skips what is there
    python benchmarks/convergence.py report    # tables, the plots and the data of `fnddp.choose`, from what is there
    python benchmarks/convergence.py --quick   # both in a minute, into a temporary folder
    python benchmarks/convergence.py train --few-bits     # and report: rotations, small residuals, two levels

Each pipeline is trained at the learning rate that is best for the plain mean and, where it loses something there,
at its own best. A run is one process's: the ranks are simulated (`fnddp.simulate_training`), and runs on 8 and on 64
of them see the same number of samples. What it found is in docs/convergence.md.
"""

import argparse
import hashlib
import json
import math
import platform
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from figures import save
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call

import fnddp
from fnddp import Link
from fnddp.cli import characters, digits, models
from fnddp.core.sync import all_in
from fnddp.plan.period import Recurring, period
from fnddp.run.choose import CODEC_SECONDS
from fnddp.simulation.tune import Gap

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
PICTURE = ROOT / "docs" / "assets" / "convergence.svg"  # on the page of the study
DATA = ROOT / "fnddp" / "cost" / "losses.json"

EXACT = "allreduce"
PLAIN = "the plain mean"  # in tables
ONE_BIT = "error_feedback(bucketize(sign(quantize(two_shot(server_memory=True)), chunk=128)))"  # on both hops
PIPELINES = [  # in the order of interest; to add one, add its text
    EXACT,
    "bucketize(quantize(two_shot))",
    "shared_momentum(error_feedback(bucketize(quantize(two_shot, bits=4))))",
    f"shared_momentum({ONE_BIT}, beta=0.5)",
    "bucketize(quantize(two_shot, bits=4))",
    "bf16(allreduce)",
    "error_feedback(powersgd(bf16(allreduce), rank=8))",
    "error_feedback(bucketize(quantize(two_shot, bits=4)))",
    "shared_momentum(allreduce)",
    "shared_momentum(allreduce, beta=0.5)",
    "shared_momentum(error_feedback(sign(allgather)))",
    "error_feedback(powersgd(bf16(allreduce), rank=4))",
    ONE_BIT,
    "bucketize(quantize(two_shot, bits=4, rounding='stochastic'))",
    "error_feedback(topk(bf16(allgather), ratio=0.05))",
    "error_feedback(sign(allgather))",
]
CLOSE = (  # to the plain mean, as far as three seeds show: more of them, on 8 ranks
    EXACT,
    "bucketize(quantize(two_shot))",
    "bf16(allreduce)",
    "error_feedback(bucketize(quantize(two_shot, bits=4)))",
    "shared_momentum(error_feedback(bucketize(quantize(two_shot, bits=4))))",
    f"shared_momentum({ONE_BIT}, beta=0.5)",
)
ACROSS, INSIDE = "two_shot(group='across')", "two_shot(group='inside')"
FEW_BITS = [  # compared on one machine, with a plain mean of their own; `fnddp.choose` does not know them
    EXACT,
    "error_feedback(bucketize(quantize(two_shot, bits=4)))",
    "error_feedback(bucketize(quantize(two_shot, bits=4)), residual='int8')",
    "error_feedback(bucketize(rotate(quantize(two_shot, bits=4))))",
    "bucketize(quantize(two_shot, bits=4))",
    "bucketize(rotate(quantize(two_shot, bits=4)))",
    "error_feedback(bucketize(lloyd_max(two_shot)))",
    "error_feedback(bucketize(rotate(lloyd_max(two_shot))))",
    f"bucketize(hierarchical(quantize({ACROSS}, bits=4), intra=quantize({INSIDE})))",
    f"bucketize(rotate(hierarchical(quantize({ACROSS}, bits=4), intra=quantize({INSIDE}))))",
]
NODE = 4  # ranks of a node, in pipelines of two levels
OVER_FEW = "allgather"  # receives n - 1 payloads: on 64 ranks these send more than the plain mean
HAS_MOMENTUM = "shared_momentum"  # gives a momentum, so the optimizer behind it has none of its own
SEARCHED = 0.01  # nats above the plain mean: what is safe, and from which on a pipeline's own rate is searched
SEARCHED_ON = 8  # ranks, for learning rates: all ranks together see the same samples on any number
LEAST_SEEDS = 3  # of what is reported
AFFORDABLE = 0.05  # nats above the plain mean that "some loss" may be
ABOUT = 1.25  # times the fastest is about as fast
RATES = ("100mbit", "1gbit", "10gbit", "100gbit")
WORDS = dict(zip(RATES, ("100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s"), strict=True))
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
        quality: The loss on held-out data, of `(module, params)`.
        steps: Until the plain mean's quality is flat.
    """

    make: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    batches: Callable[[int, int, int], Batches]
    quality: Callable[[nn.Module, dict[str, Tensor]], float]
    steps: int


TOTAL = 64  # samples of a step, on all ranks together


# Digits: a convolutional network on scikit-learn's images.


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.hidden, self.out = nn.Linear(512, 64), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:  # [batch, 64] -> [batch, 10]
        x = self.first(images.unflatten(-1, (1, 8, 8))).relu()
        return self.out(self.hidden(self.second(x).relu().flatten(-3)).relu())


def digits_task() -> Task:
    train, test = digits.load()

    def test_loss(model: nn.Module, params: dict[str, Tensor]) -> float:
        with torch.no_grad():
            return digits.loss(model, params, test.x, test.y).item()

    return Task(ConvNet, digits.loss, partial(images, train), test_loss, steps=200)


def images(train: digits.Digits, n: int, seed: int, steps: int) -> Batches:
    """Random ones of each rank's own share: every n-th image."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.arange(n).unsqueeze(1)
    shares = (len(train.y) - ranks + n - 1) // n
    for _ in range(steps):
        drawn = ranks + n * (torch.rand(n, max(1, TOTAL // n), generator=generator) * shares).long()
        yield train.x[drawn], train.y[drawn]


# Characters: a transformer of one block, on text that ships with Python.

TEXT = characters.text()
SHA256 = hashlib.sha256(TEXT.encode()).hexdigest()
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
    """On batches of so many sequences a rank; None for TOTAL in all."""
    data = characters.characters()
    train, validation = data.tensor_split([len(data) * 9 // 10])

    cut = partial(characters.windows, context=context)

    def loss(model: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, params, (x,)).flatten(0, -2), y.flatten())

    def batches(n: int, seed: int, steps: int) -> Batches:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            rows = sequences or max(1, TOTAL // n)
            yield cut(train, torch.randint(len(train) - context, (n, rows), generator=generator))

    def validation_loss(model: nn.Module, params: dict[str, Tensor]) -> float:
        with torch.no_grad():
            starts = torch.arange(0, len(validation) - context, 2 * context)
            return loss(model, params, *cut(validation, starts)).item()

    return Task(Characters, loss, batches, validation_loss, steps=600)


TASKS = {"characters": characters_task, "digits": digits_task}


# Optimizers. Their learning rates rise for the first steps, and then fall to zero.

ADAMW, SGD = "AdamW", "SGD"
RATE = {ADAMW: 0.01, SGD: 0.1}  # times powers of two
RISING = 0.05  # of all steps
BETA = 0.9  # of the first moment


def make_optimizer(name: str, rate: float, beta: float | None, params: list[Tensor]) -> torch.optim.Optimizer:
    """With a momentum of its own; or for a pipeline that gives one, of `beta`."""
    if name == SGD:
        made: torch.optim.Optimizer = torch.optim.SGD(params, lr=rate, momentum=BETA)
    else:
        made = torch.optim.AdamW(params, lr=rate, betas=(BETA, 0.999), weight_decay=0.01)
    return made if beta is None else fnddp.without_momentum(made, beta)


def beta_of(sync: fnddp.Sync) -> float | None:
    return next((each.beta for each in all_in(sync) if isinstance(each, fnddp.shared_momentum)), None)


def scheduled(
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    steps: int,
    watch: Callable[[int, list[Tensor]], None],
    params: list[Tensor],
) -> torch.optim.Optimizer:
    """An optimizer whose rate rises and falls over `steps`, after each of which `watch` is called."""
    optimizer, rising = make(params), max(1, round(RISING * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / rising, (steps - t) / (steps - rising))
    )

    def after(*_: object) -> None:
        schedule.step()
        watch(schedule.last_epoch, params)

    optimizer.register_step_post_hook(after)
    return optimizer


# Runs, and which ones are wanted.


class Setting(NamedTuple):
    task: str
    optimizer: str
    n: int


class Run(NamedTuple):
    setting: Setting
    pipeline: str
    octave: int  # the learning rate is 2 ** octave times RATE
    seed: int


Found = dict[Run, float]  # the loss in the end; infinite where it diverged


def found_in(lines: Iterable[dict[str, Any]]) -> Found:
    return {
        Run(Setting(x["task"], x["optimizer"], x["n"]), x["pipeline"], x["octave"], x["seed"]): math.inf
        if x["quality"] is None
        else x["quality"]
        for x in lines
    }


def best(found: Found, setting: Setting, text: str, seed: int) -> int | None:
    """The octave of the least loss with a seed, if those on both sides of it have been run."""
    rates = octaves(found, setting, text, seed)
    least = min(rates, key=rates.__getitem__, default=None)
    return least if least is not None and {least - 1, least + 1} <= rates.keys() else None


def octaves(found: Found, setting: Setting, text: str, seed: int) -> dict[int, float]:
    return {run.octave: loss for run, loss in found.items() if run[:2] == (setting, text) and run.seed == seed}


def searched(found: Found, setting: Setting, text: str, seed: int, start: int) -> Iterator[Run]:
    """The runs that bracket the best octave, as far as they are known by now: one more until there is none."""
    rates = octaves(found, setting, text, seed)
    least = min(rates, key=rates.__getitem__, default=start)
    for octave in (least, least + 1, least - 1):
        yield Run(setting, text, octave, seed)


def at_best_of_mean(found: Found, setting: Setting) -> int | None:
    """The octave of the plain mean, on any number of ranks."""
    return best(found, setting._replace(n=SEARCHED_ON), EXACT, 0)


def runs_on(setting: Setting, text: str) -> bool:
    return setting.n <= 8 or OVER_FEW not in text


def wanted(found: Found, settings: Sequence[Setting], pipelines: Sequence[str], seeds: Sequence[int]) -> Iterator[Run]:
    """All runs that what is found calls for, the most telling first; runs that are done are among them."""
    octave = {}
    for setting in settings:
        yield from searched(found, setting._replace(n=SEARCHED_ON), EXACT, seeds[0], 0)
        octave[setting] = at_best_of_mean(found, setting)
    known = [(setting, at) for setting, at in octave.items() if at is not None]
    mine = [(setting, text, at) for text in pipelines for setting, at in known if runs_on(setting, text)]
    for setting, text, at in mine:
        for seed in seeds:
            yield Run(setting, text, at, seed)
    for setting, text, at in mine:
        if text in CLOSE and setting.n == SEARCHED_ON:
            for seed in range(2 * len(seeds)):
                yield Run(setting, text, at, seed)
    losing = [each for each in mine if (gap_of(found, *each, each[2], seeds) or 0) > SEARCHED]
    for setting, text, at in losing:
        searching = setting._replace(n=SEARCHED_ON)
        yield from searched(found, searching, text, seeds[0], at)
        own = best(found, searching, text, seeds[0])
        if own is not None:
            for seed in seeds:
                yield Run(setting, text, own, seed)


def gaps_of(found: Found, setting: Setting, text: str, at: int, own: int, seeds: Sequence[int]) -> list[float]:
    """How far a pipeline at the octave `own` ends above the plain mean at `at`, for each seed that has both."""
    pairs = [(found.get(Run(setting, text, own, s)), found.get(Run(setting, EXACT, at, s))) for s in seeds]
    return [one - other for one, other in pairs if one is not None and other is not None]


def gap_of(found: Found, setting: Setting, text: str, at: int, own: int, seeds: Sequence[int]) -> float | None:
    gaps = gaps_of(found, setting, text, at, own, seeds)
    return statistics.fmean(gaps) if gaps else None


def train(
    out: Path, settings: Sequence[Setting], pipelines: Sequence[str], seeds: Sequence[int], steps: int | None = None
) -> None:
    """Runs what is wanted and has no line in `out` yet, until nothing is."""
    tasks = {name: make() for name, make in TASKS.items() if name in {each.task for each in settings}}
    while run := following(found_in(lines_of(out)), settings, pipelines, seeds):
        task = tasks[run.setting.task]
        line = done(replace(task, steps=steps or task.steps), run)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def following(found: Found, *options: Any) -> Run | None:
    return next((run for run in wanted(found, *options) if run not in found), None)


def losses_of(
    task: Task, model: nn.Module, sync: fnddp.Sync, n: int, seed: int, optimizer: Callable[..., torch.optim.Optimizer]
) -> tuple[float, float]:
    """Trains, and returns the loss on held-out data and that of the last ten steps; NaN if numbers were not finite."""
    batches, groups = task.batches(n, seed, task.steps), None if sync.groups == {None} else nodes(n)
    try:
        after = fnddp.simulate_training(
            partial(task.loss, model),
            named_parameters(model),
            batches,
            sync,
            world_size=n,
            optimizer=optimizer,
            groups=groups,
        )
    except torch.linalg.LinAlgError:  # of what is not finite
        return math.nan, math.nan
    return task.quality(model, after.params), after.losses[-10:].mean().item()


def nodes(n: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """How the groups of two levels divide `n` ranks."""
    inside = tuple(tuple(range(first, first + NODE)) for first in range(0, n, NODE))
    return {"inside": inside, "across": tuple(zip(*inside, strict=True))}


def done(task: Task, run: Run) -> dict[str, Any]:
    """Trains once. Pipelines get the same initial parameters and batches; seeds others."""
    (name, optimizer, n), text, octave, seed = run
    torch.manual_seed(seed)
    model = task.make()
    params = named_parameters(model)
    rate, curve = RATE[optimizer] * 2.0**octave, {}

    def watch(step: int, leaves: list[Tensor]) -> None:
        if step in (task.steps // 2, task.steps * 3 // 4):
            curve[step] = task.quality(model, dict(zip(params, leaves, strict=True)))

    sync = fnddp.parse(text)
    make = partial(make_optimizer, optimizer, rate, beta_of(sync))
    began = time.process_time()
    quality, last = losses_of(task, model, sync, n, seed, partial(scheduled, make, task.steps, watch))
    line = {
        "task": name,
        "optimizer": optimizer,
        "n": n,
        "pipeline": text,
        "octave": octave,
        "rate": rate,
        "seed": seed,
        "steps": task.steps,
        "samples": task.steps * TOTAL,
        "parameters": sum(p.numel() for p in params.values()),
        "quality": quality if math.isfinite(quality) else None,
        "curve": curve,
        "training_loss": last if math.isfinite(last) else None,
        "cpu_seconds": round(time.process_time() - began, 2),
        **where(),
    }
    at = f"{name:10} {optimizer:5} n={n:<2} seed {seed} {rate:8.4g}"
    print(f"{at}  {quality:.4f}  {line['cpu_seconds']:5.1f} s  {text}", flush=True)
    return line


@cache
def where() -> dict[str, str]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    told = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", told.read_text() if told.exists() else "")
    return {
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "host": model[1] if model else platform.machine(),
    }


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


# What was found: how far above the plain mean a pipeline ends, and how sure that is.


class Result(NamedTuple):
    """Of a pipeline in a setting: at the plain mean's best learning rate, and at its own."""

    setting: Setting
    pipeline: str
    same: Gap
    own: Gap
    own_rate: float | None  # None: the mean's


def results(found: Found, pipelines: Sequence[str]) -> list[Result]:
    """Of all that has been run with all of its seeds."""
    every: list[Result] = []
    seeds = sorted({run.seed for run in found})
    for setting in sorted({run.setting for run in found}):
        at = at_best_of_mean(found, setting)
        for text in pipelines if at is not None else []:
            rates = {run.octave for run in found if run[:2] == (setting, text)}
            gaps = {octave: Gap(tuple(gaps_of(found, setting, text, at, octave, seeds))) for octave in rates}
            full = {octave: gap for octave, gap in gaps.items() if len(gap.gaps) >= LEAST_SEEDS}
            if at in full:
                own = min(full, key=lambda octave: full[octave].mean)
                rate = None if own == at else RATE[setting.optimizer] * 2.0**own
                every.append(Result(setting, text, full[at], full[own], rate))
    return every


# Costs, of a model that is large enough.


def costs(pipelines: Sequence[str], ranks: Sequence[int], known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each pipeline on each number of ranks; those that are known are kept."""
    there = {(x["pipeline"], x["n"]): x for x in known}
    large = models.parameters(COSTED)
    trained = {name: named_parameters(make().make()) for name, make in TASKS.items()}
    return [there.get((text, n)) or cost(text, n, large, trained) for text in pipelines for n in ranks]


def named_parameters(module: nn.Module) -> dict[str, Tensor]:
    return {path: parameter.detach() for path, parameter in module.named_parameters()}


def cost(text: str, n: int, large: dict[str, Tensor], trained: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """Bytes of a step, and its time on each link, nothing hidden behind backward and nothing for encoding."""
    sync = fnddp.parse(text)
    repeated = period(sync, large, world_size=n)
    links = {rate: Link.parse(f"{rate}:{LATENCY}") for rate in RATES}
    return {
        "pipeline": text,
        "n": n,
        "model": COSTED,
        "wire_bytes": round(mean(repeated, lambda each: each.plan.wire_bytes)),
        "link_bytes": link_bytes(repeated),
        "seconds": {
            rate: mean(repeated, lambda each, on=link: each.plan.estimate(on).communication_seconds)
            for rate, link in links.items()
        },
        "link_bytes_of_trained": {
            name: link_bytes(period(sync, params, world_size=n)) for name, params in trained.items()
        },
    }


def link_bytes(repeated: Sequence[Recurring]) -> int:
    return round(mean(repeated, lambda each: each.plan.estimate(Link.parse("1gbit")).link_bytes))


def mean(repeated: Sequence[Recurring], of: Callable[[Recurring], float]) -> float:
    """Over the steps that a pipeline repeats."""
    return statistics.fmean(map(of, repeated), [each.steps for each in repeated])


# Sums in 16 bits.


def accumulation(sizes: Sequence[int], elements: int = 1024) -> list[dict[str, Any]]:
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


def report(
    out: Path, folder: Path, settings: Sequence[Setting], pipelines: Sequence[str], sizes: Sequence[int]
) -> None:
    lines, file = lines_of(out), folder / "convergence.json"
    found = found_in(lines)
    known = json.loads(file.read_text())["costs"] if file.exists() else []
    ranks = sorted({setting.n for setting in settings})
    of = results(found, pipelines)
    found_costs = costs(pipelines, ranks, known)
    errors = accumulation(sizes)
    file.write_text(json.dumps({"text_sha256": SHA256, "costs": found_costs, "accumulation": errors}, indent=1) + "\n")
    save(partial(draw_convergence, of, found_costs), folder / PICTURE.name if folder != RESULTS else PICTURE)
    save(partial(draw_accumulation, errors), folder / "accumulation.svg")
    table = Table(of, found_costs, pipelines)
    for name, text in {
        "which-pipeline.md": table.which(ranks),
        "which-pipeline-short.md": table.which_short(),
        "convergence-verdicts.md": table.verdicts(),
        "convergence-means.md": table.means(lines),
        "convergence-losses.md": table.losses(),
        "convergence-costs.md": table.costs(),
    }.items():
        (folder / name).write_text(text + "\n")
        print(f"\n{name}\n\n{text}")
    data = folder / DATA.name if folder != RESULTS else DATA
    data.write_text("[\n" + ",\n".join(json.dumps(row) for row in table.data()) + "\n]\n")
    print(f"{len(lines)} runs, {sum(x['cpu_seconds'] for x in lines) / 3600:.1f} hours of CPU")


def report_few_bits(out: Path) -> None:
    """Gaps at the plain mean's learning rate, of what has been run with all seeds."""
    found = found_in(lines_of(out))
    same = {(x.setting, x.pipeline): str(x.same) for x in results(found, FEW_BITS)}
    settings = sorted({setting for setting, _ in same}, key=lambda x: (x.n, list(RATE).index(x.optimizer), x.task))
    parts = [f"| pipeline | {' | '.join(f'{x.task}, {x.optimizer}, {x.n} ranks' for x in settings)} |"]
    parts.append("| --- |" + " --: |" * len(settings))
    for text in FEW_BITS[1:]:
        cells = [same.get((setting, text), "not run") for setting in settings]
        parts.append(f"| `{text}` | {' | '.join(cells)} |")
    out.with_suffix(".md").write_text("\n".join(parts) + "\n")
    print(*parts, f"{len(found)} runs", sep="\n")


class Table:
    """What was found and what it costs, as tables."""

    def __init__(self, of: Sequence[Result], cost: Sequence[dict[str, Any]], pipelines: Sequence[str]) -> None:
        self.of = {(x.setting, x.pipeline): x for x in of}
        self.cost = {(x["pipeline"], x["n"]): x for x in cost}
        self.pipelines = pipelines
        self.settings = sorted({x.setting for x in of})
        self.ranks = sorted({setting.n for setting in self.settings})
        self.nbytes = 4 * sum(map(Tensor.numel, models.parameters(COSTED).values()))

    def found(self, text: str, optimizer: str, n: int | None = None) -> list[Result]:
        """Of a pipeline, in all tasks; on all numbers of ranks, if none is given."""
        settings = [each for each in self.settings if each.optimizer == optimizer and n in (None, each.n)]
        return [self.of[setting, text] for setting in settings if (setting, text) in self.of]

    def pooled(self, text: str, optimizer: str) -> Gap | None:
        """At the plain mean's best rates, in all tasks and on all numbers of ranks; None where a task is missing."""
        of = self.found(text, optimizer)
        has_all = {x.setting.task for x in of} == set(TASKS)
        return Gap(tuple(gap for x in of for gap in x.same.gaps)) if has_all else None

    def is_safe(self, text: str, optimizers: Sequence[str] = (ADAMW, SGD)) -> bool:
        """Whether seeds rule out a loss of 0.01 nats: the interval of 95 % confidence ends below."""
        pooled = [self.pooled(text, optimizer) for optimizer in optimizers]
        return text == EXACT or all(gap and gap.mean + gap.half <= SEARCHED for gap in pooled)

    def loss(self, text: str, optimizer: str, n: int) -> float:
        """The larger one of the tasks', at the pipeline's own best rate; infinite where one was not run."""
        gaps = [result.own.mean for result in self.found(text, optimizer, n)]
        return 0.0 if text == EXACT else max(gaps) if len(gaps) == len(TASKS) else math.inf

    def choices(self, n: int, rate: str) -> list[tuple[str, str, list[str]]]:
        """What is lost, what to send, and with which optimizers; only what is faster than all that loses less."""
        timed = [text for text in self.pipelines if any(known in text for known in CODEC_SECONDS)]
        here = [text for text in timed if runs_on(Setting("", "", n), text)]
        link = Link.parse(f"{rate}:{LATENCY}")
        first = repr(fnddp.choose(models.parameters(COSTED), link, world_size=n))  # what sync="auto" takes
        first = first if (first, n) in self.cost else EXACT  # with few pipelines
        rows: dict[tuple[str, str], list[str]] = {("below 0.01", first): []}
        for optimizer in RATE:
            last = first
            momentum = [text for text in here if HAS_MOMENTUM in text and self.is_safe(text, [optimizer])]
            some = [text for text in here if self.loss(text, optimizer, n) <= AFFORDABLE]
            for lost, among in (("below 0.01", momentum), ("some", some)):
                text = self.fastest(n, rate, [last, *among], optimizer)
                if ABOUT * self.seconds(text, n, rate) < self.seconds(last, n, rate):
                    rows.setdefault((lost, text), []).append(optimizer)
                    last = text
        found = [(*lost_and_text, optimizers) for lost_and_text, optimizers in rows.items()]
        return sorted(found, key=lambda row: -self.seconds(row[1], n, rate))

    def fastest(self, n: int, rate: str, among: Sequence[str], optimizer: str) -> str:
        """The one of least loss among those that are about as fast as the fastest."""
        seconds = {text: self.seconds(text, n, rate) for text in among}
        near = [text for text in among if seconds[text] <= ABOUT * min(seconds.values())]
        return min(near, key=lambda text: self.loss(text, optimizer, n))

    def gaps(self, text: str, optimizer: str, n: int) -> str:
        """In each task, at the pipeline's own best rate."""
        of = [self.of.get((Setting(task, optimizer, n), text)) for task in TASKS]
        return "0" if text == EXACT else ", ".join("not run" if x is None else str(x.own) for x in of)

    def which(self, ranks: Sequence[int]) -> str:
        tasks = ", ".join(TASKS)
        lines = [
            "| ranks | link | loss | pipeline | MB | wire and codec | plain mean "
            f"| {ADAMW}: {tasks} | {SGD}: {tasks} |",
            "| --: | --- | --- | --- | --: | --: | --: | --- | --- |",
        ]
        for n in ranks:
            for rate in RATES:
                for lost, text, optimizers in self.choices(n, rate):
                    if text != EXACT and not any(self.found(text, optimizer, n) for optimizer in RATE):
                        lost += f" on {self.ranks[0]}"
                    x = self.cost[text, n]
                    times = [self.seconds(text, n, rate), self.seconds(EXACT, n, rate)]
                    losses = f"{self.gaps(text, ADAMW, n)} | {self.gaps(text, SGD, n)}"
                    cells = (
                        f"`{text}` | {x['link_bytes'] / 1e6:.1f} | {' | '.join(map(milliseconds, times))} | {losses}"
                    )
                    lines.append(f"| {n} | {WORDS[rate]} | {', '.join([lost, *optimizers])} | {cells} |")
        return "\n".join(lines)

    def which_short(self) -> str:
        n = self.ranks[0]
        rows: list[tuple[str, list[str], dict[str, str], dict[str, str]]] = []
        for rate in RATES:
            if not (choices := self.choices(n, rate)):
                continue
            (_, safe, _), *faster = choices
            cells = [self.milliseconds(EXACT, n, rate), self.faster(safe, n, rate) if safe != EXACT else PLAIN]
            fastest: dict[str, str] = {}
            nats: dict[str, str] = {}
            for optimizer in RATE:
                behind = [text for _, text, optimizers in faster if optimizer in optimizers]
                text = min(behind, key=lambda each: self.seconds(each, n, rate), default=safe)
                same = PLAIN if safe == EXACT else "the same"
                fastest[optimizer] = same if text == safe else self.faster(text, n, rate)
                nats[optimizer] = "" if text == safe else f"{round(self.loss(text, optimizer, n), 2) + 0.0:+.2f} nats"
            rows.append((WORDS[rate], cells, fastest, nats))
        is_one = all(len({*fastest.values()}) == 1 for *_, fastest, _ in rows)
        wanted = f"loss raised by up to {AFFORDABLE} nats: the fastest"
        heads = [wanted] if is_one else [f"fastest for {optimizer}" for optimizer in RATE]
        lines = [
            '| link of each rank | the plain mean | loss raised by less than 0.01 nats: `sync="auto"` '
            f"| {' | '.join(heads)} |",
            f"| {' | '.join(['---'] * (3 + len(heads)))} |",
        ]
        for words, cells, fastest, nats in rows:
            if is_one:
                lost = ", ".join(f"{each} with {optimizer}" for optimizer, each in nats.items() if each)
                cells.append(f"{next(iter(fastest.values()))}{f'; {lost}' if lost else ''}")
            else:
                cells += [f"{each}{f'; {nats[key]}' if nats[key] else ''}" for key, each in fastest.items()]
            lines.append(f"| {words} | {' | '.join(cells)} |")
        texts = dict.fromkeys(re.findall("`([a-z].*?\\))`", "".join(lines[2:])))
        sent = {text: self.cost[text, n]["link_bytes"] for text in (EXACT, *texts)}
        parts = [
            f"{size / 1e6:.1f} MB with `{text}` ({sent[EXACT] / size:.0f} times fewer)" for text, size in sent.items()
        ]
        bytes_of = ", ".join(sorted(parts[1:], key=lambda part: -float(part.split()[0])))
        lines.append(
            f"\nA rank sends {sent[EXACT] / 1e6:.1f} MB over its link in a step with the plain mean, {bytes_of}."
        )
        return "\n".join(lines)

    def faster(self, text: str, n: int, rate: str) -> str:
        ratio = self.seconds(EXACT, n, rate) / self.seconds(text, n, rate)
        times = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"
        return f"`{text}` {self.milliseconds(text, n, rate)}, **{times} times faster**"

    def milliseconds(self, text: str, n: int, rate: str) -> str:
        return milliseconds(self.seconds(text, n, rate))

    def seconds(self, text: str, n: int, rate: str) -> float:
        """Of collectives and codec; of those without a time of their own the codec is that of what they wrap."""
        codec = next(seconds for known, seconds in reversed(CODEC_SECONDS.items()) if known in text)
        return self.cost[text, n]["seconds"][rate] + codec * self.nbytes

    def verdicts(self) -> str:
        lines = [
            "| pipeline | AdamW | 95 % | pairs | SGD | 95 % | pairs | 0.01 not ruled out |",
            "| --- | --: | --- | --: | --: | --- | --: | --- |",
        ]
        for text in self.pipelines[1:]:
            cells: list[str] = []
            for optimizer in RATE:
                gap = self.pooled(text, optimizer)
                if gap is None:
                    cells.append("not run | | ")
                elif math.isinf(gap.mean):
                    cells.append(f"diverged | | {len(gap.gaps)}")
                else:
                    interval = f"{gap.mean - gap.half:+.3f} to {gap.mean + gap.half:+.3f}"
                    cells.append(f"{gap.mean:+.3f} | {interval} | {len(gap.gaps)}")
            known = [optimizer for optimizer in RATE if self.pooled(text, optimizer)]
            open_for = " and ".join(optimizer for optimizer in known if not self.is_safe(text, [optimizer]))
            lines.append(f"| `{text}` | {' | '.join(cells)} | {open_for} |")
        return "\n".join(lines)

    def means(self, lines: Sequence[dict[str, Any]]) -> str:
        """What the plain mean reaches, by learning rate."""
        found, parts = (
            found_in(lines),
            [
                "| task | optimizer | learning rate: loss, seed 0 | best | half, three quarters, all steps |",
                "| --- | --- | --- | --: | --- |",
            ],
        )
        for setting in self.settings:
            if setting.n != SEARCHED_ON:
                continue
            rates = sorted(octaves(found, setting, EXACT, 0).items())
            at = at_best_of_mean(found, setting)
            assert at is not None
            of = [
                x
                for x in lines
                if (x["task"], x["optimizer"], x["n"]) == setting and (x["pipeline"], x["octave"]) == (EXACT, at)
            ]
            curve = [
                statistics.fmean(each) for each in zip(*([*x["curve"].values(), x["quality"]] for x in of), strict=True)
            ]
            losses = ", ".join(f"{rate_of(setting, octave):g}: {loss:.3f}" for octave, loss in rates)
            later = ", ".join(f"{loss:.3f}" for loss in curve)
            parts.append(f"| {setting.task} | {setting.optimizer} | {losses} | {rate_of(setting, at):g} | {later} |")
        return "\n".join(parts)

    def losses(self) -> str:
        parts: list[str] = []
        titles = " | ".join(f"{task}, at the mean's rate | at its own" for task in TASKS)
        for n in self.ranks:
            for optimizer in RATE:
                parts.append(f"\n**{optimizer}, {n} ranks**\n\n| pipeline | fewer bytes | {titles} |")
                parts.append("| --- | --: |" + " --: | --: |" * len(TASKS))
                for text in self.pipelines:
                    of = [self.of.get((Setting(task, optimizer, n), text)) for task in TASKS]
                    cells = [
                        "not run |"
                        if x is None
                        else f"{x.same} | " + (f"{x.own} at {x.own_rate:g}" if x.own_rate else "")
                        for x in of
                    ]
                    if any(of):
                        fewer = ", ".join(f"{self.fewer(text, n, task):.1f}x" for task in TASKS)
                        parts.append(f"| `{text}` | {fewer} | {' | '.join(cells)} |")
        return "\n".join(parts).strip()

    def fewer(self, text: str, n: int, task: str) -> float:
        """How many times fewer bytes than the plain mean's a link carries, of the model that was trained."""
        of = [self.cost[each, n]["link_bytes_of_trained"][task] for each in (EXACT, text)]
        return of[0] / of[1]

    def costs(self) -> str:
        parts: list[str] = []
        for n in self.ranks:
            parts.append(f"\n{n} ranks:\n")
            parts.append(f"| pipeline | MB handed over | MB on the link | {' | '.join(WORDS.values())} |")
            parts.append(f"| --- | --: | --: |{' --: |' * len(RATES)}")
            for text in self.pipelines:
                x = self.cost[text, n]
                times = " | ".join(milliseconds(x["seconds"][rate]) for rate in RATES)
                sizes = f"{x['wire_bytes'] / 1e6:.2f} | {x['link_bytes'] / 1e6:.2f}"
                parts.append(f"| `{text}` | {sizes} | {times} |")
        return "\n".join(parts).strip()

    def data(self) -> list[dict[str, Any]]:
        """For `fnddp.choose`: what is safe, and what loses no more than some may want to, with which optimizer."""
        rows: list[dict[str, Any]] = []
        for text in self.pipelines:
            loss: dict[str, dict[str, list[float]]] = {}
            for optimizer in RATE:
                worst = {x.setting.n: x.own for x in sorted(self.found(text, optimizer), key=lambda x: x.own.mean)}
                finite = {n: gap for n, gap in worst.items() if math.isfinite(gap.mean)}
                loss[optimizer] = {str(n): [round(gap.mean, 4), round(gap.spread, 4)] for n, gap in finite.items()}
            runs = {optimizer: self.found(text, optimizer) for optimizer in RATE}
            behind = [o for o, of in runs.items() if of and max(x.own.mean for x in of) <= AFFORDABLE]
            if behind and all(self.pooled(text, optimizer) for optimizer in RATE):
                needs = None if len(behind) == len(RATE) else behind[0]
                needs = "has no momentum of its own" if HAS_MOMENTUM in text else needs
                rows.append({"pipeline": text, "safe": self.is_safe(text), "optimizer": needs, "loss": loss})
        return rows


def rate_of(setting: Setting, octave: int) -> float:
    return RATE[setting.optimizer] * 2.0**octave


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def draw_convergence(of: Sequence[Result], cost: Sequence[dict[str, Any]]) -> Figure:
    table = Table(of, cost, list(dict.fromkeys(x["pipeline"] for x in cost)))
    panels = sorted({(setting.n, setting.optimizer) for setting in table.settings})
    figure = Figure(figsize=(12, 4 * math.ceil(len(panels) / 2) + 3), layout="constrained")
    for i, (n, optimizer) in enumerate(panels):
        axes = figure.add_subplot(math.ceil(len(panels) / 2), 2, 1 + i)
        for j, text in enumerate(table.pipelines):
            marker, colour = "osD^vP*X<>"[j // 10 % 10], f"C{j % 10}"
            for x in table.found(text, optimizer, n):
                if math.isfinite(x.own.mean):
                    axes.errorbar(
                        table.fewer(text, n, x.setting.task),
                        x.own.mean,
                        yerr=x.own.spread,
                        fmt=marker,
                        color=colour,
                        label=text,
                        fillstyle="full" if x.setting.task == next(iter(TASKS)) else "none",
                    )
        axes.set(
            xscale="log",
            xlabel="times fewer bytes on the link than the plain mean",
            ylabel="nats above the plain mean",
            title=f"{optimizer}, {n} ranks",
        )
        axes.axhline(0, color="black", linewidth=0.5)
        axes.set_yscale("symlog", linthresh=0.01)
    pairs = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in reversed(pairs)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, fontsize="small")
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
    parser.add_argument("--few-bits", action="store_true", help="rotations, small residuals, two levels, on their own")
    parser.add_argument("--out", type=Path, help="lines of json, one for each run; default: a file of results/")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--optimizers", nargs="+", choices=list(RATE), default=list(RATE))
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--first", type=int, metavar="N", help="so many pipelines of the list, for less time")
    parser.add_argument("--steps", type=int, help="other than each task's own: into another --out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"text: {len(TEXT):,} characters, sha256 {SHA256}")
    pipelines = FEW_BITS if arguments.few_bits else PIPELINES
    arguments.out = arguments.out or RESULTS / ("few-bits.jsonl" if arguments.few_bits else "convergence.jsonl")
    settings = [Setting(t, o, n) for n in arguments.ranks for o in arguments.optimizers for t in arguments.tasks]
    if arguments.quick:
        with tempfile.TemporaryDirectory() as folder:
            out, some = Path(folder) / "convergence.jsonl", [EXACT, "error_feedback(sign(allgather))"]
            few = [Setting(task, ADAMW, SEARCHED_ON) for task in TASKS]
            train(out, few, some, [0, 1, 2], steps=3)
            train(out, few, some, [0, 1, 2], steps=3)  # resumes: nothing is left to do
            report(out, Path(folder), few, some, [2, 8])
    elif arguments.command == "train":
        train(arguments.out, settings, pipelines[: arguments.first], arguments.seeds, arguments.steps)
    elif arguments.few_bits:
        report_few_bits(arguments.out)
    else:
        report(arguments.out, arguments.out.parent, settings, PIPELINES, [2**i for i in range(1, 11)])


if __name__ == "__main__":
    main()

"""How few bits Muon bears on the way to the owners of matrices, and on the way back: the loss of each, and its bytes.

    python benchmarks/muon_bits.py train     # a line of json for each run, into results/; skips what is there
    python benchmarks/muon_bits.py times     # seconds of the codecs of each hop, into results/
    python benchmarks/muon_bits.py report    # tables, the figure, and the data of fnddp.choose_owned, of what is there
    python benchmarks/muon_bits.py --quick   # both in a minute, into a temporary folder

The characters of benchmarks/convergence.py on 8 virtual ranks: torch.optim.Muon for the matrices of the block, AdamW
for the rest, and all leaves through the same codec. Gradients are what `fnddp.own` sends to owners; weights come back
as differences to what all ranks have (`ef21`), who compute gradients, and are judged, with those. Muon's rate is
searched for the exact mean and for each codec on both hops. What it found is in docs/owners.md.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from convergence import (
    LATENCY,
    RATES,
    RESULTS,
    ROOT,
    WORDS,
    Gap,
    Task,
    characters_task,
    lines_of,
    milliseconds,
    named_parameters,
    scheduled,
    where,
)
from figures import save
from matplotlib.figure import Figure
from torch import Tensor, nn

import fnddp
from fnddp import Link, measure_segments
from fnddp.cli import models
from fnddp.run.choose_owned import Pair, owned_choice, owned_plans, pairs

RANKS, STEPS = 8, 250
FIRST_SEEDS, SEEDS = (0, 1, 2), (0, 1, 2, 3, 4)
OF_ADAMW = 0.02  # for the leaves that are no matrices
RATE = 0.04  # of Muon, where the search begins
CLOSE = 0.01  # nats: what the question is about
COSTED = "transformer"  # of fnddp.cli.models: 10.3 M parameters, of which small leaves are few
LINK = Link.parse("200mbit:20us")
PICTURE = ROOT / "docs" / "assets" / "muon-bits.svg"
DATA = ROOT / "fnddp" / "cost" / "muon.json"
TIMES = RESULTS / "muon-codecs.json"
ROUNDS = 20
WITHIN = (0.01, 0.02)  # nats


class Hop(NamedTuple):
    """A codec on a hop, as a text in which CARRIER stands for two_shot or allgather; None for bare carriers."""

    bits: str
    codec: str | None

    @property
    def of_own(self) -> tuple[str, str]:
        """What `fnddp.own` takes for gradients with this hop, and for weights."""
        if self.codec is None:
            return "two_shot", "allgather"
        there, back = (self.codec.replace("CARRIER", carrier) for carrier in ("two_shot", "allgather"))
        return repr(fnddp.parse(f"error_feedback({there})")), repr(fnddp.parse(f"ef21({back})"))


EXACT = Hop("32", None)
HOPS = [
    EXACT,
    Hop("8", "quantize(CARRIER)"),
    Hop("4", "quantize(CARRIER, bits=4)"),
    Hop("3", "lloyd_max(CARRIER, bits=3)"),
    Hop("2", "lloyd_max(CARRIER, bits=2)"),
    Hop("1", "lloyd_max(CARRIER, bits=1)"),
]
BY_BITS = {hop.bits: hop for hop in HOPS}
ADAMW = "AdamW"


class Arm(NamedTuple):
    """Bits on each hop, and the optimizer of matrices."""

    up: str
    down: str
    optimizer: str = "Muon"


ON_BOTH = [Arm(hop.bits, hop.bits) for hop in HOPS]
FEWER_BACK = [Arm("4", "2"), Arm("3", "1")]  # what updates bear better than gradients
ARMS = [Arm("32", "32", ADAMW), *ON_BOTH, *FEWER_BACK]
SEARCHED = ARMS[: 1 + len(HOPS)]
ARMS += [Arm(*pair) for hop in HOPS[1:] for pair in ((hop.bits, "32"), ("32", hop.bits))]


# Training.


def is_matrix(path: str, leaf: Tensor) -> bool:
    """Return whether Muon updates the leaf: embeddings, positions and the head are AdamW's, as usual."""
    return leaf.ndim == 2 and path.split(".")[0] in ("qkv", "out", "up", "down")


def optimizers(params: dict[str, Tensor], arm: Arm, rate: float, steps: int) -> list[torch.optim.Optimizer]:
    matrices = [leaf for path, leaf in params.items() if is_matrix(path, leaf)]
    rest = [leaf for path, leaf in params.items() if not is_matrix(path, leaf)]
    if arm.optimizer == ADAMW:
        makes: list[tuple[Any, list[Tensor]]] = [
            (partial(torch.optim.AdamW, weight_decay=0.01, lr=rate), list(params.values()))
        ]
    else:
        muon = partial(torch.optim.Muon, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        makes = [(muon, matrices), (partial(torch.optim.AdamW, weight_decay=0.01, lr=OF_ADAMW), rest)]
    return [scheduled(make, steps, lambda *_: None, leaves) for make, leaves in makes]


def trained(task: Task, arm: Arm, rate: float, seed: int) -> tuple[float, float]:
    """Train, and return the loss on held-out data of the weights that all ranks have, and of those of the owners."""
    torch.manual_seed(seed)
    model = task.make()
    params = named_parameters(model)
    up, down = BY_BITS[arm.up].of_own[0], BY_BITS[arm.down].of_own[1]
    done = fnddp.simulate_training(
        partial(task.loss, model),
        params,
        task.batches(RANKS, seed, task.steps),
        fnddp.parse(up),
        weights=fnddp.parse(down),
        world_size=RANKS,
        optimizer=lambda leaves: optimizers(dict(zip(params, leaves, strict=True)), arm, rate, task.steps),
    )
    return task.quality(model, done.params), task.quality(model, done.owned)


Found = dict[tuple[Arm, float, int], float]


def found_in(lines: Sequence[dict[str, Any]]) -> Found:
    found = {(Arm(x["up"], x["down"], x["optimizer"]), x["rate"], x["seed"]): x["quality"] for x in lines}
    return {run: math.inf if loss is None else loss for run, loss in found.items()}


def best_rate(found: Found, arm: Arm) -> float:
    """The best one of seed 0. Those of one hop are compared at the rate of the exact mean."""
    searched = arm if arm in SEARCHED else ON_BOTH[0]
    rates = {rate: loss for (each, rate, seed), loss in found.items() if each == searched and seed == 0}
    return min(rates, key=rates.__getitem__, default=RATE)


def wanted(found: Found, arms: Sequence[Arm], seeds: Sequence[int]) -> Iterator[tuple[Arm, float, int]]:
    """All runs, the most telling first, those that are done among them: a rate is bracketed by factors of 2."""
    for some in (FIRST_SEEDS, SEEDS):
        for arm in arms:
            rate = best_rate(found, arm)
            if arm in SEARCHED:
                yield from ((arm, each, 0) for each in (rate, 2 * rate, rate / 2))
            yield from ((arm, best_rate(found, arm), seed) for seed in some if seed in seeds)
        # At the exact mean's rate, too: how much of a loss is the rate's.
        yield from ((arm, best_rate(found, ON_BOTH[0]), seed) for arm in arms[1:] for seed in some if seed in seeds)


def following(found: Found, arms: Sequence[Arm], seeds: Sequence[int]) -> tuple[Arm, float, int] | None:
    return next((run for run in wanted(found, arms, seeds) if run not in found), None)


def train(out: Path, task: Task, arms: Sequence[Arm], seeds: Sequence[int]) -> None:
    while run := following(found_in(lines_of(out)), arms, seeds):
        arm, rate, seed = run
        began = time.process_time()
        quality, of_owners = (loss if math.isfinite(loss) else None for loss in trained(task, arm, rate, seed))
        line = {**arm._asdict(), "rate": rate, "seed": seed, "steps": task.steps, "quality": quality}
        line |= {"of_owners": of_owners, "cpu_seconds": round(time.process_time() - began, 2), **where()}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{quality}  {arm.optimizer} {arm.up} up, {arm.down} down, {rate:g}, seed {seed}", flush=True)


# Bytes, and the report.


class Cost(NamedTuple):
    """What a link carries in a step, and how long that takes it."""

    bytes: float
    seconds: float


@cache
def costed() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A model that is large enough, without values, and its optimizers: Muon has the matrices of blocks."""
    with torch.device("meta"):
        model = models.load(COSTED).build()
    named = dict(model.named_parameters())
    matrices = [path for path, leaf in named.items() if leaf.ndim == 2 and path.startswith("blocks")]
    rest = [leaf for path, leaf in named.items() if path not in matrices]
    return model, [torch.optim.Muon([named[path] for path in matrices]), torch.optim.AdamW(rest)]


@cache
def costs() -> dict[tuple[str, str], Cost]:
    """The cost of both hops, by their pipelines."""
    every = [Pair(BY_BITS[arm.up].of_own[0], BY_BITS[arm.down].of_own[1]) for arm in ARMS]
    plans = owned_plans("muon_bits", *costed(), every, RANKS)
    return {
        pair[:2]: Cost(*map(sum, zip(*map(priced, (there, *back)), strict=True)))
        for pair, (there, back) in plans.items()
    }


def cost_of(up: str, down: str) -> Cost:
    return costs()[BY_BITS[up].of_own[0], BY_BITS[down].of_own[1]]


@cache
def of_ddp() -> Cost:
    return priced(fnddp.lower(fnddp.allreduce, costed()[0], world_size=RANKS, bucket_cap_mb=25, first_bucket_mb=25))


def priced(plan: fnddp.Plan) -> Cost:
    estimate = plan.estimate(LINK)
    return Cost(estimate.link_bytes, estimate.communication_seconds)


class Row(NamedTuple):
    """An arm: how many times fewer bytes than DDP it sends, the part of DDP's time on a slow link, and its loss."""

    arm: Arm
    fewer: float
    time: float
    rate: float
    gap: Gap


def row_of(arm: Arm, rate: float, gap: Gap) -> Row:
    ours, theirs = of_ddp() if arm.optimizer == ADAMW else cost_of(arm.up, arm.down), of_ddp()
    return Row(arm, theirs.bytes / ours.bytes, ours.seconds / theirs.seconds, rate, gap)


def gaps_of(found: Found) -> list[tuple[Arm, float, Gap]]:
    """The rate of each arm, and its loss above that of the exact mean, by the seeds that both have."""
    exact = ON_BOTH[0]
    base = {seed: loss for (arm, rate, seed), loss in found.items() if arm == exact and rate == best_rate(found, exact)}
    made: list[tuple[Arm, float, Gap]] = []
    for arm in ARMS:
        gaps: dict[float, Gap] = {}
        for rate in {rate for each, rate, _ in found if each == arm}:
            of = {seed: found[arm, rate, seed] for each, at, seed in found if (each, at) == (arm, rate)}
            if len(of) > 2 or len(base) < 3:  # a rate of the search alone is none to report
                gaps[rate] = Gap(tuple(loss - base[seed] for seed, loss in sorted(of.items()) if seed in base))
        if gaps:
            rate = min(gaps, key=lambda rate: gaps[rate].mean)
            made.append((arm, rate, gaps[rate]))
    return made


def table(rows: Sequence[Row], found: Found) -> str:
    exact = [loss for (arm, at, _), loss in found.items() if (arm, at) == (ON_BOTH[0], best_rate(found, ON_BOTH[0]))]
    lines = [f"Muon with the exact mean: {sum(exact) / len(exact):.4f} nats ({len(exact)} seeds).", ""]
    lines += ["| bits to owners | bits back | fewer bytes than DDP | time on 200 Mbit/s | rate | nats above | seeds |"]
    lines += ["| --: | --: | --: | --: | --: | --: | --: |"]
    for arm, fewer, time_, rate, gap in rows:
        up, down = ("AdamW in DDP", "") if arm.optimizer == ADAMW else (arm.up, arm.down)
        shown = "0" if arm == ON_BOTH[0] else str(gap)
        lines.append(f"| {up} | {down} | {fewer:.1f}x | {time_:.2f} | {rate:g} | {shown} | {len(gap.gaps)} |")
    return "\n".join(lines)


def draw(rows: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    kinds = {
        "both hops": [row for row in rows if row.arm in ON_BOTH],
        "both hops, fewer bits back": [row for row in rows if row.arm in FEWER_BACK],
        "to owners alone": [row for row in rows if row.arm.up != "32" and row.arm.down == "32"],
        "back alone": [row for row in rows if row.arm.up == "32" and row.arm.down != "32"],
    }
    for (name, of), marker in zip(kinds.items(), "os^v", strict=True):
        finite = [row for row in of if math.isfinite(row.gap.mean)]
        x, y = [row.fewer for row in finite], [row.gap.mean for row in finite]
        axes.errorbar(x, y, yerr=[row.gap.spread for row in finite], fmt=f"{marker}-", label=name, capsize=2)
        for row in finite if "both" in name else []:
            at = (3, -11) if row.arm in ON_BOTH else (-45, 6)
            bits = row.arm.up if row.arm.up == row.arm.down else "/".join(row.arm[:2])
            axes.annotate(f" {bits} bits", (row.fewer, row.gap.mean), textcoords="offset points", xytext=at)
    for row in rows:
        if row.arm.optimizer == ADAMW:
            axes.axhline(row.gap.mean, color="grey", linestyle="--", linewidth=1, label="AdamW, exact mean")
    axes.axhline(CLOSE, color="black", linestyle=":", linewidth=1, label=f"{CLOSE} nats")
    axes.set(xscale="log", xlabel="times fewer bytes than DDP", ylabel="nats above Muon with the exact mean")
    axes.set_yscale("symlog", linthresh=CLOSE)
    axes.set_xticks([1, 2, 4, 8, 16, 32], labels=["1", "2", "4", "8", "16", "32"])
    axes.legend()
    return figure


# For fnddp.choose_owned.


def time_codecs(file: Path) -> None:
    """Write seconds to encode and decode a byte of float32 on each hop: of the model above, on the first of 8 ranks."""
    nbytes = sum(leaf.nbytes for leaf in costed()[0].parameters())
    every = [Pair(*hop.of_own) for hop in HOPS]
    made = owned_plans("muon_bits", *costed(), every, RANKS, device="cpu")
    plans = {
        text: of for pair, (there, back) in made.items() for text, of in zip(pair[:2], ((there,), back), strict=True)
    }
    seconds = dict.fromkeys(plans, math.inf)
    for _ in range(ROUNDS):  # of which the fastest counts: other processes take time, and give none
        for text, of in plans.items():
            seconds[text] = min(seconds[text], sum(sum(measure_segments(plan, calls=1)) for plan in of))
        print(" ".join(f"{1e3 * each:.1f}" for each in seconds.values()), "ms", flush=True)
    rounded = {text: float(f"{each / nbytes:.3g}") for text, each in seconds.items()}
    file.write_text(json.dumps({"seconds_per_byte": rounded, **where()}, indent=1) + "\n")


def packaged(found: Found, times: dict[str, Any]) -> str:
    """The file of `fnddp.choose_owned`: pairs of hops that were measured, and what encoding takes."""
    lines: list[str] = []
    for arm, _, gap in gaps_of(found):
        if arm.optimizer != ADAMW and math.isfinite(gap.mean):
            gradients, weights = BY_BITS[arm.up].of_own[0], BY_BITS[arm.down].of_own[1]
            most = 0.0 if arm == ON_BOTH[0] else round(gap.mean + gap.half, 4)
            lines.append(json.dumps(Pair(gradients, weights, most)._asdict()))
    seconds = json.dumps(times["seconds_per_byte"], indent=1)
    return '{"pairs": [\n' + ",\n".join(lines) + f'\n],\n"seconds_per_byte": {seconds}}}\n'


def which(ranks: Sequence[int]) -> str:
    """What `fnddp.choose_owned` takes on links, as a table; what may lose more only where that is another pair."""
    lines = ["| ranks | link | nats | gradients | weights | MB | hops and codecs | exact hops |"]
    lines += ["| --: | --- | --: | --- | --- | --: | --: | --: |"]
    for n in ranks:
        every = owned_plans("muon_bits", *costed(), pairs(max(WITHIN)), n)
        sent = {pair[:2]: (first.link_bytes + sum(x.link_bytes for x in back)) for pair, (first, back) in every.items()}
        for rate in RATES:
            taken: dict[tuple[str, str], str] = {}
            for within in WITHIN:
                plans = {pair: of for pair, of in every.items() if pair.most <= within}
                choice = owned_choice(plans, Link.parse(f"{rate}:{LATENCY}"))
                pair = choice.best.pipeline, choice.best.weights
                times = " | ".join(milliseconds(each.step(0.0)) for each in (choice.best, choice.costs[0]))
                row = f"`{pair[0]}` | `{pair[1]}` | {sent[pair] / 1e6:.1f} | {times} |"
                taken.setdefault(pair, f"| {n} | {WORDS[rate]} | {within:g} | {row}")
            lines += taken.values()
    return "\n".join(lines)


def report(out: Path, folder: Path, chart: Path) -> None:
    found = found_in(lines_of(out))
    rows = [row_of(*each) for each in gaps_of(found)]
    text = table(rows, found)
    (folder / "muon-bits.md").write_text(text + "\n")
    save(partial(draw, rows), chart)
    print(text)
    data = DATA if folder == RESULTS else folder / DATA.name
    data.write_text(packaged(found, json.loads(TIMES.read_text())))
    if folder == RESULTS:
        (folder / "muon-links.md").write_text(which((2, 8, 32)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["train", "times", "report"], default="train")
    parser.add_argument("--quick", action="store_true", help="a few steps of each, into a temporary folder")
    parser.add_argument("--out", type=Path, default=RESULTS / "muon-bits.jsonl", help="lines of json, one a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.quick:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "muon-bits.jsonl"
            train(out, replace(characters_task(), steps=4), [*ARMS[:2], ARMS[-1]], [0])
            report(out, Path(folder), Path(folder) / PICTURE.name)
    elif arguments.command == "train":
        train(arguments.out, replace(characters_task(), steps=STEPS), ARMS, arguments.seeds)
    elif arguments.command == "times":
        time_codecs(TIMES)
    else:
        report(arguments.out, arguments.out.parent, PICTURE)


if __name__ == "__main__":
    main()

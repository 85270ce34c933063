"""What outer steps do to a loss: DiLoCo and kin against averaged gradients, on 1, 8 and 64 virtual workers.

    python benchmarks/outer_convergence.py train     # a line of json for each run, into results/; skips what is there
    python benchmarks/outer_convergence.py report    # table and plot of the lines that there are
    python benchmarks/outer_convergence.py --quick   # both in a minute, into a temporary folder

Each worker has batches of its own, of the same size whatever the number of workers, and an AdamW of its own, or a Muon;
runs with the same number of workers and seed begin alike and see the same tokens. They begin with random parameters,
or, as in the paper, with trained ones and a smaller learning rate. What it found is in benchmarks/outer-loss.md.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from convergence import RESULTS, TEXT, characters_task, lines_of
from figures import save
from matplotlib.figure import Figure
from torch import Tensor

import fnddp
from fnddp import Link, allreduce, outer

SYNCHRONOUS = "allreduce"  # gradients, in every step
PLAIN = [SYNCHRONOUS, *(f"diloco(allreduce, every={h})" for h in (10, 30, 100))]
FOUR_BITS = "diloco(bucketize(quantize(two_shot, bits=4)), every=30)"
TWO_BITS, EVEN = (f"diloco(error_feedback(bucketize(quantize(two_shot, bits={b}))), every=30)" for b in (2, 4))
SPARSE = "sparse_loco(every=30, k=512)"  # an eighth of the differences: 64 of 4,096 want a larger model
MORE = [
    "local_sgd(every=30)",
    FOUR_BITS,
    TWO_BITS,
    "muloco(every=30)",  # with AdamW: what 2 bits do that are not evenly spaced
    SPARSE,
    "sparse_loco(every=30)",
    "streaming_diloco(bucketize(quantize(two_shot, bits=4)), every=30, fragments=4, delay=3, alpha=0.5)",
]
RANDOM, TRAINED = "random", "trained"  # trained: by as many steps of averaged gradients on 8 workers
LR = {RANDOM: 3e-3, TRAINED: 1e-3}
ADAMW, MUON = "AdamW", "Muon"  # the local optimizer
MULOCO = ["muloco(every=30)", "muloco(every=30, bits=4)"]
WITH_MUON = [SYNCHRONOUS, "diloco(allreduce, every=30)", TWO_BITS, EVEN, *MULOCO]
Runs = list[tuple[str, str, int, list[str], list[int]]]
# From which parameters, with which local optimizer, on how many workers, what, with which seeds.
RUNS: Runs = [
    (RANDOM, ADAMW, 1, PLAIN, [0, 1, 2]),
    (RANDOM, ADAMW, 8, [*PLAIN, *MORE], [0, 1, 2]),
    (RANDOM, ADAMW, 64, PLAIN, [0, 1, 2]),
    (RANDOM, ADAMW, 64, [FOUR_BITS, SPARSE], [0, 1]),
    (TRAINED, ADAMW, 1, [SYNCHRONOUS], [0, 1, 2]),
    (TRAINED, ADAMW, 8, [*PLAIN, FOUR_BITS], [0, 1, 2]),
    (RANDOM, MUON, 8, WITH_MUON, [0, 1, 2]),
]
STEPS, SEQUENCES, CONTEXT = 600, 4, 32
HIDDEN = ("qkv.", "out.", "up.", "down.")  # layers whose matrices are Muon's


def train(out: Path, runs: Runs, steps: int) -> None:
    """Runs what has no line in `out` yet."""
    there = {(line["begins"], line["local"], line["outer"], line["n"], line["seed"]) for line in lines_of(out)}
    task = characters_task(CONTEXT, sequences=SEQUENCES)
    for begins, local, n, texts, seeds in runs:
        for seed in seeds:
            for text in texts:
                if (begins, local, text, n, seed) not in there:
                    line = run(task, begins, local, text, n, seed, steps)
                    with out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")


@cache
def trained(seed: int, steps: int) -> dict[str, Tensor]:
    """The parameters of the synchronous run on 8 workers, from other batches than what follows."""
    task = characters_task(CONTEXT, sequences=SEQUENCES)
    torch.manual_seed(seed)
    model = task.make()
    return fnddp.simulate_training(
        partial(task.loss, model),
        {name: parameter.detach() for name, parameter in model.named_parameters()},
        task.batches(8, 1000 + seed, steps),
        allreduce,
        world_size=8,
        optimizer=partial(torch.optim.AdamW, lr=LR[RANDOM]),
    ).params


def muon_and_adamw(params: list[Tensor], *, names: list[str], lr: float) -> list[torch.optim.Optimizer]:
    """One worker's local optimizers: Muon for the matrices between its layers, AdamW for all other parameters."""
    hidden = [p for name, p in zip(names, params, strict=True) if p.ndim == 2 and name.startswith(HIDDEN)]
    others = [p for p in params if not any(p is each for each in hidden)]
    # With the decay of AdamW, and steps of the size of AdamW's, for which the learning rate is.
    muon = torch.optim.Muon(hidden, lr=lr, weight_decay=1e-2, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=lr)]


def make_optimizer(local: str, names: list[str], lr: float) -> Any:
    """What makes a local optimizer for parameters in the order of `names`."""
    return partial(torch.optim.AdamW, lr=lr) if local == ADAMW else partial(muon_and_adamw, names=names, lr=lr)


def run(task: Any, begins: str, local: str, text: str, n: int, seed: int, steps: int) -> dict[str, Any]:
    """Trains once."""
    torch.manual_seed(seed)
    model = task.make()
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if begins == TRAINED:
        params = trained(seed, steps)
    loss, batches = partial(task.loss, model), counted(task.batches(n, seed, steps))
    optimizer = make_optimizer(local, list(params), LR[begins])
    begin = time.process_time()
    if text == SYNCHRONOUS:
        done = fnddp.simulate_training(loss, params, batches, fnddp.parse(text), world_size=n, optimizer=optimizer)
        after = done.params
    else:
        done = outer.simulate_training(
            loss,
            params,
            batches,
            outer.parse(text),
            world_size=n,
            optimizer=optimizer,
            elementwise=local == ADAMW,
        )
        after = {name: leaf.mean(0) for name, leaf in done.params.items()}
    seconds = time.process_time() - begin
    wire_bytes, link_bytes = bytes_of(text, params, n)
    line = {
        "begins": begins,
        "local": local,
        "outer": text,
        "n": n,
        "seed": seed,
        "steps": steps,
        "tokens": steps * n * SEQUENCES * CONTEXT,
        "parameters": sum(p.numel() for p in params.values()),
        "quality": task.quality(model, after),
        "training_loss": done.losses[-10:].mean().item(),
        "wire_bytes_per_step": wire_bytes,
        "link_bytes_per_step": link_bytes,
        "cpu_seconds": round(seconds, 2),
    }
    who = f"{begins:7} {local:5} n={n:<2} seed {seed}"
    print(f"{who}  {line['quality']:.4f}  {wire_bytes:9,.0f} B  {seconds:5.1f} s  {text}", flush=True)
    return line


def counted(batches: Iterator[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """The same, each checked to be what tokens are counted by."""
    for x, y in batches:
        assert x.shape[1:] == (SEQUENCES, CONTEXT)
        yield x, y


def bytes_of(text: str, params: dict[str, Tensor], n: int) -> tuple[float, float]:
    """What a worker hands over, and what crosses its link, in a local step on average."""
    link = Link.parse("1gbit")
    if text == SYNCHRONOUS:
        plan = fnddp.lower(fnddp.parse(text), params, world_size=n)
        return plan.wire_bytes, plan.estimate(link).link_bytes
    plan = outer.lower(outer.parse(text), params, world_size=n)
    return plan.bytes_per_step, sum(each.plan.estimate(link).link_bytes for each in plan.exchanges) / plan.period


def summary(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and spread over seeds, and how far above the synchronous run's, seed by seed."""
    exact = {(x["begins"], x["local"], x["n"], x["seed"]): x["quality"] for x in lines if x["outer"] == SYNCHRONOUS}
    runs: dict[tuple[str, str, int, str], list[dict[str, Any]]] = {}
    for line in lines:
        runs.setdefault((line["begins"], line["local"], line["n"], line["outer"]), []).append(line)
    found: list[dict[str, Any]] = []
    for (begins, local, n, text), of in runs.items():
        quality, gaps = [x["quality"] for x in of], [x["quality"] - exact[begins, local, n, x["seed"]] for x in of]
        found.append(
            {
                "begins": begins,
                "local": local,
                "n": n,
                "outer": text,
                "seeds": len(of),
                "steps": of[0]["steps"],
                "tokens": of[0]["tokens"],
                "quality": statistics.fmean(quality),
                "spread": statistics.stdev(quality) if len(of) > 1 else 0.0,
                "gap": statistics.fmean(gaps),
                "gap_spread": statistics.stdev(gaps) if len(gaps) > 1 else 0.0,
                "wire_bytes_per_step": of[0]["wire_bytes_per_step"],
                "link_bytes_per_step": of[0]["link_bytes_per_step"],
            }
        )
    return found


def report(out: Path, folder: Path) -> None:
    found = summary(lines_of(out))
    (folder / "outer_convergence.json").write_text(json.dumps(found, indent=1) + "\n")
    save(partial(draw, found), folder / "outer_convergence.svg")
    print(tables(found))


def tables(found: list[dict[str, Any]]) -> str:
    parts: list[str] = []
    for begins, local, n in dict.fromkeys(_panel(x) for x in found):
        rows = [x for x in found if _panel(x) == (begins, local, n)]
        whole = next(x["wire_bytes_per_step"] for x in rows if x["outer"] == SYNCHRONOUS)
        of = f"{n} workers with {local}, {rows[0]['steps']} steps, {rows[0]['tokens']:,} tokens"
        parts.append(f"\n{begins} parameters, {of}\n")
        parts.append("| | loss | above the synchronous run, same seed | B a step | less by |")
        parts.append("| --- | --: | --: | --: | --: |")
        for x in rows:
            loss, gap = f"{x['quality']:.3f} ± {x['spread']:.3f}", f"{x['gap']:+.3f} ± {x['gap_spread']:.3f}"
            nbytes = x["wire_bytes_per_step"]
            parts.append(f"| `{x['outer']}` | {loss} | {gap} | {nbytes:,.0f} | {whole / nbytes:,.0f}x |")
    return "\n".join(parts)


def draw(found: list[dict[str, Any]]) -> Figure:
    panels = [panel for panel in dict.fromkeys(_panel(x) for x in found) if panel != (TRAINED, ADAMW, 1)]
    order = list(dict.fromkeys(x["outer"] for x in found))
    figure = Figure(figsize=(14, 7), layout="constrained")
    for i, (begins, local, n) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), i + 1)
        for x in (x for x in found if _panel(x) == (begins, local, n)):
            j = order.index(x["outer"])
            axes.errorbar(
                x["wire_bytes_per_step"],
                x["quality"],
                yerr=x["spread"],
                fmt="osD^vP*X<>h"[j % 11],
                color=f"C{j}" if j < 10 else "black",
                label=x["outer"],
            )
        title = f"{begins} parameters, {local},\n{n} worker{'s' if n > 1 else ''}"
        axes.set(xscale="log", xlabel="wire bytes a step and worker", ylabel="validation loss", title=title)
    pairs = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in pairs}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, fontsize="small")
    return figure


def _panel(found: dict[str, Any]) -> tuple[str, str, int]:
    return found["begins"], found["local"], found["n"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["train", "report"], default="train")
    parser.add_argument("--quick", action="store_true", help="a few runs of a few steps, into a temporary folder")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "outer_convergence.jsonl", help="lines of json, one a run"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.quick:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "outer_convergence.jsonl"
            runs: Runs = [
                (RANDOM, ADAMW, 2, [SYNCHRONOUS, "diloco(allreduce, every=2)", SPARSE], [0]),
                (TRAINED, ADAMW, 2, [SYNCHRONOUS], [0]),
                (RANDOM, MUON, 2, [SYNCHRONOUS, "muloco(every=2)"], [0]),
            ]
            train(out, runs, steps=4)
            train(out, runs, steps=4)  # resumes: nothing is left to do
            report(out, Path(folder))
            print(f"{len(lines_of(out))} runs on {len(TEXT):,} characters")
    elif arguments.command == "train":
        train(arguments.out, RUNS, STEPS)
    else:
        report(arguments.out, arguments.out.parent)


if __name__ == "__main__":
    main()

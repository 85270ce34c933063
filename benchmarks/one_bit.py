"""One bit of the momentum on both hops, next to others of few bytes: 1-bit Adam, 0/1 Adam, EF21, Lion, Dion.

    python benchmarks/one_bit.py train     # a line of json for each run, into results/; skips what is there
    python benchmarks/one_bit.py report    # the table of what is there
    python benchmarks/one_bit.py backlog   # how much waits to be sent, by pipeline and momentum: two minutes
    python benchmarks/one_bit.py --quick   # all in a minute, into a temporary folder

The characters of benchmarks/convergence.py on 8 virtual ranks, each method at its own best learning rate. What it found
is in benchmarks/one-bit.md.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from convergence import (
    EXACT,
    ONE_BIT,
    RESULTS,
    Gap,
    Task,
    beta_of,
    characters_task,
    lines_of,
    link_bytes,
    losses_of,
    make_optimizer,
    named_parameters,
    scheduled,
    where,
)
from torch import Tensor
from torch.func import grad, vmap

import fnddp
from fnddp.core import tree
from fnddp.core.codec import wide_zeros
from fnddp.core.sync import Exchange, Local, State, Sync, transform
from fnddp.core.tree import Leaves, replaced
from fnddp.plan.period import period

RANKS, SEEDS = 8, (0, 1, 2)
WARM = 0.15  # of all steps, in which 1-bit Adam sends everything (the paper: 15 to 20 %)
DECAY, EPSILON, BETA2 = 0.01, 1e-8, 0.999


class Rule(torch.optim.Optimizer):
    """An optimizer of one rule: `direction(state, grad, step)`, for each parameter."""

    def __init__(self, params: list[Tensor], lr: float, direction: Callable[[dict[str, Any], Tensor, int], Tensor]):
        super().__init__(params, {"lr": lr})
        self.direction, self.steps = direction, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                towards = self.direction(self.state[p], p.grad, self.steps)
                p.mul_(1 - group["lr"] * DECAY).sub_(group["lr"] * towards)


def adam(is_due: Callable[[int], bool], state: dict[str, Any], grad: Tensor, step: int) -> Tensor:
    """Adam without a first moment, whose second one changes only where it is due."""
    if is_due(step):
        state["v"] = BETA2 * state.get("v", 0) + (1 - BETA2) * grad**2
        state["n"] = state.get("n", 0) + 1
    return grad / ((state["v"] / (1 - BETA2 ** state["n"])).sqrt() + EPSILON)


def signs(state: dict[str, Any], grad: Tensor, step: int) -> Tensor:
    return grad.sign()


def orthogonal(state: dict[str, Any], grad: Tensor, step: int) -> Tensor:
    """The nearest orthogonal matrix of the same rank, as long as a step of Adam; Adam for vectors."""
    if grad.ndim < 2:
        return shorter(0.9) * adam(lambda _: True, state, grad, step)
    u, s, vh = torch.linalg.svd(grad, full_matrices=False)
    return 0.2 * math.sqrt(max(grad.shape)) * (u * (s > 1e-5 * s[0])) @ vh


class DionState(NamedTuple):
    momentum: Local[Leaves]
    inner: State


@transform
class dion(Sync):
    """Send momentum plus gradient, and take 1 - mu of what was sent from the momentum (Dion, Algorithm 1)."""

    inner: Sync
    mu: float = 0.95

    remembers: ClassVar[bool] = True

    def init(self, grads: Any) -> State:
        leaves, _ = tree.flatten(grads)
        return DionState(wide_zeros(leaves), self.inner.init(grads))

    def exchange(self, leaves: Leaves, state: DionState) -> Exchange:
        x = {path: leaf + state.momentum[path] for path, leaf in leaves.items()}
        inner = self.inner.exchange(x, state.inner)
        momentum = {path: each - (1 - self.mu) * inner.sent[path] for path, each in x.items()}
        return replaced(inner, state=DionState(momentum, inner.state))


class Method(NamedTuple):
    """A pipeline and what is behind it: `make(steps, rate, params)`; None: AdamW, as in convergence.py."""

    name: str
    pipeline: str
    make: Callable[[int, float, list[Tensor]], torch.optim.Optimizer] | None = None
    rate: float = 0.04  # where the search begins


def frozen(beta: float, steps: int, rate: float, params: list[Tensor]) -> torch.optim.Optimizer:
    return Rule(params, shorter(beta) * rate, partial(adam, lambda step: step <= WARM * steps))


def seldom(beta: float, steps: int, rate: float, params: list[Tensor]) -> torch.optim.Optimizer:
    return Rule(params, shorter(beta) * rate, partial(adam, lambda step: step & (step - 1) == 0))


def by_signs(steps: int, rate: float, params: list[Tensor]) -> torch.optim.Optimizer:
    return Rule(params, rate, signs)


def by_matrices(steps: int, rate: float, params: list[Tensor]) -> torch.optim.Optimizer:
    return Rule(params, rate, orthogonal)


def behind_ef21(steps: int, rate: float, params: list[Tensor]) -> torch.optim.Optimizer:
    return make_optimizer("AdamW", rate, 0.9, params)  # ef21 gives a momentum of 1 - eta


def shorter(beta: float) -> float:
    return math.sqrt((1 - beta) / (1 + beta))


FOUR_BITS = "error_feedback(bucketize(quantize(two_shot, bits=4)))"
RANK8 = "error_feedback(powersgd(bf16(allreduce), rank=8))"
METHODS = [
    Method("AdamW", EXACT),
    Method("momentum of 0.5", "shared_momentum(allreduce, beta=0.5)"),
    Method("one bit, momentum of 0.5", f"shared_momentum({ONE_BIT}, beta=0.5)"),
    Method("one bit, momentum of 0.9", f"shared_momentum({ONE_BIT})"),
    Method("one bit, momentum of 0.3", f"shared_momentum({ONE_BIT}, beta=0.3)"),
    Method("one bit, gradients", ONE_BIT),
    Method("1-bit Adam", f"shared_momentum(warmup({ONE_BIT}, steps=WARM))", partial(frozen, 0.9)),
    Method("1-bit Adam, 0.5", f"shared_momentum(warmup({ONE_BIT}, steps=WARM), beta=0.5)", partial(frozen, 0.5)),
    Method("second moment at powers of two", f"shared_momentum({ONE_BIT}, beta=0.5)", partial(seldom, 0.5)),
    Method("EF21-SGDM", "ef21(bucketize(sign(quantize(two_shot), chunk=128)), eta=0.1)", behind_ef21),
    Method("signs, exact", "shared_momentum(allreduce)", by_signs, 0.005),
    Method("signs, one bit", f"shared_momentum({ONE_BIT}, beta=0.5)", by_signs, 0.005),
    Method("low rank, gradients", RANK8),
    Method("low rank, momentum of 0.9", f"shared_momentum({RANK8})"),
    Method("low rank, momentum of 0.5", f"shared_momentum({RANK8}, beta=0.5)"),
    Method("four bits, momentum of 0.9", f"shared_momentum({FOUR_BITS})"),
    Method("four bits, momentum of 0.5", f"shared_momentum({FOUR_BITS}, beta=0.5)"),
    Method("Dion", "dion(powersgd(allreduce, rank=8))", by_matrices, 0.02),
]


def following(lines: Sequence[dict[str, Any]], methods: Sequence[Method]) -> Iterator[tuple[Method, float, int]]:
    """What is wanted and not there: rates by factors of 2 until the best is bracketed; then other seeds at the best."""
    there = {(x["method"], x["rate"], x["seed"]) for x in lines}
    for method in methods:
        rate = best_rate(lines, method)
        for wanted in ((rate, 0), (2 * rate, 0), (rate / 2, 0), *((rate, seed) for seed in SEEDS)):
            if (method.name, *wanted) not in there:
                yield (method, *wanted)
                break


def best_rate(lines: Sequence[dict[str, Any]], method: Method) -> float:
    found = {x["rate"]: x["quality"] or math.inf for x in lines if x["method"] == method.name and x["seed"] == 0}
    return min(found, key=found.__getitem__, default=method.rate)


def train(out: Path, methods: Sequence[Method], task: Task) -> None:
    while wanted := next(following(lines_of(out), methods), None):
        line = done(task, *wanted)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def done(task: Task, method: Method, rate: float, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = task.make()
    sync = fnddp.parse(method.pipeline.replace("WARM", str(round(WARM * task.steps))))
    make = method.make and partial(method.make, task.steps, rate)
    make = make or partial(make_optimizer, "AdamW", rate, beta_of(sync))
    began = time.process_time()
    quality, _ = losses_of(task, model, sync, RANKS, seed, partial(scheduled, make, task.steps, lambda *_: None))
    line = {
        "method": method.name,
        "pipeline": repr(sync),
        "rate": rate,
        "seed": seed,
        "steps": task.steps,
        "quality": quality if math.isfinite(quality) else None,
        "cpu_seconds": round(time.process_time() - began, 2),
        **where(),
    }
    print(f"{line['quality']}  {rate:g} seed {seed}  {line['cpu_seconds']:.1f} s  {method.name}", flush=True)
    return line


# How much waits to be sent.


def backlog(task: Task, text: str) -> float:
    """The length of the mean residual, in mean gradients of a step: an average over the second half of the steps.

    A residual of momenta counts 1 / (1 - beta) times, since that is how much a gradient adds to its sum.
    """
    sync = fnddp.parse(text)
    beta = beta_of(sync)
    torch.manual_seed(0)
    model = task.make()
    params = named_parameters(model)
    optimizer = make_optimizer("AdamW", METHODS[0].rate / 2, beta, list(params.values()))
    simulation = fnddp.simulate(sync, RANKS)
    state = simulation.init({path: leaf.expand(RANKS, *leaf.shape) for path, leaf in params.items()})
    gradients = vmap(grad(partial(task.loss, model)), in_dims=(None, 0, 0))
    waiting: list[float] = []
    for x, y in task.batches(RANKS, 0, task.steps):
        grads = gradients(params, x, y)
        means, state = simulation(grads, state)
        for path, leaf in params.items():
            leaf.grad = means[path]
        optimizer.step()
        residual = (state if beta is None else state.inner).residual
        lengths = [
            torch.stack([each[path].mean(0).norm() for path in params if params[path].ndim == 2]).norm().item()
            for each in (residual, grads)
        ]
        waiting.append(lengths[0] / lengths[1] / (1 - (beta or 0.0)))
    return statistics.fmean(waiting[task.steps // 2 :])


def backlogs(task: Task) -> str:
    rows = ["| pipeline | of gradients | " + " | ".join(f"of a momentum of {beta}" for beta in BETAS) + " |"]
    rows.append("| --- |" + " --: |" * (len(BETAS) + 1))
    for text in (ONE_BIT, FOUR_BITS, RANK8):
        texts = [text, *(f"shared_momentum({text}, beta={beta})" for beta in BETAS)]
        rows.append(f"| `{text}` | " + " | ".join(f"{backlog(task, each):.2f}" for each in texts) + " |")
    return "\n".join(rows)


BETAS = (0.3, 0.5, 0.7, 0.9)


def table(lines: Sequence[dict[str, Any]], methods: Sequence[Method]) -> str:
    first = METHODS[0]
    at = best_rate(lines, first)
    exact = {x["seed"]: x["quality"] for x in lines if (x["method"], x["rate"]) == (first.name, at)}
    params = named_parameters(characters_task().make())
    whole = link_bytes(period(fnddp.allreduce, params, world_size=RANKS))
    rows = ["| method | pipeline | fewer bytes | best rate | nats above AdamW |", "| --- | --- | --: | --: | --: |"]
    for method in methods:
        rate = best_rate(lines, method)
        of = [x for x in lines if (x["method"], x["rate"]) == (method.name, rate) and x["seed"] in exact]
        if not of:
            continue
        gap = Gap(tuple((x["quality"] or math.inf) - exact[x["seed"]] for x in of))
        sent = link_bytes(period(fnddp.parse(of[0]["pipeline"]), params, world_size=RANKS))
        sent = WARM * whole + (1 - WARM) * sent if "warmup" in method.pipeline else sent
        rows.append(f"| {method.name} | `{of[0]['pipeline']}` | {whole / sent:.1f}x | {rate:g} | {gap} ({len(of)}) |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["train", "report", "backlog"], default="train")
    parser.add_argument("--quick", action="store_true", help="a few steps of each, into a temporary folder")
    parser.add_argument("--out", type=Path, default=RESULTS / "one-bit.jsonl", help="lines of json, one a run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.quick:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "one-bit.jsonl"
            few = [METHODS[0], METHODS[2], METHODS[6], METHODS[-1]]
            task = replace(characters_task(), steps=8)
            train(out, few, task)
            print(table(lines_of(out), few))
            print(f"{backlog(task, RANK8):.2f} steps of gradients wait")
    elif arguments.command == "train":
        train(arguments.out, METHODS, characters_task())
    else:
        waits = arguments.command == "backlog"
        text = backlogs(replace(characters_task(), steps=200)) if waits else table(lines_of(arguments.out), METHODS)
        (arguments.out.parent / ("backlog.md" if waits else "one-bit.md")).write_text(text + "\n")
        print(text)


if __name__ == "__main__":
    main()

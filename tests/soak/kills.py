"""Replicas under torchft that are killed again and again, at random: what becomes of those that are left?

python -m tests.soak.kills --rounds 60
python -m tests.soak.kills --rounds 20 --kind torchft    # torchft's own class, in the same harness
python -m tests.soak.kills --rounds 20 --kind pure       # torchft's PureDistributedDataParallel

In a round one replica of three, or now and then two, is killed with SIGKILL: half of the time at a random moment, else
at a random point of a step. It comes back, and the round is over when all train together again. Not in CI.
"""

import argparse
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from tests.replicas import POINTS, Job, Record, write

PIPELINES = (
    "allreduce",
    "error_feedback(powersgd(fp16(allreduce), rank=2))",
    "warmup(error_feedback(powersgd(fp16(allreduce), rank=1)), steps=20)",
    "error_feedback(topk(allgather, ratio=0.3))",
    "error_feedback(quantize(two_shot, bits=8, block=16))",
)
OWN_POINTS = ("forward", "backward", "commit", "committed", "stepped")  # those where torchft's classes can be stopped


def wrap_theirs(manager: Any, net: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    from torchft import ddp

    return getattr(ddp, options["theirs"])(manager, net)


WRAPS = {
    "fnddp": {},
    "torchft": {"wrap": wrap_theirs, "theirs": "DistributedDataParallel"},
    "pure": {"wrap": wrap_theirs, "theirs": "PureDistributedDataParallel"},
}


class Soak:
    """A training that goes on while its replicas are killed."""

    def __init__(self, job: Job, points: tuple[str, ...], seed: int) -> None:
        self.job, self.points, self.random = job, points, random.Random(seed)
        self.died: Counter[str] = Counter()  # replicas that nobody killed, by how they ended

    def round(self) -> str:
        """Kills, brings back, and waits until all are together. Returns what was done."""
        names = sorted(self.job.processes)
        victims = self.random.sample(names, 2 if self.random.random() < 0.2 else 1)
        point = self.random.choice(self.points) if self.random.random() < 0.5 else ""
        for victim in victims:
            if point:
                write(self.job.path / f"{victim}.trap", point)
            else:
                time.sleep(self.random.uniform(0, 0.05))
                self.job.processes[victim].kill()
        self.job.wait_for(lambda: all(self.job.processes[name].exitcode is not None for name in victims), "to die")
        time.sleep(self.random.uniform(0, 2))  # the others notice it, or not
        self._bring_back()
        self.wait_until_together()
        return f"{' and '.join(victims)} killed {f'in {point}' if point else 'at a random moment'}"

    def _bring_back(self) -> None:
        for name, process in list(self.job.processes.items()):
            if process.exitcode is None:
                continue
            if process.exitcode != -signal.SIGKILL:
                said = (self.job.path / f"{name}.log").read_text().strip().splitlines()
                self.died[said[-1][:160] if said else f"exit code {process.exitcode}"] += 1
            (self.job.path / f"{name}.trap").unlink(missing_ok=True)
            self.job.start(name)

    def wait_until_together(self) -> None:
        """Until each replica has committed two steps in which all take part, since now."""
        begun = Counter(r.replica for r in self.job.records())

        def are_together() -> bool:
            self._bring_back()
            new: Counter[str] = Counter()
            seen: Counter[str] = Counter()
            for record in self.job.records():
                seen[record.replica] += 1
                is_full = record.committed and record.participants == self.job.replicas
                new[record.replica] += is_full and seen[record.replica] > begun[record.replica]
            return all(new[name] >= 2 for name in self.job.processes)

        self.job.wait_for(are_together, "to be together again")

    def stop(self) -> None:
        """All end with the same step."""
        last = max(r.step for r in self.job.records()) + 20
        write(self.job.path / "stop", str(last))
        self.job.wait_for(lambda: all(p.exitcode is not None for p in self.job.processes.values()), "to stop")


def run(sync: str, kind: str, rounds: int, seed: int) -> Counter[str]:
    """Counts of what happened in `rounds` rounds."""
    points = POINTS if kind == "fnddp" else OWN_POINTS
    with Job(3, sync=sync, endless=True, manager={"seconds": 10}, **WRAPS[kind]) as job:
        job.begin({})
        soak = Soak(job, points, seed)
        soak.wait_until_together()
        for number in range(rounds):
            began = time.monotonic()
            try:
                what = soak.round()
            except TimeoutError as error:
                print(f"{sync}: round {number + 1} of {rounds} does not end: {str(error)[:200]}", flush=True)
                soak.died["the training hung"] += 1
                break
            print(
                f"{sync}: {number + 1} of {rounds}, {what}, together after {time.monotonic() - began:.1f} s", flush=True
            )
        else:
            soak.stop()
        return tallied(job.records(), rounds, soak.died)


def tallied(records: list[Record], rounds: int, died: Counter[str]) -> Counter[str]:
    after: dict[int, set[str]] = {}
    for record in records:
        if record.committed:
            after.setdefault(record.step, set()).add(record.digest)
    discarded = [r for r in records if not r.committed]
    for how, count in died.items():
        print(f"  not killed, but ended: {count} times {how}")
    return Counter(
        {
            "rounds": rounds,
            "steps committed": len(after),
            "steps after which replicas differ": sum(len(digests) > 1 for digests in after.values()),
            "steps discarded": len({r.step for r in discarded}),
            "discarded steps that left something": sum(not r.is_unchanged for r in discarded),
            "replicas that ended though nobody killed them": sum(died.values()),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="of all pipelines together")
    parser.add_argument("--kind", choices=list(WRAPS), default="fnddp")
    parser.add_argument("--sync", choices=PIPELINES, help="one pipeline instead of all")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    pipelines = PIPELINES if arguments.kind == "fnddp" else PIPELINES[:1]
    pipelines = (arguments.sync,) if arguments.sync else pipelines
    total: Counter[str] = Counter()
    for i, sync in enumerate(pipelines):
        counts = run(sync, arguments.kind, arguments.rounds // len(pipelines), arguments.seed + i)
        print(
            f"{arguments.kind}, {sync}: " + ", ".join(f"{count} {what}" for what, count in counts.items()), flush=True
        )
        total.update(counts)
    print(f"{arguments.kind}, all: " + ", ".join(f"{count} {what}" for what, count in total.items()))


if __name__ == "__main__":
    main()

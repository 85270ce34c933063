"""Replicas for tests of torchft: processes under a real lighthouse.

`Job.run` starts those again that were killed, ends when all have trained together for some steps, and checks that
nobody ever differed.
"""

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.forks import forks
from tests.replica import Record, Trap, serve

SECONDS = 90  # of a job


class Job:
    """Replicas of one training, of so many ranks each, and their lighthouse."""

    def __init__(self, replicas: int, ranks: int = 1, **options: Any) -> None:
        from torchft.coordination import LighthouseServer

        self.context = forks()
        self.replicas, self.ranks, self.options = replicas, ranks, options
        self.folder = tempfile.TemporaryDirectory(prefix="fnddp-replicas-")
        self.path = Path(self.folder.name)
        # What is dead is known to be after a second; what lives is waited for.
        self.lighthouse = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=1,
            join_timeout_ms=60_000,
            quorum_tick_ms=20,
            heartbeat_timeout_ms=1000,
        )
        self.address = f"http://127.0.0.1:{self.lighthouse.address().rpartition(':')[2]}"
        self.processes: dict[str, Any] = {}
        self.incarnations: dict[str, int] = {}

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
        self.lighthouse.shutdown()
        self.folder.cleanup()

    def start(self, name: str, **options: Any) -> None:
        """Starts a replica, again if it was killed."""
        count = self.incarnations[name] = self.incarnations.get(name, -1) + 1
        given = {"replicas": self.replicas, "ranks": self.ranks, "incarnation": count, **self.options, **options}
        process = self.context.Process(target=serve, args=(name, self.address, self.path, given), daemon=True)
        process.start()
        self.processes[name] = process

    def run(self, traps: Mapping[str, Trap], watch: Callable[["Job"], None] | None = None) -> list[Record]:
        """Trains until all have taken the last steps together. What is killed is started again later.

        Args:
            traps: What befalls whom.
            watch: Called now and then.
        """
        after = max((trap.step for trap in traps.values()), default=0)
        self.begin(traps, after=after)
        self.wait_for(lambda: self._ended(after, watch), "to end")
        records = self.records()
        require_equal(records)
        return records

    def begin(self, traps: Mapping[str, Trap], **options: Any) -> None:
        """Starts all replicas, and has them begin together."""
        names = [f"r{i}" for i in range(self.replicas * self.ranks)]
        for name in names:
            self.start(name, waits=True, trap=traps.get(name), **options)
        self.wait_for(lambda: all((self.path / f"{name}.ready").exists() for name in names), "to be ready")
        (self.path / "go").touch()

    def _ended(self, after: int, watch: Callable[["Job"], None] | None) -> bool:
        if watch is not None:
            watch(self)
        self._end_whole_replicas()
        if any(r.committed and r.step >= after and r.participants < self.replicas for r in self.records()):
            for name in self.killed():  # once the others have gone on without them
                self.start(name, after=after)
        self.require_none_failed()
        return all(process.exitcode == 0 for process in self.processes.values())

    def _end_whole_replicas(self) -> None:
        """Where one rank of a replica is dead, kills the others, as torch's elastic agent does."""
        for name in self.killed():
            self.processes[name].kill()
            self.processes[name].join()

    def killed(self) -> list[str]:
        """The ranks of replicas of which one is dead: without it, the others may fail before they are killed."""
        dead = {self._replica(n) for n, process in self.processes.items() if process.exitcode == -signal.SIGKILL}
        return [name for name in self.processes if self._replica(name) in dead]

    def _replica(self, name: str) -> int:
        return int(name.removeprefix("r")) // self.ranks

    def require_none_failed(self) -> None:
        killed = self.killed()
        for name, process in self.processes.items():
            assert process.exitcode in (None, 0) or name in killed, f"{name} has failed\n{self.said()}"

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            if time.monotonic() > deadline:
                for process in self.processes.values():
                    if process.is_alive():
                        os.kill(process.pid, signal.SIGUSR1)
                time.sleep(1)  # for faulthandler to write
                raise TimeoutError(f"replicas took more than {SECONDS} s {what}\n{self.said()}")
            time.sleep(0.02)

    def said(self) -> str:
        """What all replicas have written."""
        return "\n".join(f"{file.name}:\n{file.read_text()[-6000:]}" for file in sorted(self.path.glob("*.[jl]*")))

    def records(self) -> list[Record]:
        """What all replicas have written down so far, each in its order."""
        files = sorted(self.path.glob("*.jsonl"))
        lines = [line for file in files for line in file.read_text().split("\n")[:-1]]  # without what a death has cut
        return [Record(**json.loads(line)) for line in lines]


def require_equal(records: list[Record]) -> None:
    """Whoever has committed a step is equal, to the bit, to all who have; a step that is discarded has left nothing.

    Of replicas of several ranks, those of the same rank are.
    """
    after: dict[tuple[int, int], set[str]] = {}
    for record in records:
        if record.committed:
            after.setdefault((record.step, record.rank), set()).add(record.digest)
    differ = [step for (step, _), digests in after.items() if len(digests) > 1]
    assert not differ, f"replicas differ after steps {differ}: {[r for r in records if r.step in differ]}"
    for record in records:
        assert record.committed or record.is_unchanged, f"a discarded step has left something: {record}"


def on_processes(n: int, run: Callable[..., None], ranks: int = 1, **options: Any) -> None:
    """`run(name, address, folder, options)` on n replicas, of which none may fail but those that are killed."""
    with Job(n, ranks=ranks, run=run, **options) as job:
        for i in range(n * ranks):
            job.start(f"r{i}")

        def ended() -> bool:
            job.require_none_failed()
            return all(process.exitcode is not None for process in job.processes.values())

        job.wait_for(ended, "to end")

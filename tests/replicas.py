"""Replicas for tests of torchft: processes under a real lighthouse, each of which writes a line about each step.

A replica dies at a trap. `Job.run` starts those again that were killed, ends when all have trained together for some
steps, and checks that nobody ever differed.
"""

import faulthandler
import hashlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fnddp
from fnddp.laws import bits
from tests.forks import forks

SECONDS = 90  # of a job
HEARTBEAT = 0.5  # seconds until the lighthouse knows of a replica
TOGETHER = 3  # steps that all replicas take together at the end
SIZES = (8, 16, 4)  # of the network
SMALL_BUCKETS = 2.0**-12  # MiB: several collectives in a step
POINTS = ("forward", "backward", "collective 0", "collective 1", "vote", "commit", "committed", "stepped")


@dataclass(frozen=True)
class Trap:
    """What befalls a replica in one step: where, in which, and "kill", "stop" or "raise"."""

    point: str
    step: int
    act: str = "kill"


@dataclass
class Record:
    replica: str
    rank: int  # within its replica
    step: int
    participants: int
    error: str
    digest: str  # of parameters, optimizer and the replicated state
    committed: bool = False
    is_unchanged: bool = True  # of all of the state, local too, and gradients: as before the step
    file: str = ""
    is_planned: bool = False


class Network(nn.Sequential):
    """A small network, of which replicas begin with different parameters."""

    def __init__(self, seed: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            super().__init__(nn.Linear(*SIZES[:2]), nn.Tanh(), nn.Linear(*SIZES[1:]))


def new_manager(name: str, address: str, training: Any, **options: Any) -> Any:
    """A manager as a replica of one rank has it, or as one of several ranks does that have a store together."""
    from torchft import Manager, ProcessGroupGloo

    store = options.pop("store", None) or dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    training.store = store
    seconds = options.pop("seconds", 20)
    return Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=seconds)),
        load_state_dict=training.load_state_dict,
        state_dict=training.state_dict,
        **{
            "min_replica_size": 1,
            "use_async_quorum": False,
            "timeout": timedelta(seconds=seconds),
            "quorum_timeout": timedelta(seconds=60),
            "connect_timeout": timedelta(seconds=10),
            "rank": 0,
            "world_size": 1,
            "store_addr": "127.0.0.1",
            "store_port": store.port,
            "lighthouse_addr": address,
            "replica_id": name,
            "hostname": "127.0.0.1",
            **options,
        },
    )


def meet(name: str, folder: Path, ranks: int, incarnation: int = 0) -> tuple[str, int, dict[str, Any]]:
    replica, rank = divmod(int(name.removeprefix("r")), ranks)
    port = folder / f"store-{replica}-{incarnation}"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        write(port, str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(read(port)), is_master=False, wait_for_workers=False)
    return f"replica{replica}", rank, {"store": store, "rank": rank, "world_size": ranks}


def write(path: Path, text: str = "") -> None:
    """A file that others find whole, or not at all."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def read(*paths: Path) -> str:
    """The text of the last of `paths`, when all of them are there."""
    while not all(path.exists() for path in paths):
        time.sleep(0.02)
    return paths[-1].read_text()


def wait_together(name: str, folder: Path, n: int = 2, point: str = "ready") -> None:
    time.sleep(HEARTBEAT)
    write(folder / f"{name}-{point}")
    read(*(folder / f"r{i}-{point}" for i in range(n)))


class Training:
    """A model and its optimizer, and how they go to a replica that joins."""

    def __init__(self, seed: int) -> None:
        self.net = Network(seed)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.net.load_state_dict(saved["net"])
        self.optimizer.load_state_dict(saved["optimizer"])


def digest_of(*trees: Any) -> str:
    return hashlib.sha256(repr(bits(trees)).encode()).hexdigest()[:12]


class Replica:
    def __init__(self, name: str, address: str, folder: Path, options: Mapping[str, Any]) -> None:
        self.name, self.folder, self.options = name, folder, options
        self.seed = int(name.removeprefix("r")) + 1000 * int(options["incarnation"])
        self.training = Training(self.seed)
        self.rank = 0
        if options["ranks"] > 1:
            name, self.rank, together = meet(name, folder, options["ranks"], options["incarnation"])
            options = {**options, "manager": {**options.get("manager", {}), **together}}
        self.manager = new_manager(name, address, self.training, **options.get("manager", {}))
        self.model: Any = options.get("wrap", wrap)(self.manager, self.training.net, options)
        self.trap: Trap | None = options.get("trap")
        self.grads: dict[str, Tensor] = {}
        self._set_traps()

    def run(self) -> None:
        from torchft import Optimizer

        optimizer = Optimizer(self.manager, self.training.optimizer)
        if not self.options["incarnation"]:
            wait_together(self.name, self.folder, self.options["replicas"] * self.options["ranks"])
        together = 0
        while together < TOGETHER:
            done = self.step(optimizer)
            with (self.folder / f"{self.name}.jsonl").open("a") as file:
                file.write(json.dumps(done.__dict__) + "\n")
            is_together = done.committed and done.participants == self.options["replicas"]
            is_over = is_together and done.step > self.options.get("after", 0)
            together = together + 1 if is_over else 0
            time.sleep(0 if is_together else 0.02)
        self.manager.shutdown(wait=False)

    def step(self, optimizer: Any) -> Record:
        optimizer.zero_grad()
        step, before, local = self.manager.current_step(), self.digest(), self.of_its_own()
        error = ""
        try:
            self._started = count()
            self.reach("forward")
            with self.model.weight(1.0 + self.seed) if self.options.get("weighs") else nullcontext():
                for _ in range(self.options.get("backwards", 1)):
                    self.loss(step).backward()
        except ZeroDivisionError as raised:  # that of a trap
            error = repr(raised)
            if self.options.get("leaves_out"):
                return Record(self.name, self.rank, step, self.manager.num_participants(), error, before)
        means = {name: p.grad for name, p in self.training.net.named_parameters() if p.grad is not None}
        optimizer.step()
        committed = self.manager.current_step() > step
        self.reach("stepped", step)
        lost = self.manager.errored()
        error = error or str(lost and lost.original_exception)
        return Record(
            *(self.name, self.rank, step, self.manager.num_participants(), error, self.digest()),
            committed=committed,
            is_unchanged=(before, local) == (self.digest(), self.of_its_own()),
            file=self.keep(step, means) if committed and self.options.get("keeps") else "",
            is_planned=getattr(self.model, "plan", None) is not None,
        )

    def loss(self, step: int) -> Tensor:
        inputs = torch.randn(16, SIZES[0], generator=torch.Generator().manual_seed(1000 * self.seed + step))
        return nn.functional.mse_loss(self.model(inputs), torch.tanh(inputs[:, : SIZES[-1]]))

    def digest(self) -> str:
        return digest_of(self.training.state_dict(), self.replicated())

    def replicated(self) -> dict[str, Any]:
        saved = fnddp.state_dict(getattr(self.model, "sync_state", ()))
        return {key: value for key, value in saved.items() if key.startswith("replicated/")}

    def of_its_own(self) -> str:
        grads = {name: p.grad for name, p in self.training.net.named_parameters() if p.grad is not None}
        return digest_of(getattr(self.model, "sync_state", ()), grads)

    def keep(self, step: int, means: dict[str, Tensor]) -> str:
        file = self.folder / f"{self.name}-{self.options['incarnation']}-{step}.pt"
        residual = getattr(self.model.sync_state, "residual", {})
        torch.save({"grads": dict(self.grads), "means": means, "residual": dict(residual)}, file)
        return str(file)

    def reach(self, point: str, step: int | None = None) -> None:
        trap = self.trap
        if trap is None or (trap.point, trap.step) != (point, self.manager.current_step() if step is None else step):
            return
        self.trap = None
        if trap.act == "raise":
            raise ZeroDivisionError(f"a trap in {point}")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[trap.act])

    def _set_traps(self) -> None:
        for name, parameter in self.training.net.named_parameters():
            parameter.register_hook(lambda grad, name=name: self._arrives(name, grad))
        wire = getattr(self.model, "_wire", None)
        if wire is not None:
            start, vote = wire.start, wire.vote
            wire.start = lambda *a: (self.reach(f"collective {next(self._started)}"), start(*a))[1]
            wire.vote = lambda *a: (self.reach("vote"), vote(*a))[1]
        should_commit = self.manager.should_commit

        def asks() -> bool:
            step = self.manager.current_step()
            self.reach("commit")
            committed = should_commit()
            self.reach("committed", step)
            return committed

        self.manager.should_commit = asks

    def _arrives(self, name: str, grad: Tensor) -> None:
        self.grads[name] = grad.clone()
        if name == "2.weight":  # one of the first
            self.reach("backward")


def wrap(manager: Any, net: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    from fnddp.integrations.torchft import DistributedDataParallel

    return DistributedDataParallel(
        manager, net, sync=fnddp.parse(options.get("sync", "allreduce")), bucket_cap_mb=SMALL_BUCKETS
    )


def serve(name: str, address: str, folder: Path, options: Mapping[str, Any]) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with (folder / f"{name}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        try:
            options.get("run", run_replica)(name, address, folder, options)
            code = 0
        except BaseException:
            traceback.print_exc(file=log)
            code = 1
        log.flush()
        os._exit(code)  # torchft's threads would be waited for


def run_replica(name: str, address: str, folder: Path, options: Mapping[str, Any]) -> None:
    Replica(name, address, folder, options).run()


class Job:
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
        count = self.incarnations[name] = self.incarnations.get(name, -1) + 1
        given = {"replicas": self.replicas, "ranks": self.ranks, "incarnation": count, **self.options, **options}
        process = self.context.Process(target=serve, args=(name, self.address, self.path, given), daemon=True)
        process.start()
        self.processes[name] = process

    def run(self, traps: Mapping[str, Trap], watch: Callable[["Job"], None] = lambda job: None) -> list[Record]:
        """Trains until all have taken the last steps together. What is killed is started again later."""
        after = max((trap.step for trap in traps.values()), default=0)
        for name in [f"r{i}" for i in range(self.replicas * self.ranks)]:
            self.start(name, trap=traps.get(name), after=after)
        self.wait_for(lambda: self._ended(after, watch), "to end")
        records = self.records()
        require_equal(records)
        return records

    def _ended(self, after: int, watch: Callable[["Job"], None]) -> bool:
        watch(self)
        for name in self.killed():  # where one rank is dead, the others too, as torch's elastic agent does
            self.processes[name].kill()
            self.processes[name].join()
        if any(r.committed and r.step >= after and r.participants < self.replicas for r in self.records()):
            for name in self.killed():  # once those that are left have gone on without them
                self.start(name, after=after)
        self.require_none_failed()
        return all(process.exitcode == 0 for process in self.processes.values())

    def killed(self) -> list[str]:
        """The ranks of replicas of which one is dead: without it, the others may fail before they are killed."""
        dead = {self._replica(n) for n, process in self.processes.items() if process.exitcode == -signal.SIGKILL}
        return [name for name in self.processes if self._replica(name) in dead]

    def _replica(self, name: str) -> int:
        return int(name.removeprefix("r")) // self.ranks

    def require_none_failed(self) -> None:
        ended = [name for name, process in self.processes.items() if process.exitcode not in (None, 0)]
        failed = set(ended) - set(self.killed())  # asked after `ended`: one may be killed between the two
        assert not failed, f"{sorted(failed)} failed\n{self.said()}"

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
        return "\n".join(f"{file.name}:\n{file.read_text()[-6000:]}" for file in sorted(self.path.glob("*.[jl]*")))

    def records(self) -> list[Record]:
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

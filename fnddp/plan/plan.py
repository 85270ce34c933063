"""A plan: a schedule that can print itself and estimate its cost."""

from dataclasses import dataclass

from fnddp.cost.estimate import Compute, Links, StepCost, estimate, predict
from fnddp.ir.plan_data import PlanData
from fnddp.show.beside import to_trace
from fnddp.show.text import show


@dataclass(frozen=True, repr=False)
class Plan(PlanData):
    """A pipeline lowered for given leaves, phase and world: data that can print itself and estimate its cost."""

    def __repr__(self) -> str:
        return (
            f"<Plan of {self.sync!r}: {len(self.leaves)} leaves, {len(self.collectives)} collectives, "
            f"{self.rounds} rounds, {self.wire_bytes:,} B>"
        )

    def __str__(self) -> str:
        return self.show()

    def show(self, code: bool = False) -> str:
        """Return the plan as text, as `print` shows it: slot by slot, gradients needed, computation, and messages.

        Segments of a slot that look the same are one line. With `code`, every operation is shown.

        >>> import torch
        >>> from fnddp import allreduce, fp16, lower
        >>> params = {"weight": torch.empty(1024, 512, device="meta"), "bias": torch.empty(1024, device="meta")}
        >>> print(lower(fp16(allreduce), params, world_size=8).show())
        fp16(allreduce)
        2 leaves, 525,312 parameters, 2.0 MiB, 1 bucket; 8 ranks
        <BLANKLINE>
        slot 0
          need bias, weight: encode, 3 operations
            send c0: all_reduce sum float16[525312] over 8 ranks, 1,050,624 B, round 1 of 1: bias, weight
        <BLANKLINE>
        slot 1
          wait c0: decode, 2 operations
        <BLANKLINE>
        on the wire: 1,050,624 B per rank; on its link: 1,838,592 B, 2.0x fewer than a plain mean of float32
        1 round, 1 collective; peak extra memory ...
        """
        return show(self, code)

    def estimate(self, link: Links | str, *, backward_seconds: float = 0.0) -> StepCost:
        """Return the cost of a step's collectives and, with `backward_seconds`, the time that backward does not hide.

        This is `predict` with no other times: the gradients of K buckets are ready at 1/K, 2/K, ... of backward, and a
        collective starts once its bucket is ready and the previous collective is done. The link's burst is full at the
        start of the step. Collectives of different groups never overlap, even on separate links, so the result is an
        upper bound. The wrong choice where collectives slow backward down, as on the CPU: measure instead.

        Args:
            link: The link between ranks, for all groups or by group name (None is the default group), or its text, such
                as "1gbit:20us". As in all methods that take links, a group without a link is a ValueError.

        >>> import torch
        >>> from fnddp import allreduce, fp16, lower
        >>> params = {"w": torch.empty(1000, 1000, device="meta")}
        >>> for sync in (allreduce, fp16(allreduce)):
        ...     seconds = lower(sync, params, world_size=2).estimate("1gbit").seconds
        ...     print(f"{seconds * 1e3:.0f} ms")
        32 ms
        16 ms
        """
        return estimate(self.collectives, link, backward_seconds)

    def predict(self, link: Links | str, compute: Compute) -> StepCost:
        """Return the predicted times of a step: `estimate` plus the computation before, between and after collectives.

        See `fnddp.cost.estimate.predict` for the model.

        Args:
            compute: The computation of a rank, from `fnddp.measure_backward` and `fnddp.measure_segments`. A `Compute`
                for another plan, or with an arrival after the end of backward, is a ValueError.

        >>> import torch
        >>> from fnddp import Compute, Link, allreduce, lower
        >>> plan = lower(allreduce, {"w": torch.empty(1000, 1000, device="meta")}, world_size=2)
        >>> print(plan.predict(Link.parse("1gbit"), Compute(forward_seconds=0.05, backward_seconds=0.1)))
        collective  slot  payload  on the link   time  done at
        all_reduce     0     4 MB         4 MB  32 ms   182 ms
        total                4 MB         4 MB  32 ms
        step 182 ms = forward 50 ms + backward 100 ms + exposed 32 ms
        """
        return predict(self, link, compute)

    def to_trace(self, link: Links, compute: Compute | None = None) -> str:
        """Return the predicted step as JSON in Chrome's trace event format, for https://ui.perfetto.dev.

        It has two tracks, computation and wire. Ranges have the same names as in a measured trace
        (`torch.profiler.profile`, `export_chrome_trace`), so that you can compare the two.

        Args:
            compute: See `predict`; None if computation takes no time, so that only the wire is shown.

        >>> import json, torch
        >>> from fnddp import Link, allreduce, lower
        >>> plan = lower(allreduce, {"w": torch.empty(1000, 1000, device="meta")}, world_size=2)
        >>> events = json.loads(plan.to_trace(Link.parse("1gbit")))["traceEvents"]
        >>> [(event["name"], event["dur"]) for event in events if event.get("cat") == "wire"]
        [('fnddp c0 all_reduce', 32000.0)]
        """
        return to_trace(self, self.predict(link, compute or Compute()))

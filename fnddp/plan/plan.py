"""A plan: a schedule that prints, draws and costs itself."""

from dataclasses import dataclass

from fnddp.cost.estimate import Compute, Links, StepCost, estimate, predict
from fnddp.ir.plan_data import PlanData
from fnddp.show.beside import to_trace
from fnddp.show.drawing import to_html, to_svg
from fnddp.show.text import show


@dataclass(frozen=True, repr=False)
class Plan(PlanData):
    """A pipeline lowered for given leaves, a phase and a world: inert data that prints, draws and costs itself."""

    def __repr__(self) -> str:
        return (
            f"<Plan of {self.sync!r}: {len(self.leaves)} leaves, {len(self.collectives)} collectives, "
            f"{self.rounds} rounds, {self.wire_bytes:,} B>"
        )

    def __str__(self) -> str:
        return self.show()

    def show(self, code: bool = False) -> str:
        """Return the plan as text, as `print` shows it: slot by slot what must have arrived, is computed, and is sent.

        Segments of a slot that look alike are one line, unless `code` asks for every operation.

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

    def to_svg(self, link: Links | None = None) -> str:
        """Return the plan as an SVG picture: a timeline of the gradients that arrive, the computation and the wire.

        Collectives are drawn as long as they are large, or, with a link, as they take; computations all alike, since
        a plan does not know how long they take. Notebooks draw a plan that is the last expression of a cell.

        Args:
            link: The connection of the ranks: of all groups, or by the group's name (None is the default group). A
                group without one is a ValueError, in all that takes links.

        >>> import torch
        >>> from fnddp import allreduce, lower
        >>> svg = lower(allreduce, {"w": torch.empty(8)}, world_size=2).to_svg()
        >>> svg[:4], svg.count('class="collective"')
        ('<svg', 1)
        """
        return to_svg(self, link)

    def _repr_html_(self) -> str:
        return to_html(self)

    def estimate(self, link: Links | str, *, backward_seconds: float = 0.0) -> StepCost:
        """Return the cost of a step's collectives, and with `backward_seconds`, what backward does not hide of them.

        It is `predict` where nothing else takes time: the gradients of K buckets are ready at 1/K, 2/K, ... of
        backward, and a collective starts once its bucket is ready and the one before it is done. The link's burst is
        full at the start of the step. Groups share one link in time even where they have links of their own: an upper
        bound. The wrong choice where collectives slow backward down, as on the CPU: measure it while they run.

        Args:
            link: See `to_svg`; also as text, such as "1gbit:20us".

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
        """Return a step on a clock: `estimate`, with what is computed before, between and after the collectives.

        See `fnddp.cost.estimate.predict` for the model.

        Args:
            compute: The computation of a rank, as `fnddp.measure_backward` and `fnddp.measure_segments` return it. One
                of another plan, or with an arrival after backward's end, is a ValueError.

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

        It has two tracks, computation and wire. Ranges are named as in a measured trace (`torch.profiler.profile`,
        `export_chrome_trace`), so that the two can be compared.

        Args:
            compute: See `predict`; None for no time at all, which leaves the wire.

        >>> import json, torch
        >>> from fnddp import Link, allreduce, lower
        >>> plan = lower(allreduce, {"w": torch.empty(1000, 1000, device="meta")}, world_size=2)
        >>> events = json.loads(plan.to_trace(Link.parse("1gbit")))["traceEvents"]
        >>> [(event["name"], event["dur"]) for event in events if event.get("cat") == "wire"]
        [('fnddp c0 all_reduce', 32000.0)]
        """
        return to_trace(self, self.predict(link, compute or Compute()))

"""A plan: a schedule, and the ways to look at it."""

from dataclasses import dataclass

from fnddp.cost.estimate import Estimate, estimate
from fnddp.cost.queue import Links
from fnddp.cost.step import Compute, Step, predict
from fnddp.ir.schedule import Schedule
from fnddp.show.clock import to_trace
from fnddp.show.drawing import to_html, to_svg
from fnddp.show.text import show


@dataclass(frozen=True, repr=False)
class Plan(Schedule):
    """A pipeline lowered for given leaves, a phase and a world: inert data that prints, draws and costs itself.

    Attributes:
        sync: The pipeline.
        leaves: What it synchronizes, by path.
        buckets: The bucket of each leaf, in the order in which gradients are expected.
        segments: What runs without a break, in order.
        peak_bytes: Memory that a step takes at most beside the gradients and the state it is given: buffers of
            collectives, temporaries, and what it returns.
    """

    def __repr__(self) -> str:
        return (
            f"<Plan of {self.sync!r}: {len(self.leaves)} leaves, {len(self.collectives)} collectives, "
            f"{self.rounds} rounds, {self.wire_bytes:,} B>"
        )

    def __str__(self) -> str:
        return self.show()

    def show(self, code: bool = False) -> str:
        """The plan as text: slot by slot what must have arrived, what is computed, and what is sent.

        Steps of a slot that look alike are one line. `print(plan)` prints this.

        Args:
            code: Every segment, and every operation.

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
        on the wire: 1,050,624 B per rank; float32 gradients: 2,101,248 B, 2.0x as much
        1 round, 1 collective; peak extra memory ...
        """
        return show(self, code)

    def to_svg(self, link: Links | None = None) -> str:
        """The plan as a picture: a timeline of the gradients that arrive, the computation and the wire.

        Collectives are drawn as long as they are large, or, with a link, as they take; computations all alike, since
        a plan does not know how long they take. In a notebook the last expression of a cell is drawn by itself.

        Args:
            link: What connects the ranks, of all groups or by the group's name.

        Returns:
            An SVG document.

        Raises:
            ValueError: A group has no link.

        >>> import torch
        >>> from fnddp import allreduce, lower
        >>> svg = lower(allreduce, {"w": torch.empty(8)}, world_size=2).to_svg()
        >>> svg[:4], svg.count('class="collective"')
        ('<svg', 1)
        """
        return to_svg(self, link)

    def _repr_html_(self) -> str:
        return to_html(self)

    def estimate(
        self, link: Links, *, backward_seconds: float | None = None, overhead_seconds: float = 0.0
    ) -> Estimate:
        """What the collectives of a step cost, and with `backward_seconds`, what backward does not hide of them.

        See `fnddp.cost.estimate.estimate` for the model.

        Args:
            link: Of all groups, or by the group's name (None is the default group).
            backward_seconds: Without it nothing is hidden.
            overhead_seconds: Encode and decode that backward does not hide.

        Raises:
            ValueError: A group has no link.

        >>> import torch
        >>> from fnddp import Link, allreduce, fp16, lower
        >>> params = {"w": torch.empty(1000, 1000, device="meta")}
        >>> for sync in (allreduce, fp16(allreduce)):
        ...     seconds = lower(sync, params, world_size=2).estimate(Link.parse("1gbit")).step_seconds
        ...     print(f"{seconds * 1e3:.0f} ms")
        32 ms
        16 ms
        """
        return estimate(self.collectives, link, backward_seconds=backward_seconds, overhead_seconds=overhead_seconds)

    def predict(self, link: Links, compute: Compute) -> Step:
        """A step on a clock: `estimate`, with what is computed before, between and after the collectives.

        See `fnddp.cost.step.predict` for the model.

        Args:
            link: Of all groups, or by the group's name (None is the default group).
            compute: What a rank computes and how long that takes: see `fnddp.measure_backward` and
                `fnddp.measure_segments`.

        Raises:
            ValueError: A group has no link, or `compute` is of another plan or has an arrival after backward's end.

        >>> import torch
        >>> from fnddp import Compute, Link, allreduce, lower
        >>> plan = lower(allreduce, {"w": torch.empty(1000, 1000, device="meta")}, world_size=2)
        >>> print(plan.predict(Link.parse("1gbit"), Compute(forward_seconds=0.05, backward_seconds=0.1)))
        step 182 ms = forward 50 ms + backward 100 ms + exposed 32 ms; wire 32 ms
        """
        return predict(self, link, compute)

    def to_trace(self, link: Links, compute: Compute | None = None) -> str:
        """The predicted step as a trace for https://ui.perfetto.dev or chrome://tracing.

        Ranges are called as those that runners give to torch's profiler, so that a measured trace
        (`torch.profiler.profile`, `export_chrome_trace`) can be compared with it. There are two tracks, what a rank
        computes and what is on the wire.

        Args:
            link: Of all groups, or by the group's name (None is the default group).
            compute: What a rank computes; None for no time at all, which leaves the wire.

        Returns:
            JSON, in Chrome's trace event format.

        Raises:
            ValueError: A group has no link, or `compute` is of another plan.

        >>> import json, torch
        >>> from fnddp import Link, allreduce, lower
        >>> plan = lower(allreduce, {"w": torch.empty(1000, 1000, device="meta")}, world_size=2)
        >>> events = json.loads(plan.to_trace(Link.parse("1gbit")))["traceEvents"]
        >>> [(event["name"], event["dur"]) for event in events if event.get("cat") == "wire"]
        [('fnddp c0 all_reduce', 32000.0)]
        """
        return to_trace(self, self.predict(link, compute or Compute()))

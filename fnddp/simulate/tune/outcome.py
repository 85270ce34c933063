"""Costs and final losses of pipelines: which of them beats which, and whether any beats a 16-bit wire."""

import math
import statistics
from dataclasses import dataclass
from typing import Any

from fnddp.cost.step import Compute, MeanStep

MEAN = "allreduce"
SIXTEEN_BITS = ("fp16(allreduce)", "bf16(allreduce)", "bf16(two_shot)")
"""Pipelines that compression has to beat: half of the bytes, for the price of a cast."""

MARGIN = 0.02
"""A step must be shorter by this share to count as faster: predictions are not better than that."""
SAME = 1e-4
"""Losses that differ by less, relative to them, are the same: rounding does that."""


@dataclass(frozen=True)
class Outcome:
    """The costs of a pipeline, and the losses that training with it ends with.

    Attributes:
        pipeline: Its expression.
        wire_bytes: Bytes that one rank passes to its collectives in a step, the mean over a period after all warm-ups.
        link_bytes: Bytes that one rank sends over its link in a step, likewise.
        step: The steps of such a period, predicted.
        losses: The final loss, by seed.
    """

    pipeline: str
    wire_bytes: int
    link_bytes: int
    step: MeanStep
    losses: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The mean time of a step."""
        return self.step.seconds

    @property
    def loss(self) -> float:
        """The mean over seeds; infinite where a training diverged."""
        mean = statistics.fmean(self.losses)
        return mean if math.isfinite(mean) else math.inf

    @property
    def spread(self) -> float:
        """Half the distance between the best and the worst seed."""
        return (max(self.losses) - min(self.losses)) / 2 if math.isfinite(self.loss) else math.inf

    def as_json(self) -> dict[str, Any]:
        """Return the costs, for programs."""
        parts = ("encode", "decode", "communication", "exposed")
        times = {f"{part}_seconds": getattr(self.step, f"{part}_seconds") for part in parts}
        sizes = {"wire_bytes": self.wire_bytes, "link_bytes": self.link_bytes}
        return {"pipeline": self.pipeline, **sizes, "step_seconds": self.seconds, **times}

    def beats(self, other: "Outcome") -> bool:
        """Return whether `other` is no better in anything, and worse in something."""
        slack = SAME * abs(other.loss)
        is_no_worse = self.seconds <= other.seconds and self.loss <= other.loss + slack
        return is_no_worse and (self.seconds < other.seconds or self.loss < other.loss - slack)


@dataclass(frozen=True)
class Tuned:
    """The findings of `tune`.

    Attributes:
        outcomes: Of each pipeline, the fastest first.
        compute: Forward and backward, as measured.
        within: How much worse than the plain mean's a loss may be, relative to it.
    """

    outcomes: tuple[Outcome, ...]
    compute: Compute
    within: float

    @property
    def mean(self) -> Outcome:
        """The plain mean's outcome."""
        return next(each for each in self.outcomes if each.pipeline == MEAN)

    @property
    def threshold(self) -> float:
        """The largest loss that is good enough; not finite where the plain mean diverged."""
        return self.mean.loss + self.within * abs(self.mean.loss)

    @property
    def good(self) -> tuple[Outcome, ...]:
        """Outcomes whose loss is good enough, the fastest first; none where the plain mean diverged."""
        is_known = math.isfinite(self.threshold)
        return tuple(each for each in self.outcomes if is_known and each.loss <= self.threshold)

    @property
    def pareto(self) -> tuple[Outcome, ...]:
        """Outcomes that no other beats in time and loss."""
        return tuple(each for each in self.outcomes if not any(other.beats(each) for other in self.outcomes))

    @property
    def winner(self) -> Outcome:
        """The fastest whose loss is good enough, if it is faster than `plain` by `MARGIN`; `plain` otherwise.

        Without any whose loss is good enough it is the plain mean, which has diverged: see `doubt`.
        """
        return next((each for each in self.good if _is_faster(each, self.plain)), self.plain)

    @property
    def plain(self) -> Outcome:
        """The outcome to beat: of the fastest 16-bit wire that is good enough, if that beats the plain mean itself."""
        half = self.sixteen_bits
        return half if half is not None and _is_faster(half, self.mean) else self.mean

    @property
    def sixteen_bits(self) -> Outcome | None:
        """The fastest 16-bit wire whose loss is good enough."""
        return next((each for each in self.good if each.pipeline in SIXTEEN_BITS), None)

    @property
    def verdict(self) -> str:
        """The winner in words, and by how much it is faster."""
        if not self.good:
            return "No winner: there is no loss to compare with"
        best, plain = self.winner, self.plain
        if best is plain:
            return f"Nothing beats {'the plain mean' if plain is self.mean else 'a 16-bit wire'}: {plain.pipeline}"
        ratio = f"{best.pipeline}: {plain.seconds / best.seconds:.2f}x as fast as {plain.pipeline}"
        return ratio if self.sixteen_bits else f"{ratio}; no 16-bit wire is good enough"

    @property
    def doubt(self) -> str | None:
        """The reason why the losses do not distinguish pipelines; None if they do."""
        if not math.isfinite(self.mean.loss):
            return "the plain mean itself diverged: lower the learning rate"
        noise = self.mean.spread
        if len(self.mean.losses) < 2:
            return "one seed says nothing of the spread: give more"
        if noise > self.within * abs(self.mean.loss):
            relative = noise / abs(self.mean.loss)
            return f"seeds alone move the plain mean's loss by {relative:.1%}, more than {self.within:.1%}"
        return None


def _is_faster(one: Outcome, other: Outcome) -> bool:
    return one.seconds < (1 - MARGIN) * other.seconds

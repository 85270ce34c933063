"""Time and loss together: `fnddp tune`."""

from fnddp.tune.outcome import MARGIN, MEAN, SAME, SIXTEEN_BITS, Outcome, Tuned
from fnddp.tune.problem import Batch, Forward, Problem, final_loss
from fnddp.tune.search import CANDIDATES, Progress, cost, tune

__all__ = [
    "CANDIDATES",
    "MARGIN",
    "MEAN",
    "SAME",
    "SIXTEEN_BITS",
    "Batch",
    "Forward",
    "Outcome",
    "Problem",
    "Progress",
    "Tuned",
    "cost",
    "final_loss",
    "tune",
]

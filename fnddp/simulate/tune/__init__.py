"""Time and loss together: `fnddp tune`."""

from fnddp.simulate.tune.outcome import MARGIN, MEAN, SAME, SIXTEEN_BITS, Outcome, Tuned
from fnddp.simulate.tune.problem import Batch, Forward, Problem, final_loss
from fnddp.simulate.tune.search import CANDIDATES, Progress, cost, tune

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

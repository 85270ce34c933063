"""Time and loss together: the search of `fnddp tune`."""

from fnddp.simulate.tune.outcome import MARGIN, MEAN, SIXTEEN_BITS, Outcome, Tuned
from fnddp.simulate.tune.problem import Problem, final_loss
from fnddp.simulate.tune.search import CANDIDATES, cost, tune

__all__ = ["CANDIDATES", "MARGIN", "MEAN", "SIXTEEN_BITS", "Outcome", "Problem", "Tuned", "cost", "final_loss", "tune"]
